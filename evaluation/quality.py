"""``evaluate.py quality``: how close generated texts are to human ones.

**Conditional** (Latent-Thought paper, arXiv 2502.01567, Table 2; after SEDD, arXiv 2310.16834, and
SSD-LM, arXiv 2210.17432): the first 50 tokens of 1,000 validation texts are continued by 50 tokens,
five times each. MAUVE (arXiv 2102.01454) compares 1,000 human texts of 100 tokens with 5,000
generated ones, including prompts.

- As in SSD-LM's published code, prompts are part of both sides, each human text counts once, and
  MAUVE has its library's defaults.
- Unlike it, prompts are spread evenly over the split (``human_texts``), and MAUVE is the mean over
  five seeds of its k-means, reported with their deviation: smaller differences between models are
  not significant.

**Unconditional** (Table 3): 64 samples of 1,024 tokens after the start token. Generative perplexity
is exp(total nats / total tokens) of their text under GPT-2 XL; token entropy is computed on each
sample's tokens (`token_entropy`), and samples per second from the wall time of generation.

- NOTE(paper): section 3.3 calls the judge "LTM-XLarge", appendix A.3 GPT-2 XL; we take the latter.
- NOTE(paper): appendix A.3 says "greedy decoding (top-k = 1)", with which a model without latent
  vectors writes the same text 64 times. We report several sampling methods, and the number of
  distinct texts.
- The judge uses its own tokenizer, and does not score the first token, which has no context.
  SEDD's code averages the perplexities of samples instead of their nats; that number is in the
  file too (``mean_of_perplexities``).

The end of a document does not end a text, and judges read it as their EOS. Judge and featurizer
compute in float32 for any ``--precision``.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from datamodules import (
    AnswerDataModule,
    LanguageDataModule,
    Sentences,
    SentenceTokenizer,
    TextDataModule,
    Tokenizer,
)
from datamodules.store import Split, TokenStream
from datamodules.text import IGNORE, EvaluationWindows
from evaluation.arguments import (
    add_corpus_arguments,
    add_file_arguments,
    add_model_arguments,
    add_tokenizer_argument,
    chosen,
    data_recipe,
    load_checkpoint,
    load_model,
    load_own_tokenizer,
)
from evaluation.cost import GeneratedSteps, cost_cells, price
from evaluation.devices import Precision, autocast
from evaluation.load import build_data, check_fit, prepare
from evaluation.output import check_targets, format_table, report_result, write_jsonl
from evaluation.pretrained import Pretrained
from evaluation.provenance import describe_data, describe_result
from evaluation.scoring import Totals
from evaluation.tables import FIVE_DIGITS, FOUR, FOUR_DIGITS, TableColumn, as_aligned, show_columns
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.generation import SamplingConfig, generate, written_text
from lightning_models.layers import recording

# ---- settings

Mode = Literal["conditional", "unconditional"]
Sampling = Literal["greedy", "multinomial", "nucleus"]
TOP_P = 0.95
"""Probability of the nucleus."""
MAUVE_SEEDS = range(25, 30)
"""Seeds of the k-means within MAUVE; the first one is the library's default."""


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Settings for generation and its judges; the defaults are the papers' protocols."""

    mode: Literal["conditional", "unconditional", "both"] = "both"
    """conditional: continuations of prompts (MAUVE); unconditional: samples from the start token
    (generative perplexity, entropy, speed)."""
    sampling: tuple[Sampling, ...] = ("greedy", "multinomial")
    """Sampling methods at temperature 1, nucleus with top_p 0.95; each has a row."""
    seed: NonNegativeInt = 0
    """Text n is drawn from the random stream (seed, n)."""
    batch_size: PositiveInt = 8
    """Texts generated or read at once; affects speed and memory, and results up to rounding."""
    prompts: PositiveInt = 1000
    """Number of human texts to continue."""
    continuations: PositiveInt = 5
    """Number of continuations of each prompt."""
    prompt_tokens: PositiveInt = 50
    """Length of a prompt in tokens."""
    new_tokens: PositiveInt = 50
    """Length of a continuation in tokens."""
    featurizer: str = "gpt2-large"
    """Hub name or folder of the model whose hidden states MAUVE compares."""
    samples: PositiveInt = 64
    """Number of samples from the start token."""
    sample_tokens: PositiveInt = 1024
    """Length of a sample in tokens; the end of a document does not end it."""
    judge: str | None = "gpt2-xl"
    """Hub name or folder of the causal language model that scores samples. Null means no
    generative perplexity."""

    def __post_init__(self) -> None:
        SamplingConfig(seed=self.seed)  # raises before models are loaded
        if self.prompts < 2:
            raise ValueError(
                f"prompts ({self.prompts}) must be at least 2: MAUVE compares distributions"
            )

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to run."""
        return ("conditional", "unconditional") if self.mode == "both" else (self.mode,)


# ---- human texts


def human_texts(
    data: LanguageDataModule, split: Split, *, count: int, length: int
) -> list[list[int]]:
    """Returns the first ``length`` tokens of ``count`` rows, evenly spread over a split.

    Rows are the windows of ``evaluate.py perplexity``. For sentence models they are documents
    without the BOS of their sentences, which such models do not generate either. The data must be
    prepared and set up.

    Raises:
        ValueError: If the data have fewer rows, or no rows of this length.
    """
    check_running_text(data)
    stream = data.stream(split)
    if not len(stream):
        raise ValueError(f"The {split} split is empty. {data.how_to_get(split)}")
    if isinstance(data, Sentences):
        return _document_starts(stream, data.tokenizer.bos_id, split, count, length)
    assert isinstance(data, TextDataModule)
    if length > data.block_size:
        raise ValueError(
            f"prompt_tokens + new_tokens ({length}) exceed the window of the data "
            f"({data.block_size}); lower them, or set --data.block_size {length}"
        )
    windows = EvaluationWindows(
        stream,
        block_size=data.block_size,
        eos_id=data.tokenizer.eos_id,
        bos_id=data.tokenizer.text_bos_id,
    )
    taken = _spread(len(stream) // data.block_size, count, f"full windows in the {split} split")
    rows: list[list[int]] = windows.rows(taken)[:, :length].tolist()
    return rows


def check_running_text(data: LanguageDataModule) -> None:
    """Raises a ValueError for data that are not running text, such as questions with answers."""
    if not isinstance(data, Sentences | TextDataModule) or isinstance(data, AnswerDataModule):
        raise ValueError(
            f"data ({type(data).__name__}) have no running text to continue; name a corpus with "
            "--data"
        )


def _document_starts(
    stream: TokenStream, bos_id: int, split: Split, count: int, length: int
) -> list[list[int]]:
    """Returns the first tokens, without BOS, of documents that are long enough.

    A sentence is BOS, at least one word and EOS, so at most a third of 3/2 ``length`` tokens are
    BOS.
    """
    marked = -(-length * 3 // 2)
    documents = np.arange(stream.num_documents)
    starts = stream.starts(documents)
    starts = starts[stream.ends(documents) - starts >= marked]
    taken = starts[_spread(len(starts), count, f"long enough documents in the {split} split")]
    rows = stream.gather(taken[:, None] + np.arange(marked))
    return [row[row != bos_id][:length].tolist() for row in rows]


def _spread(available: int, count: int, noun: str) -> np.ndarray:
    """Returns ``count`` ascending, equally spaced indices below ``available``."""
    if count > available:
        raise ValueError(
            f"prompts ({count}): there are only {available} {noun}; set fewer, or name other "
            "text with --data and --split"
        )
    return np.arange(count) * available // count


def documents(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Decodes ``ids`` and splits them into documents; markers of sentences are dropped.

    The first part continues a document unless it begins with BOS or documents have marked
    sentences.
    """
    parts: list[list[int]] = [[]]
    for i in ids:
        if i in tokenizer.stop_ids:
            parts.append([])
        else:
            parts[-1].append(i)
    first, *others = parts
    begins = isinstance(tokenizer, SentenceTokenizer) or first[:1] == [tokenizer.text_bos_id]
    decode = tokenizer.decode if begins else tokenizer.decode_continuation
    return [decode(first), *map(tokenizer.decode, others)]


