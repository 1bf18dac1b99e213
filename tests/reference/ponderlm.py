"""PonderLM-2 and PonderLM-3 (arXiv 2603.02023) as their equations say, in float64.

One row at a time, a list of token ids; every pass and every slot computes all that lies in front
of it again. Weights are a dict by their names in the network's state dict; those of PonderLM-3 have
``router.weight`` (K+1, D) and ``router.bias`` (K+1,), those of PonderLM-2 have not. The numbers
are a ``PonderConfig``'s or a ``PonderLM2Config``'s; what training and inference do differently,
``alpha`` and ``tau``, are arguments.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def leaves(state_dict):
    """Float64 copies of a state dict's weights that take gradients."""
    return {
        name: value.detach().double().clone().requires_grad_() for name, value in state_dict.items()
    }


# ---- the transformer (LLaMA style)


def transformer(weights, config, x, positions, mask):
    """The outputs (N, D) after the final norm of inputs (N, D); ``mask`` (N, N) joins scores."""
    for layer in range(config.num_layers):
        name = f"blocks.{layer}"
        normed = norm(weights, config, x, f"{name}.attention_norm")
        x = x + attention(weights, config, normed, positions, mask, f"{name}.attention")
        normed = norm(weights, config, x, f"{name}.feed_forward_norm")
        x = x + swiglu(weights, normed, f"{name}.feed_forward")
    return norm(weights, config, x, "norm")


def attention(weights, config, x, positions, mask, name):
    """softmax(q k^T scale + mask) v of every head, and the output matrix."""
    q, k, v = (x @ weights[f"{name}.qkv.weight"].T).chunk(3, dim=-1)
    heads, channels = [], config.dim // config.num_heads
    for head in range(config.num_heads):
        part = slice(head * channels, (head + 1) * channels)
        queries = rotate(q[:, part], positions, config.rope_base)
        keys = rotate(k[:, part], positions, config.rope_base)
        scores = queries @ keys.T * score_scale(config) + mask
        odds = (scores - scores.max(dim=-1, keepdim=True).values.detach()).exp()
        heads.append(odds / odds.sum(dim=-1, keepdim=True) @ v[:, part])
    return torch.cat(heads, dim=-1) @ weights[f"{name}.out.weight"].T


def score_scale(config):
    """1/sqrt(C), or what App. A as printed multiplies q k^T with: 1/sqrt(C + 1)."""
    channels = config.dim // config.num_heads
    literal = getattr(config, "augmentation", "exact") == "literal"
    return 1 / math.sqrt(channels + 1 if literal else channels)


def rotate(x, positions, base):
    """Channels (i, i + C/2) of row n turned by positions[n] base^(-2 i / C)."""
    half = x.shape[-1] // 2
    angles = [[p * base ** (-2 * i / x.shape[-1]) for i in range(half)] for p in positions]
    cos = torch.tensor([[math.cos(a) for a in row] for row in angles], dtype=torch.float64)
    sin = torch.tensor([[math.sin(a) for a in row] for row in angles], dtype=torch.float64)
    left, right = x[:, :half], x[:, half:]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def swiglu(weights, x, name):
    """W_down (silu(W_gate x) * W_up x)."""
    gate, value = (x @ weights[f"{name}.up.weight"].T).chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * value @ weights[f"{name}.down.weight"].T


def norm(weights, config, x, name):
    """RMSNorm."""
    size = (x * x).mean(dim=-1, keepdim=True)
    return x / (size + config.norm_eps).sqrt() * weights[f"{name}.weight"]


def embed(weights, config, token):
    """sqrt(2.5 D) times the token's embedding, under the initialisation it goes with."""
    scale = math.sqrt(2.5 * config.dim) if config.init == "ponderlm" else 1.0
    return scale * weights["embedding.weight"][token]


def logits(weights, h):
    """The head on a post-norm state, or on a sum of them."""
    return weights.get("head.weight", weights["embedding.weight"]) @ h


def cross_entropy(weights, h, target):
    """-log softmax(head h)[target], in nats."""
    scores = logits(weights, h)
    highest = scores.max().item()
    return (scores - highest).exp().sum().log() + highest - scores[target]


