"""Thought Gestalt's training step against the paper's literal computation: time and memory.

    python -m benchmarks.sentences                                # against 67 slots, and growth
    python -m benchmarks.sentences --device cuda --layers 12 --dim 768 --heads 12 --vocab 50304 \
        --bf16 yes --streams 64 --only speed                      # the 85M model: sentences/s

Sentences have the lengths of those in Python's documentation (``datamodules.Sentences``, a BPE of
``--bpe`` entries); their tokens are random, so that any vocabulary can be asked for. Dropout is off
on both sides. Time: rivals in turn, median ratio. Memory: each side alone in a fresh process, the
peak above what it held before its first step.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import Options, built, compare, in_turn, megabytes, seconds
from lightning_models import ThoughtGestaltConfig, ThoughtGestaltLM
from lightning_models.layers.blocks import join_heads, split_heads
from lightning_models.thought_gestalt.memory import MemoryAttention
from lightning_models.thought_gestalt.network import GestaltBlock, ThoughtGestaltNetwork

SLOTS = 67


def sentence_lengths(options: Options) -> list[int]:
    """Returns the slots of the sentences of some streams, in the order of the text."""
    from datamodules import PythonDocs, Sentences

    corpus = PythonDocs(tokenizer=f"bpe:{options.bpe}", cache_dir=options.cache_dir)
    data = Sentences(corpus=corpus)
    data.prepare_data()
    data.setup()
    batches = data.training_source()
    rows = [row for n in range(8) for row in batches.batch(n)["lengths"].tolist()]
    return [length for row in rows for length in row if length]


def build_batch(options: Options, sentences: int) -> dict[str, Any]:
    """Returns streams of ``sentences`` sentences with real lengths and random words."""
    lengths = torch.tensor(options.lengths)
    need = options.streams * sentences
    lengths = lengths.repeat(-(-need // len(lengths)))[:need].view(options.streams, sentences)
    width = int(lengths.max())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocab - 3, (*lengths.shape, width), generator=generator)
    tokens[..., 0] = options.vocab - 3
    tokens.scatter_(2, lengths[..., None] - 1, options.vocab - 2)
    place = torch.arange(width)
    following = torch.cat((tokens[..., 1:], torch.zeros_like(tokens[..., :1])), dim=-1)
    targets = torch.where(place < lengths[..., None] - 1, following, -100)
    batch = {"tokens": tokens, "lengths": lengths, "targets": targets}
    batch["is_last"] = torch.zeros_like(lengths, dtype=torch.bool)
    return {key: value.to(options.device) for key, value in batch.items()}


def build_model(options: Options) -> ThoughtGestaltLM:
    """Returns the model without dropout."""
    config = ThoughtGestaltConfig(
        vocab_size=options.vocab,
        block_size=SLOTS,
        num_layers=options.layers,
        dim=options.dim,
        num_heads=options.heads,
        sentence_layer=options.sentence_layer,
        attention_dropout=0.0,
        token_dropout=0.0,
        sentence_dropout=0.0,
        **options.changes,
    )
    model = ThoughtGestaltLM(config)
    built(model, options)
    return model


def build_step(options: Options) -> Callable[[], float]:
    """Returns a function that does a training step of ``options.side``: nats per target."""
    model, batch = build_model(options), build_batch(options, options.sentences)
    assert model.network is not None
    literal, padded = LiteralGestalt(model.network), None
    if options.side == "literal":
        padded = tensorize(batch, SLOTS)
    count = int((batch["targets"] >= 0).sum())

    def loss() -> Tensor:
        """Nats per target of the streams."""
        nats = model.loss(batch).terms["nll"].sum if padded is None else literal.loss(padded)
        return nats / count

    return harness.training_step(model, loss, options.device, bf16=options.bf16)


def _side(options: Options, side: str = "ours", **changes: Any) -> Options:
    """Returns the options of a side, with other fields of the model's config."""
    return Options(**{**vars(options), "side": side, "changes": changes})


