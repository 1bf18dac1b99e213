"""The baselines at a small size with lively weights, and what all of their tests ask of them."""

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import TransformerConfig, TransformerLM
from tests.ponderlm.cases import SIZES, V
from tests.reference import ponderlm as reference

PLAIN = {
    "norm": "rms",
    "activation": "swiglu",
    "bias": False,
    "positions": "rope",
    "tie_head": False,
    "init": "ponderlm",
}
"""The decoder below all of them, in the plain transformer's words."""
COUNTED = {
    torch.ops.aten.addmm_: lambda into, left, right, out_shape=None, **_: (
        2 * left[0] * left[1] * right[1]
    )
}
"""Torch's counter knows only the other form of this product."""


def build(model, kind, seed=0, **changes):
    lm = model(kind(**{**SIZES, **changes}))
    lm.configure_model()
    enliven(lm.network, seed)
    return lm.eval()


def initialised(model, kind, steps=None):
    """A model as it is drawn with one seed: of ``steps``, or the plain decoder where they are None.

    All of its other sizes are those of the suite.
    """
    sizes = {key: value for key, value in SIZES.items() if key != "thinking_steps"}
    torch.manual_seed(3)
    lm = model(kind(**sizes, **(PLAIN if steps is None else {"thinking_steps": steps})))
    lm.configure_model()
    return lm


def plain_decoder():
    """What the baselines are without any of their steps."""
    return initialised(TransformerLM, TransformerConfig)


def enliven(network, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else 0.4 * drawn)


def rows_of(lengths, seed=0, vocab=V):
    """A batch of random rows of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    targets = torch.randint(0, vocab, shape, generator=generator)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return {"tokens": tokens, "targets": targets.masked_fill(~mask, -100), "mask": mask}


# ---- by the equations


def blocks(weights, config, x, positions):
    """All blocks, before the final norm, on inputs (N, D) that see themselves and earlier ones."""
    mask = reference.mask_matrix([torch.zeros((), dtype=torch.float64)] * len(positions))
    for layer in range(config.num_layers):
        name = f"blocks.{layer}"
        normed = reference.norm(weights, config, x, f"{name}.attention_norm")
        args = positions, mask, f"{name}.attention"
        x = x + reference.attention(weights, config, normed, *args)
        normed = reference.norm(weights, config, x, f"{name}.feed_forward_norm")
        x = x + reference.swiglu(weights, normed, f"{name}.feed_forward")
    return x


def embedded(weights, config, tokens):
    return torch.stack([reference.embed(weights, config, token) for token in tokens])


def cross_entropies(weights, config, h, targets, normed=False):
    """Losses (N,) of states (N, D), 0 where there is no target."""
    h = h if normed else reference.norm(weights, config, h, "norm")
    losses = [
        reference.cross_entropy(weights, state, target) if target >= 0 else state.sum() * 0
        for state, target in zip(h, targets, strict=True)
    ]
    return torch.stack(losses)


def own_rows(batch):
    """Lists of tokens and of targets of each row, without padding."""
    for tokens, targets, mask in zip(batch["tokens"], batch["targets"], batch["mask"], strict=True):
        yield tokens[mask].tolist(), targets[mask].tolist()


def check_loss_and_gradients(model, by_depth, batch):
    """The summed loss and the gradient of every weight, against ``by_depth(weights, ...)``.

    ``by_depth`` (weights, config, tokens, targets) returns the losses (T,) after each depth.
    """
    weights = reference.leaves(model.network.state_dict())
    rows = [by_depth(weights, model.config, *row)[-1].sum() for row in own_rows(batch)]
    expected = sum(rows)
    expected.backward()
    loss = model.loss(batch).terms["nll"].sum
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-9)
    for name, parameter in model.network.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, atol=1e-8, rtol=1e-8)


def recorded(model, batch):
    found = {}

    def keep(name):
        return lambda **values: found.update({name: values})

    names = ("thinking_steps", "depth_losses", "entropy")
    return model.recorded(batch, **{name: keep(name) for name in names}), found


def check_depths(model, by_depth, batch):
    """Scores and recorded statistics against ``by_depth``; see above."""
    scores, found = recorded(model, batch)
    assert torch.equal(scores.log_prob, model.score(batch).log_prob)
    losses = found["depth_losses"]["losses"]
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses[..., -1], -scores.log_prob)
    weights = reference.leaves(model.network.state_dict())
    for number, (tokens, targets) in enumerate(own_rows(batch)):
        with torch.no_grad():
            expected = torch.stack(by_depth(weights, model.config, tokens, targets), dim=-1)
        own = losses[number, : len(tokens)].double()
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
        assert not losses[number, len(tokens) :].any()
    odds = F.log_softmax(logits_of(model, batch["tokens"]), dim=-1)
    entropy = -(odds.exp() * odds).sum(dim=-1)
    seen = batch["mask"]
    torch.testing.assert_close(found["entropy"]["entropy"][seen], entropy[seen])
    return found["thinking_steps"]


def logits_of(model, tokens):
    with torch.no_grad():
        states, _ = model.read({"tokens": tokens}, every_depth=False)
        return states @ model.network.output_matrix.t()


# ---- compute


def unseen_flops(config, rows, lengths):
    """What the math kernel spends on keys after the query, in passes of these lengths."""
    return sum(
        config.num_layers * 4 * config.dim * rows * length * (length - 1) // 2 for length in lengths
    )


def counted_flops(model, batch, lengths, training):
    factor = 3 if training else 1
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        if training:
            sum(term.sum for term in model.loss(batch).terms.values()).backward()
        else:
            logits_of(model, batch["tokens"])
    unseen = unseen_flops(model.config, len(batch["tokens"]), lengths)
    return counter.get_total_flops() - factor * unseen
