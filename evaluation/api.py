"""A checkpoint from Python: ``lightning_models.load``.

It does what the commands do, with the same functions: ``generate`` decodes as ``evaluate.py
generate``, ``score`` reads texts as ``evaluate.py tasks``, ``think`` shows what the analyses of
``callbacks.analysis`` collect.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
import pandas as pd
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities import move_data_to_device
from tqdm import tqdm

from callbacks import ForkAnalysis, GateAnalysis, PosteriorAnalysis, StepAllocation, ThoughtTrace
from callbacks.analysis.base import Analysis, NothingToAnalyseError
from callbacks.analysis.token_text import REPLACEMENT, pieces
from datamodules import SentenceTokenizer, Tokenizer
from datamodules.readers import check_utf8
from evaluation.arguments import load_with_tokenizer
from evaluation.devices import Device, Precision, autocast
from evaluation.generate import continue_prompts
from evaluation.perplexity import Mode
from evaluation.scoring import Totals, score_batch
from evaluation.tasks.readers import Piece, Reader, label, reader_of, scored_of
from evaluation.thoughts import TokenTrace, losses_figure, save_page, trace_text
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Which
from lightning_models.generation import SamplingConfig, generate_steps, whole_number, written_text
from lightning_models.outputs import Likelihood
from lightning_models.runtime import choose_kernels

ANALYSES: tuple[Callable[[], Analysis], ...] = (
    ForkAnalysis,
    StepAllocation,
    PosteriorAnalysis,
    GateAnalysis,
    ThoughtTrace,
)
"""What ``think`` asks a model for; the first that it has something for is shown."""
ROWS = 32
"""Rows that are scored at once."""
MOST_TOKENS = 2**31 - 1
"""Longest sequence that may be asked for."""
Compute = Literal["scoring", "training", "generation"]
"""What FLOPs are counted of."""


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} ({value}) must be one of {', '.join(get_args(choices))}")


def _check_type(kind: Any, wanted: str, **values: Any) -> None:
    """Raises a ValueError that names the argument; jsonargparse does so for the commands."""
    for name, value in values.items():
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} ({value!r}) must be {wanted}")


def _plain(value: Any) -> Any:
    """Returns a number of NumPy's as Python's, which configs and their files hold."""
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
    """Returns a trained model with its tokenizer; the data of its training need not be there.

    The file runs no code: it is read as tensors and plain values.

    Args:
        path: a checkpoint file, or the folder of a run.
        which: of a folder's run the furthest checkpoint, or the best one.
        device: where it runs; 'auto' takes a GPU if there is one.
        precision: of the matrix products, '32', 'tf32' or 'bf16'; weights stay float32.
        changes: fields of the method's config to set to other values than in training, such as
            ``{"inner_steps": 4}``.
        tokenizer: name of the tokenizer, for checkpoints that name none.
        packages: packages of your own whose classes the checkpoint may name; they are imported.

    Raises:
        ValueError: if the checkpoint cannot be read or rebuilt, or the tokenizer does not fit.
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


@dataclass(frozen=True)
class TextScore:
    """The log-likelihood of a text."""

    nats_per_token: float
    """Mean negative log-likelihood of a scored token, terms of the whole text included."""
    likelihood: Likelihood
    """What that is: 'exact', 'lower_bound' (of the likelihood), 'estimate' or 'noncausal'."""
    causal: bool
    """Whether the prediction of a token never depends on later tokens."""
    totals: Totals = field(repr=False)
    """The sums, in nats."""
    tokens: pd.DataFrame = field(repr=False)
    """A line a scored token: ``place`` among them, ``id``, ``text``, ``nats``. They add up to all
    nats but those of the whole text, ``totals.sequence_nats`` (a KL divergence)."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers under the keys of ``evaluate.py perplexity --output``."""
        kind = {"likelihood": self.likelihood, "causal": self.causal}
        return {**self.totals.as_dict(self.likelihood), **kind}


@dataclass(frozen=True)
class Thinking:
    """What a method did while it read a text."""

    analysis: str
    """Which analysis shows it: ``fork_analysis``, ``step_allocation``, ...; ``loss`` for none."""
    tables: Mapping[str, pd.DataFrame]
    """By name, the most telling one first; their columns are documented at the analysis."""
    figures: Mapping[str, Any] = field(repr=False)
    """Matplotlib figures by name, the most telling one first."""
    trace: TokenTrace = field(repr=False)
    """Loss of each token and what the method did at it, as ``save`` shows them."""

    @property
    def table(self) -> pd.DataFrame:
        """The first table."""
        return next(iter(self.tables.values()))

    @property
    def figure(self) -> Any:
        """The first figure."""
        return next(iter(self.figures.values()))

    def save(self, path: str | Path) -> Path:
        """Writes one HTML page that needs no network, and returns its path.

        ``evaluate.py think`` shows several models on one page.

        Raises:
            ValueError: If the name does not end in .html, or the folder takes no files.
        """
        return save_page([self.trace], path)


