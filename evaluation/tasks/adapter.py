"""Adapter that makes any model of this project a model of lm-evaluation-harness."""

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
from evaluation.tasks.readers import Batch, Segment, label, reader_of, scored_of
from evaluation.tasks.writing import Continuations, WritingRequest, write
from lightning_models import LanguageModel
from lightning_models.layers import first_alike, recording
from lightning_models.outputs import Likelihood

Mode = Literal["blockwise", "autoregressive"]
Context = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[Any], list[Any]]


# ---- answers


@dataclass
class RequestStats:
    """Statistics of the computation of a log-likelihood.

    Attributes:
        scored: Number of scored tokens.
        read: Number of tokens read in all passes; a context that several requests share counts for
            each of them, as do its FLOPs.
        flops: Forward FLOPs of reading them, including additional steps and inference: the executed
            ones if the model records them, else the planned ones.
        steps: Sum of the additional steps of the scored tokens, or None if the model records none.
        likelihood: Kind of the log-likelihood.
        causal: Whether no token's probability depends on later tokens.
        nominal_flops: Planned FLOPs of reading the tokens.
    """

    scored: int = 0
    read: int = 0
    flops: float = 0.0
    steps: float | None = None
    likelihood: Likelihood = "exact"
    causal: bool = True
    nominal_flops: float = 0.0


Facts = RequestStats  # the class's name in pickled answers of older caches

_FREE_TOKENS = 256
"""Number of continuation tokens that always share a row: attention costs little there."""


class LogLikelihood(tuple[float, bool]):
    """Log-likelihood of a continuation, with its statistics.

    For the harness it is a pair: log-probability in nats, and whether greedy decoding writes it.
    """

    facts: RequestStats

    def __new__(cls, log_prob: float, greedy: bool, facts: RequestStats) -> "LogLikelihood":
        pair = super().__new__(cls, (log_prob, greedy))
        pair.facts = facts
        return pair

    def __reduce__(self) -> tuple[Any, ...]:
        # for cache files and other processes
        return LogLikelihood, (*self, self.facts)


class RollingLogLikelihood(float):
    """Log-likelihood of a whole text in nats, with its statistics."""

    facts: RequestStats

    def __new__(cls, log_prob: float, facts: RequestStats) -> "RollingLogLikelihood":
        value = super().__new__(cls, log_prob)
        value.facts = facts
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return RollingLogLikelihood, (float(self), self.facts)


@dataclass
class TaskUsage:
    """Time and tokens spent on a task in this process, without cached answers."""

    seconds: float = 0.0
    written_tokens: float = 0.0
    written_steps: float | None = None
    prompt_tokens: int = 0
    prompts: int = 0

    def add_written(
        self, prompt: Sequence[int], continuations: Continuations, seconds: float
    ) -> None:
        """Adds one text of a batch of continuations."""
        rows = len(continuations.texts)
        self.seconds += seconds / rows
        self.prompts += 1
        self.prompt_tokens += len(prompt)
        self.written_tokens += continuations.tokens / rows
        if continuations.steps is not None:
            self.written_steps = (self.written_steps or 0) + continuations.steps / rows


# ---- the model


@dataclass
class _PartialAnswer:
    """Running sum over the segments of a request."""

    task: str
    missing: int
    """Number of segments that are not scored yet."""
    log_prob: float = 0.0
    greedy: bool = True
    facts: RequestStats = field(default_factory=RequestStats)


_RequestSegment = tuple[int, Segment]
"""Index of a request, and one of its segments."""


