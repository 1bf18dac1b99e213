"""PonderLM-3 against the plain transformer in training, and against full depth in generation.

    python -m benchmarks.pondering                           # all three tables, on a CPU
    python -m benchmarks.pondering --only generation --steps 3
    python -m benchmarks.pondering --device cuda --layers 24 --dim 1024 --heads 16 --context 2048 \
        --batch 4 --vocab 50304 --steps 3 --bf16 --compile --checkpoint

Training: overhead = (our step time / our FLOPs) / (plain step time / plain FLOPs), against the
plain transformer of the same widths on (K + 1) L positions; J is ``--iterations``. Memory: each
side's peak above what it held before its first step, in a process of its own; plain is one pass
over the interleaved sequence. Generation: with every token at k steps, time per token should be
(a + (k + 1) b) / (a + (K + 1) b) of that at full depth, where a is the output layer with sampling
and b one slot of all rows; both are timed in turn with the generation. ``mixed``: the depth of each
token of each row is drawn evenly from 0..K, so that rows are at different tokens.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, Step, built, compare, megabytes, random_windows, seconds
from lightning_models import (
    LanguageModel,
    PonderConfig,
    PonderLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.generation import Sampler, SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.output_layer import logits
from lightning_models.ponderlm import sequential
from lightning_models.ponderlm.router import Steps, executed_steps

LLAMA = {"norm": "rms", "activation": "swiglu", "bias": False, "tie_head": False}
FIRM = 50.0
"""Logit of the number of steps that a token is given; the others have 0."""
GREEDY = SamplingConfig(temperature=0)
BATCHES = (1, 8)
"""Rows of the generation table."""
REPEATS = 20
"""Slots, and choices of a token, that are timed together."""


# ---- training


def build(options: Options) -> LanguageModel:
    """Returns ``options.side``, ``ours`` or ``plain``, on the device, in training mode."""
    shape: dict[str, Any] = {
        "vocab_size": options.vocab,
        "block_size": options.context,
        "num_layers": options.layers,
        "dim": options.dim,
        "num_heads": options.heads,
        "init": "ponderlm",
        "positions": "rope",
        **LLAMA,
    }
    model: LanguageModel
    if options.side == "plain":
        model = TransformerLM(TransformerConfig(**shape))
    else:
        config = PonderConfig(
            **shape,
            thinking_steps=options.steps,
            jacobi_iterations=(options.iterations, options.iterations),
            checkpoint_passes=options.checkpoint,
        )
        model = PonderLM(config)
    return built(model, options)


def build_step(options: Options) -> Step:
    """Returns a function that does one whole training step."""
    model, batch = build(options), random_windows(options, options.vocab, length_of(options))
    loss = functools.partial(harness.objective, model, batch)
    return harness.training_step(model, loss, options.device, bf16=options.bf16)


def length_of(options: Options) -> int:
    """Returns the tokens of a row: those of the plain transformer fill all slots."""
    context: int = options.context
    return context * (options.steps + 1) if options.side == "plain" else context


def _side(side: str, options: Options, **changes: Any) -> Options:
    return Options(**{**vars(options), "side": side, **changes})


def training(options: Options) -> Iterator[dict[str, Any]]:
    """Yields times, FLOPs and their quotient in both precisions."""
    for bf16 in (False, True):
        sides = [_side(side, options, bf16=bf16, checkpoint=False) for side in ("ours", "plain")]
        lengths = map(length_of, sides)
        ours, plain = (
            build(side).flops_per_token(length, training=True) * length
            for side, length in zip(sides, lengths, strict=True)
        )
        time = compare(build_step(sides[0]), build_step(sides[1]), options.rounds)
        yield {
            "precision": "bf16" if bf16 else "float32",
            "ours s": time.ours,
            "plain s": time.theirs,
            "FLOP ratio": ours / plain,
            "overhead": time.ratio / (ours / plain),
        }


def memory(options: Options) -> Iterator[dict[str, Any]]:
    """Yields peak memory of a step, with the passes' activations held and computed again."""
    plain = megabytes("benchmarks.pondering", _side("plain", options))
    for checkpoint in (False, True):
        ours = megabytes("benchmarks.pondering", _side("ours", options, checkpoint=checkpoint))
        yield {
            "passes": "computed again" if checkpoint else "held",
            "ours MB": ours,
            "one plain pass MB": plain,
            "ratio": ours / plain,
        }


# ---- generation, by depth


def generation(options: Options) -> Iterator[dict[str, Any]]:
    """Yields time per token by depth, for single rows and for a batch."""
    model = build(_side("ours", options)).eval()
    assert isinstance(model, PonderLM)
    for rows in BATCHES:
        generator = torch.Generator().manual_seed(0)
        shape = rows, options.prompt
        prompts = torch.randint(1, options.vocab, shape, generator=generator).tolist()
        for depth in [*range(model.config.thinking_steps), "mixed"]:
            yield {"batch": rows, "depth": depth, **_at_depth(model, prompts, depth, options)}


