"""Cached greedy decoding against ``transformers``' generate, in tokens per second.

python -m benchmarks.decoding
python -m benchmarks.decoding --device cuda --layers 12 --dim 768 --heads 12 --vocab 50257
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare
from benchmarks.peers import gpt2_pair
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate


def main() -> None:
    """Parses the command line and prints one row per batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = options.prompt + options.new
    theirs, ours = gpt2_pair(options.vocab, context, options.layers, options.dim, options.heads)
    theirs.to(options.device).eval()
    ours.to(options.device).eval()
    print(f"prompt {options.prompt}, {options.new} new tokens, torch {torch.__version__}")
    print("batch  ours tok/s  theirs tok/s  speed ratio  same text")
    for batch in options.batches:
        prompts = torch.randint(1, options.vocab, (batch, options.prompt), device=options.device)
        ours_on = partial(_ours, ours, prompts, options.new)
        theirs_on = partial(_theirs, theirs, prompts, options.new)
        time = compare(ours_on, theirs_on, options.rounds)
        tokens = batch * options.new
        same = ours_on() == theirs_on()
        print(
            f"{batch:5d} {tokens / time.ours:11.0f} {tokens / time.theirs:13.0f} "
            f"{1 / time.ratio:12.2f}  {same}"
        )


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


if __name__ == "__main__":
    main()
