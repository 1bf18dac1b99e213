"""The decode loop shared by all methods, and sampling."""

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

MAX_SEED = 2**64 - 1
"""Random streams use 64 bits of their seed."""


class Decoder(Protocol):
    """A model that decodes step by step, see ``LanguageModel``."""

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """Consumes all but the last token of each right-padded prompt (B, P)."""

    def decode_step(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advances each row by one unit of work; returns logits (B, V) and ready (B,)."""


COLDEST = 1e-30
"""Temperatures below this are treated as greedy, because logits divided by them overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options for sampling the next token.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits. With 0 the most likely token is chosen."""
    top_k: int | None = None
    """Number of most likely tokens to sample from. By default all are."""
    top_p: float | None = None
    """Total probability of the smallest set of tokens to sample from. By default all are."""
    seed: int = 0
    """Seed. Row r draws from a stream of (seed, r), so results do not depend on batching."""

    def __post_init__(self) -> None:
        """Checks types, which Python callers may get wrong, and ranges."""
        values: dict[str, Any] = {
            "temperature": finite_number("temperature", self.temperature),
            "seed": whole_number("seed", self.seed, minimum=0, maximum=MAX_SEED),
        }
        if self.top_k is not None:
            values["top_k"] = whole_number("top_k", self.top_k, minimum=1)
        if self.top_p is not None:
            values["top_p"] = finite_number("top_p", self.top_p)
            if not 0 < values["top_p"] <= 1:
                raise ValueError(f"top_p ({self.top_p}) must be in (0, 1], or null")
        if values["temperature"] < 0:
            raise ValueError(f"temperature ({self.temperature}) must be 0 (greedy) or above")
        for key, value in values.items():
            object.__setattr__(self, key, value)  # Python numbers instead of NumPy's


def whole_number(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Converts an integer of any type, such as NumPy's, to Python's.

    Raises:
        ValueError: If the value is not an integer (bools do not count), or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} ({value!r}) must be a whole number")
    result = int(value)
    if result < minimum:
        raise ValueError(f"{name} ({result}) must be at least {minimum}")
    if maximum is not None and result > maximum:
        raise ValueError(f"{name} ({result}) must be at most {maximum}")
    return result


def finite_number(name: str, value: Any) -> float:
    """Converts a real number of any type, such as NumPy's, to Python's.

    Raises:
        ValueError: If the value is not a number (bools do not count), infinite, NaN or too large
            for a float.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} ({value!r}) must be a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} ({value}) must be finite, at most {sys.float_info.max:.1g}")
    return result


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """Returns the new token ids of each prompt, with the stop token if one was reached.

    Args:
        model: Model in eval mode.
        prompts: Token ids of each prompt, at least one; lengths may differ.
        max_new_tokens: Maximum number of new tokens per row.
        **options: See ``generate_steps``.

    Raises:
        ValueError: If a prompt is empty.
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
    """Yields pairs of a prompt's index and its next token id, as soon as the token is chosen.

    Rows that are not ready, because the method is still thinking, wait for their logits; finished
    rows leave the batch. Gradients are disabled inside only. A row that exceeds the context of
    training, which rotary positions allow, gives one warning; a model with learned positions raises
    an error.

    Args:
        model: Model in eval mode.
        prompts: Token ids of each prompt, at least one; lengths may differ.
        max_new_tokens: Maximum number of new tokens per row.
        sampling: Sampling options.
        stop_ids: Tokens after which a row ends.
        vocab_size: Number of ids that may be chosen; the vocabulary's padding comes after them.
            Defaults to all.
        device: Device of the model.
        first_row: Random stream of the first prompt, if prompts come in several calls.
        streams: Random streams of the prompts. By default they are consecutive.
        ended: Function of a row's index and its new token ids that returns whether it ends. By
            default only stop tokens end rows.

    Raises:
        ValueError: If a prompt is empty.
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
    tokens = padded.gather(1, lengths[:, None] - 1)[:, 0]  # (B,), last tokens of the prompts
    streams = range(first_row, first_row + len(prompts)) if streams is None else streams
    keys = [(sampling.seed, stream) for stream in streams]
    cache = model.init_cache(padded, lengths, max_new_tokens, keys)
    limit = getattr(model, "context_limit", None)
    sampler = Sampler(sampling, streams)
    out: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # prompt of each remaining row
    while True:
        logits, ready = model.decode_step(cache, tokens)  # (B, V), (B,)
        if not bool(ready.any()):
            continue
        chosen = sampler.choose(logits[:, :vocab_size], ready, rows)
        tokens = torch.where(ready, chosen, tokens)  # rows that are not ready keep their token
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
        if len(keep) < len(rows):  # finished rows leave the batch and the cache
            index = on_device(keep, device, torch.int64)
            cache.select(index)
            tokens, rows = tokens[index], [rows[i] for i in keep]


def _warn_past(limit: int) -> None:
    """Warns that a model reads more than in training; by default each text is shown once."""
    warnings.warn(
        f"prompt and continuation are longer than the {limit} tokens of the model's training "
        "(block_size), so what is written there was never trained; lower max_new_tokens or "
        "shorten the prompt",
        stacklevel=1,
    )