def _at_depth(
    model: PonderLM, prompts: list[list[int]], depth: Any, options: Options
) -> dict[str, float]:
    most = model.config.thinking_steps
    runs: list[Callable[[], float]] = [
        lambda: _generate(model, prompts, depth, options),
        lambda: _generate(model, prompts, most, options),
        lambda: _one_head(model, len(prompts)),
        lambda: _one_slot(model, prompts, options),
    ]
    times = [[run() for run in runs] for _ in range(options.rounds + 1)][1:]
    steps = _mean_steps(model, prompts, depth, options)
    ratio = statistics.median(t[0] / t[1] for t in times)
    own, a, b = (statistics.median(t[i] for t in times) for i in (0, 2, 3))
    predicted = (a + (steps + 1) * b) / (a + (most + 1) * b)
    return {
        "steps": steps,
        "ms/token": 1e3 * own,
        "a ms": 1e3 * a,
        "b ms": 1e3 * b,
        "ratio to full": ratio,
        "predicted": predicted,
        "measured/predicted": ratio / predicted,
    }


@torch.no_grad()
def _generate(model: PonderLM, prompts: list[list[int]], depth: Any, options: Options) -> float:
    """Returns seconds per new token of a row, after the prompt."""
    with _FixedRouter(model, depth):
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=options.device)
        tokens = torch.tensor(prompts, device=options.device)
        start = seconds(lambda: model.init_cache(tokens, lengths, options.new))
        whole = seconds(lambda: _continue(model, prompts, options))
    return (whole - start) / options.new


def _mean_steps(model: PonderLM, prompts: list[list[int]], depth: Any, options: Options) -> float:
    """Returns the additional steps that a generated token takes."""
    taken: list[int] = []
    counting = recording(generated_steps=lambda steps: taken.extend(steps.tolist()))
    with _FixedRouter(model, depth), counting:
        _continue(model, prompts, options)
    return statistics.mean(taken)


def _continue(model: PonderLM, prompts: list[list[int]], options: Options) -> None:
    generate(model, prompts, max_new_tokens=options.new, sampling=GREEDY, device=options.device)


class _FixedRouter:
    """Context in which the router gives every token ``depth`` steps, or mixed ones."""

    def __init__(self, model: PonderLM, depth: Any) -> None:
        self.model, self.depth = model, depth

    def __enter__(self) -> None:
        self.model.network.route = self._route  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.model.network.route

    def _route(self, first: Tensor) -> Steps:
        most = self.model.config.thinking_steps
        if self.depth == "mixed":  # as good as random, and the same at each run
            depth = (first[..., 0].abs() * 1e4).long() % (most + 1)
        else:
            depth = torch.full(first.shape[:-1], self.depth, device=first.device)
        scores = FIRM * torch.nn.functional.one_hot(depth, most + 1).float()
        tails = scores.flip(-1).logcumsumexp(dim=-1).flip(-1)
        log_tail = tails - tails[..., :1]
        executed = executed_steps(log_tail, self.model.config.tau)
        return Steps(scores.log_softmax(dim=-1), log_tail, executed)


def _one_head(model: PonderLM, rows: int) -> float:
    """Returns the seconds of an output layer and the choice of a token, for all rows."""
    matrix = model.network.output_matrix.detach()
    h, ready = matrix[:rows], torch.ones(rows, dtype=torch.bool, device=matrix.device)
    sampler = Sampler(GREEDY, range(rows))

    def run() -> None:
        """Chooses a token a row, ``REPEATS`` times."""
        for _ in range(REPEATS):
            scores = logits(h, matrix).float()
            sampler.choose(scores, ready, range(rows)).tolist()

    return seconds(run) / REPEATS


@torch.no_grad()
def _one_slot(model: PonderLM, prompts: list[list[int]], options: Options) -> float:
    """Returns the seconds of a slot of all rows, after the prompts."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=options.device)
    tokens = torch.tensor(prompts, device=options.device)
    cache = model.init_cache(tokens, lengths, REPEATS)
    last = tokens[:, -1]

    def run() -> None:
        """Advances every row by a slot, ``REPEATS`` times."""
        for _ in range(REPEATS):
            bool(sequential.advance(model.network, cache, last).any())

    return seconds(run) / REPEATS


def main() -> None:
    """Parses the command line and prints the tables that are asked for."""
    sizes = {"layers": 4, "dim": 256, "heads": 4, "context": 128, "batch": 8, "vocab": 4096}
    parser = harness.options_parser(__doc__, **sizes, prompt=32)
    parser.add_argument("--steps", type=int, default=3, help="K")
    parser.add_argument("--iterations", type=int, default=2, help="J")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--compile", action="store_true")
    tables = {"training": training, "memory": memory, "generation": generation}
    harness.run(parser, tables, build_step)


if __name__ == "__main__":
    main()
