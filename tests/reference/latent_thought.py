"""The Latent-Thought Language Model (Kong et al.) as its equations say, in float64.

One sequence at a time, a list of token ids; one query of one head at a time, one latent vector
after the other. Noise is an argument, so that nothing here is random.
"""

import math

import torch


class LatentThought:
    """The decoder p(x | z) of eq. 1, from a network's weights.

    ``weights`` are float64 leaves by their name in the state dict. ``prior``, where one is learned,
    carries vectors (Z, D) of N(0, I) to those that are read.
    """

    def __init__(self, state_dict, config, prior=None):
        self.weights = {
            name: value.detach().double().clone().requires_grad_()
            for name, value in state_dict.items()
        }
        self.config, self.prior = config, prior

    # ---- sequences

    def log_likelihood(self, tokens, targets, z):
        """log p(x | z), a sum over the targets that are no -100."""
        rows = self.log_probs(tokens, z)
        return sum(rows[place][target] for place, target in enumerate(targets) if target >= 0)

    def log_probs(self, tokens, z):
        """The log-probabilities (T, V) of what follows each token under latent vectors (Z, D)."""
        if self.prior is not None:
            z = self.prior(z)
        states = [self.weights["embedding.weight"][token] for token in tokens]
        for layer in range(self.config.num_layers):
            states = self.block(states, self.vectors_of(z, layer), f"blocks.{layer}")
        matrix = self.weights.get("head.weight", self.weights["embedding.weight"])
        return torch.stack([log_softmax(matrix @ self.norm(x, "norm")) for x in states])

    def vectors_of(self, z, layer):
        """z_l, the vectors that a layer reads, each with the position of its key in tokens."""
        config, count = self.config, self.config.latents_per_layer
        layered = config.latents == "layered"
        total = count * config.num_layers if layered else count
        spacing = {
            "index": 1,
            "spread": config.block_size / count,
            "public": config.block_size // total,
        }[config.latent_positions]
        first = layer * count if layered else 0
        return [(z[first + n], n * spacing) for n in range(count)]

    # ---- a layer (section 2.1, App. A.1)

    def block(self, states, latents, name):
        """Self-attention, cross-attention and SwiGLU, each after an RMSNorm and added."""
        normed = [self.norm(x, f"{name}.attention_norm") for x in states]
        seen = self.self_attention(normed, f"{name}.attention")
        states = [x + y for x, y in zip(states, seen, strict=True)]
        normed = [self.norm(x, f"{name}.latent_norm") for x in states]
        read = self.cross_attention(normed, latents, f"{name}.latent_attention")
        states = [x + y for x, y in zip(states, read, strict=True)]
        normed = [self.norm(x, f"{name}.feed_forward_norm") for x in states]
        return [
            x + self.swiglu(y, f"{name}.feed_forward") for x, y in zip(states, normed, strict=True)
        ]

    def self_attention(self, states, name):
        """Each token reads itself and the k - 1 tokens in front of it."""
        window = self.config.window or len(states)
        queries, keys, values = [], [], []
        for place, x in enumerate(states):
            q, k, v = (self.weights[f"{name}.qkv.weight"] @ x).chunk(3)
            queries.append([self.rotate(part, place) for part in self.heads(q)])
            keys.append([self.rotate(part, place) for part in self.heads(k)])
            values.append(self.heads(v))
        out = []
        for place in range(len(states)):
            first = max(0, place - window + 1)
            out.append(
                self.read(queries[place], keys[first : place + 1], values[first : place + 1], name)
            )
        return out

    def cross_attention(self, states, latents, name):
        """Each token reads all vectors of this layer."""
        keys, values = [], []
        for vector, position in latents:
            k, v = (self.weights[f"{name}.key_value.weight"] @ vector).chunk(2)
            keys.append([self.rotate(part, position) for part in self.heads(k)])
            values.append(self.heads(v))
        out = []
        for place, x in enumerate(states):
            query = self.heads(self.weights[f"{name}.query.weight"] @ x)
            out.append(self.read([self.rotate(q, place) for q in query], keys, values, name))
        return out

    def heads(self, x):
        """The parts of a vector that belong to the heads."""
        return list(x.chunk(self.config.num_heads))

    def read(self, query, keys, values, name):
        """softmax(q k / sqrt(C)) v of every head of one query, and the output matrix."""
        heads = []
        for head, q in enumerate(query):
            scores = [k[head] @ q / math.sqrt(len(q)) for k in keys]
            weights = log_softmax(torch.stack(scores)).exp()
            heads.append(sum(w * v[head] for w, v in zip(weights, values, strict=True)))
        return self.weights[f"{name}.out.weight"] @ torch.cat(heads)

    def rotate(self, x, position):
        """Each pair (i, i + C/2) turned by its own angle."""
        half = len(x) // 2
        left, right = [], []
        for i in range(half):
            angle = position * self.config.rope_base ** (-2 * i / len(x))
            left.append(x[i] * math.cos(angle) - x[half + i] * math.sin(angle))
            right.append(x[i] * math.sin(angle) + x[half + i] * math.cos(angle))
        return torch.stack(left + right)

    def swiglu(self, x, name):
        """W_down (silu(W_gate x) * W_up x)."""
        gate, value = (self.weights[f"{name}.up.weight"] @ x).chunk(2)
        return self.weights[f"{name}.down.weight"] @ (gate / (1 + (-gate).exp()) * value)

    def norm(self, x, name):
        scale = (sum(value * value for value in x) / len(x) + self.config.norm_eps).sqrt()
        return x / scale * self.weights[f"{name}.weight"]


