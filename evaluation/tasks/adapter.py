"""Any model of ours as a model of lm-evaluation-harness."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lm_eval.api.model import LM
from torch import Tensor
from tqdm import tqdm

from datamodules import Tokenizer
from evaluation.tasks.readers import Piece, Reader, reader_of
from evaluation.tasks.writing import Wish, write
from lightning_models import LanguageModel
from lightning_models.layers import recording
from lightning_models.outputs import Likelihood


@dataclass(frozen=True)
class Facts:
    """How a log-likelihood came about.

    Attributes:
        scored: Tokens whose log-probabilities it is the sum of.
        read: Tokens that the model has read for it, those of all its passes together.
        flops: Forward FLOPs of reading them, additional steps and inference included: those that
            ran, where the model records them.
        steps: Additional steps of the scored tokens together; None where the model tells of none.
        likelihood: Kind of the log-likelihood.
        causal: Whether no token's probability depends on later tokens.
        nominal_flops: FLOPs of reading them as the configuration plans.
    """

    scored: int
    read: int
    flops: float
    steps: float | None
    likelihood: Likelihood
    causal: bool
    nominal_flops: float = 0.0


class LogLikelihood(tuple[float, bool]):
    """What the harness wants of a continuation, with the facts.

    A pair for the harness: log-probability in nats, and whether greedy decoding writes it.
    """

    facts: Facts

    def __new__(cls, log_prob: float, greedy: bool, facts: Facts) -> "LogLikelihood":
        """Returns the pair."""
        pair = super().__new__(cls, (log_prob, greedy))
        pair.facts = facts
        return pair

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a cache file or another process rebuilds it from."""
        return LogLikelihood, (*self, self.facts)