# ---- generation


class WrittenTexts(NamedTuple):
    """Texts generated by a model with one sampling method."""

    prompts: list[list[int]]
    """Prompt of each text."""
    new: list[list[int]]
    """Generated tokens of each text, without the prompt."""
    seconds: float
    """Wall time of the generation."""

    @property
    def whole(self) -> list[list[int]]:
        """Prompt and generated tokens of each text."""
        return [[*prompt, *new] for prompt, new in zip(self.prompts, self.new, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the number of texts and their speed under the keys of the JSON file."""
        return {
            "texts": len(self.new),
            "distinct_texts": len(set(map(tuple, self.whole))),
            "seconds": self.seconds,
            "texts_per_second": len(self.new) / self.seconds,
        }


def write_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    *,
    new_tokens: int,
    way: Sampling,
    config: QualityConfig,
    precision: Precision = "32",
) -> WrittenTexts:
    """Generates exactly ``new_tokens`` tokens after each prompt, beyond the end of a document.

    Text n has the random stream (seed, n): results do not depend on batches, and repeated prompts
    get different continuations.
    """
    sampling = SamplingConfig(
        temperature=0.0 if way == "greedy" else 1.0,
        top_p=TOP_P if way == "nucleus" else None,
        seed=config.seed,  # models that draw latent vectors use it in greedy decoding too
    )
    new: list[list[int]] = []
    seconds = 0.0
    starts = range(0, len(prompts), config.batch_size)
    for first in tqdm(starts, desc="generating", unit=" batches", disable=None):
        start = time.perf_counter()
        with autocast(model.device, precision):
            new += generate(  # returns ids on the CPU, so a GPU has finished
                model,
                prompts[first : first + config.batch_size],
                max_new_tokens=new_tokens,
                sampling=sampling,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                first_row=first,
            )
        seconds += time.perf_counter() - start
    return WrittenTexts(list(prompts), new, seconds)


def check_room(model: LanguageModel, tokenizer: Tokenizer, config: QualityConfig) -> None:
    """Raises a ValueError if texts do not fit the model's context."""
    limit = model.context_limit
    begin = len(tokenizer.prompt_ids(""))
    needs: dict[Mode, tuple[str, int]] = {
        "conditional": ("new_tokens", config.prompt_tokens),
        "unconditional": ("sample_tokens", begin),
    }
    for key, prompt in (needs[mode] for mode in config.modes):
        new = getattr(config, key)
        if limit is None or prompt + new - 1 <= limit:  # the last token is not read
            continue
        max_new_tokens = limit + 1 - prompt
        cure = (
            f"pass --{key} {max_new_tokens} or less" if max_new_tokens > 0 else "shorten the prompt"
        )
        raise ValueError(
            f"{key} ({new}) after a prompt of length {prompt} does not fit the model's context of "
            f"{limit}; {cure}"
        )


# ---- token entropy, and MAUVE with its authors' library


def token_entropy(samples: Sequence[Sequence[int]]) -> float:
    """Returns the entropy of the token frequencies within a sample in nats, averaged over samples.

    It ranges from 0, for one repeated token, to the logarithm of the length. It distinguishes
    collapsed text, to which other models assign a high likelihood, from good text (Zheng et al.
    2024, arXiv 2409.02908).
    """
    entropies = []
    for tokens in samples:
        shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
        entropies.append(-(shares * np.log(shares)).sum())
    return float(np.mean(entropies))


def text_features(
    featurizer: Pretrained, texts: Iterable[Sequence[str]], batch_size: int = 8
) -> Tensor:
    """Returns the last layer's state at the last token of each text, float32 (N, D), for MAUVE.

    A text is a list of consecutive documents, cut at the featurizer's context; empty texts are left
    out, as in the library. The featurizer is a decoder without head.

    Raises:
        ValueError: If all texts are empty.
    """
    from mauve.utils import featurize_tokens_from_model

    rows = [featurizer.encode_documents(text)[: featurizer.context] for text in texts]
    ids = [torch.tensor([row]) for row in rows if row]
    if not ids:
        raise ValueError(
            "MAUVE has no text to compare: every text is empty in the tokenizer of featurizer "
            f"({featurizer.source})"
        )
    features: Tensor = featurize_tokens_from_model(featurizer.model, ids, batch_size, "texts")
    return features.float().cpu()


def mauve_scores(human: Tensor, generated: Tensor) -> list[float]:
    """Returns MAUVE in (0, 1], higher for closer texts, for each seed of its k-means.

    Other settings are the library's defaults: one bucket for ten texts of the smaller side, and
    scaling 5. Features are (N, D) and (M, D).
    """
    import mauve

    sides = {"p_features": human.numpy(), "q_features": generated.numpy()}
    return [
        float(mauve.compute_mauve(**sides, seed=seed, verbose=False).mauve) for seed in MAUVE_SEEDS
    ]


# ---- generative perplexity: likelihood of texts under another language model


def judge_texts(
    judge: Pretrained, texts: Iterable[Sequence[str]], batch_size: int = 8
) -> dict[str, Any]:
    """Computes the perplexity of texts under a causal model, under the keys of the JSON file.

    A text is a list of consecutive documents, tokenised by the judge. Its first token is not
    scored, unless the tokenizer prepends BOS by default; the end of a document within a text is the
    judge's EOS, and is scored. ``cut_texts`` counts the texts that were cut at the judge's context.
    """
    rows = [judge.encode_documents(text) for text in texts]
    kept = [row[: judge.context] for row in rows]
    starts = range(0, len(rows), batch_size)
    bar = tqdm(starts, desc="judging", unit=" batches", disable=None)
    nats = torch.cat([_judged_nats(judge.model, kept[n : n + batch_size]) for n in bar])  # (N,)
    tokens = torch.tensor([max(0, len(row) - 1) for row in kept])
    totals = Totals(nats.sum().item(), int(tokens.sum()), None)
    return {
        "generative_perplexity": totals.perplexity,
        "nats_per_token": totals.nats_per_token,
        "judged_tokens": totals.tokens,
        "cut_texts": sum(len(row) > len(part) for row, part in zip(rows, kept, strict=True)),
        # the average of SEDD's code, at least as large if texts have equal lengths
        "mean_of_perplexities": (nats / tokens)[tokens > 0].exp().mean().item(),
    }


def _judged_nats(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the nats of each row without its first token, float64 (B,)."""
    # an empty row gets a token, which is not scored: attention without any key would give nan
    ids = pad_sequence(
        [torch.tensor(row or [0]) for row in rows], batch_first=True, padding_value=IGNORE
    ).to(model.device)
    mask = ids != IGNORE
    with torch.inference_mode():
        logits = model(input_ids=ids.clamp(min=0), attention_mask=mask.long()).logits[:, :-1]
        sums = [  # row by row, to avoid a float32 copy of the whole batch's logits
            cross_entropy(row.float(), target, ignore_index=IGNORE, reduction="none").double().sum()
            for row, target in zip(logits, ids[:, 1:], strict=True)
        ]
    return torch.stack(sums).cpu()


# ---- metrics of the texts


HEADLINES = ("mauve", "generative_perplexity", "token_entropy", "samples_per_second")
"""Main metrics, at the top level of the JSON file as ``<sampling>_<name>``."""
TITLES: dict[Mode, str] = {"conditional": "continuations", "unconditional": "samples"}
"""Titles of the printed tables."""
COLUMNS = {
    "mauve": TableColumn("MAUVE", FOUR),
    "mauve_deviation": TableColumn("+-", FOUR),
    "generative_perplexity": TableColumn("gen. perplexity", FIVE_DIGITS),
    "token_entropy": TableColumn("entropy (nats)", FOUR),
    "texts": TableColumn("texts"),
    "distinct_texts": TableColumn("different"),
    "cut_texts": TableColumn("cut to the judge's context"),
    "texts_per_second": TableColumn("per second", FOUR_DIGITS),
}
"""Columns of the printed tables; columns without values are left out."""


Row = tuple[Mode, Sampling]
"""A row of the tables: mode and sampling method."""


class QualityProtocol(NamedTuple):
    """Prompts of a mode, and metrics of its texts."""

    prompts: list[list[int]]
    new_tokens: int
    measure: Callable[[WrittenTexts], dict[str, Any]]
    """Computes the metrics of texts under the keys of the JSON file."""


def continuations(
    human: Sequence[list[int]], tokenizer: Tokenizer, config: QualityConfig, device: torch.device
) -> QualityProtocol:
    """Returns the conditional protocol: MAUVE between generated and human texts with prompts.

    Raises:
        ValueError: If MAUVE's library is missing or the featurizer cannot be loaded.
    """
    try:
        import mauve  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"MAUVE needs the package mauve-text ({error}): pip install -e '.[quality]', or "
            "use --mode unconditional"
        ) from error
    featurizer = Pretrained(config.featurizer, device, head="none", key="featurizer")

    def features(texts: Sequence[Sequence[int]]) -> Tensor:
        cut = (documents(ids, tokenizer) for ids in texts)
        return text_features(featurizer, cut, config.batch_size)

    target = features(human)

    def measure(texts: WrittenTexts) -> dict[str, Any]:
        scores = mauve_scores(target, features(texts.whole))
        spread = {"mauve_by_seed": scores, "mauve_deviation": stdev(scores)}
        return {"mauve": mean(scores), **spread, "human_texts": len(human)}

    # continuation c of prompt p has index p * continuations + c
    starts = [text[: config.prompt_tokens] for text in human for _ in range(config.continuations)]
    return QualityProtocol(starts, config.new_tokens, measure)


def samples(tokenizer: Tokenizer, config: QualityConfig, device: torch.device) -> QualityProtocol:
    """Returns the unconditional protocol: entropy and, with a judge, generative perplexity.

    Raises:
        ValueError: If the judge cannot be loaded.
    """
    judge = None if config.judge is None else Pretrained(config.judge, device, key="judge")

    def measure(texts: WrittenTexts) -> dict[str, Any]:
        cut = (documents(ids, tokenizer) for ids in texts.new)
        judged = {} if judge is None else judge_texts(judge, cut, config.batch_size)
        speed = len(texts.new) / texts.seconds
        return {**judged, "token_entropy": token_entropy(texts.new), "samples_per_second": speed}

    return QualityProtocol(
        [tokenizer.prompt_ids("")] * config.samples, config.sample_tokens, measure
    )


def quality_table(numbers: Mapping[Row, Mapping[str, Any]], facts: Mapping[str, str]) -> str:
    """Formats a table for each mode, and the facts that hold for all rows."""
    tables = []
    for mode in dict.fromkeys(mode for mode, _ in numbers):
        rows = {way: row for (of, way), row in numbers.items() if of == mode}
        frame = pd.DataFrame(list(rows.values()), index=list(rows), dtype=object)
        tables.append(as_aligned(show_columns(frame.rename_axis(TITLES[mode]), COLUMNS)))
    return "\n\n".join([*tables, format_table(facts)])


def _as_result(numbers: Mapping[Row, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the metrics of each mode by sampling method, with ``HEADLINES`` at the top level."""
    top: dict[str, Any] = {}
    modes: dict[str, dict[str, Any]] = {mode: {} for mode in TITLES}
    for (mode, way), row in numbers.items():
        top |= {f"{way}_{key}": row[key] for key in HEADLINES if key in row}
        modes[mode][way] = {key: value for key, value in row.items() if key not in HEADLINES}
    return {**top, **modes}


# ---- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options; data options default to those in the checkpoint."""
    add_model_arguments(parser)
    add_corpus_arguments(parser)
    parser.add_class_arguments(QualityConfig, skip={"sampling"})
    parser.add_argument(
        "--sampling",
        nargs="+",
        type=Sampling,
        default=list(QualityConfig.sampling),
        help="Sampling methods at temperature 1, nucleus with top_p 0.95; each has a row.",
    )
    add_tokenizer_argument(
        parser, "Tokenizer name, for checkpoints without one and --mode unconditional."
    )
    add_file_arguments(
        parser, output="JSON file to write.", texts="JSONL file to write, one text per line."
    )


def run(settings: Namespace) -> None:
    """Generates and measures texts, prints a table, and writes the requested files."""
    settings.sampling = tuple(dict.fromkeys(settings.sampling))
    config = chosen(settings, QualityConfig)
    target, lines = check_targets(output=settings.output, texts=settings.texts)
    checkpoint = load_checkpoint(settings)
    model = load_model(settings, checkpoint)
    data = _load_data(settings, checkpoint, model) if "conditional" in config.modes else None
    tokenizer = data.tokenizer if data else load_own_tokenizer(settings, checkpoint, model)
    check_room(model, tokenizer, config)
    # built before hours of generation, so that a missing package or model fails now
    protocols: dict[Mode, QualityProtocol] = {}
    if data is not None:
        length = config.prompt_tokens + config.new_tokens
        human = human_texts(data, settings.split, count=config.prompts, length=length)
        protocols["conditional"] = continuations(human, tokenizer, config, model.device)
    if "unconditional" in config.modes:
        protocols["unconditional"] = samples(tokenizer, config, model.device)
    steps = GeneratedSteps()
    write = partial(write_texts, model, tokenizer, config=config, precision=settings.precision)
    with recording(generated_steps=steps.count):
        texts_by_row: dict[Row, WrittenTexts] = {
            (mode, way): write(protocol.prompts, new_tokens=protocol.new_tokens, way=way)
            for mode, protocol in protocols.items()
            for way in config.sampling
        }
    if lines is not None:
        rows = (_lines(mode, way, texts, tokenizer) for (mode, way), texts in texts_by_row.items())
        write_jsonl(lines, list(itertools.chain(*rows)))
    longest = max(len(text) for texts in texts_by_row.values() for text in texts.whole)
    cost = price(model, longest, steps.mean, sum(texts.seconds for texts in texts_by_row.values()))
    numbers = {
        (mode, way): {**protocols[mode].measure(texts), **texts.as_dict()}
        for (mode, way), texts in texts_by_row.items()
    }
    options = {
        **vars(config),
        "featurizer": config.featurizer if "conditional" in protocols else None,
        "judge": config.judge if "unconditional" in protocols else None,
        "mauve_text": version("mauve-text") if "conditional" in protocols else None,
    }
    described = describe_result(checkpoint, model, tokenizer, settings.precision, options)
    of_data = describe_data(checkpoint, data, settings.split) if data else None
    result = {**_as_result(numbers), **cost, **described, "data": of_data}
    details = {
        **described["settings"],
        **described,
        "split": settings.split if data else None,
    }
    keys = ("featurizer", "judge", "split", "batch_size", "precision", "device", "checkpoint")
    facts = {key.replace("_", " "): str(details[key]) for key in keys if details[key] is not None}
    report_result(quality_table(numbers, {**facts, **cost_cells(cost)}), result, target)


def _load_data(
    settings: Namespace, checkpoint: Checkpoint, model: LanguageModel
) -> LanguageDataModule:
    if settings.tokenizer is not None:
        raise ValueError(
            f"tokenizer ({settings.tokenizer}): prompts use the tokenizer of the data; set "
            "--data.tokenizer, or use --mode unconditional"
        )
    data = build_data(checkpoint, data_recipe(settings, checkpoint))
    check_running_text(data)
    check_fit(model, data)
    prepare(data, checkpoint)
    return data


def _lines(
    mode: Mode, way: Sampling, texts: WrittenTexts, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    return [
        {
            "mode": mode,
            "sampling": way,
            "number": idx,
            "prompt": "".join(documents(prompt, tokenizer)),
            "text": written_text(tokenizer, new, begins=mode == "unconditional"),
            "tokens": new,
        }
        for idx, (prompt, new) in enumerate(zip(texts.prompts, texts.new, strict=True))
    ]
