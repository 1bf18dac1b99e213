"""Thinking States: training against Coconut, speculative prefill, answering against CoT.

    python -m benchmarks.thinking                            # all tables, on a CPU
    python -m benchmarks.thinking --only training --batch 8
    python -m benchmarks.thinking --only prefill --every 8 4 1
    python -m benchmarks.thinking --device cuda --bf16 --shape Qwen/Qwen2.5-0.5B

Training (Fig. 6 of the paper): forward, backward and AdamW on a query of 128 tokens (``--length``)
in 2, 4, 8 and 16 chunks (``--counts``), with as many thought tokens in all (``--thoughts``, ends
counted), against 2 chunks; and of Coconut with as many latents, against 2 latents. Prefill and
answering: chunks k, 2k, 3k, ... of each query think a thought of as many tokens each (``--every``,
``--thought``); all others think nothing. Networks have random weights; trained ones are timed by
``python evaluate.py reason --ckpt A B``. Ratios are medians over rounds of rivals in turn; the
first row of a training table is a size against itself, and shows the noise.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Options, built, compare
from lightning_models import (
    CoconutConfig,
    CoconutLM,
    CoTConfig,
    CoTLM,
    LanguageModel,
    NoCoTConfig,
    NoCoTLM,
    ThinkingStatesConfig,
    ThinkingStatesLM,
)
from lightning_models.generation import SamplingConfig, generate
from lightning_models.thinking_states.backbone import KNOWN
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.reading import ReadQueries, read_queries

GREEDY = SamplingConfig(temperature=0)
LATENTS = 6
"""Of Coconut, as in the paper's Table 2."""
METHODS: dict[str, tuple[Any, Any]] = {
    "Thinking States": (ThinkingStatesLM, ThinkingStatesConfig),
    "Coconut": (CoconutLM, CoconutConfig),
    "CoT": (CoTLM, CoTConfig),
    "no CoT": (NoCoTLM, NoCoTConfig),
}
PREFIX, SEPARATOR = (1, 2, 3, 4), (5,)
"""Ids of the answer prefix and of the step separator."""
MARK = 6
"""Token after which the models of `tell_when_to_think` think, at the end of a chunk."""
FIRST = 7
"""The first id that texts are drawn from; those of thoughts are the last ones."""


def build(method: str, options: Options, **config: Any) -> LanguageModel:
    """Returns a model with random weights, on the device, in training mode.

    Args:
        method: a key of ``METHODS``.
        options: of the command line.
        **config: further fields of its config.
    """
    kind, settings = METHODS[method]
    sizes: dict[str, Any] = {
        "num_layers": options.layers,
        "dim": options.dim,
        "num_heads": options.heads,
    }
    if options.shape is not None:
        sizes = {"architecture": dict(KNOWN[options.shape])}
    wording = {"answer_prefix": PREFIX, "step_separator": SEPARATOR}
    lengths = {"vocab_size": options.vocab, "block_size": 4 * options.length}
    model: LanguageModel = kind(settings(**sizes, **lengths, **wording, **config))
    return built(model, options)


def latents(number: int, each: int = 1) -> dict[str, int]:
    """Returns the fields of a Coconut with ``number`` latents and no step left of the chain."""
    last = number // each
    return {"c_thought": each, "max_latent_stage": last, "first_stage": last + 1}


def random_tokens(options: Options, *shape: int) -> Tensor:
    """Returns text of that shape, int64, on the device; the same each time."""
    generator = torch.Generator().manual_seed(0)
    last = options.vocab - options.thought
    return torch.randint(FIRST, last, shape, generator=generator).to(options.device)


def thought_tokens(options: Options) -> list[int]:
    """Returns the thought that is thought after each ``MARK`` at the end of a chunk."""
    return list(range(options.vocab - options.thought, options.vocab))


@torch.no_grad()
def tell_when_to_think(network: ThinkingStatesNetwork, thought: list[int]) -> None:
    """Sets embedding and T's head so that T writes ``thought`` after ``MARK``, and ends it there.

    Everything is computed as ever, by layers with random weights. Embeddings are made so long that
    what layers add hardly matters: all tokens share a direction that T's head takes for the end of
    a thought; ``MARK`` and the thought's tokens have one of their own, four times as long, that it
    takes for the next token. A state ends with a token without such a direction, so that it wakes
    no thought at the next chunk's end, and silences none.

    Args:
        network: with a head of T's own, and a width above the thought's tokens.
        thought: different ids.
    """
    head: nn.Linear | None = network.thinking.head
    embedding = network.backbone.model.embed_tokens.weight
    width = embedding.shape[1]
    assert head is not None
    assert width > len(thought)
    length = width / 4
    embedding[:, 0] += length
    head.weight.zero_()
    head.weight[network.config.special_id("thought_end"), 0] = 1.0
    for place, (before, token) in enumerate(zip([MARK, *thought], thought, strict=False), start=1):
        embedding[before, place] += 4 * length
        head.weight[token, place] = 1.0