# ---- the router (section 3.2.1)


def tail_naive(s):
    """w_k = sum_{j >= k} s_j."""
    return torch.stack([sum(s[j] for j in range(k, len(s))) for k in range(len(s))])


def tail_log(g):
    """log w_k = log sum_{j >= k} exp(g_j) - log sum_j exp(g_j)."""
    return torch.stack([log_sum_exp(g[k:]) - log_sum_exp(g) for k in range(len(g))])


def log_sum_exp(g):
    """log sum exp(g), without overflow."""
    highest = g.max().item()
    return (g - highest).exp().sum().log() + highest


def route(weights, config, h, alpha):
    """log s and log w (K+1,) of a token from its h^(0)."""
    steps = config.thinking_steps
    g = weights["router.weight"] @ h + weights["router.bias"]
    shape = getattr(config, "alpha_shape", "ramp")
    shift = [alpha if shape == "scalar" else alpha * k / max(steps, 1) for k in range(steps + 1)]
    g = g + torch.tensor(shift, dtype=torch.float64)
    return g - log_sum_exp(g), tail_log(g)


def stops_at(log_tail, k, tau):
    """Whether a token takes no step k: w_k < tau (section 3.3)."""
    return k > 0 and log_tail is not None and log_tail[k].exp().item() < tau


def key_bias(config, log_tail, k, tau):
    """What all scores of slot k as a key get: log w_k, or as in Fig. 7 log w_(k-1)."""
    zero = torch.zeros((), dtype=torch.float64)
    if k == 0 or log_tail is None:
        return zero
    if stops_at(log_tail, k, tau):
        return zero - math.inf
    return log_tail[k - 1] if config.mask_index == "literal" else log_tail[k]


def bias_in(config, done, t, k, tau):
    """The bias of a slot by the router after a pass; 0 without one."""
    known = done is not None and done.log_tail is not None
    return key_bias(config, done.log_tail[t] if known else None, k, tau)


def place(config, t, k):
    """The rotary position of slot k of token t."""
    return t if config.latent_positions == "shared" else t * (config.thinking_steps + 1) + k


def mask_matrix(biases):
    """M + G (N, N): a query a row, a key a column; causal, and every row has the keys' biases."""
    causal = torch.full((len(biases), len(biases)), -math.inf, dtype=torch.float64).triu(1)
    return causal + torch.stack([torch.stack(biases)] * len(biases))


# ---- parallel: Jacobi iterations (section 3.4.1)


class Pass(NamedTuple):
    """States (T, slots, D) of a pass; log s and log w (T, K+1) of its own h^(0), or None."""

    states: Tensor
    log_steps: Tensor | None
    log_tail: Tensor | None


def one_pass(weights, config, slots, before=None, alpha=0.0, tau=0.0):
    """One application to interleaved slots; ``slots[k]`` (T, D) are the inputs of slot k.

    The w of the pass before attenuate keys.
    """
    inputs, positions, biases = [], [], []
    length, count = len(slots[0]), len(slots)
    for t in range(length):
        for k in range(count):
            inputs.append(slots[k][t])
            positions.append(place(config, t, k))
            biases.append(bias_in(config, before, t, k, tau))
    out = transformer(weights, config, torch.stack(inputs), positions, mask_matrix(biases))
    states = torch.stack([out[t * count : (t + 1) * count] for t in range(length)])
    if "router.weight" not in weights:
        return Pass(states, None, None)
    routed = [route(weights, config, states[t, 0], alpha) for t in range(length)]
    return Pass(states, *(torch.stack(part) for part in zip(*routed, strict=True)))


def jacobi(weights, config, tokens, iterations, *, alpha=0.0, tau=0.0, grad_last_passes=None):
    """All passes of a row: K growing ones, J that refine all latents, the final one.

    What passes in front of the last ``grad_last_passes`` hand on carries no gradient.
    """
    steps = config.thinking_steps
    embedded = torch.stack([embed(weights, config, token) for token in tokens])
    counts = [*range(1, steps + 1), *([steps + 1] * (iterations + 1))]
    slots, done, passes = [embedded], None, []
    for number, count in enumerate(counts):
        assert len(slots) == count
        done = one_pass(weights, config, slots, done, alpha, tau)
        if grad_last_passes is not None and number < len(counts) - grad_last_passes:
            done = Pass(*(None if value is None else value.detach() for value in done))
        passes.append(done)
        slots = [embedded] + [done.states[:, k] for k in range(min(count, steps))]
    return passes


