"""Small Thinking States models whose thoughts can be decided, and batches for them.

Models with random weights hardly ever end a thought. ``outspoken`` sets weights so that T ends the
thought after quiet tokens, and goes on after loud ones: the first channel says which they are,
and the residual stream carries it through all layers. So queries decide where thoughts are, and
everything else is the real computation.
"""

import torch
from torch import nn

from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.module import ThinkingStatesLM
from tests.methods import decoder
from tests.reference import thinking_states_grid as literal

V = 24
PREFIX = (5, 7, 1)
SIZES = {
    "vocab_size": V,
    "vocab_multiple": 1,
    "block_size": 64,
    "num_layers": 3,
    "dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_dim": 24,
    "chunk_size": 4,
    "tie_head": False,
    "init_std": 0.3,
    "answer_prefix": PREFIX,
    "max_thought_tokens": 6,
}
GRIDS = ("left_align", "partial", "absolute")
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
LOUD, QUIET = torch.arange(0, V, 2), torch.arange(1, V, 2)


def on(family):
    """A small backbone of another family than the default, with lively weights, its head untied."""
    sizes = {"vocab_size": V, "hidden_size": 16, "initializer_range": 0.3, "eos_token_id": 4}
    return {"architecture": decoder(family, dropout=0.1, tie_word_embeddings=False, **sizes)}


def build(seed=0, family=None, **changes):
    """A model in evaluation mode, its T and C differing from the backbone's layers."""
    torch.manual_seed(seed)
    changes |= {} if family is None else on(family)
    model = ThinkingStatesLM(ThinkingStatesConfig(**{**SIZES, **changes}))
    model.configure_model()
    with torch.no_grad():
        for part in (model.network.thinking, model.network.compression):
            for weight in part.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def outspoken(seed=0, strength=4.0, **changes):
    """A model that thinks with tokens after chunks whose last token is loud."""
    model = build(seed, **changes)
    network = model.network
    with torch.no_grad():
        embedding = network.backbone.model.get_input_embeddings().weight
        embedding[:, 0] = 0.0
        embedding[QUIET, 0], embedding[LOUD, 0] = strength, -strength
        matrix = network.thinking_matrix
        matrix[:, 0] = 0.0
        matrix[V] = 0.0
        matrix[V, 0] = 20.0
    return model


def exact(model):
    """The model in float64, norms too, which are computed in float32 otherwise."""
    model.double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(("Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm")):
                norm = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def query_of(chunks, c, loud=(), seed=0, length=None):
    """A query (1, Q) of ``chunks`` chunks, of which those in ``loud`` end with a loud token."""
    generator = torch.Generator().manual_seed(seed)
    query = QUIET[torch.randint(0, len(QUIET), (1, chunks * c), generator=generator)]
    for chunk in loud:
        query[0, (chunk + 1) * c - 1] = LOUD[chunk % len(LOUD)]
    return query if length is None else query[:, -length:]


def ragged(lengths, seed=0):
    """Random queries (B, Q) of these lengths, right-padded with other tokens."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(0, V, (len(lengths), max(lengths)), generator=generator)
    return query, torch.tensor(lengths)


def reasoning_batch(lengths=(11, 4, 9), answers=(3, 1, 2), seed=0, steps=4, size=3):
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    query, query_lengths = ragged(lengths, seed)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    step_lengths = 1 + draw(size, rows, steps)
    step_lengths[torch.arange(steps) >= draw(steps + 1, rows, 1)] = 0
    step_lengths[0, 0] = 2  # at least one step
    places = (torch.rand(rows, steps, generator=generator) * query_lengths[:, None]).long()
    places = places.sort(dim=1).values.masked_fill(step_lengths == 0, -1)
    targets = draw(V, rows, max(answers))
    targets[torch.arange(max(answers)) >= torch.tensor(answers)[:, None]] = -100
    return {
        "query": query,
        "query_lengths": query_lengths,
        "steps": draw(V, rows, steps, size),
        "step_lengths": step_lengths,
        "step_places": places,
        "targets": targets,
        "sequence_id": torch.arange(rows),
        "group": torch.zeros(rows, dtype=torch.int64),
        "num_bytes": torch.ones(rows, dtype=torch.int64),
        "epochs": 0.0,
    }


def without_steps(batch):
    return {
        **batch,
        "step_lengths": torch.zeros_like(batch["step_lengths"]),
        "step_places": torch.full_like(batch["step_places"], -1),
    }


def rows_of(batch, rows):
    return {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def place_of(t, q, grid):
    """Chunk and place of token ``t`` of a row with a query of ``q`` tokens."""
    return literal.find(grid.mode, grid.chunk_size, q, t)


def chunks_of(q, total, grid):
    """The tokens of each chunk of a row of ``total`` tokens that thinks, by the chunk's number."""
    kind, c, thinks = grid.mode, grid.chunk_size, grid.in_answers
    return {
        chunk: [t for t in range(total) if place_of(t, q, grid)[0] == chunk]
        for chunk in literal.thinking_chunks(kind, c, q, total, thinks)
    }


def gold_of(batch, row, layout):
    """The gold thought of every chunk of a row that thinks, by the chunk's number."""
    q, total = int(batch["query_lengths"][row]), len(row_of(batch, row, layout))
    thoughts = {chunk: [] for chunk in chunks_of(q, total, layout.grid)}
    for step, size in enumerate(batch["step_lengths"][row].tolist()):
        if not size:
            continue
        chunk, _ = place_of(int(batch["step_places"][row, step]), q, layout.grid)
        if chunk in thoughts:
            lead = [layout.separator] if thoughts[chunk] else []
            thoughts[chunk] += lead + batch["steps"][row, step, :size].tolist()
    return thoughts


def row_of(batch, row, layout):
    """The tokens of a row: query, prefix, answer without its EOS."""
    query = batch["query"][row, : int(batch["query_lengths"][row])].tolist()
    answer = [token for token in batch["targets"][row].tolist() if token >= 0]
    return query + list(layout.prefix) + answer[:-1]