def rival(options: Options) -> Iterator[dict[str, Any]]:
    """Yields time and memory against the literal computation."""
    sides = [_side(options, side) for side in ("ours", "literal")]
    steps = [build_step(side) for side in sides]
    first = [step() for step in steps]
    time = compare(steps[0], steps[1], options.rounds)
    memory = [megabytes("benchmarks.sentences", side) for side in sides]
    rows = ("loss", *first, None), ("s", time.ours, time.theirs, time.ratio)
    for name, ours, literal, ratio in (*rows, ("MB", *memory, memory[0] / memory[1])):
        yield {"": name, "ours": ours, "literal": literal, "ratio": ratio}


def by_sentences(options: Options) -> Iterator[dict[str, Any]]:
    """Yields how time and memory of a step grow with the sentences of a stream."""
    asked = [Options(**{**vars(_side(options)), "sentences": s}) for s in options.growth]
    times = in_turn([build_step(each) for each in asked], options.rounds)
    for each, taken in zip(asked, map(statistics.median, times), strict=True):
        again = Options(**{**vars(each), "changes": {"checkpoint_sentences": True}})
        yield {
            "sentences": each.sentences,
            "s/step": taken,
            "ms/sentence step": 1e3 * taken / each.sentences,
            "MB": megabytes("benchmarks.sentences", each),
            "MB checkpointed": megabytes("benchmarks.sentences", again),
        }


def by_memory(options: Options) -> Iterator[dict[str, Any]]:
    """Yields how the time of a step grows with the size of the memory."""
    base = build_step(_side(options, memory_size=1))
    for size in (10, 20, 40):
        step = build_step(_side(options, memory_size=size))
        yield {"M": size, "s/step relative to M = 1": compare(step, base, options.rounds).ratio}


