"""A checkpoint from Python: ``lightning_models.load``.

It shares its functions with the commands: ``generate`` decodes like ``evaluate.py generate``,
``score`` reads texts like ``evaluate.py tasks``, and ``think`` shows the statistics that the
analyses of ``callbacks.analysis`` collect.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
import pandas as pd
from jsonargparse import Namespace
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from callbacks import ForkAnalysis, GateAnalysis, PosteriorAnalysis, StepAllocation, ThoughtTrace
from callbacks.analysis.base import Analysis, NothingToAnalyseError
from callbacks.analysis.token_text import REPLACEMENT
from datamodules import Tokenizer
from datamodules.readers import check_utf8
from evaluation.arguments import load_with_tokenizer
from evaluation.devices import Device, Precision, autocast
from evaluation.generate import continue_prompts
from evaluation.perplexity import Mode
from evaluation.tasks.readers import Reader, reader_of
from evaluation.text_results import TextScore, TokenLogits, figure_page
from evaluation.text_scores import checked_ids, score_texts, token_logits
from evaluation.thoughts import TokenTrace, losses_figure, trace_text
from evaluation.thoughts_page import save_page
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Which
from lightning_models.generation import (
    SamplingConfig,
    cut_before,
    generate_steps,
    stops_at,
    whole_number,
    written_text,
)
from lightning_models.runtime import choose_kernels

ANALYSES: tuple[Callable[[], Analysis], ...] = (
    ForkAnalysis,
    StepAllocation,
    PosteriorAnalysis,
    GateAnalysis,
    ThoughtTrace,
)
"""Analyses that ``think`` tries; it shows the first one that applies to the model."""
MAX_TOKENS = 2**31 - 1
"""Upper bound of sequence lengths in arguments."""
Compute = Literal["scoring", "training", "generation"]
"""Computations that FLOPs are counted for."""


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} ({value}) must be one of {', '.join(get_args(choices))}")


def _check_type(cls: Any, expected: str, **values: Any) -> None:
    """Raises a ValueError that names the argument; jsonargparse does so for the commands."""
    for name, value in values.items():
        if not isinstance(value, cls) or (isinstance(value, bool) and cls is not bool):
            raise ValueError(f"{name} ({value!r}) must be {expected}")


def _texts(values: Any, key: str = "text") -> list[str]:
    """Returns a text or several texts as a list.

    Raises:
        ValueError: If a value is not text, or cannot be encoded as UTF-8.
    """
    texts = list(values) if isinstance(values, list | tuple) else [values]
    for text in texts:
        _check_type(str, "str, or a list of str", **{key: text})
        check_utf8(text, f"{key} {text!a}")
    return texts


def _plain(value: Any) -> Any:
    """Converts a NumPy scalar to a Python number, as configs and their files hold."""
    return value.item() if isinstance(value, np.generic) else value


def load(
    path: str | Path,
    *,
    which: Which = "last",
    device: Device = "auto",
    precision: Precision = "32",
    changes: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    packages: tuple[str, ...] = (),
) -> "LoadedModel":
    """Loads a trained model with its tokenizer; its training data is not needed.

    The file runs no code: it is read as tensors and plain values. If a folder has several runs,
    the newest one is loaded, and a warning names it.

    Args:
        path: A checkpoint file, or the folder of a run.
        which: Checkpoint of a folder to load: the latest or the best.
        device: Device to run on; 'auto' uses a GPU if there is one.
        precision: Precision of the matrix products, '32', 'tf32' or 'bf16'; weights stay float32.
        changes: Fields of the method's config to set to other values than in training, such as
            ``{"inner_steps": 4}``.
        tokenizer: Name of the tokenizer, for checkpoints without one.
        packages: Your packages with classes that the checkpoint names; they are imported.

    Raises:
        ValueError: If the checkpoint cannot be read or rebuilt, or the tokenizer does not fit.
    """
    _check_type((str, Path), "a path", path=path)
    _check_choice("device", device, Device)
    _check_choice("precision", precision, Precision)
    _check_type((Mapping, type(None)), "a mapping of fields to values, or None", changes=changes)
    _check_type((str, type(None)), "the name of a tokenizer, or None", tokenizer=tokenizer)
    _check_type((tuple, list), "a tuple of names", packages=packages)
    for name in packages:
        _check_type(str, "names of packages", packages=name)
    settings = Namespace(
        ckpt=str(path),
        which=which,
        device=device,
        set={key: _plain(value) for key, value in (changes or {}).items()},
        tokenizer=tokenizer,
        packages=list(packages),
    )
    choose_kernels()
    checkpoint, model, own_tokenizer = load_with_tokenizer(settings)
    return LoadedModel(checkpoint, model, own_tokenizer, precision)


@dataclass(frozen=True, repr=False)
class Thinking:
    """Record of a method reading a text; a notebook shows the first figure and table."""

    analysis: str
    """Name of the analysis, such as ``fork_analysis`` or ``step_allocation``; ``loss`` if none."""
    tables: Mapping[str, pd.DataFrame]
    """Tables by name, the most important one first; the analysis documents their columns."""
    figures: Mapping[str, Any] = field(repr=False)
    """Matplotlib figures by name, the most important one first."""
    trace: TokenTrace = field(repr=False)
    """Loss and statistics of the method at each token, which ``save`` writes as a page."""

    @property
    def table(self) -> pd.DataFrame:
        """The first table."""
        return next(iter(self.tables.values()))

    @property
    def figure(self) -> Any:
        """The first figure."""
        return next(iter(self.figures.values()))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} ({len(table)} rows)" for name, table in self.tables.items())
        return f"Thinking: {self.analysis}; tables {sizes}; figures {', '.join(self.figures)}"

    def _repr_html_(self) -> str:
        return figure_page(repr(self), self.figure, self.table)

    def save(self, path: str | Path) -> Path:
        """Writes a self-contained HTML page and returns its path.

        ``evaluate.py think`` shows several models on one page.

        Raises:
            ValueError: If the name does not end in .html, or the folder cannot be written to.
        """
        return save_page([self.trace], path)


class LoadedModel:
    """A trained model with its tokenizer, as ``lightning_models.load`` returns it.

    Its methods take and return texts; ``generate`` and ``score`` also take lists, which they batch.
    Calling it with token ids returns logits.

    Attributes:
        checkpoint: The checkpoint that it was loaded from.
        model: The model in eval mode, on its device.
        tokenizer: The tokenizer that it was trained with.
        precision: Precision of the matrix products.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: LanguageModel,
        tokenizer: Tokenizer,
        precision: Precision = "32",
    ) -> None:
        self.checkpoint, self.model, self.tokenizer = checkpoint, model, tokenizer
        self.precision = precision

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"{type(self.model).__name__}: {size:,} parameters, step {self.checkpoint.step:,}, "
            f"tokenizer {self.tokenizer.name}, on {self.model.device}"
        )

    # ---- generation

    @overload
    def generate(
        self,
        text: str,
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> str: ...

    @overload
    def generate(
        self,
        text: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        text: str,
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        stream: Literal[True],
        **sampling: Any,
    ) -> Iterator[str]: ...

    def generate(
        self,
        text: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 100,
        stop: str | Sequence[str] = (),
        stream: bool = False,
        **sampling: Any,
    ) -> str | list[str] | Iterator[str]:
        """Continues a text, or answers a question; the prompt is not part of the result.

        ```python
        lm.generate("The function returns", max_new_tokens=40, stop=".")
        lm.generate(["A list is", "A tuple is"], max_new_tokens=40, temperature=0)
        ```

        Args:
            text: The prompt; an empty one starts a document. A list of prompts is decoded as a
                batch, each prompt independently: the same prompt twice has the same continuation.
            max_new_tokens: Maximum length of the continuation in tokens.
            stop: Text, or several texts, before which a continuation is cut.
            stream: Whether to return an iterator of pieces that concatenate to the text. A
                character that spans several tokens is in the piece of its last token, and
                consecutive byte-fallback tokens make one piece.
            **sampling: Fields of ``SamplingConfig``: temperature (0 takes the most likely token),
                top_k, top_p, seed.

        Returns:
            A text, or a list of texts for a list of prompts, or an iterator of pieces.

        Raises:
            ValueError: If an option is out of range, or prompt and continuation do not fit the
                model's context.
            TypeError: If an option of sampling does not exist.
        """
        prompts = _texts(text)
        limit = whole_number("max_new_tokens", max_new_tokens, minimum=0, maximum=MAX_TOKENS)
        _check_type(bool, "True or False", stream=stream)
        stops = _texts(stop, "stop")
        if "" in stops:
            raise ValueError("stop ('') ends every text; give texts of at least one character")
        config = SamplingConfig(**sampling)
        if stream:
            _check_type(str, "one str with stream=True", text=text)
            return self._written(prompts[0], limit, config, stops)
        pairs = continue_prompts(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens=limit,
            sampling=config,
            precision=self.precision,
            streams=[0] * len(prompts),
            stop=stops,
        )
        texts = [continuation for _, continuation in pairs]
        return texts[0] if isinstance(text, str) else texts

    def _written(
        self, text: str, max_new_tokens: int, sampling: SamplingConfig, stops: Sequence[str]
    ) -> Iterator[str]:
        """Yields the new text of a continuation once its last character is complete.

        Text that may be the beginning of a stop text is held back until it turns out not to be.
        """
        begins, holdback = not text, max(map(len, stops), default=1) - 1
        steps = generate_steps(
            self.model,
            [self.tokenizer.prompt_ids(text)],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=self.tokenizer.stop_ids,
            vocab_size=self.tokenizer.vocab_size,
            device=self.model.device,
            ended=stops_at(self.tokenizer, [stops], [begins]),
        )
        text_of = partial(written_text, self.tokenizer, begins=begins)
        ids: list[int] = []
        num_shown = 0
        while True:
            with autocast(self.model.device, self.precision):  # not while the caller has its turn
                token = next(steps, (0, None))[1]
            if token is None:
                break
            ids.append(token)
            # Consecutive byte pieces are decoded together: an invalid one changes the ones before.
            if token in self.tokenizer.byte_pieces or not written_text(self.tokenizer, [token]):
                continue
            whole = text_of(ids)
            if len(whole) - holdback > num_shown and not whole.endswith(REPLACEMENT):
                piece = cut_before(whole, stops)[num_shown : len(whole) - holdback]
                num_shown += len(piece)
                if piece:
                    yield piece
        rest = cut_before(text_of(ids), stops)[num_shown:]
        if rest:
            yield rest

    # ---- scores

    @overload
    def score(
        self, text: str, *, context: str | Sequence[str] = ..., mode: Mode = ...
    ) -> TextScore: ...

    @overload
    def score(
        self,
        text: list[str] | tuple[str, ...],
        *,
        context: str | Sequence[str] = ...,
        mode: Mode = ...,
    ) -> list[TextScore]: ...

    def score(
        self,
        text: str | list[str] | tuple[str, ...],
        *,
        context: str | Sequence[str] = "",
        mode: Mode = "blockwise",
    ) -> TextScore | list[TextScore]:
        """Computes the log-likelihood of a text, and states its kind.

        A text longer than the model's context is cut into windows, each preceded by as much of the
        text as fits. A sentence model scores the words, not the markers between them.

        ```python
        lm.score("A list is a mutable sequence.").nats_per_token
        [score.likelihood for score in lm.score(["A list.", "A tuple."])]
        lm.score(" mutable", context="A list is").tokens  # one line per scored token
        ```

        Args:
            text: A text of at least one token, or a list of such texts, which are read in batches.
                For a model that answers questions, the answer, whose EOS is scored too.
            context: Preceding text, which is not scored. By default ``text`` starts a document.
                The two are encoded separately, so that exactly ``text`` is scored even if the
                tokenizer would merge across the boundary. For a model that answers questions, the
                question. With a list of texts, one context for all or a list of the same length.
            mode: 'blockwise' reads the text in one pass; 'autoregressive' scores each token given
                its prefix only, which differs for models that are not causal.

        Returns:
            The score, or a list of scores for a list of texts.

        Raises:
            ValueError: If there is nothing to score, or no question where the model needs one.
        """
        _check_choice("mode", mode, Mode)
        texts, contexts = _texts(text), _texts(context, "context")
        contexts = contexts * len(texts) if isinstance(context, str) else contexts
        if len(contexts) != len(texts):
            raise ValueError(
                f"context has {len(contexts)} texts for {len(texts)} to score; give one each, or "
                "one str for all"
            )
        if self.model.reads == "reasoning" and not all(contexts):
            raise ValueError(
                f"{type(self.model).__name__} scores answers to questions; give the question as "
                "context: score('18', context='...')"
            )
        scores = score_texts(
            self.model,
            self.tokenizer,
            list(zip(texts, contexts, strict=True)),
            self._reader(*texts),
            from_prefixes=mode == "autoregressive" and not self.model.causal,
            precision=self.precision,
        )
        return scores[0] if isinstance(text, str) else scores

    # ---- logits

    def logits(self, text: str, *, mode: Mode = "blockwise") -> TokenLogits:
        """Returns the logits (1, T, V) after each token of a text, see ``__call__``.

        The first token is the start of the document: row t predicts token t of
        ``lm.tokenizer.encode(text)``, and the last row predicts the token that follows the text.

        Args:
            text: Text that starts a document.
            mode: See ``__call__``.

        Raises:
            ValueError: See ``__call__``.
        """
        _check_type(str, "text (str)", text=text)
        check_utf8(text, f"text {text!a}")
        return self([self.tokenizer.prompt_ids(text)], mode=mode)

    def __call__(
        self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]], *, mode: Mode = "blockwise"
    ) -> TokenLogits:
        """Returns the logits (B, T, V) after each token of rows of token ids.

        If the model is causal (``lm.model.causal``), each row of logits is a prediction of the
        next token. Thoughtbubbles with a budget for the window, Mixture-of-Recursions with expert
        choice, and Latent-Thought LMs, whose latents are inferred from all tokens, see later
        tokens: ``causal`` of the result is false, and ``mode='autoregressive'``, which reads each
        prefix separately at T times the cost, gives true predictions.

        ```python
        ids = torch.tensor([lm.tokenizer.prompt_ids("A list is")])
        logits = lm(ids).logits  # (1, T, V)
        lm.tokenizer.decode([logits[0, -1].argmax().item()])
        ```

        Args:
            ids: Whole numbers (B, T) or (T,) from 0 to ``config.vocab_size`` - 1; a document begins
                with ``lm.tokenizer.start_id``.
            mode: 'blockwise' reads all tokens in one pass; 'autoregressive' reads each prefix
                separately if the model is not causal.

        Raises:
            ValueError: If the ids are invalid or too many for the model's positions, or the model
                reads sentences or questions, which have no logits at each token of a row.
        """
        _check_choice("mode", mode, Mode)
        return token_logits(
            self.model,
            self.tokenizer,
            checked_ids(self.model, ids),
            from_prefixes=mode == "autoregressive" and not self.model.causal,
            precision=self.precision,
        )

    def _reader(self, *texts: str) -> Reader:
        for text in texts:
            check_utf8(text, f"text {text!a}")
            if not text:
                raise ValueError("text ('') is empty; give at least one token")
        return reader_of(self.model, self.tokenizer, documents=True)

    # ---- thinking

    def think(self, text: str) -> Thinking:
        """Records how the method reads a text: its forks, steps, latents, gates or thoughts.

        ``Analysis.analyse_text`` makes the tables, by method:

        - Thoughtbubbles: ``tokens`` with the streams of each token after each fork layer.
        - PonderLM: ``tokens`` with the executed steps of each token, its losses and the router's w.
        - Latent-Thought LM: ``latents``, KL, mean and variance of each vector, and ``coordinates``.
        - Thought Gestalt: ``attention`` to memory by layer and age of sentences, with the gates.
        - Thinking States: ``thoughts`` after each chunk of a question.
        - Other methods: ``tokens`` with the loss of each token.

        ``trace`` and ``save`` cover every method, token by token.

        Args:
            text: Text to read in one pass, followed by the end of the document; a question for a
                model that answers questions. It must fit the model's context.

        Raises:
            ValueError: If the text is empty or too long.
        """
        trace = self.trace(text)
        reader = self._reader(text)
        rows = reader.batch([reader.document(text)], whole=True)
        batch = move_data_to_device(rows, self.model.device)
        for analysis in (make() for make in ANALYSES):
            if analysis.reads != self.model.reads:
                continue
            try:
                with autocast(self.model.device, self.precision):
                    report = analysis.analyse_text(self.model, batch, self.tokenizer)
            except NothingToAnalyseError:
                continue
            return Thinking(analysis.tag, report.tables, report.drawn(), trace)
        tables = {"tokens": trace.tokens}
        return Thinking("loss", tables, {"tokens": losses_figure(tables)}, trace)

    def trace(self, text: str) -> TokenTrace:
        """Returns the per-token trace of a text, which every method has.

        Args:
            text: See ``think``.

        Raises:
            ValueError: If the text is empty or too long.
        """
        _check_type(str, "text (str)", text=text)
        reader = self._reader(text)
        size = len(reader.document(text).tokens) - 1
        if reader.limit is not None and size > reader.limit:
            raise ValueError(
                f"text has {size} tokens with the start of the document, and the model reads "
                f"{reader.limit} at once; give a shorter text"
            )
        return trace_text(self.model, self.tokenizer, reader, text, self.precision)

    # ---- compute

    def flops(
        self,
        context: int | None = None,
        kind: Compute = "scoring",
    ) -> float:
        """Counts FLOPs per token over all passes, operation by operation (docs/compute.md).

        Args:
            context: Length of the sequence in tokens. Defaults to the window it was trained with.
            kind: Computation to count: scoring in one pass, training, or generation.
        """
        _check_choice("kind", kind, Compute)
        tokens = self.model.config.block_size
        if context is not None:
            tokens = whole_number("context", context, minimum=1, maximum=MAX_TOKENS)
        if kind == "generation":
            return self.model.generation_flops(tokens)
        return self.model.flops_per_token(tokens, training=kind == "training")
