"""``evaluate.py quality``: how much what a model writes is like human text.

**Conditional** (Latent-Thought paper, arXiv 2502.01567, Table 2; after SEDD, arXiv 2310.16834, and
SSD-LM, arXiv 2210.17432): the first 50 tokens of 1,000 validation texts are continued by 50 tokens,
five times each. MAUVE (arXiv 2102.01454) compares human texts with generated ones, prompts
included: 1,000 of 100 tokens with 5,000.

- From the papers: the numbers above, and nucleus sampling at 0.95. From SSD-LM's published code:
  prompts are part of both sides, each human text counts once, and MAUVE has its library's defaults
  (states of GPT-2 large, a tenth as many clusters as human texts).
- Ours: prompts are the first tokens of the windows that perplexity scores too (of documents, for
  models of sentences), evenly spread over the split; MAUVE is the mean over several seeds of its
  k-means, next to their deviation: smaller differences between models mean nothing.

**Unconditional** (Table 3): 64 samples of 1,024 tokens after the start token alone. Generative
perplexity is exp(total nats / total tokens) of their text under GPT-2 XL, token entropy that of
each sample's own tokens (`token_entropy`), samples per second the wall time of
generating, eight at once.

- NOTE(paper): section 3.3 calls the judge "LTM-XLarge", appendix A.3 GPT-2 XL; we take the latter.
- NOTE(paper): appendix A.3 says "greedy decoding (top-k = 1)", under which a model without latent
  vectors writes one text 64 times. We report each way of sampling, and how many texts differ.
- Ours: the judge reads the text through its own tokenizer, and does not score the first token, for
  which it has no context. SEDD's code averages the perplexities of samples instead of their nats;
  that number is in the file too (``mean_of_perplexities``).

In both, lengths are fixed: the end of a document does not end a text, and judges read it as their
own EOS. Judge and featurizer compute in float32 whatever ``--precision`` says.
"""

import dataclasses
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from datamodules import LanguageDataModule, Tokenizer
from evaluation.arguments import (
    Split,
    add_corpus_arguments,
    add_model_arguments,
    data_recipe,
    load_checkpoint,
    load_model,
    load_own_tokenizer,
)
from evaluation.cost import Cost, GeneratedSteps, price
from evaluation.load import (
    Pretrained,
    build_data,
    check_fit,
    describe_data,
    describe_model,
    prepare,
)
from evaluation.output import check_targets, write_json, write_jsonl
from evaluation.quality.measures import (
    Author,
    Judge,
    QualityReport,
    measure_continuations,
    measure_samples,
    require_mauve,
)
from evaluation.quality.texts import (
    QualityConfig,
    Sampling,
    Written,
    check_room,
    check_running_text,
    human_texts,
)
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.layers import recording


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the checkpoint."""
    add_model_arguments(parser)
    add_corpus_arguments(parser, argv)
    parser.add_class_arguments(QualityConfig, skip={"sampling"})
    parser.add_argument(
        "--sampling",
        nargs="+",
        type=Sampling,
        default=list(QualityConfig.sampling),
        help="Ways of sampling, all at temperature 1; each gets its row.",
    )
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Tokenizer name, where the checkpoint names none and nothing is continued.",
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument(
        "--texts", type=str | None, default=None, help="JSONL file to write, a text a line."
    )


def run(settings: Namespace) -> None:
    """Generates, measures, prints a table and writes the files that are asked for."""
    config = _config(settings)
    target, texts = check_targets(output=settings.output, texts=settings.texts)
    checkpoint = load_checkpoint(settings)
    model = load_model(settings, checkpoint)
    tokenizer, data = _tokenizer_and_data(settings, config, checkpoint, model)
    author = Author(model, tokenizer, settings.precision)
    _check_lengths(author, config)
    # Before hours of generating: what is not there fails now.
    featurizer, judge = _readers(config, model.device)
    steps = GeneratedSteps()
    with recording(generated_steps=steps.count):
        human, continued, sampled = _write(author, data, settings.split, config)
    if texts is not None:
        write_jsonl(texts, _lines(author, {"conditional": continued, "unconditional": sampled}))
    report = QualityReport(
        {}
        if featurizer is None
        else measure_continuations(author, continued, human, featurizer, config),
        measure_samples(author, sampled, judge, config),
        model=type(model).__name__,
        checkpoint=str(checkpoint.path),
        data=None if data is None else describe_data(checkpoint, data, settings.split),
        settings=_describe(checkpoint, author, config),
        cost=_cost(model, [*continued.values(), *sampled.values()], steps.mean),
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())


def _config(settings: Namespace) -> QualityConfig:
    """Returns what the command line says of the config's fields."""
    keys = [field.name for field in dataclasses.fields(QualityConfig)]
    chosen = {key: settings[key] for key in keys}
    return QualityConfig(**{**chosen, "sampling": tuple(dict.fromkeys(settings.sampling))})