# ---- training


class Timed(NamedTuple):
    """What is timed of a model in training.

    Attributes:
        step: A whole training step.
        forward: The loss alone, its graph included.
    """

    step: Callable[[], float]
    forward: Callable[[], Tensor]


def training(options: Options) -> Iterator[dict[str, Any]]:
    """Yields how a step grows with chunks, and with latents."""
    for method in ("Thinking States", "Coconut"):
        least = build_timed(method, options.counts[0], options)
        for number in options.counts:
            timed = build_timed(method, number, options)
            step = compare(timed.step, least.step, options.rounds)
            forward = compare(timed.forward, least.forward, options.rounds)
            yield {
                "method": method,
                "chunks or latents": number,
                "step s": step.ours,
                f"step to {options.counts[0]}": step.ratio,
                "forward s": forward.ours,
                f"forward to {options.counts[0]}": forward.ratio,
            }


def build_timed(method: str, number: int, options: Options) -> Timed:
    """Returns what is timed of a model with that many chunks or latents."""
    sizes = {"chunk_size": options.length // number}
    config = latents(number) if method == "Coconut" else sizes
    model = build(method, options, **config)
    batch = training_batch(number, options)

    def loss() -> Tensor:
        """The training objective of the batch."""
        return harness.objective(model, batch)

    def forward() -> Tensor:
        """The same without its gradient."""
        with torch.autocast(kind, torch.bfloat16, enabled=options.bf16):
            return loss().detach()

    kind = torch.device(options.device).type
    return Timed(harness.training_step(model, loss, options.device, bf16=options.bf16), forward)


def training_batch(number: int, options: Options) -> dict[str, Any]:
    """Returns queries of ``number`` chunks with a step at the end of each.

    Steps and the ends of their thoughts are ``options.thoughts`` tokens in all.
    """
    rows, length, device = options.batch, options.length, options.device
    each, chunk = options.thoughts // number - 1, options.length // number
    places = torch.arange(1, number + 1, device=device) * chunk - 1
    answers = random_tokens(options, rows, options.answer)
    return {
        "query": random_tokens(options, rows, length),
        "query_lengths": torch.full((rows,), length, device=device),
        "steps": random_tokens(options, rows, number, each),
        "step_lengths": torch.full((rows, number), each, device=device),
        "step_places": places.expand(rows, -1),
        "targets": torch.cat((answers, torch.zeros_like(answers[:, :1])), dim=1),
        "sequence_id": torch.arange(rows, device=device),
        "epochs": 0.0,
    }


# ---- prefill and answers


def prefill(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what speculation saves, for each spacing of thoughts."""
    model = thinker(options)
    for every in options.every:
        query = queries(every, options)
        read_by = partial(_read, model, query, options=options)
        found = [read_by(how) for how in ("sequential", "speculative")]
        for read in found:
            assert _thinking(read) == _expected(every, options), "thoughts are not where they go"
        time = compare(
            partial(read_by, "sequential"), partial(read_by, "speculative"), options.rounds
        )
        yield {
            "thoughts at each": every,
            "sequential rounds": found[0].rounds[0],
            "speculative rounds": found[1].rounds[0],
            "sequential s": time.ours,
            "speculative s": time.theirs,
            "times faster": time.ratio,
        }


def answering(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what methods take for thinking and answer together, against CoT.

    CoT writes as many tokens as Thinking States thinks, and a separator before each thought.
    """
    every = options.every[0]
    query = queries(every, options).tolist()
    written = (options.chunks // every) * (options.thought + len(SEPARATOR))
    chain: Any = build("CoT", options, max_chain_tokens=written).eval()
    room = written + len(PREFIX) + options.answer
    cot = partial(_answer, chain, query, room, options)
    for row in cot():
        assert len(chain.answer_tokens(row)) == options.answer, "the chain ended early"
    for name, model in _rivals(options).items():
        time = compare(cot, partial(_answer, model, query, options.answer, options), options.rounds)
        yield {
            "method": name,
            "s": time.theirs,
            f"CoT s ({written} tokens)": time.ours,
            "times faster": time.ratio,
        }


def _rivals(options: Options) -> dict[str, Any]:
    return {
        "Thinking States": thinker(options),
        "the same, sequential": thinker(options, prefill="sequential"),
        f"Coconut, {LATENTS} latents": build("Coconut", options, **latents(LATENTS, 2)).eval(),
        "no CoT": build("no CoT", options).eval(),
    }


def thinker(options: Options, **config: Any) -> ThinkingStatesLM:
    """Returns a model that thinks after ``MARK`` at the end of a chunk, and nowhere else."""
    sizes = {"chunk_size": options.chunk_size, "max_thought_tokens": options.thought + 1}
    model = build("Thinking States", options, **sizes, **config).eval()
    assert isinstance(model, ThinkingStatesLM)
    tell_when_to_think(model.network, thought_tokens(options))
    return model


def queries(every: int, options: Options) -> Tensor:
    """Returns queries (B, Q) of whole chunks, of which each ``every``-th one is to think."""
    tokens = random_tokens(options, options.batch, options.chunks, options.chunk_size)
    tokens[:, every - 1 :: every, -1] = MARK
    return tokens.flatten(1)


def _read(model: ThinkingStatesLM, query: Tensor, how: str, options: Options) -> ReadQueries:
    lengths = torch.full((len(query),), query.shape[1], device=query.device)
    with torch.autocast(query.device.type, torch.bfloat16, enabled=options.bf16):
        return read_queries(model.network, query, lengths, how)


def _thinking(read: ReadQueries) -> list[list[list[int]]]:
    return [[thought.tokens for thought in row] for row in read.thoughts()]


def _expected(every: int, options: Options) -> list[list[list[int]]]:
    thought = thought_tokens(options)
    row = [thought if (k + 1) % every == 0 else [] for k in range(options.chunks)]
    return [row] * options.batch


def _answer(model: Any, query: list[list[int]], room: int, options: Options) -> list[list[int]]:
    ask: Callable[..., list[list[int]]] = partial(generate, model, query, sampling=GREEDY)
    with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.bf16):
        return ask(max_new_tokens=room, vocab_size=options.vocab, device=options.device)


# ---- command line


def check(options: Options) -> None:
    """Checks that sizes fit together.

    Raises:
        ValueError: if they do not; the message says which.
    """
    for number in options.counts:
        if number < 1 or options.length % number or options.thoughts % number:
            raise ValueError(
                f"counts ({number}) must divide length ({options.length}) and thoughts "
                f"({options.thoughts})"
            )
        if options.thoughts < 2 * number:
            raise ValueError(
                f"thoughts ({options.thoughts}) must be two tokens a chunk or more, of which one "
                f"is the end; counts has {number}"
            )
    for every in options.every:
        if not 1 <= every <= options.chunks:
            raise ValueError(f"every ({every}) must be from 1 to chunks ({options.chunks})")
    if options.thought < 1:
        raise ValueError(f"thought ({options.thought}) must be at least 1")


def main() -> None:
    """Parses the command line and prints the tables that are asked for."""
    sizes = {"layers": 4, "dim": 256, "heads": 4, "vocab": 4096, "batch": 1}
    parser = harness.options_parser(__doc__, rounds=9, **sizes)
    parser.add_argument("--shape", choices=(*KNOWN,), default=None, help="instead of sizes")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--length", type=int, default=128, help="training: tokens of the query")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--thoughts", type=int, default=64, help="training: tokens of all thoughts")
    parser.add_argument("--chunks", type=int, default=32, help="prefill, answering")
    parser.add_argument("--chunk_size", type=int, default=8, help="prefill, answering")
    parser.add_argument(
        "--every",
        type=int,
        nargs="+",
        default=[8, 4, 1],
        help="k: chunks k, 2k, ... of a query think; answering takes the first number",
    )
    parser.add_argument("--thought", type=int, default=4, help="prefill, answering: tokens of one")
    parser.add_argument("--answer", type=int, default=4, help="tokens of the answer")
    tables = {"training": training, "prefill": prefill, "answering": answering}
    harness.run(parser, tables, prepare=check)


if __name__ == "__main__":
    main()