class RollingLogLikelihood(float):
    """Log-likelihood of a whole text in nats, with the facts."""

    facts: Facts

    def __new__(cls, log_prob: float, facts: Facts) -> "RollingLogLikelihood":
        """Returns the number."""
        number = super().__new__(cls, log_prob)
        number.facts = facts
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a cache file or another process rebuilds it from."""
        return RollingLogLikelihood, (float(self), self.facts)


@dataclass(frozen=True)
class Spent:
    """What log-likelihoods have cost together.

    Attributes:
        scored: Scored tokens.
        read: Tokens read.
        flops: Forward FLOPs.
        steps: Additional steps of the scored tokens; None where the model tells of none.
        requests: How many log-likelihoods these are.
        kinds: Kinds of those that score anything, each once.
        causal: Whether all are causal; None where there are none.
        nominal_flops: Forward FLOPs as the configuration plans.
    """

    scored: int
    read: int
    flops: float
    steps: float | None
    requests: int
    kinds: tuple[Likelihood, ...]
    causal: bool | None
    nominal_flops: float = 0.0

    @classmethod
    def of(cls, outcomes: Iterable[Any]) -> "Spent":
        """Returns the sums over those outcomes that carry facts."""
        facts = [o.facts for o in outcomes if isinstance(o, LogLikelihood | RollingLogLikelihood)]
        known = [f.steps for f in facts if f.steps is not None]
        return cls(
            scored=sum(f.scored for f in facts),
            read=sum(f.read for f in facts),
            flops=sum(f.flops for f in facts),
            steps=sum(known) if known else None,
            requests=len(facts),
            kinds=tuple(dict.fromkeys(f.likelihood for f in facts if f.scored)),
            causal=all(f.causal for f in facts) if facts else None,
            nominal_flops=sum(f.nominal_flops for f in facts),
        )

    @property
    def length(self) -> int:
        """Tokens of a request on average, rounded up; at least 1."""
        return max(1, -(-self.read // max(1, self.requests)))

    @property
    def mean_steps(self) -> float | None:
        """Additional steps of a scored token; None where the model tells of none."""
        return None if self.steps is None else self.steps / max(1, self.scored)


# ---- the model


Mode = Literal["blockwise", "autoregressive"]
Context = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[Any], list[Any]]


class Job(NamedTuple):
    """A piece of a request.

    Attributes:
        request: Number of the request that it is a part of.
        piece: What is read.
    """

    request: int
    piece: Piece


@dataclass
class Sum:
    """What is known of a request so far."""

    missing: int
    """Pieces that are not scored yet."""
    log_prob: float = 0.0
    greedy: bool = True
    scored: int = 0
    read: int = 0
    flops: float = 0.0
    nominal_flops: float = 0.0
    steps: float | None = None
    likelihood: Likelihood = "exact"


@dataclass
class _Recorded:
    """What a model records while it scores one batch."""

    greedy: Tensor | None = None
    steps: Tensor | None = None
    flops: list[float] | None = None

    def take_greedy(self, *, greedy: Tensor) -> None:
        self.greedy = greedy

    def take_steps(self, *, executed: Tensor, most: float) -> None:
        self.steps = executed

    def take_flops(self, *, flops: Tensor, tokens: Tensor) -> None:
        self.flops = flops.tolist()


@dataclass
class Work:
    """What was computed for a task in this process, answers from a cache left out."""

    seconds: float = 0.0
    written_tokens: float = 0.0
    written_steps: float | None = None
    prompt_tokens: int = 0
    prompts: int = 0


class HarnessModel(LM):
    """Answers the harness' three kinds of requests with a model's own scores and decode loop.

    Rows of a batch have similar lengths; what a batch holds changes no answer. Every answer goes
    to the harness' cache as soon as its batch is done.

    Args:
        model: On its device, in eval mode.
        tokenizer: The one the model was trained with.
        batch_size: Rows that are scored, or written, at once.
        mode: 'blockwise' reads context and continuation in one pass; 'autoregressive' scores each
            token after its prefix alone, where that makes a difference (models that are not
            causal).
        context: Makes the context of the model's passes (its autocast).
        max_gen_toks: Most tokens of a continuation where the task does not say.
        seed: Of random draws of written texts.
        rank: This process among ``world_size``.
        world_size: Processes that share the examples.
        gather: From a value to those of all ranks.
        progress: Whether bars are shown; None: where stderr is a terminal.

    Attributes:
        work: What was computed here, by task.

    Raises:
        ValueError: If the model scores no plain texts.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        context: Context,
        mode: Mode = "blockwise",
        max_gen_toks: int = 256,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather = lambda value: [value],
        progress: bool | None = None,
    ) -> None:
        super().__init__()
        self.model, self.own_tokenizer = model, tokenizer
        self.reader: Reader = reader_of(model, tokenizer)
        self.batch_size, self.mode, self.max_gen_toks = batch_size, mode, max_gen_toks
        self.seed = seed
        self._context, self._gather = context, gather
        self._rank, self._world_size = rank, world_size
        self._hidden = None if progress is None else not progress
        self.work: defaultdict[str, Work] = defaultdict(Work)
        self._flops = lru_cache(maxsize=None)(model.flops_per_token)

    # ---- what the harness asks of ranks

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, one after the other."""
        return torch.cat([part.reshape(-1) for part in self._gather(tensor.cpu())])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on rank ``dst``, None on others."""
        found = self._gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._gather(None)

    # ---- requests

    def loglikelihood(self, requests: list[Any]) -> list[Any]:
        """Returns of each (context, continuation) a ``LogLikelihood``."""
        found: list[Any] = [None] * len(requests)
        cuts = [self._pieces(*request.args) for request in requests]
        for number, total in self._sums(cuts, requests, given=True):
            facts = self._facts(total, given=True)
            found[number] = LogLikelihood(total.log_prob, total.greedy, facts)
            self.cache_hook.add_partial("loglikelihood", requests[number].args, found[number])
        return found

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """Returns of each (text,) a ``RollingLogLikelihood``: all of its tokens, from the start.

        Nothing is given, so that a method which infers something from what is given bounds the
        likelihood of the text instead.
        """
        found: list[Any] = [None] * len(requests)
        cuts = [self._pieces("", *request.args) for request in requests]
        for number, total in self._sums(cuts, requests, given=False):
            facts = self._facts(total, given=False)
            found[number] = RollingLogLikelihood(total.log_prob, facts)
            args = requests[number].args
            self.cache_hook.add_partial("loglikelihood_rolling", args, found[number])
        return found

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Returns a continuation of each (context, options), cut in front of the stop texts."""
        found: list[Any] = [None] * len(requests)
        wishes = [
            Wish.of(context, options, self.reader, most=self.max_gen_toks, seed=self.seed)
            for context, options in (request.args for request in requests)
        ]
        with self._bar(len(requests), "writing", " texts") as bar, torch.no_grad():
            for batch in _alike(wishes, self.batch_size):
                start = time.perf_counter()
                with self._context():
                    written = write(self.model, self.own_tokenizer, [wishes[i] for i in batch])
                seconds = (time.perf_counter() - start) / len(batch)
                for number, text in zip(batch, written.texts, strict=True):
                    found[number] = text
                    hooked = requests[number]
                    self.cache_hook.add_partial("generate_until", hooked.args, text)
                    self._note_written(_task(hooked), wishes[number], written, seconds)
                bar.update(len(batch))
        return found

    def _note_written(self, task: str, wish: Wish, written: Any, seconds: float) -> None:
        work = self.work[task]
        work.seconds += seconds
        work.prompts += 1
        work.prompt_tokens += len(wish.prompt)
        work.written_tokens += written.tokens / len(written.texts)
        if written.steps is not None:
            work.written_steps = (work.written_steps or 0) + written.steps / len(written.texts)

    # ---- scoring

    def _pieces(self, context: str, continuation: str) -> list[Piece]:
        """Returns what is read for a request; nothing where there is nothing to score."""
        if not continuation and not context[len(context.rstrip()) :]:
            return []
        pieces = self.reader.pieces(context, continuation)
        if self.mode == "blockwise" or self.model.causal:
            return pieces
        return [prefix for piece in pieces for prefix in piece.prefixes()]

    def _sums(
        self, cuts: Sequence[Sequence[Piece]], requests: Sequence[Any], *, given: bool
    ) -> Iterator[tuple[int, Sum]]:
        """Yields number and result of each request as soon as all of its pieces are scored."""
        sums = [Sum(missing=len(pieces)) for pieces in cuts]
        jobs = [Job(n, piece) for n, pieces in enumerate(cuts) for piece in pieces]
        jobs.sort(key=lambda job: (-self.reader.read_tokens(job.piece), job.piece.tokens))
        yield from ((n, total) for n, total in enumerate(sums) if not total.missing)
        with self._bar(len(jobs), "scoring", " rows") as bar:
            for first in range(0, len(jobs), self.batch_size):
                batch = jobs[first : first + self.batch_size]
                self._add_batch(batch, sums, requests, given=given)
                bar.update(len(batch))
                for number in dict.fromkeys(job.request for job in batch):
                    if not sums[number].missing:
                        yield number, sums[number]

    def _add_batch(
        self, batch: Sequence[Job], sums: Sequence[Sum], requests: Sequence[Any], *, given: bool
    ) -> None:
        """Scores the pieces, and adds what they are to their requests' sums."""
        start, pieces = time.perf_counter(), [job.piece for job in batch]
        rows = self.reader.batch(pieces)
        if not given and self.mode == "blockwise":
            rows.pop("context", None)
            rows["sequence_id"] = torch.tensor([piece.whole_number for piece in pieces])
        recorded = _Recorded()
        facts_too = recording(
            greedy=recorded.take_greedy,
            thinking_steps=recorded.take_steps,
            flops=recorded.take_flops,
        )
        with facts_too, torch.no_grad(), self._context():
            scores = self.model.score(move_data_to_device(rows, self.device))
        log_probs = self._scored(scores.log_prob, pieces)
        greedy = self._scored(recorded.greedy, pieces)
        steps = None if recorded.steps is None else self._scored(recorded.steps, pieces)
        terms = scores.sequence_term.detach().double().cpu().tolist()
        seconds = time.perf_counter() - start
        read = [self.reader.read_tokens(piece) for piece in pieces]
        for row, job in enumerate(batch):
            total = sums[job.request]
            total.missing -= 1
            total.log_prob += float(log_probs[row].double().sum()) + terms[row]
            total.greedy &= bool(greedy[row].all())
            total.scored += len(log_probs[row])
            total.read += read[row]
            planned = read[row] * self._flops(read[row])
            total.nominal_flops += planned
            total.flops += planned if recorded.flops is None else recorded.flops[row]
            if steps is not None:
                total.steps = (total.steps or 0.0) + steps[row].sum().item()
            total.likelihood = scores.kind
            share = seconds * read[row] / max(1, sum(read))
            self.work[_task(requests[job.request])].seconds += share

    def _scored(self, per_target: Tensor | None, pieces: Sequence[Piece]) -> list[Tensor]:
        assert per_target is not None, f"{type(self.model).__name__}.score does not record greedy"
        return self.reader.scored_of(per_target.detach().cpu(), pieces)

    def _facts(self, total: Sum, *, given: bool) -> Facts:
        """Returns the facts; prefixes alone are causal, and what made them inexact is gone."""
        likelihood, causal = total.likelihood, self.model.causal
        if self.mode == "autoregressive":
            causal, likelihood = True, "exact" if likelihood == "noncausal" else likelihood
        elif given and likelihood == "estimate":  # inferred from what is given alone
            causal = True
        return Facts(
            total.scored,
            total.read,
            total.flops,
            total.steps,
            likelihood,
            causal,
            total.nominal_flops,
        )

    def _bar(self, total: int, what: str, unit: str) -> Any:
        hidden = True if self._rank else self._hidden
        return tqdm(total=total, desc=what, unit=unit, disable=hidden)


def _task(request: Any) -> str:
    return str(request.task_name)


def _alike(wishes: Sequence[Wish], size: int) -> Iterator[list[int]]:
    """Yields the numbers of wishes that can be written at once, the longest prompts first."""
    groups: dict[Any, list[int]] = {}
    for number, wish in enumerate(wishes):
        key = (wish.sampling, wish.most, wish.alone and number)
        groups.setdefault(key, []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda n: (-len(wishes[n].prompt), wishes[n].prompt))
        yield from (numbers[i : i + size] for i in range(0, len(numbers), size))
