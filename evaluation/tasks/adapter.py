"""Any model of ours as a model of lm-evaluation-harness."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from lm_eval.api.model import LM, hash_args
from torch import Tensor
from tqdm import tqdm

from datamodules import Tokenizer
from datamodules.text import IGNORE
from evaluation.tasks.readers import Batch, Piece, label, reader_of, scored_of
from evaluation.tasks.writing import Continuations, WritingRequest, write
from lightning_models import LanguageModel
from lightning_models.layers import first_alike, recording
from lightning_models.outputs import Likelihood

Mode = Literal["blockwise", "autoregressive"]
Context = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[Any], list[Any]]


# ---- answers


@dataclass
class Facts:
    """How a log-likelihood came about.

    Attributes:
        scored: Tokens whose log-probabilities it is the sum of.
        read: Tokens that the model has read for it, those of all its passes together; a context
            that several requests share counts for each of them, as do its FLOPs.
        flops: Forward FLOPs of reading them, additional steps and inference included: those that
            ran, where the model records them.
        steps: Additional steps of the scored tokens together; None where the model records none.
        likelihood: Kind of the log-likelihood.
        causal: Whether no token's probability depends on later tokens.
        nominal_flops: FLOPs of reading them as the configuration plans.
    """

    scored: int = 0
    read: int = 0
    flops: float = 0.0
    steps: float | None = None
    likelihood: Likelihood = "exact"
    causal: bool = True
    nominal_flops: float = 0.0


_FREE_TOKENS = 256
"""Most tokens of continuations that always make one row: attention costs little there."""


class LogLikelihood(tuple[float, bool]):
    """What the harness wants of a continuation, with the facts.

    A pair for the harness: log-probability in nats, and whether greedy decoding writes it.
    """

    facts: Facts

    def __new__(cls, log_prob: float, greedy: bool, facts: Facts) -> "LogLikelihood":
        pair = super().__new__(cls, (log_prob, greedy))
        pair.facts = facts
        return pair

    def __reduce__(self) -> tuple[Any, ...]:
        # for cache files and other processes
        return LogLikelihood, (*self, self.facts)


class RollingLogLikelihood(float):
    """Log-likelihood of a whole text in nats, with the facts."""

    facts: Facts

    def __new__(cls, log_prob: float, facts: Facts) -> "RollingLogLikelihood":
        number = super().__new__(cls, log_prob)
        number.facts = facts
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return RollingLogLikelihood, (float(self), self.facts)


@dataclass
class Work:
    """What was computed for a task in this process, answers from a cache left out."""

    seconds: float = 0.0
    written_tokens: float = 0.0
    written_steps: float | None = None
    prompt_tokens: int = 0
    prompts: int = 0

    def add_written(self, prompt: Sequence[int], written: Continuations, seconds: float) -> None:
        """Counts one of the texts that were written together."""
        rows = len(written.texts)
        self.seconds += seconds / rows
        self.prompts += 1
        self.prompt_tokens += len(prompt)
        self.written_tokens += written.tokens / rows
        if written.steps is not None:
            self.written_steps = (self.written_steps or 0) + written.steps / rows


# ---- the model


@dataclass
class _Sum:
    """What is known of a request so far."""

    task: str
    missing: int
    """Pieces that are not scored yet."""
    log_prob: float = 0.0
    greedy: bool = True
    facts: Facts = field(default_factory=Facts)


_Job = tuple[int, Piece]  # number of the request, and a piece of it


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
        self.reader = reader_of(model, tokenizer)
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
        return self._answers("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """Returns of each (text,) a ``RollingLogLikelihood``: all of its tokens, from the start.

        Nothing is given, so that a method which infers something from what is given bounds the
        likelihood of the text instead.
        """
        return self._answers("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Returns a continuation of each (context, options), cut before the stop texts.

        A request that the harness repeats stands in the list several times: each has draws of its
        own, and an entry of its own in the cache.
        """
        wanted, seen = [], Counter[int]()
        for request in requests:
            wanted.append(self._writing_request(request, seen[id(request)]))
            seen[id(request)] += 1
        keys = [(*r.args, one.stream) for r, one in zip(requests, wanted, strict=True)]
        cached = self.cache_hook.dbdict or {}
        found = [cached.get(hash_args("generate_until", key)) for key in keys]
        missing = [number for number, text in enumerate(found) if text is None]
        with self._bar(len(missing), "writing", " texts") as bar, torch.no_grad():
            for batch in _alike(wanted, missing, self.batch_size):
                start = time.perf_counter()
                with self._context():
                    written = write(self.model, self.own_tokenizer, [wanted[i] for i in batch])
                seconds = time.perf_counter() - start
                for number, text in zip(batch, written.texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", keys[number], text)
                    work = self.work[str(requests[number].task_name)]
                    work.add_written(wanted[number].prompt, written, seconds)
                bar.update(len(batch))
        return found

    def _writing_request(self, request: Any, attempt: int) -> WritingRequest:
        context, options = request.args
        example = (request.doc_id or 0) * (request.repeats or 1)
        return WritingRequest.of(
            context,
            options,
            self.reader,
            most=self.max_gen_toks,
            seed=self.seed,
            example=example,
            attempt=attempt,
        )

    # ---- scoring

    def _answers(self, kind: str, requests: list[Any]) -> list[Any]:
        """Returns the log-likelihood of each request, in order."""
        given = kind == "loglikelihood"
        found: list[Any] = [None] * len(requests)
        texts = [request.args if given else ("", *request.args) for request in requests]
        before = self.reader.spanned
        cuts = [self._pieces(*pair, given=given) for pair in texts]
        if spanned := self.reader.spanned - before:
            rank_zero_warn(
                f"tasks: in {spanned} of {len(requests)} requests a token spans the join of "
                "context and continuation; they are split as the harness' hf model does it, which "
                "leaves out tokens there (docs/tasks.md)"
            )
        tasks = [str(request.task_name) for request in requests]
        for idx, total in self._sums(cuts, tasks, given=given):
            facts = total.facts
            facts.likelihood, facts.causal = label(
                facts.likelihood,
                self.model.causal,
                from_prefixes=self.mode == "autoregressive",
                given=given,
            )
            if given:
                found[idx] = LogLikelihood(total.log_prob, total.greedy, facts)
            else:
                found[idx] = RollingLogLikelihood(total.log_prob, facts)
            self.cache_hook.add_partial(kind, requests[idx].args, found[idx])
        return found

    def _pieces(self, context: str, continuation: str, *, given: bool) -> list[Piece]:
        """Returns what is read for a request; nothing where there is nothing to score."""
        if not continuation and not context[len(context.rstrip()) :]:
            return []
        pieces = (
            self.reader.pieces(context, continuation)
            if given
            else self.reader.rolling_pieces(continuation)
        )
        if self.mode == "blockwise" or self.model.causal:
            return pieces
        return [prefix for piece in pieces for prefix in piece.prefixes()]

    def _sums(
        self, cuts: Sequence[Sequence[Piece]], tasks: Sequence[str], *, given: bool
    ) -> Iterator[tuple[int, _Sum]]:
        """Yields number and result of each request as soon as all of its pieces are scored."""
        sums = [_Sum(task, len(pieces)) for task, pieces in zip(tasks, cuts, strict=True)]
        jobs = [(idx, piece) for idx, pieces in enumerate(cuts) for piece in pieces]
        share = given and self.model.shares_prefixes and self.batch_size > 1
        whole = not given and self.mode == "blockwise"
        yield from ((idx, total) for idx, total in enumerate(sums) if not total.missing)
        with self._bar(len(jobs), "scoring", " rows") as bar:
            for batch, shared in self._batches(jobs, share=share):
                pieces = [piece for _, piece in batch]
                if shared:
                    rows = self.reader.shared_batch(pieces)
                else:
                    rows = self.reader.batch(pieces, whole=whole)
                self._add_batch(rows, pieces, [sums[idx] for idx, _ in batch])
                bar.update(len(batch))
                for idx in dict.fromkeys(idx for idx, _ in batch):
                    if not sums[idx].missing:
                        yield idx, sums[idx]

    def _batches(self, jobs: Sequence[_Job], *, share: bool) -> Iterator[tuple[list[_Job], bool]]:
        """Yields batches of jobs, and whether the jobs of a batch share what they are given."""
        order = sorted(jobs, key=lambda job: (-self.reader.read_tokens(job[1]), job[1].tokens))
        groups: dict[tuple[int, ...], list[_Job]] = {}
        for job in order:
            groups.setdefault(_given(job), []).append(job)
        shared = {
            given: group
            for given, group in groups.items()
            if share and len(group) > 1 and len(given) > 1
        }
        yield from ((batch, True) for batch in self._shared_batches(list(shared.values())))
        plain = [job for job in order if _given(job) not in shared]
        for first in range(0, len(plain), self.batch_size):
            yield plain[first : first + self.batch_size], False

    def _shared_batches(self, groups: list[list[_Job]]) -> Iterator[list[_Job]]:
        """Yields batches of jobs grouped by context, those with most tokens in a group first.

        Groups of a batch are alike, as a method may read each as one row.
        """
        batch: list[_Job] = []
        for group in sorted(groups, key=_tokens_once, reverse=True):
            for part in self._parts(group):
                # equal contexts of a batch are one row again
                is_same = bool(batch) and _given(batch[-1]) == _given(part[0])
                if batch and (is_same or not self._fit([*batch, *part])):
                    yield batch
                    batch = []
                batch += part
        if batch:
            yield batch

    def _parts(self, group: Sequence[_Job]) -> Iterator[list[_Job]]:
        """Yields the jobs of a context in parts that may be read as one row each, sorted by tokens.

        Attention grows with the square of a row: its continuations are in all no longer than the
        context with the longest of them, or than 256 tokens.
        """
        most = max(_FREE_TOKENS, max(len(piece.tokens) for _, piece in group))
        part: list[_Job] = []
        for job in sorted(group, key=lambda job: job[1].tokens):
            if len(part) == self.batch_size or (part and _continued([*part, job]) > most):
                yield part
                part = []
            part.append(job)
        yield part

    def _fit(self, jobs: Sequence[_Job]) -> bool:
        """Whether jobs that share contexts fit a batch: its rows, and the positions of its padding.

        A batch is as wide as its longest context and its longest continuation together, and
        positions may be learned.
        """
        if len(jobs) > self.batch_size:
            return False
        pieces = [piece for _, piece in jobs]
        width = max(p.given for p in pieces) + max(len(p.tokens) - p.given for p in pieces) - 1
        return self.reader.limit is None or width <= self.reader.limit

    def _add_batch(self, rows: Batch, pieces: Sequence[Piece], sums: Sequence[_Sum]) -> None:
        """Scores the rows of pieces, and adds the results to the sums that they belong to."""
        start = time.perf_counter()
        read = [self.reader.read_tokens(piece) for piece in pieces]
        seen: dict[str, Any] = {}  # what the model records, by name: greedy, executed, flops, ...
        taken = dict.fromkeys(("greedy", "thinking_steps", "flops"), seen.update)
        targets, owners = rows["targets"], None
        if "prefix" in rows:  # targets that rows have in common are scored in the first of them
            owners = first_alike(rows["prefix_row"], rows["tokens"], targets)
            is_first = owners == torch.arange(len(owners))[:, None]
            rows = rows | {"targets": targets.where(is_first, IGNORE)}
        with recording(**taken), torch.no_grad(), self._context():
            scores = self.model.score(move_data_to_device(rows, self.device))

        def scored(values: Tensor) -> list[Tensor]:
            values = values.cpu()
            return scored_of(values if owners is None else values.gather(0, owners), targets)

        log_probs, greedy = scored(scores.log_prob), scored(seen["greedy"])
        steps = scored(seen["executed"]) if "executed" in seen else None
        terms = scores.sequence_term.double().cpu().tolist()
        seconds = time.perf_counter() - start
        planned = [tokens * self._flops(tokens) for tokens in read]
        flops = seen["flops"].tolist() if "flops" in seen else planned
        for row, total in enumerate(sums):
            facts = total.facts
            total.missing -= 1
            total.log_prob += float(log_probs[row].double().sum()) + terms[row]
            total.greedy &= bool(greedy[row].all())
            facts.scored += len(log_probs[row])
            facts.read += read[row]
            facts.nominal_flops += planned[row]
            facts.flops += flops[row]
            if steps is not None:
                facts.steps = (facts.steps or 0.0) + steps[row].sum().item()
            facts.likelihood = scores.kind
            self.work[total.task].seconds += seconds * read[row] / max(1, sum(read))

    def _bar(self, total: int, what: str, unit: str) -> Any:
        hidden = True if self._rank else self._hidden
        return tqdm(total=total, desc=what, unit=unit, disable=hidden)


def _given(job: _Job) -> tuple[int, ...]:
    """Returns the tokens that a job is given."""
    return job[1].tokens[: job[1].given]


def _tokens_once(group: Sequence[_Job]) -> int:
    """Returns the tokens of a context and of all its continuations."""
    return len(_given(group[0])) + _continued(group)


def _continued(group: Sequence[_Job]) -> int:
    """Returns the tokens of all continuations of a context."""
    return sum(len(piece.tokens) - piece.given for _, piece in group)


def _alike(
    wanted: Sequence[WritingRequest], missing: Sequence[int], size: int
) -> Iterator[list[int]]:
    """Yields the numbers of requests that can be written at once, the longest prompts first."""
    groups: dict[Any, list[int]] = {}
    for number in missing:
        groups.setdefault((wanted[number].sampling, wanted[number].most), []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda n: (-len(wanted[n].prompt), wanted[n].prompt))
        yield from (numbers[i : i + size] for i in range(0, len(numbers), size))