class HarnessModel(LM):
    """Answers the harness' three types of requests with a model's scores and decode loop.

    Rows of a batch have similar lengths, and answers do not depend on the batch. Every answer is
    cached as soon as its batch is done.

    Args:
        model: The model on its device, in eval mode.
        tokenizer: The tokenizer that the model was trained with.
        batch_size: Number of rows scored, or written, at once.
        mode: 'blockwise' reads context and continuation in one pass; 'autoregressive' scores each
            token given its prefix only, which differs for models that are not causal.
        context: Function that returns the context manager of the model's passes (its autocast).
        max_gen_toks: Maximum length of a continuation, unless the task sets one.
        seed: Seed of sampled texts.
        rank: Rank of this process.
        world_size: Number of processes that share the examples.
        gather: Function that gathers a value from all ranks.
        progress: Whether to show progress bars. Defaults to whether stderr is a terminal.

    Attributes:
        usage: Time and tokens of this process, by task.

    Raises:
        ValueError: If the model cannot score plain texts.
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
        self.usage: defaultdict[str, TaskUsage] = defaultdict(TaskUsage)
        self._flops = lru_cache(maxsize=None)(model.flops_per_token)

    # ---- interface of the harness for ranks

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenates the flattened tensors of all ranks."""
        return torch.cat([part.reshape(-1) for part in self._gather(tensor.cpu())])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on rank ``dst``, None on others."""
        objects = self._gather(obj)
        return objects if self.rank == dst else None

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._gather(None)

    # ---- requests

    def loglikelihood(self, requests: list[Any]) -> list[Any]:
        """Returns a ``LogLikelihood`` for each (context, continuation)."""
        return self._answers("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """Returns a ``RollingLogLikelihood`` of all tokens for each (text,).

        There is no context, so a method that infers latents bounds the likelihood of the text
        instead of estimating it.
        """
        return self._answers("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Returns a continuation for each (context, options), cut before the stop texts.

        The list has a request several times if the harness repeats it; each repeat has separate
        draws and a separate entry in the cache.
        """
        writing_requests, repeats = [], Counter[int]()
        for request in requests:
            writing_requests.append(self._writing_request(request, repeats[id(request)]))
            repeats[id(request)] += 1
        keys = [
            (*r.args, request.stream) for r, request in zip(requests, writing_requests, strict=True)
        ]
        cached = self.cache_hook.dbdict or {}
        texts = [cached.get(hash_args("generate_until", key)) for key in keys]
        missing = [idx for idx, text in enumerate(texts) if text is None]
        with self._bar(len(missing), "writing", " texts") as bar, torch.no_grad():
            for batch in _alike(writing_requests, missing, self.batch_size):
                start = time.perf_counter()
                with self._context():
                    continuations = write(
                        self.model, self.own_tokenizer, [writing_requests[i] for i in batch]
                    )
                seconds = time.perf_counter() - start
                for idx, text in zip(batch, continuations.texts, strict=True):
                    texts[idx] = text
                    self.cache_hook.add_partial("generate_until", keys[idx], text)
                    usage = self.usage[str(requests[idx].task_name)]
                    usage.add_written(writing_requests[idx].prompt, continuations, seconds)
                bar.update(len(batch))
        return texts

    def _writing_request(self, request: Any, attempt: int) -> WritingRequest:
        context, options = request.args
        example = (request.doc_id or 0) * (request.repeats or 1)
        return WritingRequest.of(
            context,
            options,
            self.reader,
            max_new_tokens=self.max_gen_toks,
            seed=self.seed,
            example=example,
            attempt=attempt,
        )

    # ---- scoring

    def _answers(self, request_type: str, requests: list[Any]) -> list[Any]:
        """Returns the log-likelihood of each request, in order."""
        has_context = request_type == "loglikelihood"
        answers: list[Any] = [None] * len(requests)
        texts = [request.args if has_context else ("", *request.args) for request in requests]
        spanned_before = self.reader.spanned
        cuts = [self._segments(*pair, has_context=has_context) for pair in texts]
        if spanned := self.reader.spanned - spanned_before:
            rank_zero_warn(
                f"tasks: in {spanned} of {len(requests)} requests a token spans the join of "
                "context and continuation; they are split like in the harness' hf model, which "
                "leaves out tokens there (docs/tasks.md)"
            )
        tasks = [str(request.task_name) for request in requests]
        for idx, total in self._sums(cuts, tasks, has_context=has_context):
            facts = total.facts
            facts.likelihood, facts.causal = label(
                facts.likelihood,
                self.model.causal,
                from_prefixes=self.mode == "autoregressive",
                has_context=has_context,
            )
            if has_context:
                answers[idx] = LogLikelihood(total.log_prob, total.greedy, facts)
            else:
                answers[idx] = RollingLogLikelihood(total.log_prob, facts)
            self.cache_hook.add_partial(request_type, requests[idx].args, answers[idx])
        return answers

    def _segments(self, context: str, continuation: str, *, has_context: bool) -> list[Segment]:
        """Returns the segments of a request; none if there is nothing to score."""
        if not continuation and not context[len(context.rstrip()) :]:
            return []
        segments = (
            self.reader.segments(context, continuation)
            if has_context
            else self.reader.rolling_segments(continuation)
        )
        if self.mode == "blockwise" or self.model.causal:
            return segments
        return [prefix for segment in segments for prefix in segment.prefixes()]

    def _sums(
        self, cuts: Sequence[Sequence[Segment]], tasks: Sequence[str], *, has_context: bool
    ) -> Iterator[tuple[int, _PartialAnswer]]:
        """Yields index and result of each request as soon as all of its segments are scored."""
        sums = [
            _PartialAnswer(task, len(segments)) for task, segments in zip(tasks, cuts, strict=True)
        ]
        jobs = [(idx, segment) for idx, segments in enumerate(cuts) for segment in segments]
        share = has_context and self.model.shares_prefixes and self.batch_size > 1
        whole = not has_context and self.mode == "blockwise"
        yield from ((idx, total) for idx, total in enumerate(sums) if not total.missing)
        with self._bar(len(jobs), "scoring", " rows") as bar:
            for batch, shared in self._batches(jobs, share=share):
                segments = [segment for _, segment in batch]
                if shared:
                    rows = self.reader.shared_batch(segments)
                else:
                    rows = self.reader.batch(segments, whole=whole)
                self._add_batch(rows, segments, [sums[idx] for idx, _ in batch])
                bar.update(len(batch))
                for idx in dict.fromkeys(idx for idx, _ in batch):
                    if not sums[idx].missing:
                        yield idx, sums[idx]

    def _batches(
        self, jobs: Sequence[_RequestSegment], *, share: bool
    ) -> Iterator[tuple[list[_RequestSegment], bool]]:
        """Yields batches of segments, and whether the segments of a batch share contexts."""
        order = sorted(jobs, key=lambda job: (-self.reader.read_tokens(job[1]), job[1].tokens))
        groups: dict[tuple[int, ...], list[_RequestSegment]] = {}
        for job in order:
            groups.setdefault(_given(job), []).append(job)
        shared = {
            context: group
            for context, group in groups.items()
            if share and len(group) > 1 and len(context) > 1
        }
        yield from ((batch, True) for batch in self._shared_batches(list(shared.values())))
        plain = [job for job in order if _given(job) not in shared]
        for first in range(0, len(plain), self.batch_size):
            yield plain[first : first + self.batch_size], False

    def _shared_batches(
        self, groups: list[list[_RequestSegment]]
    ) -> Iterator[list[_RequestSegment]]:
        """Yields batches of segments grouped by context, the groups with most tokens first.

        Groups of a batch have similar sizes, as a method may read each as one row.
        """
        batch: list[_RequestSegment] = []
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

    def _parts(self, group: Sequence[_RequestSegment]) -> Iterator[list[_RequestSegment]]:
        """Splits the segments of a context into parts that a method may read as one row each.

        Attention is quadratic in the length of a row, so the continuations of a part have at most
        as many tokens in total as the longest segment, or 256.
        """
        budget = max(_FREE_TOKENS, max(len(segment.tokens) for _, segment in group))
        part: list[_RequestSegment] = []
        for job in sorted(group, key=lambda job: job[1].tokens):
            if len(part) == self.batch_size or (part and _continued([*part, job]) > budget):
                yield part
                part = []
            part.append(job)
        yield part

    def _fit(self, jobs: Sequence[_RequestSegment]) -> bool:
        """Returns whether segments that share contexts fit a batch, in rows and in width.

        A batch is as wide as its longest context and its longest continuation together, and the
        number of positions may be limited.
        """
        if len(jobs) > self.batch_size:
            return False
        segments = [segment for _, segment in jobs]
        width = max(p.given for p in segments) + max(len(p.tokens) - p.given for p in segments) - 1
        return self.reader.limit is None or width <= self.reader.limit

    def _add_batch(
        self, rows: Batch, segments: Sequence[Segment], sums: Sequence[_PartialAnswer]
    ) -> None:
        """Scores the rows of segments, and adds the results to the sums of their requests."""
        start = time.perf_counter()
        read = [self.reader.read_tokens(segment) for segment in segments]
        recorded: dict[str, Any] = {}  # recorded statistics by name: greedy, executed, flops, ...
        taken = dict.fromkeys(("greedy", "thinking_steps", "flops"), recorded.update)
        targets, owners = rows["targets"], None
        if "prefix" in rows:  # a target that several rows share is scored in the first of them
            owners = first_alike(rows["prefix_row"], rows["tokens"], targets)  # (B, T), row indices
            is_first = owners == torch.arange(len(owners))[:, None]
            rows = rows | {"targets": targets.where(is_first, IGNORE)}
        with recording(**taken), torch.no_grad(), self._context():
            scores = self.model.score(move_data_to_device(rows, self.device))

        def scored(values: Tensor) -> list[Tensor]:
            values = values.cpu()
            return scored_of(values if owners is None else values.gather(0, owners), targets)

        log_probs, greedy = scored(scores.log_prob), scored(recorded["greedy"])
        steps = scored(recorded["executed"]) if "executed" in recorded else None
        terms = scores.sequence_term.double().cpu().tolist()
        seconds = time.perf_counter() - start
        planned = [tokens * self._flops(tokens) for tokens in read]
        flops = recorded["flops"].tolist() if "flops" in recorded else planned
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
            self.usage[total.task].seconds += seconds * read[row] / max(1, sum(read))

    def _bar(self, total: int, description: str, unit: str) -> Any:
        hidden = True if self._rank else self._hidden
        return tqdm(total=total, desc=description, unit=unit, disable=hidden)


def _given(job: _RequestSegment) -> tuple[int, ...]:
    """Returns the context tokens of a segment."""
    return job[1].tokens[: job[1].given]


def _tokens_once(group: Sequence[_RequestSegment]) -> int:
    """Returns the number of tokens of a context and all its continuations."""
    return len(_given(group[0])) + _continued(group)


def _continued(group: Sequence[_RequestSegment]) -> int:
    """Returns the number of tokens of all continuations of a context."""
    return sum(len(segment.tokens) - segment.given for _, segment in group)


def _alike(
    requests: Sequence[WritingRequest], missing: Sequence[int], size: int
) -> Iterator[list[int]]:
    """Yields batches of indices of requests with equal options, the longest prompts first."""
    groups: dict[Any, list[int]] = {}
    for idx in missing:
        groups.setdefault((requests[idx].sampling, requests[idx].most), []).append(idx)
    for indices in groups.values():
        indices.sort(key=lambda n: (-len(requests[n].prompt), requests[n].prompt))
        yield from (indices[i : i + size] for i in range(0, len(indices), size))
