"""The one decode loop of every method, and sampling."""

import math
import numbers
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_models.runtime import in_eval_mode, on_device, seeded_generator, uncompiled

MOST_SEED = 2**64 - 1
"""Random streams are told apart by 64 bits of their seed."""


class Decoder(Protocol):
    """A model that decodes step by step (see ``LanguageModel`` for the meaning of the steps)."""

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """Consumes all but the last token of each right-padded prompt (B, P)."""

    def decode_step(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advances each row by one unit of its own work; returns logits (B, V), ready (B,)."""


COLDEST = 1e-30
"""Temperatures below are greedy: logits divided by them overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen.

    Raises:
        ValueError: if a value is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample among this many most likely tokens only."""
    top_p: float | None = None
    """Sample among the fewest tokens that together have this probability only."""
    seed: int = 0
    """Row r draws from a stream of (seed, r): results do not depend on batching."""

    def __post_init__(self) -> None:
        """Checks types, which Python callers may get wrong, and ranges."""
        values: dict[str, Any] = {
            "temperature": finite_number("temperature", self.temperature),
            "seed": whole_number("seed", self.seed, least=0, most=MOST_SEED),
        }
        if self.top_k is not None:
            values["top_k"] = whole_number("top_k", self.top_k, least=1)
        if self.top_p is not None:
            values["top_p"] = finite_number("top_p", self.top_p)
            if not 0 < values["top_p"] <= 1:
                raise ValueError(f"top_p ({self.top_p}) must be in (0, 1], or null")
        if values["temperature"] < 0:
            raise ValueError(f"temperature ({self.temperature}) must be 0 (greedy) or above")
        for key, value in values.items():
            object.__setattr__(self, key, value)  # a plain number in place of NumPy's


def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Returns an integer of any type, such as NumPy's, as Python's.

    Raises:
        ValueError: if it is no integer (``True`` is none), or out of its range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} ({value!r}) must be a whole number")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} ({number}) must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name} ({number}) must be at most {most}")
    return number


def finite_number(name: str, value: Any) -> float:
    """Returns a real number of any type, such as NumPy's, as Python's.

    Raises:
        ValueError: if it is no number (``True`` is none), infinite, NaN or too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} ({value!r}) must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} ({value}) must be finite, at most {sys.float_info.max:.1g}")
    return number


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """Returns the new token ids of each prompt, a stop token included where one was reached.

    Args:
        model: in eval mode.
        prompts: token ids, at least one a row; rows may differ in length.
        max_new_tokens: upper bound per row.
        **options: see ``generate_steps``.

    Raises:
        ValueError: if a prompt is empty.
    """
    out: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_steps(model, prompts, max_new_tokens=max_new_tokens, **options):
        out[row].append(token)
    return out


@torch.no_grad()
def generate_steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
    first_row: int = 0,
    streams: Sequence[int] | None = None,
    ended: Callable[[int, Sequence[int]], bool] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yields each new token id as it is chosen, with the number of its prompt from 0.

    Rows that are not ready (a method still thinking) wait for their logits; finished rows leave
    the batch. Gradients are off inside only. A warning says once if a row outgrows the context of
    the training, as rotary positions allow; learned ones are refused by the model.

    Args:
        model: in eval mode.
        prompts: token ids, at least one a row; rows may differ in length.
        max_new_tokens: upper bound per row.
        sampling: how tokens are chosen.
        stop_ids: a row ends after any of these tokens.
        vocab_size: ids from here on (padding of the vocabulary) are never chosen.
        device: where the model is.
        first_row: number of the first prompt's random stream, where prompts come in several calls.
        streams: numbers of the prompts' random streams, where they do not follow each other.
        ended: tells whether a row ends, from its number and its new token ids; by default only
            stop tokens end rows.

    Raises:
        ValueError: if a prompt is empty.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompts must hold at least one token each; start with the EOS token")
    if max_new_tokens < 1:
        return
    lengths = on_device([len(prompt) for prompt in prompts], device)
    padded = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.as_tensor(prompt)
    padded = on_device(padded, device)
    tokens = padded.gather(1, lengths[:, None] - 1)[:, 0]
    places = range(first_row, first_row + len(prompts)) if streams is None else streams
    keys = [(sampling.seed, place) for place in places]
    cache = model.init_cache(padded, lengths, max_new_tokens, keys)
    limit = getattr(model, "context_limit", None)
    sampler = Sampler(sampling, places)
    out: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each remaining row belongs to
    while True:
        logits, ready = model.decode_step(cache, tokens)
        if not bool(ready.any()):
            continue
        chosen = sampler.choose(logits[:, :vocab_size], ready, rows)
        tokens = torch.where(ready, chosen, tokens)
        for row, token, is_ready in zip(rows, tokens.tolist(), ready.tolist(), strict=True):
            if is_ready:
                if limit is not None and len(prompts[row]) + len(out[row]) > limit:
                    _warn_past(limit)
                    limit = None
                out[row].append(token)
                yield row, token
        keep = [
            index
            for index, row in enumerate(rows)
            if len(out[row]) < max_new_tokens
            and (not out[row] or out[row][-1] not in stop_ids)
            and (not out[row] or ended is None or not ended(row, out[row]))
        ]
        if not keep:
            break
        if len(keep) < len(rows):
            index = on_device(keep, device, torch.int64)
            cache.select(index)
            tokens, rows = tokens[index], [rows[i] for i in keep]


def _warn_past(limit: int) -> None:
    """Warns that a model reads more than in training; the default filter shows a text once."""
    warnings.warn(
        f"prompt and continuation are longer than the {limit} tokens of the model's training "
        "(block_size), so what is written there was never trained; lower max_new_tokens or "
        "shorten the prompt",
        stacklevel=1,
    )


