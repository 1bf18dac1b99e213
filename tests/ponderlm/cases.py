"""Small pondering models whose weights are large enough for every slot to matter."""

import torch

from lightning_models.ponderlm import PonderConfig, PonderLM, PonderLM2, PonderLM2Config
from tests.reference import ponderlm as reference

V = 11
SIZES = {
    "vocab_size": V,
    "vocab_multiple": 1,
    "block_size": 8,
    "num_layers": 2,
    "dim": 8,
    "num_heads": 2,
    "ffn_dim": 12,
    "thinking_steps": 2,
}
STYLES = {
    "k0": {"thinking_steps": 0},
    "k1": {"thinking_steps": 1},
    "k2": {},
    "k3": {"thinking_steps": 3},
    "literal-index": {"mask_index": "literal"},
    "literal-augmentation": {"augmentation": "literal"},
    "sequential-positions": {"latent_positions": "sequential"},
    "plain-init": {"init": "gpt2", "norm_eps": 0.1},
    "tied": {"tie_head": True},
}
"""Configurations of PonderLM-3."""
FIXED_STYLES = {
    f"fixed-{name}": STYLES[name] for name in ("k0", "k1", "k3", "sequential-positions")
}
"""Configurations of PonderLM-2, whose number of steps is fixed."""
ALL_STYLES = {
    **{name: (PonderLM, changes) for name, changes in STYLES.items()},
    **{name: (PonderLM2, changes) for name, changes in FIXED_STYLES.items()},
}
EXACT = {"atol": 1e-10, "rtol": 1e-8}


def config_of(kind=PonderConfig, **changes):
    """A small configuration: PonderLM-3's unless ``kind`` is ``PonderLM2Config``."""
    return kind(**{**SIZES, **changes})


def shapes_of(config):
    """The shapes of a network's weights by name."""
    D, F = config.dim, config.hidden_dim
    shapes = {"embedding.weight": (V, D), "norm.weight": (D,)}
    if not config.tie_head:
        shapes["head.weight"] = (V, D)
    for layer in range(config.num_layers):
        shapes |= {
            f"blocks.{layer}.attention_norm.weight": (D,),
            f"blocks.{layer}.attention.qkv.weight": (3 * D, D),
            f"blocks.{layer}.attention.out.weight": (D, D),
            f"blocks.{layer}.feed_forward_norm.weight": (D,),
            f"blocks.{layer}.feed_forward.up.weight": (2 * F, D),
            f"blocks.{layer}.feed_forward.down.weight": (D, F),
        }
    if isinstance(config, PonderConfig):
        shapes["router.weight"] = (config.thinking_steps + 1, D)
        shapes["router.bias"] = (config.thinking_steps + 1,)
    return shapes


def toy_weights(config, seed=0, scale=0.4, router=0.5):
    """Float64 weights that take gradients: normals of these deviations, norms around 1."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(shapes_of(config).items()):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            weights[name] = 1 + 0.3 * drawn
        else:
            weights[name] = drawn * (router if "router" in name else scale)
    return {name: value.requires_grad_() for name, value in weights.items()}


def build(kind=PonderLM, seed=0, scale=0.4, router=0.5, **changes):
    """A float64 model in evaluation mode, with the weights of ``toy_weights``."""
    config = config_of(PonderConfig if kind is PonderLM else PonderLM2Config, **changes)
    model = kind(config)
    model.configure_model()
    model.double()
    weights = toy_weights(config, seed, scale, router)
    model.network.load_state_dict({name: value.detach() for name, value in weights.items()})
    return model.eval()


def weights_of(model):
    return reference.leaves(model.network.state_dict())


def some_tokens(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (length,), generator=generator).tolist()


def rows_of(lengths, seed=0):
    """A batch of random rows of these lengths, padded on the right, targets -100 there."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, V, (len(lengths), max(lengths) + 1), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        "tokens": stream[:, :-1].masked_fill(~mask, 0),
        "targets": stream[:, 1:].masked_fill(~mask, -100),
        "mask": mask,
    }


def row_of(batch, row):
    length = int(batch["mask"][row].sum())
    return batch["tokens"][row, :length].tolist(), batch["targets"][row, :length].tolist()


def recorded(model, batch, *names):
    """The scores of a batch, and all that was recorded by these names: lists of dicts."""
    found = {name: [] for name in names}

    def keep(name):
        return lambda **values: found[name].append(values)

    scores = model.recorded(batch, **{name: keep(name) for name in names})
    return scores, found


def believed(model, batch):
    """The batch with what the model holds most likely as targets: depth then lowers losses."""
    with torch.no_grad():
        h = model.network(batch["tokens"], 1).read_out
    best = (h @ model.network.output_matrix.t()).argmax(dim=-1)
    return {**batch, "targets": best.masked_fill(batch["targets"] < 0, -100)}