def _tokenizer_and_data(
    settings: Namespace, config: QualityConfig, checkpoint: Checkpoint, model: LanguageModel
) -> tuple[Tokenizer, LanguageDataModule | None]:
    """Returns the model's tokenizer, and the prepared data where prompts are continued.

    Raises:
        ValueError: if one of them does not fit the model.
    """
    if not config.conditional:
        return load_own_tokenizer(settings, checkpoint, model), None
    if settings.tokenizer is not None:
        raise ValueError(
            f"tokenizer ({settings.tokenizer}): prompts have that of the data; set "
            "--data.tokenizer, or take --mode unconditional"
        )
    data = build_data(checkpoint, data_recipe(settings))
    check_running_text(data)
    check_fit(model, data)
    prepare(data, checkpoint)
    return data.tokenizer, data


def _check_lengths(author: Author, config: QualityConfig) -> None:
    """Raises a ValueError, naming the option, if what is to be written does not fit the model."""
    if config.conditional:
        check_room(author.model, config.prompt_tokens, config.new_tokens, "new_tokens")
    if config.unconditional:
        start = len(author.tokenizer.prompt_ids(""))
        check_room(author.model, start, config.sample_tokens, "sample_tokens")


def _readers(config: QualityConfig, device: torch.device) -> tuple[Pretrained | None, Judge | None]:
    """Returns featurizer and judge, None where they are not needed.

    Raises:
        ValueError: if one cannot be loaded, or MAUVE's library is missing.
    """
    featurizer, judge = None, None
    if config.conditional:
        require_mauve()
        featurizer = Pretrained(config.featurizer, device, head="none", key="featurizer")
    if config.unconditional and config.judge is not None:
        judge = Judge(Pretrained(config.judge, device, key="judge"))
    return featurizer, judge


def _write(
    author: Author, data: LanguageDataModule | None, split: Split, config: QualityConfig
) -> tuple[list[list[int]], dict[str, Written], dict[str, Written]]:
    """Returns human texts, continuations of their prompts, and samples, the latter two by way.

    Empty where they are not asked for.
    """
    human: list[list[int]] = []
    continued: dict[str, Written] = {}
    sampled: dict[str, Written] = {}
    if data is not None:
        length = config.prompt_tokens + config.new_tokens
        human = human_texts(data, split, count=config.prompts, length=length)
        prompts = _repeat([text[: config.prompt_tokens] for text in human], config.continuations)
        continued = author.write(prompts, config.new_tokens, config)
    if config.unconditional:
        starts = _repeat([author.tokenizer.prompt_ids("")], config.samples)
        sampled = author.write(starts, config.sample_tokens, config)
    return human, continued, sampled


def _cost(model: LanguageModel, written: Sequence[Written], steps: float | None) -> Cost:
    """Returns what it cost to write texts, as if all were as long as the longest."""
    texts = [
        len(prompt) + len(new)
        for own in written
        for prompt, new in zip(own.prompts, own.new, strict=True)
    ]
    return price(model, max(texts), steps, sum(own.seconds for own in written))


def _repeat(prompts: Sequence[list[int]], times: int) -> list[list[int]]:
    """Returns each prompt ``times`` times in a row: continuation c of prompt p is p * times + c."""
    return [prompt for prompt in prompts for _ in range(times)]


def _lines(author: Author, texts: dict[str, dict[str, Written]]) -> list[dict[str, Any]]:
    """Returns a line of the texts file for each text."""
    decode = author.tokenizer.decode
    return [
        {
            "mode": mode,
            "sampling": sampling,
            "number": number,
            "prompt": decode(prompt),
            "text": decode(new),
            "tokens": new,
        }
        for mode, ways in texts.items()
        for sampling, written in ways.items()
        for number, (prompt, new) in enumerate(zip(written.prompts, written.new, strict=True))
    ]


def _describe(checkpoint: Checkpoint, author: Author, config: QualityConfig) -> dict[str, Any]:
    """Returns how the texts were made and measured."""
    return {
        **config.used(),
        **({"mauve_text": version("mauve-text")} if config.conditional else {}),
        "tokenizer": author.tokenizer.name,
        "precision": author.precision,
        **describe_model(checkpoint, author.model),
        "trained_on": checkpoint.data_state.get("fingerprint"),
    }