def read_out(done, tau=0.0):
    """h_hat (T, D) of a final pass: sum_k s_k h^(k) of the steps taken; PonderLM-2: h^(K)."""
    if done.log_steps is None:
        return done.states[:, -1]
    rows = []
    for states, log_s, log_w in zip(*done, strict=True):
        taken = [k for k in range(len(states)) if not stops_at(log_w, k, tau)]
        rows.append(sum(log_s[k].exp() * states[k] for k in taken))
    return torch.stack(rows)


# ---- sequential: as tokens are generated (section 3.3)


class Thought(NamedTuple):
    """What a token came to: its states [h^(0), .., h^(K_hat)] (D,), h_hat (D,), logits (V,)."""

    states: list[Tensor]
    executed: int
    log_steps: Tensor | None
    log_tail: Tensor | None
    read_out: Tensor
    logits: Tensor


def sequential(weights, config, tokens, *, alpha=0.0, tau=0.0, behind=None):
    """A ``Thought`` of every token of a row, slot by slot, with the hard stop at ``tau``.

    ``behind`` is a ``Prompt`` that has been read in parallel.
    """
    slots = [] if behind is None else list(behind.slots)
    first, thoughts = 0 if behind is None else behind.length, []
    for t, token in enumerate(tokens, start=first):
        x, states, log_steps, log_tail = embed(weights, config, token), [], None, None
        for k in range(config.thinking_steps + 1):
            if stops_at(log_tail, k, tau):
                break
            slots.append(Slot(x, place(config, t, k), key_bias(config, log_tail, k, tau)))
            x = latest(weights, config, slots, None if behind is None else behind.mask)
            states.append(x)
            if k == 0 and "router.weight" in weights:
                log_steps, log_tail = route(weights, config, x, alpha)
        h = states[-1]
        if log_steps is not None:
            h = sum(log_steps[k].exp() * state for k, state in enumerate(states))
        out = logits(weights, h)
        thoughts.append(Thought(states, len(states) - 1, log_steps, log_tail, h, out))
    return thoughts


class Slot(NamedTuple):
    """Input (D,), rotary position, and bias as a key of later slots."""

    x: Tensor
    position: int
    bias: Tensor


def latest(weights, config, slots, read=None):
    """The output (D,) of the last slot; queries of a prompt keep the mask ``read`` they had."""
    mask = mask_matrix([slot.bias for slot in slots])
    if read is not None:
        mask[: len(read), : len(read)] = read
    x = torch.stack([slot.x for slot in slots])
    return transformer(weights, config, x, [slot.position for slot in slots], mask)[-1]


class Prompt(NamedTuple):
    """The slots of a prompt's last pass, the mask (N, N) of that pass, and tokens."""

    slots: list[Slot]
    mask: Tensor
    length: int


def read_in_parallel(weights, config, tokens, iterations, *, alpha=0.0, tau=0.0):
    """A prompt read by Jacobi iterations: what the slots of its last pass leave to later ones.

    The last pass attenuates by the w of the pass before it, later slots by that of the last.
    """
    passes = jacobi(weights, config, tokens, iterations, alpha=alpha, tau=tau)
    last, before = passes[-1], passes[-2] if config.thinking_steps else None
    slots, biases = [], []
    for t, token in enumerate(tokens):
        for k in range(config.thinking_steps + 1):
            x = embed(weights, config, token) if k == 0 else before.states[t, k - 1]
            slots.append(Slot(x, place(config, t, k), bias_in(config, last, t, k, tau)))
            biases.append(bias_in(config, before, t, k, tau))
    return Prompt(slots, mask_matrix(biases), len(tokens))


# ---- the objective (section 3.4.2)