def speed(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what one model does in a second."""
    step = build_step(_side(options))
    step()
    taken = statistics.median(seconds(step) for _ in range(options.rounds))
    count = options.sentences * options.streams
    yield {"sentences/s": count / taken, "sentence steps/s": options.sentences / taken}


# ---- the rival
#
# What the paper describes, batched over the streams that still have a sentence, with fused
# attention: padding is computed and masked, each cross-attention projects all of memory again.


IGNORE = -100


class Padded(NamedTuple):
    """A batch as sentence tensors; streams with more sentences come first."""

    tokens: Tensor
    """int64 (B, S, 67): BOS, words, padding, EOD or padding, EOS."""
    labels: Tensor
    """int64 (B, S, 67), -100 at padding and at EOS."""
    real: Tensor
    """Bool (B, S, 67)."""
    active: list[int]
    """Streams that have a t-th sentence, for every t."""


def tensorize(batch: dict[str, Any], slots: int) -> Padded:
    """Returns the sentence tensors of a batch as ``datamodules.Sentences`` makes them."""
    order = (batch["lengths"] > 0).sum(dim=1).argsort(descending=True, stable=True)
    compact, lengths = batch["tokens"][order], batch["lengths"][order]
    tail = 1 + batch["is_last"][order].long()  # EOS, or EOD and EOS
    tokens = torch.zeros(*lengths.shape, slots, dtype=torch.int64, device=compact.device)
    labels, real = torch.full_like(tokens, IGNORE), torch.zeros_like(tokens, dtype=torch.bool)
    for row, t in (lengths > 0).nonzero().tolist():
        used, ends = int(lengths[row, t]), int(tail[row, t])
        places = [*range(used - ends), *range(slots - ends, slots)]
        tokens[row, t, places] = compact[row, t, :used]
        labels[row, t, places[:-1]] = compact[row, t, 1:used]
        real[row, t, places] = True
    return Padded(tokens, labels, real, (lengths > 0).sum(dim=0).tolist())


class LiteralGestalt:
    """A network's weights in the literal computation (``alternate`` layers)."""

    def __init__(self, network: ThoughtGestaltNetwork) -> None:
        """Shares the weights of ``network``."""
        self.network = network

    def loss(self, batch: Padded) -> Tensor:
        """Returns the summed cross-entropy of all targets, in nats."""
        network, memory = self.network, list[Tensor]()
        total = torch.zeros((), device=batch.tokens.device)
        for t, rows in enumerate(batch.active):
            tokens, real = batch.tokens[:rows, t], batch.real[:rows, t]
            x = network.embedding(tokens) + network.position.weight
            memory = [vector[:rows] for vector in memory][-network.config.memory_size :]
            if memory:
                x = torch.cat((memory[-1][:, None], x[:, 1:]), dim=1)
            x, vector = self._blocks(x, _visible(real), memory)
            logits = network.norm(x) @ network.output_matrix.t()
            labels = batch.labels[:rows, t].flatten()
            losses = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
            total = total + losses
            memory.append(vector)
        return total

    def _blocks(self, x: Tensor, visible: Tensor, memory: list[Tensor]) -> tuple[Tensor, Tensor]:
        vectors = torch.stack(memory, dim=1) if memory else None
        sentence = x
        for number, block in enumerate(self.network.blocks, start=1):
            assert isinstance(block, GestaltBlock)
            x = self._block(block, x, visible, vectors)
            if number == self.network.config.sentence_layer:
                assert self.network.sentence_head is not None
                sentence = self.network.sentence_head.layers(x[:, -1])
        return x, sentence

    def _block(
        self, block: GestaltBlock, x: Tensor, visible: Tensor, vectors: Tensor | None
    ) -> Tensor:
        if block.attention is not None and block.attention_norm is not None:
            attention, heads = block.attention, block.attention.num_heads
            parts = attention.qkv(block.attention_norm(x)).chunk(3, dim=-1)
            q, k, v = (split_heads(part, heads) for part in parts)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            x = x + attention.out(join_heads(out))
        if block.memory_attention is not None and vectors is not None:
            assert block.memory_norm is not None
            x = x + self._read(block.memory_attention, block.memory_norm(x), vectors)
        return x + block.feed_forward(block.feed_forward_norm(x))

    def _read(self, attention: MemoryAttention, x: Tensor, vectors: Tensor) -> Tensor:
        positions = self.network.slots[: vectors.shape[1]].to(vectors.dtype)
        projected = (
            attention.query(x),
            attention.key(vectors + positions),
            attention.value(vectors),
        )
        q, k, v = (split_heads(part, attention.num_heads) for part in projected)
        out = F.scaled_dot_product_attention(q, k, v)
        return attention.gate[0] * attention.out(join_heads(out))


def _visible(real: Tensor) -> Tensor:
    """Returns who sees whom, bool (A, 1, 67, 67): causal, no padding, but padding sees itself."""
    slots = torch.arange(real.shape[1], device=real.device)
    causal = slots[None] <= slots[:, None]
    itself = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    return ((causal & real[:, None]) | itself)[:, None]


def read_lengths(options: Options) -> None:
    """Adds the lengths of real sentences to the options."""
    options.lengths = sentence_lengths(options)


def main() -> None:
    """Parses the command line and prints the tables."""
    sizes = {"layers": 6, "dim": 192, "heads": 6, "sentence_layer": 3, "vocab": 2048 + 3}
    parser = harness.options_parser(__doc__, **sizes, bpe=2048, streams=32, sentences=30)
    parser.add_argument("--growth", type=int, nargs="+", default=[10, 30, 50, 70, 90])
    parser.add_argument("--bf16", type=lambda s: s == "yes", default=False)
    parser.add_argument("--cache_dir", default="data_cache")
    tables = {"rival": rival, "sentences": by_sentences, "memory": by_memory, "speed": speed}
    default = ["rival", "sentences", "memory"]
    harness.run(parser, tables, build_step, default=default, prepare=read_lengths)


if __name__ == "__main__":
    main()
