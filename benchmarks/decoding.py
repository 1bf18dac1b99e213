"""Cached greedy decoding against ``transformers``' generate, in tokens per second.

python -m benchmarks.decoding
python -m benchmarks.decoding --device cuda --layers 12 --dim 768 --heads 12 --vocab 50257
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, compare, gpt2_pair
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate


def decoding(options: Options) -> Iterator[dict[str, Any]]:
    """Yields one row per batch size."""
    context = options.prompt + options.new
    theirs, ours = gpt2_pair(options.vocab, context, options.layers, options.dim, options.heads)
    theirs.to(options.device).eval()
    ours.to(options.device).eval()
    for batch in options.batches:
        prompts = torch.randint(1, options.vocab, (batch, options.prompt), device=options.device)
        ours_on = partial(_ours, ours, prompts, options.new)
        theirs_on = partial(_theirs, theirs, prompts, options.new)
        time = compare(ours_on, theirs_on, options.rounds)
        yield {
            "batch": batch,
            "ours tokens/s": batch * options.new / time.ours,
            "theirs tokens/s": batch * options.new / time.theirs,
            "speed ratio": 1 / time.ratio,
            "same text": ours_on() == theirs_on(),
        }


def _ours(model: LanguageModel, prompts: Tensor, new: int) -> list[list[int]]:
    greedy = SamplingConfig(temperature=0)
    rows = prompts.tolist()
    return generate(model, rows, max_new_tokens=new, sampling=greedy, device=prompts.device)


def _theirs(model: Any, prompts: Tensor, new: int) -> list[list[int]]:
    written = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    rows: list[list[int]] = written[:, prompts.shape[1] :].tolist()
    return rows


def main() -> None:
    """Parses the command line and prints the table."""
    sizes = {"layers": 6, "dim": 256, "heads": 4, "vocab": 4096, "prompt": 32, "new": 128}
    parser = harness.options_parser(__doc__, **sizes)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    harness.run(parser, {"decoding": decoding})


if __name__ == "__main__":
    main()