def depth_losses(weights, done, targets, renormalised=True):
    """Cross-entropy [t][i] of each target had its token stopped after step i; None: no target.

    PonderLM-3: of sum_{j <= i} s_j h^(j), divided by sum_{j <= i} s_j if ``renormalised``.
    """
    rows = []
    for t, target in enumerate(targets):
        if target < 0:
            rows.append(None)
            continue
        row = []
        for i in range(len(done.states[t])):
            h = done.states[t, i]
            if done.log_steps is not None:
                s = done.log_steps[t].exp()
                h = sum(s[j] * done.states[t, j] for j in range(i + 1))
                h = h / sum(s[j] for j in range(i + 1)) if renormalised else h
            row.append(cross_entropy(weights, h, target))
        rows.append(row)
    return rows


PRESETS = {"paper": (10.0, 0.5), "ours": (100.0, 0.05)}  # beta and theta


def fractions(config, c):
    """f_k, k = 1..K: what fraction of the w_k is penalised, by mean losses c_0..c_K."""
    beta, theta = PRESETS[config.penalty]
    beta = beta if config.penalty_beta is None else config.penalty_beta
    theta = theta if config.penalty_theta is None else config.penalty_theta
    rho = []
    for value in c:
        u = value - c[-1] if config.penalty == "ours" else value
        rho.append(1 / (1 + math.exp(min(beta * (u - theta), 700.0))))  # 1 - sigmoid
    if config.penalty == "ours":
        return [rho[k - 1] for k in range(1, len(c))]
    return [max(rho[k] - rho[k - 1], 0.0) for k in range(1, len(c))]


def mean_losses(weights, config, rows):
    """c_0..c_K, of every so many targets; ``rows`` are final passes with their targets."""
    each = []
    for done, targets in rows:
        losses = depth_losses(weights, done, targets, renormalised=config.penalty != "paper")
        each += [[value.item() for value in row] for row in losses if row is not None]
    measured = each[:: config.depth_losses_every]
    steps = range(config.thinking_steps + 1)
    return [sum(row[i] for row in measured) / max(1, len(measured)) for i in steps]


def bottom(w, counts):
    """sum_k mean(the n_k smallest w_k) of tokens' w (K+1,); there is no mean of nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for k, count in enumerate(counts, start=1):
        smallest = sorted((own[k] for own in w), key=lambda value: value.item())[:count]
        if count > 0:
            total = total + sum(smallest) / count
    return total


def penalised(log_tail, config):
    """w (K+1,) of a token, or, on the log scale, how far log w is above log tau, in its units."""
    if config.penalty_scale == "linear":
        return log_tail.exp()
    return torch.stack([(1 - w / math.log(config.tau)).clamp(min=0) for w in log_tail])


def penalty(weights, config, rows):
    """L_aux / lambda, of all tokens that have a target.

    ``expected_steps``: the mean over tokens of sum_{k >= 1} w_k.
    """
    kept = [(done, t) for done, targets in rows for t, x in enumerate(targets) if x >= 0]
    w = [penalised(done.log_tail[t], config) for done, t in kept]
    if config.penalty == "expected_steps":
        return sum((sum(own[1:]) / len(w) for own in w), torch.zeros((), dtype=torch.float64))
    f = fractions(config, mean_losses(weights, config, rows))
    return bottom(w, [math.floor(value * len(w)) for value in f])


class Objective(NamedTuple):
    """Mean cross-entropy of all targets, penalty without lambda, number of targets, their sum."""

    nll: Tensor
    penalty: Tensor
    number: int
    total: Tensor


def objective(weights, config, rows, iterations):
    """What training lowers, L_CE + lambda * penalty, of rows of tokens and targets (-100: none)."""
    finals, nll, number = [], torch.zeros((), dtype=torch.float64), 0
    for tokens, targets in rows:
        last = config.grad_last_passes
        done = jacobi(weights, config, tokens, iterations, grad_last_passes=last)[-1]
        finals.append((done, targets))
        for h, target in zip(read_out(done), targets, strict=True):
            if target >= 0:
                nll, number = nll + cross_entropy(weights, h, target), number + 1
    nll = nll / max(number, 1)
    if "router.weight" not in weights:
        return Objective(nll, torch.zeros(()).double(), number, nll)
    extra = penalty(weights, config, finals)
    return Objective(nll, extra, number, nll + config.penalty_weight * extra)
