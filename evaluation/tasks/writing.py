"""Continuations that end at stop texts, written by the decode loop of all methods."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from datamodules import Tokenizer
from evaluation.cost import GeneratedSteps
from evaluation.generate import left_for_prompt
from evaluation.tasks.readers import Reader
from lightning_models import LanguageModel
from lightning_models.generation import (
    SamplingConfig,
    cut_before,
    generate,
    stops_at,
    written_text,
)
from lightning_models.layers import recording

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
_OWN = {"document_start", "streams"}
"""Options of this project's: see docs/tasks.md."""


@dataclass(frozen=True)
class WritingRequest:
    """A text that a task wants to be continued.

    Attributes:
        prompt: Token ids.
        until: Texts that end a continuation, none of them empty.
        most: Most new tokens.
        sampling: How tokens are chosen.
        stream: Number of its random draws, at most 62 bits.
    """

    prompt: tuple[int, ...]
    until: tuple[str, ...]
    most: int
    sampling: SamplingConfig
    stream: int

    @classmethod
    def of(
        cls,
        context: str,
        options: Mapping[str, Any],
        reader: Reader,
        *,
        most: int,
        seed: int,
        example: int = 0,
        attempt: int = 0,
    ) -> "WritingRequest":
        """Returns what is written for a request of the harness.

        Args:
            context: Text to continue.
            options: The task's ``generation_kwargs``. With ``document_start`` the prompt stands
                after BOS or the end-of-text token, as documents do in training. Draws follow from
                the prompt, or with ``streams: example`` from the number of the example.
            reader: Encodes it; prompts are cut on the left to what fits with the new tokens.
            most: New tokens, where the options do not say.
            seed: Of the draws.
            example: First stream of the example, where they follow from its number.
            attempt: How many times the harness has asked the same before: added to the stream.

        Raises:
            ValueError: If the new tokens do not fit, or an option is unknown.
        """
        typed = {key: value for key, value in options.items() if value is not None}
        if isinstance(typed.get("until"), tuple):
            typed["until"] = list(typed["until"])
        asked: dict[str, Any] = dict(normalize_gen_kwargs(typed, most))
        unknown = sorted(set(asked) - _KNOWN - _OWN)
        if unknown:
            raise ValueError(
                f"tasks: generation_kwargs {', '.join(unknown)} are not known; known are "
                f"{', '.join(sorted(_KNOWN | _OWN))}"
            )
        most = asked["max_gen_toks"]
        as_document = options.get("document_start")
        ids = reader.tokenizer.prompt_ids(context) if as_document else reader.prompt(context)
        room = left_for_prompt(reader.limit, most, "max_gen_toks")
        ids = ids if room is None else ids[-room:]
        sampling = SamplingConfig(temperature=0, seed=seed)
        if asked["do_sample"]:
            cuts = {key: asked.get(key) for key in ("top_k", "top_p")}
            temperature = float(asked.get("temperature", 1.0))  # 0 is greedy
            sampling = SamplingConfig(temperature=temperature, seed=seed, **cuts)
        stream = example if options.get("streams") == "example" else _stream_of(ids)
        until = tuple(filter(None, asked["until"]))
        return cls(tuple(ids), until, most, sampling, stream + attempt)


def _stream_of(ids: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:8], "big") >> 2


class Continuations(NamedTuple):
    """Continuations, and what they took.

    Attributes:
        texts: One a request, cut before the first stop text.
        tokens: New tokens together.
        steps: Additional steps of those; None where the model records none.
    """

    texts: list[str]
    tokens: int
    steps: float | None


def write(
    model: LanguageModel, tokenizer: Tokenizer, requests: Sequence[WritingRequest]
) -> Continuations:
    """Returns the continuations of requests with the same sampling and number of tokens.

    A row ends once it has written a stop text. Streams are the requests' own numbers, so that
    neither what is drawn nor what a method infers before it writes depends on the batch.

    There is at least one request.
    """
    start = tuple(tokenizer.prompt_ids(""))
    begins = [request.prompt == start for request in requests]

    taken = GeneratedSteps()
    with recording(generated_steps=taken.count):
        rows = generate(
            model,
            [request.prompt for request in requests],
            max_new_tokens=requests[0].most,
            sampling=requests[0].sampling,
            stop_ids=tokenizer.stop_ids,
            vocab_size=tokenizer.vocab_size,
            device=model.device,
            streams=[request.stream for request in requests],
            ended=stops_at(tokenizer, [request.until for request in requests], begins),
        )
    texts = [
        cut_before(written_text(tokenizer, row, begins=first), request.until)
        for row, first, request in zip(rows, begins, requests, strict=True)
    ]
    tokens = sum(map(len, rows))
    return Continuations(texts, tokens, None if taken.mean is None else taken.mean * tokens)