class Sampler:
    """Chooses tokens from logits, with one random stream a row."""

    def __init__(self, config: SamplingConfig, streams: Sequence[int]) -> None:
        self.config = config
        self.generators = [seeded_generator(config.seed, number) for number in streams]

    def choose(self, logits: Tensor, ready: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns one id a row (B,); only ready rows advance their stream.

        Args:
            logits: (B, V).
            ready: (B,) bool; what is returned for other rows means nothing.
            rows: the stream each row draws from.
        """
        if self.config.temperature < COLDEST:
            return logits.argmax(dim=-1)
        flags = ready.tolist()
        draws = [
            torch.rand((), generator=self.generators[row], dtype=torch.float64).item()
            if flag
            else 0.0
            for row, flag in zip(rows, flags, strict=True)
        ]
        ids, cumulative = self._distribution(logits)
        level = on_device(draws, logits.device, torch.float64) * cumulative[:, -1]
        place = torch.searchsorted(cumulative, level[:, None], right=True)
        place = place.clamp(max=cumulative.shape[1] - 1)
        return ids.gather(1, place)[:, 0]

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids (B, k), most likely first, and their cumulative probabilities, float64."""
        config = self.config
        k = logits.shape[-1] if config.top_k is None else min(config.top_k, logits.shape[-1])
        top, ids = (logits.double() / config.temperature).topk(k, dim=-1)
        probabilities = top.softmax(dim=-1)
        cumulative = probabilities.cumsum(dim=-1)
        if config.top_p is not None:
            before = cumulative - probabilities
            probabilities = probabilities.masked_fill(before >= config.top_p, 0.0)
            cumulative = probabilities.cumsum(dim=-1)
        return ids, cumulative


# ---- from prompts to texts


def written_text(tokenizer: Any, ids: Sequence[int], *, begins: bool = False) -> str:
    """Returns the text of new token ids, without stop tokens.

    Args:
        tokenizer: the data's tokenizer.
        ids: what a model has written.
        begins: whether the text begins a document. Elsewhere it goes on with the prompt, and a
            space at its beginning is part of it.
    """
    kept = [i for i in ids if i not in tokenizer.stop_ids]
    text: str = (tokenizer.decode if begins else tokenizer.decode_continuation)(kept)
    return text


_LOOK_BACK = 16
"""Tokens decoded together to look for a stop text; more where one has more characters."""


def stops_at(
    tokenizer: Any, stops: Sequence[Sequence[str]], begins: Sequence[bool]
) -> Callable[[int, Sequence[int]], bool]:
    """Returns the ``ended`` of ``generate_steps`` for rows that end at texts.

    Args:
        tokenizer: The data's tokenizer.
        stops: Texts that end each row, none of them empty.
        begins: Whether each row begins a document, see ``written_text``.
    """

    def ended(row: int, ids: Sequence[int]) -> bool:
        """Whether the latest token has completed a stop text (of bytes one character each)."""
        if not stops[row]:
            return False
        longest = max(len(stop.encode()) for stop in stops[row])
        latest = ids[-max(_LOOK_BACK, longest) :]
        whole = begins[row] and len(latest) == len(ids)
        text = written_text(tokenizer, latest, begins=whole)
        return any(stop in text for stop in stops[row])

    return ended


def cut_before(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop text."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=None)]


class ContinuesText:
    """Mixed into ``LanguageModel``: writes with the model's ``init_cache`` and ``decode_step``."""

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any,
        max_new_tokens: int,
        first_row: int = 0,
        streams: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[str]:
        """Returns a continuation of each prompt (an empty prompt starts a document).

        Submodules return to the modes they were in; the global random state is left alone.

        Args:
            prompts: texts.
            tokenizer: the data's tokenizer (``datamodule.tokenizer``).
            max_new_tokens: upper bound on each continuation, in tokens.
            first_row: number of the first prompt's random stream, where prompts come in several
                calls.
            streams: as ``generate_steps`` has it.
            stop: Texts that end a continuation, which is cut before the first one.
            **sampling: fields of ``SamplingConfig``: temperature, top_k, top_p, seed.
        """
        begins = [not prompt for prompt in prompts]
        rows = self.generate_ids(
            [tokenizer.prompt_ids(prompt) for prompt in prompts],
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            first_row=first_row,
            streams=streams,
            ended=stops_at(tokenizer, [stop] * len(prompts), begins) if stop else None,
            **sampling,
        )
        pairs = zip(begins, rows, strict=True)
        texts = [written_text(tokenizer, row, begins=first) for first, row in pairs]
        return [cut_before(text, stop) for text in texts]

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokenizer: Any,
        max_new_tokens: int,
        first_row: int = 0,
        streams: Sequence[int] | None = None,
        ended: Callable[[int, Sequence[int]], bool] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Returns the new token ids of each prompt, a stop token included where one was reached.

        Submodules return to the modes they were in; the global random state is left alone.

        Args:
            prompts: token ids, at least one each.
            tokenizer: the data's tokenizer, which has the stop tokens and the size of the
                vocabulary.
            max_new_tokens: as ``generate_text`` has it.
            first_row: as ``generate_text`` has it.
            streams: as ``generate_steps`` has it.
            ended: as ``generate_steps`` has it.
            **sampling: as ``generate_text`` has it.

        Raises:
            ValueError: if a prompt is empty.
        """
        model: Any = self
        with (
            in_eval_mode(model),
            model.gathered(),
            model.precision_context(),
            uncompiled(model.compile_network),  # a cache has another length for each token
        ):
            return generate(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                sampling=SamplingConfig(**sampling),
                stop_ids=tokenizer.stop_ids,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                first_row=first_row,
                streams=streams,
                ended=ended,
            )