class Sampler:
    """Samples tokens from logits, with one random stream per row."""

    def __init__(self, config: SamplingConfig, streams: Sequence[int]) -> None:
        self.config = config
        self.generators = [seeded_generator(config.seed, stream) for stream in streams]

    def choose(self, logits: Tensor, ready: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns one id per row (B,) int64; only ready rows advance their stream.

        Args:
            logits: Logits (B, V).
            ready: Mask of the rows to sample (B,) bool. Ids of other rows are arbitrary.
            rows: Index of the stream of each row.
        """
        if self.config.temperature < COLDEST:
            return logits.argmax(dim=-1)
        flags = ready.tolist()
        # one CPU generator per row, so that a row's draws depend on no other row or device
        draws = [
            torch.rand((), generator=self.generators[row], dtype=torch.float64).item()
            if flag
            else 0.0
            for row, flag in zip(rows, flags, strict=True)
        ]
        ids, cumulative = self._distribution(logits)
        # inverse CDF; scaled by the total, which top_p makes less than 1
        level = on_device(draws, logits.device, torch.float64) * cumulative[:, -1]  # (B,)
        # the first id whose cumulative probability exceeds the level, (B, 1)
        index = torch.searchsorted(cumulative, level[:, None], right=True)
        index = index.clamp(max=cumulative.shape[1] - 1)  # rounding may put the level at the total
        return ids.gather(1, index)[:, 0]

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids (B, k), most likely first, and their cumulative probabilities, float64."""
        config = self.config
        k = logits.shape[-1] if config.top_k is None else min(config.top_k, logits.shape[-1])
        # sorted in descending order, which top_p needs; the softmax is over these k ids alone
        top, ids = (logits.double() / config.temperature).topk(k, dim=-1)  # (B, k)
        probabilities = top.softmax(dim=-1)
        cumulative = probabilities.cumsum(dim=-1)
        if config.top_p is not None:
            before = cumulative - probabilities  # the token that reaches top_p is kept
            probabilities = probabilities.masked_fill(before >= config.top_p, 0.0)
            cumulative = probabilities.cumsum(dim=-1)
        return ids, cumulative


# ---- from prompts to texts


def written_text(tokenizer: Any, ids: Sequence[int], *, begins: bool = False) -> str:
    """Returns the text of new token ids, without stop tokens.

    Args:
        tokenizer: The data's tokenizer.
        ids: Token ids that a model has generated.
        begins: Whether the text begins a document. Otherwise it continues the prompt, and a space
            at its beginning is part of it.
    """
    kept = [i for i in ids if i not in tokenizer.stop_ids]
    text: str = (tokenizer.decode if begins else tokenizer.decode_continuation)(kept)
    return text


_LOOK_BACK = 16
"""Number of tokens decoded to find a stop text, or the bytes of the longest one if more."""


def stops_at(
    tokenizer: Any, stops: Sequence[Sequence[str]], begins: Sequence[bool]
) -> Callable[[int, Sequence[int]], bool]:
    """Returns the ``ended`` function of ``generate_steps`` for rows that end at stop texts.

    Args:
        tokenizer: The data's tokenizer.
        stops: Texts that end each row, none of them empty.
        begins: Whether each row begins a document, see ``written_text``.
    """

    def ended(row: int, ids: Sequence[int]) -> bool:
        """Whether the latest token has completed a stop text."""
        if not stops[row]:
            return False
        longest = max(len(stop.encode()) for stop in stops[row])  # a token may be a single byte
        latest = ids[-max(_LOOK_BACK, longest) :]
        whole = begins[row] and len(latest) == len(ids)
        text = written_text(tokenizer, latest, begins=whole)
        return any(stop in text for stop in stops[row])

    return ended


def cut_before(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop text."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=None)]


class ContinuesText:
    """Mixin of ``LanguageModel`` that generates with its ``init_cache`` and ``decode_step``."""

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
        """Returns a continuation of each prompt; an empty prompt starts a document.

        Training modes of submodules and the global random state are unchanged.

        Args:
            prompts: Texts to continue.
            tokenizer: The data's tokenizer (``datamodule.tokenizer``).
            max_new_tokens: Maximum number of tokens of each continuation.
            first_row: See ``generate_steps``.
            streams: See ``generate_steps``.
            stop: Texts that end a continuation, which is cut before the first one.
            **sampling: Fields of ``SamplingConfig``: temperature, top_k, top_p, seed.
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
        """Returns the new token ids of each prompt, with the stop token if one was reached.

        Training modes of submodules and the global random state are unchanged.

        Args:
            prompts: Token ids of each prompt, at least one.
            tokenizer: The data's tokenizer, with the stop tokens and the size of the vocabulary.
            max_new_tokens: Maximum number of tokens of each continuation.
            first_row: See ``generate_steps``.
            streams: See ``generate_steps``.
            ended: See ``generate_steps``.
            **sampling: Fields of ``SamplingConfig``.

        Raises:
            ValueError: If a prompt is empty.
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