class LoadedModel:
    """A trained model with its tokenizer.

    Attributes:
        checkpoint: Where it comes from.
        model: In eval mode, on its device.
        tokenizer: The one that it was trained with.
        precision: Of the matrix products.
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
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> str: ...

    @overload
    def generate(
        self, text: str, *, max_new_tokens: int = ..., stream: Literal[True], **sampling: Any
    ) -> Iterator[str]: ...

    def generate(
        self, text: str, *, max_new_tokens: int = 100, stream: bool = False, **sampling: Any
    ) -> str | Iterator[str]:
        """Returns a continuation of a text, or an answer to a question, without the prompt.

        Args:
            text: the prompt; an empty one starts a document.
            max_new_tokens: longest continuation, in tokens.
            stream: whether to return an iterator of pieces, as they are written, that join to the
                text. A character of several tokens comes with the last of them; of byte-fallback
                pieces, all in a row come together.
            **sampling: fields of ``SamplingConfig``: temperature (0: the likeliest token), top_k,
                top_p, seed.

        Raises:
            ValueError: If an option is out of its range, or prompt and continuation do not fit the
                model's context.
            TypeError: If an option of sampling does not exist.
        """
        _check_type(str, "text (str)", text=text)
        most = whole_number("max_new_tokens", max_new_tokens, least=0, most=MOST_TOKENS)
        _check_type(bool, "True or False", stream=stream)
        check_utf8(text, f"prompt {text!a}")
        config = SamplingConfig(**sampling)
        if stream:
            return self._written(text, most, config)
        ((_, continuation),) = continue_prompts(
            self.model,
            self.tokenizer,
            [text],
            max_new_tokens=most,
            sampling=config,
            precision=self.precision,
        )
        return continuation

    def _written(self, text: str, max_new_tokens: int, sampling: SamplingConfig) -> Iterator[str]:
        """Yields what a continuation grows by; nothing while its last character is incomplete."""
        steps = generate_steps(
            self.model,
            [self.tokenizer.prompt_ids(text)],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=self.tokenizer.stop_ids,
            vocab_size=self.tokenizer.vocab_size,
            device=self.model.device,
        )
        text_of = partial(written_text, self.tokenizer, begins=not text)
        ids: list[int] = []
        shown = 0
        while True:
            with autocast(self.model.device, self.precision):  # not while the caller has its turn
                token = next(steps, (0, None))[1]
            if token is None:
                break
            ids.append(token)
            # Byte pieces in a row are decoded together: a broken one changes those before it.
            if token in self.tokenizer.byte_pieces or not written_text(self.tokenizer, [token]):
                continue
            whole = text_of(ids)
            if len(whole) > shown and not whole.endswith(REPLACEMENT):
                yield whole[shown:]
                shown = len(whole)
        rest = text_of(ids)[shown:]
        if rest:
            yield rest

    # ---- scores

    def score(self, text: str, *, context: str = "", mode: Mode = "blockwise") -> TextScore:
        """Returns the log-likelihood of a text.

        A text longer than the model's context is cut into windows, each with as much before it as
        fits. Of models of sentences words are scored, not the marks between them.

        Args:
            text: at least one token. Of a model that answers questions the answer; its end is
                scored, too.
            context: text before it, which is given and not scored; none: ``text`` starts a
                document. Both are encoded alone, so that what is scored is exactly ``text`` even
                where the tokenizer would join them in one token. Of a model that answers questions
                the question.
            mode: 'blockwise' reads the text in one pass; 'autoregressive' scores each token from
                its prefix alone, which makes a difference for models that are not causal.

        Raises:
            ValueError: if there is nothing to score, or no question where the model needs one.
        """
        _check_choice("mode", mode, Mode)
        _check_type(str, "text (str)", text=text, context=context)
        reader = self._reader(text)
        if self.model.reads == "reasoning" and not context:
            raise ValueError(
                f"{type(self.model).__name__} scores answers to questions; give the question as "
                "context: score('18', context='...')"
            )
        check_utf8(context, f"context {context!a}")
        parts = reader.pieces(context, text)
        if not parts:
            raise ValueError(
                f"text ({text!a}) has no tokens in {self.tokenizer.name}; give at least one token"
            )
        from_prefixes = mode == "autoregressive" and not self.model.causal
        if from_prefixes:
            parts = [prefix for part in parts for prefix in part.prefixes()]
        whole = not context and not from_prefixes
        nats, of_text, kind = self._nats(reader, parts, whole=whole)
        likelihood, causal = label(
            kind, self.model.causal, from_prefixes=from_prefixes, given=bool(context)
        )
        ids = [
            i
            for part in parts
            for i, is_scored in zip(part.tokens, part.scored, strict=True)
            if is_scored
        ]
        marked = isinstance(self.tokenizer, SentenceTokenizer)  # marks have nats, not known here
        texts = pieces(self.tokenizer, ids, begins=not context)
        totals = Totals(
            nats.sum().item() + of_text,
            len(ids),
            None if marked else len(text.encode()),
            all_nats=math.nan if marked else None,
            sequence_nats=of_text,
        )
        columns = {"place": range(len(ids)), "id": ids, "text": texts}
        tokens = pd.DataFrame({**columns, "nats": nats.numpy()})
        return TextScore(totals.nats_per_token, likelihood, causal, totals, tokens)

    def _nats(
        self, reader: Reader, parts: list[Piece], *, whole: bool
    ) -> tuple[torch.Tensor, float, Likelihood]:
        """Returns float64 nats of all scored tokens (N,), of whole texts, and their kind."""
        nats, of_texts, kind = [], 0.0, self.model.likelihood
        hidden = None if len(parts) > ROWS else True  # None: hidden where stderr is no terminal
        for start in tqdm(range(0, len(parts), ROWS), desc="scoring", disable=hidden):
            group = parts[start : start + ROWS]
            batch = reader.batch(group, whole=whole)
            scores = score_batch(self.model, batch, self.precision)
            nats += scored_of(-scores.log_prob.double().cpu(), batch["targets"])
            of_texts -= scores.sequence_total().item()
            kind = scores.kind
        return torch.cat(nats), of_texts, kind

    def _reader(self, text: str) -> Reader:
        check_utf8(text, f"text {text!a}")
        if not text:
            raise ValueError("text ('') is empty; give at least one token")
        return reader_of(self.model, self.tokenizer, documents=True)

    # ---- thinking

    def think(self, text: str) -> Thinking:
        """Shows how the method read a text: its forks, steps, latents, gates or thoughts.

        The tables are those of ``Analysis.analyse_text``, by method:

        - Thoughtbubbles: ``tokens`` with the streams of each token after each fork layer.
        - PonderLM: ``tokens`` with the executed steps of each token, its losses and the router's w.
        - Latent-Thought LM: ``latents``, KL, mean and variance of each vector, and ``coordinates``.
        - Thought Gestalt: ``attention`` to memory by layer and age of sentences, with the gates.
        - Thinking States: ``thoughts`` after each chunk of a question.

        - All others: ``tokens`` with the loss of each token.

        ``trace`` and ``save`` show all methods token by token.

        Args:
            text: read in one pass, with the end of the document after it; a question for a model
                that answers questions. At most as long as the model's context.

        Raises:
            ValueError: if the text is empty or too long.
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
        """Returns the part of ``think`` that all methods have: what was done at each token.

        Args:
            text: See ``think``.

        Raises:
            ValueError: if the text is empty or too long.
        """
        _check_type(str, "text (str)", text=text)
        reader = self._reader(text)
        size = len(reader.document(text).tokens) - 1
        if reader.limit is not None and size > reader.limit:
            raise ValueError(
                f"text has {size} tokens with the start of the document, and the model reads "
                f"{reader.limit} at once; give a shorter one"
            )
        return trace_text(self.model, self.tokenizer, reader, text, self.precision)

    # ---- compute

    def flops(
        self,
        context: int | None = None,
        kind: Compute = "scoring",
    ) -> float:
        """Returns FLOPs per token, all passes counted operation by operation (docs/compute.md).

        Args:
            context: Tokens in a sequence, by default as many as a window of the training has.
            kind: Whether FLOPs of scoring in one pass, training or generation are counted.
        """
        _check_choice("kind", kind, Compute)
        tokens = self.model.config.block_size
        if context is not None:
            tokens = whole_number("context", context, least=1, most=MOST_TOKENS)
        if kind == "generation":
            return self.model.generation_flops(tokens)
        return self.model.flops_per_token(tokens, training=kind == "training")
