"""Queries that are read while thinking, and answered, by networks that are told when to think.

Chunks k, 2k, 3k, ... of each query think a thought of as many tokens each (``--every``,
``--thought``); all others think nothing. See `thinking_models.tell_when_to_think`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare
from benchmarks.thinking_models import (
    MARK,
    PREFIX,
    SEPARATOR,
    build,
    latents,
    random_tokens,
    tell_when_to_think,
    thought_tokens,
)
from lightning_models import ThinkingStatesLM
from lightning_models.generation import SamplingConfig, generate
from lightning_models.thinking_states.reading import ReadQueries, read_queries

GREEDY = SamplingConfig(temperature=0)
LATENTS = 6
"""Of Coconut, as in the paper's Table 2."""


def report_prefill(options: argparse.Namespace) -> None:
    """Prints what speculation saves, for each spacing of thoughts."""
    model = thinker(options)
    print(f"{options.chunks} chunks of {options.chunk_size} tokens, thoughts of {options.thought}")
    print(
        "thoughts at   rounds: sequential  speculative  sequential s  speculative s  times faster"
    )
    for every in options.every:
        query = queries(every, options)
        run = partial(_read, model, query, options=options)
        found = [run(how) for how in ("sequential", "speculative")]
        for read in found:
            assert _thinking(read) == _expected(every, options), "thoughts are not where they go"
        rounds = [read.rounds[0] for read in found]
        time = compare(partial(run, "sequential"), partial(run, "speculative"), options.rounds)
        print(
            f"each {every:3d}. {rounds[0]:20d} {rounds[1]:12d} {time.ours:13.4f} "
            f"{time.theirs:14.4f} {time.ratio:13.2f}",
            flush=True,
        )


def report_answering(options: argparse.Namespace) -> None:
    """Prints what methods take for thinking and answer together, against CoT.

    CoT writes as many tokens as Thinking States thinks, and a separator in front of each thought.
    """
    every = options.every[0]
    query = queries(every, options).tolist()
    written = (options.chunks // every) * (options.thought + len(SEPARATOR))
    print(f"{written} tokens of chain, {len(PREFIX)} of prefix, {options.answer} of answer")
    print("                               s   CoT s  times faster")
    chain: Any = build("CoT", options, max_chain_tokens=written).eval()
    room = written + len(PREFIX) + options.answer
    cot = partial(_answer, chain, query, room, options)
    for row in cot():
        assert len(chain.answer_tokens(row)) == options.answer, "the chain ended early"
    for name, model in _rivals(options).items():
        time = compare(cot, partial(_answer, model, query, options.answer, options), options.rounds)
        print(f"{name:25s} {time.theirs:7.4f} {time.ours:7.4f} {time.ratio:13.2f}", flush=True)


def _rivals(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "Thinking States": thinker(options),
        "the same, sequential": thinker(options, prefill="sequential"),
        f"Coconut, {LATENTS} latents": build("Coconut", options, **latents(LATENTS, 2)).eval(),
        "no CoT": build("no CoT", options).eval(),
    }


def thinker(options: argparse.Namespace, **config: Any) -> ThinkingStatesLM:
    """Returns a model that thinks after ``MARK`` at the end of a chunk, and nowhere else."""
    sizes = {"chunk_size": options.chunk_size, "max_thought_tokens": options.thought + 1}
    model = build("Thinking States", options, **sizes, **config).eval()
    assert isinstance(model, ThinkingStatesLM)
    tell_when_to_think(model.network, thought_tokens(options))
    return model


def queries(every: int, options: argparse.Namespace) -> Tensor:
    """Returns queries (B, Q) of whole chunks, of which each ``every``-th one is to think."""
    tokens = random_tokens(options, options.batch, options.chunks, options.chunk_size)
    tokens[:, every - 1 :: every, -1] = MARK
    return tokens.flatten(1)


def _read(
    model: ThinkingStatesLM, query: Tensor, how: str, options: argparse.Namespace
) -> ReadQueries:
    lengths = torch.full((len(query),), query.shape[1], device=query.device)
    with torch.autocast(query.device.type, torch.bfloat16, enabled=options.bf16):
        return read_queries(model.network, query, lengths, how)


def _thinking(read: ReadQueries) -> list[list[list[int]]]:
    return [[thought.tokens for thought in row] for row in read.thoughts()]


def _expected(every: int, options: argparse.Namespace) -> list[list[list[int]]]:
    thought = thought_tokens(options)
    row = [thought if (k + 1) % every == 0 else [] for k in range(options.chunks)]
    return [row] * options.batch


def _answer(
    model: Any, query: list[list[int]], room: int, options: argparse.Namespace
) -> list[list[int]]:
    ask: Callable[..., list[list[int]]] = partial(generate, model, query, sampling=GREEDY)
    with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.bf16):
        return ask(max_new_tokens=room, vocab_size=options.vocab, device=options.device)
