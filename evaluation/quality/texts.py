"""Settings of ``evaluate.py quality``, human texts to continue, and texts that a model writes."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from datamodules import AnswerDataModule, LanguageDataModule, Sentences, TextDataModule, Tokenizer
from datamodules.store import TokenStream
from datamodules.text import NonOverlappingWindows
from evaluation.arguments import Split
from evaluation.load import Precision, autocast
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate

Sampling = Literal["greedy", "multinomial", "nucleus"]


@dataclass(frozen=True)
class Written:
    """What a model wrote after prompts with one way of sampling."""

    prompts: list[list[int]]
    """Of each text."""
    new: list[list[int]]
    """Generated tokens of each text, without the prompt."""
    seconds: float
    """Wall time of generating, and of nothing else."""

    @property
    def distinct(self) -> int:
        """How many different texts there are."""
        return len(
            {(*prompt, -1, *new) for prompt, new in zip(self.prompts, self.new, strict=True)}
        )

    @property
    def texts_per_second(self) -> float:
        """Texts generated in a second of wall time."""
        return len(self.new) / self.seconds


def sampling_config(name: Sampling, *, top_p: float = 0.95, seed: int = 0) -> SamplingConfig:
    """Returns a way of sampling by its name, always at temperature 1.

    Args:
        name: 'greedy' takes the likeliest token, 'multinomial' draws from all, 'nucleus' from the
            likeliest that have the probability ``top_p`` together.
        top_p: see there.
        seed: of the random streams; models that draw latents have it in greedy decoding too.

    Raises:
        ValueError: if ``top_p`` is out of its range.
    """
    if name == "greedy":
        return SamplingConfig(temperature=0.0, seed=seed)
    return SamplingConfig(top_p=top_p if name == "nucleus" else None, seed=seed)


def write_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: SamplingConfig,
    batch_size: int = 8,
    precision: Precision = "32",
) -> Written:
    """Returns continuations of exactly ``new_tokens`` tokens: the end of a document is no end.

    Text number n has the random stream (seed, n), so that batches change nothing.

    Args:
        model: on its device, in eval mode.
        tokenizer: the one it was trained with.
        prompts: token ids; one that occurs again gets another continuation, where there is chance.
        new_tokens: length of all continuations.
        sampling: how tokens are chosen.
        batch_size: how many are generated at once.
        precision: of the matrix products.
    """
    new: list[list[int]] = []
    seconds = 0.0
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc="generating", unit=" batches", disable=None):
        began = time.perf_counter()
        with autocast(model.device, precision):
            new += generate(  # its ids are on the CPU: a GPU has nothing left to do after it
                model,
                prompts[start : start + batch_size],
                max_new_tokens=new_tokens,
                sampling=sampling,
                eos_id=None,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                first_row=start,
            )
        seconds += time.perf_counter() - began
    return Written([list(prompt) for prompt in prompts], new, seconds)


def check_room(model: LanguageModel, prompt_tokens: int, new_tokens: int, key: str) -> None:
    """Checks that prompt and continuation fit the model's context.

    Raises:
        ValueError: if not; the message names the option ``key`` and what it may be.
    """
    limit = model.context_limit
    if limit is None or prompt_tokens + new_tokens - 1 <= limit:  # the last one is not read again
        return
    most = limit + 1 - prompt_tokens
    cure = f"pass --{key} {most} or less" if most > 0 else "shorten the prompt"
    raise ValueError(
        f"{key} ({new_tokens}) after a prompt of {prompt_tokens} do not fit the model's context "
        f"of {limit} tokens; {cure}"
    )


def human_texts(
    data: LanguageDataModule, split: Split, *, count: int, length: int
) -> list[list[int]]:
    """Returns the first ``length`` tokens of ``count`` rows of a split, evenly spread over it.

    Rows are the windows that perplexity scores too. For models of sentences they are documents,
    without the BOS of their sentences, which such models do not write either.

    Args:
        data: prepared and set up.
        split: which documents.
        count: how many texts.
        length: tokens of each.

    Raises:
        ValueError: if there are no such rows, or fewer.
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
            f"prompt_tokens + new_tokens ({length}) are more than a window of the data has "
            f"({data.block_size}); lower them, or set --data.block_size {length}"
        )
    windows = NonOverlappingWindows(
        stream, block_size=data.block_size, eos_id=data.tokenizer.eos_id
    )
    numbers = _spread(len(stream) // data.block_size, count, f"full windows in the {split} split")
    rows: list[list[int]] = windows.rows(numbers)[:, :length].tolist()
    return rows


def check_running_text(data: LanguageDataModule) -> None:
    """Raises a ValueError if data are not texts to continue: questions with answers are none."""
    texts = isinstance(data, Sentences | TextDataModule)
    if not texts or isinstance(data, AnswerDataModule):
        raise ValueError(
            f"data ({type(data).__name__}) have no running text to continue; name a corpus with "
            "--data"
        )


def _document_starts(
    stream: TokenStream, bos_id: int, split: Split, count: int, length: int
) -> list[list[int]]:
    """Returns the first tokens, BOS left out, of documents that are long enough.

    A sentence is BOS, at least one word and EOS: of 3/2 ``length`` tokens no more than a third are
    BOS.
    """
    marked = -(-length * 3 // 2)
    everything = np.arange(stream.num_documents)
    starts = stream.starts(everything)
    starts = starts[stream.ends(everything) - starts >= marked]
    chosen = starts[_spread(len(starts), count, f"long enough documents in the {split} split")]
    rows = stream.gather(chosen[:, None] + np.arange(marked))
    return [row[row != bos_id][:length].tolist() for row in rows]


def _spread(available: int, count: int, what: str) -> np.ndarray:
    """Returns ``count`` numbers below ``available``, ascending, at equal distances.

    Raises:
        ValueError: if there are fewer.
    """
    if count > available:
        raise ValueError(
            f"prompts ({count}): there are only {available} {what}; ask for fewer, or name other "
            "text with --data and --split"
        )
    return np.arange(count) * available // count


def documents(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Returns the text of ``ids``, cut where documents end; other markers vanish."""
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == tokenizer.stop_id:
            parts.append([])
        else:
            parts[-1].append(i)
    return [tokenizer.decode(part) for part in parts]


# ---- settings


Mode = Literal["conditional", "unconditional", "both"]

_OF_PROMPTS = (
    "prompts",
    "continuations",
    "prompt_tokens",
    "new_tokens",
    "featurizer",
    "mauve_seeds",
)
_OF_SAMPLES = ("samples", "sample_tokens", "judge")
_WORDS = ("mode", "sampling", "top_p", "seed", "featurizer", "judge")


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What is generated, and who judges it; the defaults are the papers' protocols.

    Raises:
        ValueError: if a value is out of its range.
    """

    mode: Mode = "both"
    """conditional: continue prompts (MAUVE); unconditional: samples from nothing (generative
    perplexity, entropy, speed)."""
    sampling: tuple[Sampling, ...] = ("greedy", "multinomial")
    """Ways of sampling, all at temperature 1; each gets its row."""
    top_p: float = 0.95
    """Probability of the nucleus."""
    seed: int = 0
    """Text n is drawn from the stream of (seed, n)."""
    batch_size: int = 8
    """Texts generated at once; decides the speed, not the texts (up to rounding)."""
    prompts: int = 1000
    """Human texts to continue."""
    continuations: int = 5
    """Continuations of each prompt."""
    prompt_tokens: int = 50
    """Length of a prompt."""
    new_tokens: int = 50
    """Length of a continuation."""
    featurizer: str = "gpt2-large"
    """Hub name or folder of the model whose states MAUVE compares."""
    mauve_seeds: int = 5
    """Seeds of the k-means within MAUVE; their mean is reported, and how much they differ."""
    samples: int = 64
    """Samples from the start token alone."""
    sample_tokens: int = 1024
    """Length of a sample; it does not end with a document."""
    judge: str | None = "gpt2-xl"
    """Hub name or folder of the causal language model that scores samples; null: none does, and
    there is no generative perplexity."""
    judge_batch_size: int = 8
    """Texts that judge and featurizer read at once."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, value in self.used().items():
            if key not in _WORDS and value < 1:
                raise ValueError(f"{key} ({value}) must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be in (0, 1]")
        if not self.sampling:
            raise ValueError("sampling () names no way of sampling; give greedy or multinomial")
        if self.conditional and self.prompts < 2:
            raise ValueError(
                f"prompts ({self.prompts}) must be at least 2: MAUVE compares distributions"
            )

    @property
    def conditional(self) -> bool:
        """Whether prompts are continued."""
        return self.mode != "unconditional"

    @property
    def unconditional(self) -> bool:
        """Whether samples start from nothing."""
        return self.mode != "conditional"

    def used(self) -> dict[str, Any]:
        """Returns the settings that decide something here, as plain values."""
        idle = [] if self.conditional else [*_OF_PROMPTS]
        idle += [] if self.unconditional else _OF_SAMPLES
        idle += [] if "nucleus" in self.sampling else ["top_p"]
        values = {**dataclasses.asdict(self), "sampling": list(self.sampling)}
        return {key: value for key, value in values.items() if key not in idle}
