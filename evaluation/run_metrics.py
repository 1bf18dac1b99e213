"""Metrics of one run: sizes, amount and cost of training, likelihood of held-out text, tasks.

Runs that differ in nothing but the seed are one row of a report.
"""

import glob
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datamodules import LanguageDataModule, Sentences, Store, Tokenizer
from datamodules.readers import parse_json
from evaluation.arguments import Split
from evaluation.load import (
    Device,
    Precision,
    build_data,
    build_model,
    build_tokenizer,
    check_fit,
    count_lexical,
    count_train_tokens,
    non_embedding_parameters,
    pick_device,
    prepare,
)
from evaluation.perplexity import measure_perplexity
from evaluation.runs import (
    FLOPS_TAG,
    MODEL,
    MOST_KEYS,
    RunRecord,
    differing,
    label_runs,
    micro_batches,
    window_tokens,
)
from lightning_models.checkpoint import CheckpointError, Recipe

# ---- result files


ABOVE = 2
"""How many folders above its log folder results of a run may lie: below the root of the run."""


@dataclass(frozen=True)
class ResultFile:
    """What a command wrote about a checkpoint."""

    path: Path
    content: Mapping[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that it is about."""
        return Path(self.content["checkpoint"]).expanduser().resolve()


def named_results(words: Sequence[str], runs: Sequence[RunRecord]) -> list[ResultFile]:
    """Returns the result files that the command line names.

    Args:
        words: files or patterns.
        runs: that are compared.

    Raises:
        ValueError: if a file is missing or no result, or is about none of the runs.
    """
    compared = {run.checkpoint.path.resolve() for run in runs}
    results = []
    for path in (path for word in words for path in _files(word)):
        result = _read(path)
        if isinstance(result, str):
            raise ValueError(f"results ({path}): {result}")
        if result.checkpoint not in compared:
            raise ValueError(
                f"results ({path}) is about {result.content['checkpoint']}, which is not compared; "
                "name that run, too, or leave the file out"
            )
        results.append(result)
    return results


def results_beside(run: RunRecord) -> list[ResultFile]:
    """Returns the results in the folders of a run that are about its checkpoint and not older."""
    path = run.checkpoint.path.resolve()
    folders = [path.parent]
    if run.log is not None:
        log = run.log.resolve()
        folders += [log, *log.parents[:ABOVE]]
    found = (_read(file) for folder in dict.fromkeys(folders) for file in _jsons(folder))
    changed = path.stat().st_mtime
    return [
        result
        for result in found
        if isinstance(result, ResultFile)
        and result.checkpoint == path
        and result.path.stat().st_mtime >= changed
    ]


@dataclass(frozen=True)
class TaskResult:
    """What a model has reached on a task."""

    metrics: Mapping[str, float]
    """Standard errors left out; perplexities are named by the kind of their likelihood."""
    how: Mapping[str, Any]
    """How it was measured: what must be the same for two of them to be compared."""

    @property
    def examples(self) -> int:
        """How many were scored; 0 where the file does not say."""
        return int(self.how.get("examples") or 0)


HOW_TASK = ("examples", "of_examples", "num_fewshot", "version", "likelihood")
HOW_ASKED = ("mode", "budget", "precision", "counted")


def tasks_in(results: Iterable[ResultFile]) -> dict[str, TaskResult]:
    """Returns the result of each task; of several the one with the most examples.

    Of two with as many the later one. What was measured with other settings of the model than it
    was trained with (``--set``) is left out, and so are the tasks that a group consists of where
    the group has a mean.
    """
    found: dict[str, TaskResult] = {}
    for result in results:
        asked = result.content.get("settings", {})
        tasks = result.content.get("tasks")
        if not isinstance(tasks, Mapping) or asked.get("set"):
            continue
        inside = {member for task in tasks.values() for member in _members(task)}
        for name, task in tasks.items():
            one = _task_result(task, asked)
            if one.metrics and name not in inside:
                before = found.get(str(name))
                if before is None or one.examples >= before.examples:
                    found[str(name)] = one
    return found


def _members(task: Any) -> Sequence[str]:
    """Returns the tasks of a group that has numbers of its own."""
    if not isinstance(task, Mapping) or not task.get("metrics"):
        return ()
    members: Sequence[str] = task.get("tasks", ())
    return members


def _task_result(task: Any, asked: Mapping[str, Any]) -> TaskResult:
    content = task if isinstance(task, Mapping) else {}
    metrics = content.get("metrics", content)
    numbers = metrics.items() if isinstance(metrics, Mapping) else ()
    how = {key: content.get(key) for key in HOW_TASK} | {key: asked.get(key) for key in HOW_ASKED}
    return TaskResult(
        {key: value for key, value in numbers if _is_metric(key, value)},
        {key: value for key, value in how.items() if value is not None},
    )


def _is_metric(key: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and "stderr" not in key


def _files(word: str) -> list[Path]:
    path = Path(word).expanduser()
    found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        raise ValueError(f"results ({word}): there is no such file")
    return sorted(found)


def _jsons(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def _read(path: Path) -> ResultFile | str:
    """Returns a result, or what is wrong with it."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), str):
        return "names no checkpoint; give results of evaluate.py tasks or perplexity --output"
    return ResultFile(path, content)


# ---- amount and cost of training


SPEED_TAG = "throughput/tokens_per_second"
ACCURACY_TAG = "val/accuracy"


@dataclass(frozen=True)
class TrainingCost:
    """Sizes and costs of one run."""

    parameters: int
    """Trainable numbers."""
    non_embedding: int
    """Numbers outside embeddings and output matrix, frozen ones too."""
    steps: int
    """Optimiser steps."""
    tokens: int | None
    """Tokens of text, each time they were trained on; None where that is not known."""
    positions: int | None
    """The same with the markers of sentences: what FLOPs are counted on."""
    flops_per_position: float | None
    """FLOPs of a training step."""
    planned: bool
    """Whether they are what the configuration plans, as texts decide what a step computes."""
    published_per_position: float | None
    """The same as the method's paper counts them; None where it counts as we do."""
    tokens_per_second: float | None
    """Tokens of text, by the median of what was logged; None where nothing was."""
    accuracy: float | None
    """Share of right answers, as last logged in validation; None where nothing was."""

    @property
    def flops(self) -> float | None:
        """FLOPs of the whole training."""
        if self.positions is None or self.flops_per_position is None:
            return None
        return self.positions * self.flops_per_position

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs per token of text."""
        return None if self.flops is None or not self.tokens else self.flops / self.tokens

    @property
    def published_per_token(self) -> float | None:
        """The count of the method's paper per token of text; None where it counts as we do."""
        if self.published_per_position is None or not self.tokens or self.positions is None:
            return None
        return self.published_per_position * self.positions / self.tokens


class LoggedPoint(NamedTuple):
    """A logged value, and the training up to there."""

    steps: int
    """Optimiser steps done."""
    tokens: float
    """Tokens of text, each time they were trained on."""
    flops: float
    """FLOPs of training on them."""
    value: float


def logged_points(training: TrainingCost, logged: Mapping[int, float]) -> list[LoggedPoint]:
    """Returns a logged value over tokens and FLOPs, which are taken to be even over the steps.

    Args:
        training: amount and cost at the run's checkpoint.
        logged: value by step; steps count from 0.

    Returns:
        Points in the order of their steps; none where tokens or FLOPs are not known.
    """
    if training.tokens is None or training.flops is None or not training.steps:
        return []
    return [
        LoggedPoint(step + 1, share * training.tokens, share * training.flops, value)
        for step, value in sorted(logged.items())
        for share in [(step + 1) / training.steps]
    ]


def training_cost(run: RunRecord) -> TrainingCost:
    """Returns sizes and costs of a run that is not scored; its data are opened where needed.

    Tokens of windows are known from the checkpoint, unless some of them mark sentences.

    Raises:
        ValueError: if data are needed and are not there.
    """
    windows = run.outline.reads == "windows"
    if windows and not has_markers(build_tokenizer(run.checkpoint)):
        return describe_training(run, None, None)
    data = open_data(run, ScoringOptions())
    return describe_training(run, data, count_train_tokens(run.checkpoint, data))


def describe_training(
    run: RunRecord, data: LanguageDataModule | None, train_tokens: int | None
) -> TrainingCost:
    """Returns sizes and costs of a run.

    Args:
        run: which.
        data: its own, prepared; None: not needed, as it reads windows without markers.
        train_tokens: lexical tokens of the train split, each counted once; None: not known.
    """
    tokens, positions = _amount(run, data, train_tokens)
    outline = run.outline
    share = tokens / positions if tokens and positions else 1.0
    speeds, answers = run.scalars.get(SPEED_TAG, {}), run.scalars.get(ACCURACY_TAG, {})
    return TrainingCost(
        parameters=sum(p.numel() for p in outline.parameters() if p.requires_grad),
        non_embedding=non_embedding_parameters(outline),
        steps=run.checkpoint.step,
        tokens=tokens,
        positions=positions,
        flops_per_position=_flops(run, data),
        planned=outline.adaptive_training,
        published_per_position=outline.published_flops_per_token(outline.config.block_size),
        tokens_per_second=statistics.median(speeds.values()) * share if speeds else None,
        accuracy=answers[max(answers)] if answers else None,
    )


def describe_order(run: RunRecord) -> dict[str, Any]:
    """Returns what decides, besides the text, which tokens an optimiser step has, in its order."""
    order: Mapping[str, Any] = run.checkpoint.data_state.get("order", {})
    accumulated = run.record.get("trainer", "accumulate_grad_batches")
    if accumulated is None and run.checkpoint.step:
        accumulated = round(micro_batches(run.checkpoint) / run.checkpoint.step)
    return {"rows": run.outline.reads, **order, "accumulate_grad_batches": accumulated}


def _amount(
    run: RunRecord, data: LanguageDataModule | None, train_tokens: int | None
) -> tuple[int | None, int | None]:
    """Returns tokens of text and positions that a run was trained on; None: not known."""
    if isinstance(data, Sentences):
        return _of_sentences(run, data)
    each = window_tokens(run.checkpoint, run.outline)
    if each is None:
        return None, None
    positions = round(each * run.checkpoint.step)
    if data is None or not has_markers(data.tokenizer):
        return positions, positions
    if train_tokens is None:
        return None, positions
    counts = data.counts("train")
    return round(positions * (train_tokens + counts.documents) / counts.tokens), positions


def _of_sentences(run: RunRecord, data: Sentences) -> tuple[int | None, int | None]:
    """Returns the same of sentences, by dealing them again.

    On several devices the batches of as many steps on one of them are counted, which are even.
    """
    ranks = run.checkpoint.data_state.get("order", {}).get("world_size", 1)
    number = micro_batches(run.checkpoint) * ranks
    if not number or run.checkpoint.data_state.get("fingerprint") != data.fingerprint:
        return None, None
    source = data.training_source()
    sums = dict.fromkeys(("lexical", "eos", "eod"), 0.0)
    for n in range(number):
        counts = source.counts(n)
        sums = {key: value + counts[key] for key, value in sums.items()}
    text = sums["lexical"] + sums["eod"]  # the end of a document is a token of windows, too
    return round(text), round(text + 2 * sums["eos"])  # BOS and EOS of every sentence


def has_markers(tokenizer: Tokenizer) -> bool:
    """Whether tokens besides those that end documents are no text: the markers of sentences."""
    return set(tokenizer.special_ids) != {tokenizer.eos_id}


def _flops(run: RunRecord, data: LanguageDataModule | None) -> float | None:
    """Returns the FLOPs per position of a training step.

    Of windows by today's count, of other rows by that of the training, on the batches it met;
    where that was not logged, of documents of average length.
    """
    if run.outline.reads == "windows":
        return run.outline.flops_per_token(run.outline.config.block_size, training=True)
    logged = run.scalars.get(FLOPS_TAG, {})
    if logged:
        return statistics.fmean(logged.values())
    if run.outline.reads != "sentences" or data is None:
        return None
    return run.outline.flops_per_token(data.row_tokens("train"), training=True)


def read_source(data: LanguageDataModule) -> dict[str, Any]:
    """Returns what identifies the text of prepared data, whatever it was tokenised with."""
    corpus = getattr(data, "corpus", data)
    meta = Store(corpus.store_dir).meta
    return {"source": meta.get("source"), "origin": meta.get("origin")}


# ---- likelihood of held-out text, and FLOPs of inference


NOW = "measured now"
SAME_RECIPE = frozenset({"cache_dir", "num_proc", "num_workers", "predict_file"})
"""Arguments of data that change nothing of what is scored."""


@dataclass(frozen=True)
class ScoringOptions:
    """How every run is scored."""

    split: Split = "val"
    limit_batches: int | None = None
    batch_size: int | None = None
    """Rows a batch; None: as trained."""
    precision: Precision = "32"
    device: Device = "auto"


@dataclass(frozen=True)
class HeldOutScore:
    """What a model makes of held-out text."""

    content: Mapping[str, Any]
    """The result of ``evaluate.py perplexity``."""
    source: str
    """Where it comes from: the name of a file, or ``NOW``."""
    context: int
    """Tokens of a row, on average."""
    markers: float
    """Positions per token of text, at least 1: where sentences are marked, markers are computed."""
    generation_flops: float
    """FLOPs of generating a position in such a context, with the steps that targets took."""

    @property
    def likelihood(self) -> str:
        """Its kind: exact, lower_bound, estimate or noncausal."""
        return str(self.content["likelihood"])

    @property
    def counted(self) -> str:
        """Which targets nats per token are of: ``all``, or ``lexical`` ones."""
        return str(self.content["counted"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """How much was scored, and how."""
        settings: Mapping[str, Any] = self.content["settings"]
        return settings


def open_data(run: RunRecord, how: ScoringOptions) -> LanguageDataModule:
    """Returns the data that a run was trained on, prepared.

    Raises:
        ValueError: if they are not there, or are not those of its tokenizer.
    """
    recipe = run.checkpoint.data_recipe
    if recipe is None:
        raise CheckpointError(
            f"{run.checkpoint.path} was trained without a datamodule, so it names no held-out text"
        )
    if how.batch_size is not None:
        arguments = {**recipe["init_args"], "eval_batch_size": how.batch_size}
        recipe = {**recipe, "init_args": arguments}
    data = build_data(run.checkpoint, recipe)
    check_fit(run.outline, data)
    prepare(data, run.checkpoint)
    return data


def score(
    run: RunRecord, data: LanguageDataModule, how: ScoringOptions, results: Iterable[ResultFile]
) -> HeldOutScore:
    """Returns the score of a run on a split of its own data.

    Args:
        run: which.
        data: its own, prepared.
        how: split and settings.
        results: one of them is taken over where it was measured in the same way.

    Raises:
        ValueError: if the split is empty or the weights do not fit.
    """
    content, source = _taken_over(run, data, how, results) or (_measured(run, data, how), NOW)
    context = data.row_tokens(how.split)
    generation = content.get("generation_flops_per_token")
    if generation is None:
        generation = run.outline.generation_flops(context)
    return HeldOutScore(content, source, context, _markers(data, how.split), float(generation))


def _measured(run: RunRecord, data: LanguageDataModule, how: ScoringOptions) -> dict[str, Any]:
    model = build_model(run.checkpoint).to(pick_device(how.device))
    report = measure_perplexity(
        run.checkpoint,
        model,
        data,
        split=how.split,
        precision=how.precision,
        limit_batches=how.limit_batches,
    )
    return report.as_dict()


def _taken_over(
    run: RunRecord, data: LanguageDataModule, how: ScoringOptions, results: Iterable[ResultFile]
) -> tuple[Mapping[str, Any], str] | None:
    """Returns the first result that was measured as it would be now, and its file's name."""
    of_batches = len(data.evaluation_source(how.split))
    limit = how.limit_batches
    wanted = {
        "mode": "blockwise",
        "split": how.split,
        "fingerprint": data.fingerprint,
        "recipe": _plain(data.recipe()),
        "batches": of_batches if limit is None else min(limit, of_batches),
        "batch_size": data.eval_batch_size,
        "precision": how.precision,
        "device": pick_device(how.device).type,
        "set": {},
    }
    for result in results:
        if result.checkpoint != run.checkpoint.path.resolve() or _facts(result.content) != wanted:
            continue
        if run.outline.adaptive and "nominal_steps" not in result.content:
            continue  # of a version that gave the nominal costs as those that ran
        return result.content, result.path.name
    return None


def _facts(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a result must share to be taken over; None if it is of another command."""
    data, settings = content.get("data"), content.get("settings")
    if not (isinstance(data, Mapping) and isinstance(settings, Mapping)):
        return None
    if not isinstance(content.get("nats_per_token"), float):  # null where nothing was scored
        return None
    facts = {key: settings.get(key) for key in ("batches", "batch_size", "precision", "set")}
    return {
        "mode": content.get("mode"),
        "split": data.get("split"),
        "fingerprint": data.get("fingerprint"),
        "recipe": _plain(data.get("recipe")),
        "device": str(settings.get("device")).partition(":")[0],
        **facts,
    }


def _plain(recipe: Any) -> Any:
    """Returns a recipe as JSON has it, without what changes nothing."""
    if isinstance(recipe, Mapping):
        kept = {key: value for key, value in recipe.items() if key not in SAME_RECIPE}
        # both are in the batch size, which is compared by itself
        return {key: _plain(v) for key, v in kept.items() if key != "eval_batch_size"}
    return json.loads(json.dumps(recipe))


def _markers(data: LanguageDataModule, split: Split) -> float:
    """Returns the positions per token of text; the end of a document is one."""
    if data.rows == "reasoning" or not has_markers(data.tokenizer):
        return 1.0
    counts = data.counts(split)
    lexical = count_lexical(data.stream(split), data.tokenizer.special_ids)
    return counts.tokens / max(1, lexical + counts.documents)


# ---- all of one run


ANSWERS = "answers"
"""What is counted where models are asked questions: targets are answers, and no text."""


@dataclass(frozen=True)
class RunMetrics:
    """A run with its sizes, costs and likelihood."""

    run: RunRecord
    training: TrainingCost
    score: HeldOutScore
    tasks: Mapping[str, TaskResult]
    """Results of tasks, by their names."""
    text: str
    """What it was trained on: name of the corpus, digest of all that identifies the text."""
    tokenizer: str
    """The same of the tokenizer, without the markers of sentences."""
    order: Mapping[str, Any]
    """What decides which tokens an optimiser step has."""
    same_text: bool
    """Whether the text that is there today is what the checkpoint was trained on."""

    @property
    def name(self) -> str:
        """What tells the run from the others."""
        return self.run.name

    @property
    def counted(self) -> str:
        """Which targets nats per token are of: all, lexical ones, or those of answers."""
        return ANSWERS if self.run.outline.reads == "reasoning" else self.score.counted

    @property
    def likelihood(self) -> str:
        """Kind of its likelihood."""
        return self.score.likelihood


def measure(run: RunRecord, how: ScoringOptions, named: Sequence[ResultFile]) -> RunMetrics:
    """Returns what is known of a run; its held-out text is scored unless a result file has that.

    Args:
        run: which.
        how: split and settings of the scoring.
        named: result files that the command line names; those next to the run are looked for.

    Raises:
        ValueError: if its data are not there or it cannot be scored.
    """
    data = open_data(run, how)
    path = run.checkpoint.path.resolve()
    results = [*results_beside(run), *(file for file in named if file.checkpoint == path)]
    scored = score(run, data, how, reversed(results))  # what is named first
    return RunMetrics(
        run=run,
        training=describe_training(run, data, scored.content.get("train_tokens")),
        score=scored,
        tasks=tasks_in(results),
        text=_digest(data_name(run), read_source(data)),
        tokenizer=_tokenizer(run),
        order=describe_order(run),
        same_text=run.checkpoint.data_state.get("fingerprint") == data.fingerprint,
    )


def data_name(run: RunRecord) -> str:
    """Returns the class of the corpus that a run was trained on."""
    recipe: Mapping[str, Any] = run.checkpoint.data_recipe or {}
    inner = recipe.get("init_args", {}).get("corpus")
    chosen = inner if isinstance(inner, Mapping) and "class_path" in inner else recipe
    return str(chosen.get("class_path", "")).rpartition(".")[2]


def _tokenizer(run: RunRecord) -> str:
    state = run.checkpoint.data_state
    inner = state.get("corpus")
    saved = (inner if isinstance(inner, Mapping) else state).get("tokenizer")
    if not saved:
        built = build_tokenizer(run.checkpoint)
        return _digest(built.name, built.state())
    content = {key: value for key, value in saved.items() if key != "name"}
    if saved.get("kind") != "json":  # one that is not stored whole is what its name says
        return str(saved.get("name") or saved.get("kind"))
    return _digest(str(saved.get("name")).rpartition("/")[2], content)


def _digest(name: str, content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return f"{name} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# ---- rows: runs that differ in the seed only


KINDS = {
    "exact": "exact",
    "lower_bound": "bound",
    "estimate": "estimate",
    "noncausal": "not causal",
}
"""Kinds of likelihoods in the order of the rows, and what columns call them."""
NOT_A_RECIPE = SAME_RECIPE | {
    "seed",
    "compile",
    "eval_batch_size",
    "data_files",  # what the text is, its fingerprint says
    "val_files",
    "test_files",
}
"""Keys in which runs of one recipe may differ."""


@dataclass(frozen=True)
class ReportRow:
    """Runs of one recipe with different seeds."""

    label: str
    members: tuple[RunMetrics, ...]

    @property
    def first(self) -> RunMetrics:
        """Any of them: what is no number is the same for all."""
        return self.members[0]

    @property
    def seeds(self) -> list[str]:
        """Seed of each member, with that of the data order where members differ in it."""
        orders = {member.order.get("seed") for member in self.members}
        return [_seed(member, with_order=len(orders) > 1) for member in self.members]

    @property
    def loss(self) -> float:
        """What rows of a kind are ordered by: mean bits per byte, else nats per token."""
        contents = [member.score.content for member in self.members]
        key = "bits_per_byte" if all(c.get("bits_per_byte") for c in contents) else "nats_per_token"
        return statistics.fmean(content[key] or 0.0 for content in contents)


def make_rows(measured: Sequence[RunMetrics], keys: str | None = None) -> list[ReportRow]:
    """Returns the rows, ordered by kind of likelihood and by loss within each.

    Args:
        measured: runs in any order, at least one.
        keys: of the models' config that name the rows, separated by commas; None: what the command
            line names them, else the class of the model, and what rows of one class differ in.

    Raises:
        ValueError: if no model has such a key.
    """
    groups: dict[tuple[str | None, str], list[RunMetrics]] = {}
    for one in measured:
        groups.setdefault((one.run.row, recipe_of(one)), []).append(one)
    members = [tuple(sorted(group, key=lambda one: one.name)) for group in groups.values()]
    labels = _labels([group[0] for group in members], keys)
    rows = [ReportRow(label, group) for label, group in zip(labels, members, strict=True)]
    order = list(KINDS)
    return sorted(
        rows,
        key=lambda row: (
            order.index(row.first.likelihood),
            row.first.counted == "answers",
            row.loss,
            row.label,
        ),
    )


def recipe_of(one: RunMetrics) -> str:
    """Returns what runs of different seeds have in common, as text."""
    run = one.run
    order = {key: value for key, value in one.order.items() if key != "seed"}
    parts = {
        "model": _bare(run.checkpoint.model_recipe),
        "data": _bare(run.checkpoint.data_recipe),
        "fingerprint": run.checkpoint.data_state.get("fingerprint"),
        "order": order,
        "steps": run.checkpoint.step,
        "precision": run.record.get("trainer", "precision"),
    }
    return json.dumps(parts, sort_keys=True, default=str)


def same_seeds(rows: Sequence[ReportRow]) -> list[str]:
    """Returns a sentence for each row of which two runs have the same known seed."""
    found = []
    for row in rows:
        known = [seed for seed in row.seeds if not seed.startswith("?")]
        if len(set(known)) < len(known):
            found.append(
                f"{row.label}: two of its runs have the same seed ({', '.join(row.seeds)}), so "
                "their spread says nothing about seeds."
            )
    return found


def _seed(member: RunMetrics, *, with_order: bool) -> str:
    seed = member.run.record.get("seed_everything")
    text = "?" if seed is None or isinstance(seed, bool) else str(seed)
    return f"{text} (data {member.order.get('seed', '?')})" if with_order else text


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _bare(v) for key, v in value.items() if key not in NOT_A_RECIPE}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value


def _labels(firsts: Sequence[RunMetrics], keys: str | None) -> list[str]:
    recipes = [one.run.outline.recipe() for one in firsts]
    names = [one.name for one in firsts]
    if keys is not None:
        chosen = label_runs(recipes, names, keys).texts()
        return _unique(chosen, names)
    texts = [one.run.row or "" for one in firsts]
    unnamed = [number for number, text in enumerate(texts) if not text]
    for kind in dict.fromkeys(firsts[number].run.model for number in unnamed):
        numbers = [number for number in unnamed if firsts[number].run.model == kind]
        found = _of_one_class([recipes[n] for n in numbers], [names[n] for n in numbers])
        for number, text in zip(numbers, found, strict=True):
            texts[number] = text
    return _unique(texts, names)


def _of_one_class(recipes: Sequence[Recipe], names: Sequence[str]) -> list[str]:
    """Returns what tells models of one class apart: the class, one or two keys, or the names."""
    kind = recipes[0]["class_path"].rpartition(".")[2]
    if len(recipes) == 1:
        return [kind]
    keys = differing([recipe["init_args"].get("config", {}) for recipe in recipes])
    if not 0 < len(keys) <= MOST_KEYS:
        return [f"{kind} ({name})" for name in names]
    return _unique(label_runs(recipes, names, ",".join([MODEL, *keys])).texts(), names)


def _unique(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the texts, with the name of a run after those that are not unique."""
    return [
        text if texts.count(text) == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]
