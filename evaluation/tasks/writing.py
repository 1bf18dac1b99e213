"""Continuations that end at stop texts, with the decode loop of all methods."""

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
"""Further options of this project, see docs/tasks.md."""


@dataclass(frozen=True)
class WritingRequest:
    """A prompt of a task to continue.

    Attributes:
        prompt: Token ids of the prompt.
        until: Texts that end a continuation, none of them empty.
        most: Maximum number of new tokens.
        sampling: Temperature, top-k, top-p and seed.
        stream: Id of its random stream, at most 62 bits.
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
        max_new_tokens: int,
        seed: int,
        example: int = 0,
        attempt: int = 0,
    ) -> "WritingRequest":
        """Converts a request of the harness.

        Args:
            context: Text to continue.
            options: The task's ``generation_kwargs``. With ``document_start`` the prompt follows
                BOS or the end-of-text token, like documents in training. The random stream is a
                hash of the prompt, or with ``streams: example`` the index of the example.
            reader: Reader that encodes the prompt, which is truncated on the left to make room for
                the new tokens.
            max_new_tokens: Maximum number of new tokens, unless the options set one.
            seed: Seed of the draws.
            example: First random stream of the example, for ``streams: example``.
            attempt: Number of earlier repeats of the same request, which is added to the stream.

        Raises:
            ValueError: If the new tokens do not fit, or an option is unknown.
        """
        typed = {key: value for key, value in options.items() if value is not None}
        if isinstance(typed.get("until"), tuple):
            typed["until"] = list(typed["until"])
        parsed: dict[str, Any] = dict(normalize_gen_kwargs(typed, max_new_tokens))
        unknown = sorted(set(parsed) - _KNOWN - _OWN)
        if unknown:
            raise ValueError(
                f"tasks: unknown generation_kwargs {', '.join(unknown)}; they must be among "
                f"{', '.join(sorted(_KNOWN | _OWN))}"
            )
        max_new_tokens = parsed["max_gen_toks"]
        as_document = options.get("document_start")
        ids = reader.tokenizer.prompt_ids(context) if as_document else reader.prompt(context)
        max_prompt = left_for_prompt(reader.limit, max_new_tokens, "max_gen_toks")
        ids = ids if max_prompt is None else ids[-max_prompt:]
        sampling = SamplingConfig(temperature=0, seed=seed)
        if parsed["do_sample"]:
            cuts = {key: parsed.get(key) for key in ("top_k", "top_p")}
            temperature = float(parsed.get("temperature", 1.0))  # 0 is greedy
            sampling = SamplingConfig(temperature=temperature, seed=seed, **cuts)
        stream = example if options.get("streams") == "example" else _stream_of(ids)
        until = tuple(filter(None, parsed["until"]))
        return cls(tuple(ids), until, max_new_tokens, sampling, stream + attempt)


def _stream_of(ids: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:8], "big") >> 2


class Continuations(NamedTuple):
    """Continuations of a batch, and their cost.

    Attributes:
        texts: Continuation of each request, cut before the first stop text.
        tokens: Number of new tokens in the batch.
        steps: Sum of their additional steps, or None if the model records none.
    """

    texts: list[str]
    tokens: int
    steps: float | None


def write(
    model: LanguageModel, tokenizer: Tokenizer, requests: Sequence[WritingRequest]
) -> Continuations:
    """Continues one or more prompts with the same sampling and number of tokens.

    A row ends once it has written a stop text. Random streams belong to requests, so draws and
    inferred latents do not depend on the batch.
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