def log_softmax(scores):
    """s - log sum exp s."""
    highest = scores.max().item()
    return scores - highest - (scores - highest).exp().sum().log()


# ---- posteriors (section 2.2)


def divergence(mean, log_variance):
    """KL(N(mu, sigma^2) || N(0, 1)) = -log sigma + (sigma^2 + mu^2) / 2 - 1/2, over all numbers."""
    total = 0.0
    for mu, lv in zip(mean.flatten(), log_variance.flatten(), strict=True):
        sigma = (lv / 2).exp()
        total = total - sigma.log() + (sigma**2 + mu**2) / 2 - 0.5
    return total


def sample(mean, log_variance, noise):
    """The reparametrisation mu + sigma * noise."""
    return mean + (log_variance / 2).exp() * noise


def elbo(model, tokens, targets, mean, log_variance, noise):
    """Eq. 5 with one sample of q."""
    z = sample(mean, log_variance, noise)
    return model.log_likelihood(tokens, targets, z) - divergence(mean, log_variance)


class AdamW:
    """The update of Loshchilov & Hutter (2019) of one tensor (Z, D).

    With ``inner_scaling: vector`` the squared gradient is averaged over each row.
    """

    def __init__(self, config, eps=1e-8):
        self.betas, self.weight_decay, self.eps = config.inner_betas, config.inner_weight_decay, eps
        self.by_row = config.inner_scaling == "vector"
        self.count, self.first, self.second = 0, 0.0, 0.0

    def updated(self, value, gradient, rate):
        """The value one step on."""
        self.count += 1
        slow, fast = self.betas
        self.first = slow * self.first + (1 - slow) * gradient
        square = gradient**2
        if self.by_row:
            square = torch.stack([sum(row) / len(row) for row in square])[:, None]
        self.second = fast * self.second + (1 - fast) * square
        first = self.first / (1 - slow**self.count)
        second = self.second / (1 - fast**self.count)
        decayed = value - rate * self.weight_decay * value
        return decayed - rate * first / (second.sqrt() + self.eps)


def step_size(config, rate, step):
    """eta_fast of a step counted from 0: constant, or a cosine from ``rate`` to a tenth of it."""
    if config.inner_schedule == "constant":
        return rate
    lowest = rate / 10
    turn = math.pi * step / config.inner_steps
    return lowest + (rate - lowest) * (1 + math.cos(turn)) / 2


class FastLearning:
    """Lines 6 to 11 of Algorithm 1 for one sequence.

    ``path`` has mean and log-variance before the first step and after each; ``gradients`` the sum
    over the steps of what the objective's gradient with respect to the weights is.

    Args:
        model: a ``LatentThought``.
        tokens, targets: the sequence.
        start: normals (Z, D) of the first log-variances.
        draws: normals (Z, D) of each step.
        rate: eta_fast of the first step.
        first: normals (Z, D) that the first means are ``init_mean_std`` times.
    """

    def __init__(self, model, tokens, targets, start, draws, rate, first=0.0):
        self.model, self.tokens, self.targets = model, tokens, targets
        self.gradients = {name: torch.zeros_like(w) for name, w in model.weights.items()}
        config = model.config
        mean = torch.zeros_like(start) + config.init_mean_std * first
        log_variance = config.init_log_variance + 0.1 * start
        self.path = [(mean, log_variance)]
        optimizers = [AdamW(config) for _ in range(2)]
        for step in range(config.inner_steps):
            rate_now = step_size(config, rate, step)
            parameters = mean.requires_grad_(), log_variance.requires_grad_()
            slopes = self.slopes(parameters, draws[step])
            mean, log_variance = (
                optimizer.updated(value.detach(), slope, rate_now)
                for optimizer, value, slope in zip(optimizers, parameters, slopes, strict=True)
            )
            self.path.append((mean.clone(), log_variance.clone()))

    def slopes(self, parameters, noise):
        """The gradients of -ELBO with respect to mean and log-variance."""
        weights = self.model.weights
        objective = -elbo(self.model, self.tokens, self.targets, *parameters, noise)
        found = torch.autograd.grad(objective, [*parameters, *weights.values()], allow_unused=True)
        for name, gradient in zip(weights, found[2:], strict=True):
            if gradient is not None:
                self.gradients[name] += gradient
        return found[:2]


def langevin(model, tokens, targets, start, draws):
    """Eq. 4: all z of a chain of ``len(draws)`` steps from ``start``."""
    size, path = model.config.langevin_step_size, [start]
    for noise in draws:
        z = path[-1].detach().requires_grad_()
        log_prior = sum(-value * value / 2 - math.log(2 * math.pi) / 2 for value in z.flatten())
        joint = model.log_likelihood(tokens, targets, z) + log_prior
        (slope,) = torch.autograd.grad(joint, z)
        path.append((z + size * slope + math.sqrt(2 * size) * noise).detach())
    return path


def floor(config, rate):
    """KL of one coordinate of which the decoder makes no use, after the inner steps.

    Its mean starts one deviation from 0.
    """
    starts = config.init_mean_std, config.init_log_variance
    mean, log_variance = (torch.tensor([[x]], dtype=torch.float64) for x in starts)
    optimizers = [AdamW(config) for _ in range(2)]
    for step in range(config.inner_steps):
        size = step_size(config, rate, step)
        pull = (log_variance.exp() - 1) / 2
        mean = optimizers[0].updated(mean, mean, size)
        log_variance = optimizers[1].updated(log_variance, pull, size)
    return divergence(mean, log_variance).item() if config.inner_steps else 0.0
