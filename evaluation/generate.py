"""``evaluate.py generate``: continuations of prompts."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from tqdm import tqdm

from datamodules import Tokenizer, read_prompts
from datamodules.readers import check_utf8
from evaluation.arguments import (
    add_file_arguments,
    add_model_arguments,
    add_tokenizer_argument,
    chosen,
    load_with_tokenizer,
)
from evaluation.cost import GeneratedSteps
from evaluation.devices import Precision, autocast
from evaluation.output import check_targets, write_jsonl
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig
from lightning_models.layers import recording


def collect_prompts(texts: Sequence[str], file: str | None) -> list[str]:
    """Returns the prompts of the command line, followed by the prompts of the file.

    Raises:
        ValueError: If there are none, one cannot be encoded as UTF-8, or the file cannot be read.
    """
    for text in texts:
        check_utf8(text, f"prompt {text!a}")
    prompts = [*texts, *([] if file is None else read_prompts(Path(file)))]
    if not prompts:
        raise ValueError('there is nothing to continue; give --prompt "..." or --prompts_file F')
    return prompts


def left_for_prompt(limit: int | None, new_tokens: int, key: str) -> int | None:
    """Returns the number of tokens that a model's context leaves for a prompt.

    Args:
        limit: Context of the model in tokens, or None if it is unlimited.
        new_tokens: Number of tokens to generate.
        key: Option that sets ``new_tokens``, for the message.

    Raises:
        ValueError: If none are left.
    """
    if limit is not None and new_tokens >= limit:
        raise ValueError(
            f"{key} ({new_tokens}) leaves no room for a prompt in the model's context of {limit} "
            f"tokens; set it (for a task in its generation_kwargs) to {limit // 2} or less"
        )
    return None if limit is None else limit - new_tokens


# ---- the command


GROUP = 32
"""Prompts decoded at once: few enough for the caches of a GPT-2 to fit a small GPU."""


def continue_prompts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    precision: Precision = "32",
    streams: Sequence[int] | None = None,
    stop: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Yields each prompt with its continuation, in order.

    A continuation depends only on the prompt, its random stream and the seed.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Texts; an empty one starts a document.
        max_new_tokens: Maximum length of a continuation in tokens.
        sampling: Temperature, top-k, top-p and seed.
        precision: Precision of the matrix products.
        streams: Random stream of each prompt. Defaults to 0, 1, 2 and so on.
        stop: Texts at which a continuation ends; it is cut before the first one.
    """
    streams = range(len(prompts)) if streams is None else streams
    starts = range(0, len(prompts), GROUP)
    hidden = None if len(starts) > 1 else True  # None hides the bar unless stderr is a terminal
    for start in tqdm(starts, desc="generating", unit=" groups", disable=hidden):
        group = prompts[start : start + GROUP]
        with autocast(model.device, precision):
            texts = model.generate_text(
                group,
                tokenizer=tokenizer,
                max_new_tokens=max_new_tokens,
                streams=streams[start : start + GROUP],
                stop=stop,
                **dataclasses.asdict(sampling),
            )
        yield from zip(group, texts, strict=True)


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        type=str,
        default=[],
        metavar="TEXT",
        help='Text to continue; may be repeated. "" starts a document.',
    )
    parser.add_argument(
        "--prompts_file",
        type=str | None,
        default=None,
        help="File with more prompts: txt with one per line, or jsonl with the field prompt.",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=PositiveInt,
        default=100,
        help="Maximum length of a continuation in tokens.",
    )
    parser.add_class_arguments(SamplingConfig)
    add_tokenizer_argument(parser)
    add_file_arguments(parser, output="JSONL file to write.")


def run(settings: Namespace) -> None:
    """Prints each prompt with its continuation, and writes the output file if requested."""
    (target,) = check_targets(output=settings.output)
    sampling = chosen(settings, SamplingConfig)
    prompts = collect_prompts(settings.prompt, settings.prompts_file)
    _, model, tokenizer = load_with_tokenizer(settings)
    rows, taken = [], GeneratedSteps()
    with recording(generated_steps=taken.count):
        for prompt, continuation in continue_prompts(
            model,
            tokenizer,
            prompts,
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            precision=settings.precision,
        ):
            print(f"--- {prompt}\n{continuation}")
            rows.append({"prompt": prompt, "continuation": continuation})
    if taken.mean is not None:
        print(f"--- {taken.mean:.2f} additional steps per token")
    if target is not None:
        write_jsonl(target, rows)
