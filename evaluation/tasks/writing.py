"""Continuations that end at stop texts, written by the decode loop of all methods."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules import Tokenizer
from evaluation.cost import GeneratedSteps
from evaluation.tasks.readers import Reader
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
_ALIASES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_LOOK_BACK = 16
"""Tokens decoded together to look for a stop text; more where one has more characters."""


@dataclass(frozen=True)
class Wish:
    """What a task wants to be written.

    Attributes:
        prompt: Token ids.
        until: Texts that end a continuation.
        most: Most new tokens.
        sampling: How tokens are chosen.
        number: Stream of random draws, a function of the prompt alone, 62 bits.
    """

    prompt: tuple[int, ...]
    until: tuple[str, ...]
    most: int
    sampling: SamplingConfig
    number: int

    @property
    def alone(self) -> bool:
        """Whether it has a batch of its own, because its tokens are drawn by its own number."""
        return self.sampling.temperature > 0

    @classmethod
    def of(
        cls, context: str, options: Mapping[str, Any], reader: Reader, *, most: int, seed: int
    ) -> "Wish":
        """Returns the wish of a request.

        Args:
            context: Text to continue.
            options: The task's ``generation_kwargs``.
            reader: Encodes it; prompts are cut on the left to what fits with the new tokens.
            most: New tokens, where the options do not say.
            seed: Of the draws.

        Raises:
            ValueError: If the new tokens do not fit, or an option is unknown.
        """
        unknown = sorted(set(options) - _KNOWN - set(_ALIASES))
        if unknown:
            raise ValueError(
                f"tasks: generation_kwargs {', '.join(unknown)} are not known; known are "
                f"{', '.join(sorted(_KNOWN))}"
            )
        given = [options[key] for key in _ALIASES if options.get(key) is not None]
        most = int(given[0]) if given else most
        ids = reader.prompt(context)
        if reader.limit is not None:
            if most >= reader.limit:
                raise ValueError(
                    f"max_gen_toks ({most}) leaves no room for the prompt in a context of "
                    f"{reader.limit} tokens; set --max_gen_toks, or the task's generation_kwargs, "
                    f"to {reader.limit // 2} or less"
                )
            ids = ids[most - reader.limit :]
        until = options.get("until") or ()
        number = int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:8], "big") >> 2
        stops = (until,) if isinstance(until, str) else tuple(until)
        return cls(tuple(ids), stops, most, _sampling(options, seed), number)


def _sampling(options: Mapping[str, Any], seed: int) -> SamplingConfig:
    """Returns how tokens are chosen: greedily, unless ``do_sample`` or a temperature says else."""
    temperature = float(options.get("temperature") or 0.0)
    samples = options.get("do_sample")
    if samples is False:
        temperature = 0.0
    elif samples and not temperature:
        temperature = 1.0
    if not temperature:
        return SamplingConfig(temperature=0, seed=seed)
    cuts = {key: options.get(key) for key in ("top_k", "top_p")}
    return SamplingConfig(temperature=temperature, seed=seed, **cuts)


class Written(NamedTuple):
    """Continuations, and what they took.

    Attributes:
        texts: One a wish, cut in front of the first stop text.
        tokens: New tokens together.
        steps: Additional steps of those; None where the model tells of none.
    """

    texts: list[str]
    tokens: int
    steps: float | None


def write(model: LanguageModel, tokenizer: Tokenizer, wishes: Sequence[Wish]) -> Written:
    """Returns the continuations of wishes with the same sampling and number of tokens.

    Args:
        model: On its device, in eval mode.
        tokenizer: The one it was trained with.
        wishes: At least one; several only if nothing is drawn.
    """
    taken = GeneratedSteps()
    decoder = _Stopping(model, tokenizer, wishes)
    with recording(generated_steps=taken.count):
        rows = generate(
            decoder,
            [wish.prompt for wish in wishes],
            max_new_tokens=wishes[0].most,
            sampling=wishes[0].sampling,
            eos_id=tokenizer.stop_id,
            vocab_size=tokenizer.vocab_size,
            device=model.device,
            first_row=wishes[0].number if wishes[0].alone else 0,
        )
    texts = [
        _cut(_text(tokenizer, ids), wish.until) for ids, wish in zip(rows, wishes, strict=True)
    ]
    tokens = sum(map(len, rows))
    return Written(texts, tokens, None if taken.mean is None else taken.mean * tokens)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode([i for i in ids if i != tokenizer.stop_id])


def _cut(text: str, until: Sequence[str]) -> str:
    """Returns the text in front of the first stop text."""
    return text[: min([text.find(stop) for stop in until if stop and stop in text], default=None)]


class _Stopping:
    """A model whose rows end with the stop token once they have written a stop text.

    The decode loop knows a stop token only. Streams are the wishes' own numbers, so that what a
    method draws before it writes does not depend on the batch.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, wishes: Sequence[Wish]) -> None:
        self.model, self.tokenizer, self.wishes = model, tokenizer, wishes

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> "_Rows":
        """Returns the model's own cache, with what each row has written next to it."""
        own = [(wish.sampling.seed, wish.number) for wish in self.wishes]
        return _Rows(
            self.model.init_cache(prompts, lengths, max_new_tokens, own),
            list(self.wishes),
            [[] for _ in self.wishes],
            [False] * len(self.wishes),
        )

    def decode_step(self, cache: "_Rows", tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the model's logits; rows that have written a stop text can only stop."""
        for row, token in enumerate(tokens.tolist()):
            if cache.was_ready[row]:
                cache.written[row].append(token)
        logits, ready = self.model.decode_step(cache.own, tokens)
        cache.was_ready = ready.tolist()
        ended = [self._ends(*pair) for pair in zip(cache.written, cache.wishes, strict=True)]
        if any(ended):
            rows = torch.tensor(ended, device=logits.device)
            only = torch.full_like(logits[0], -torch.inf)
            only[self.tokenizer.stop_id] = 0.0
            logits = torch.where(rows[:, None], only, logits)
            ready = ready | rows
        return logits, ready

    def _ends(self, written: Sequence[int], wish: Wish) -> bool:
        """Whether the latest token has completed a stop text (of bytes one character each)."""
        longest = max((len(stop.encode()) for stop in wish.until), default=0)
        if not longest or not written:
            return False
        text = _text(self.tokenizer, written[-max(_LOOK_BACK, longest) :])
        return any(stop and stop in text for stop in wish.until)


@dataclass
class _Rows:
    """A cache of the model, and the rows that are left in it."""

    own: Any
    wishes: list[Wish]
    written: list[list[int]]
    was_ready: list[bool]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.own.select(rows)
        kept = rows.tolist()
        self.wishes = [self.wishes[i] for i in kept]
        self.written = [self.written[i] for i in kept]
        self.was_ready = [self.was_ready[i] for i in kept]
