"""The table of runs: provenance, sizes, training cost, likelihood and tasks of each run.

``measure`` computes the ``RunMetrics`` of a run, and ``runs_frame`` the table of several runs, from
which reports, figures and ``runs.csv`` are made.
"""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from datamodules import LanguageDataModule, Sentences, Store, Tokenizer
from datamodules.store import Split
from evaluation.cost import non_embedding_parameters
from evaluation.devices import Device, Precision
from evaluation.load import build_data, build_tokenizer, check_fit, prepare
from evaluation.perplexity import score_checkpoint
from evaluation.provenance import count_lexical
from evaluation.results import results_of
from evaluation.runs import RunRecord, is_number, make_labels
from evaluation.scoring import PERPLEXITY_KEYS, bounded_exp
from evaluation.tables import KINDS
from lightning_models.checkpoint import CheckpointError
from lightning_models.outputs import Likelihood
from lightning_models.recipe import resolve_class

ANSWERS = "answers"
"""Targets of models that answer questions, which are not text."""
BITS, NATS = "bits_per_byte", "nats_per_token"
NOW, BEFORE = "measured now", "measured before"
Task = Mapping[str, Mapping[str, Any]]
"""Scores of a task: its ``metrics``, and the settings of the measurement under ``how``."""


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run; unknown ones are None.

    FLOPs per token are per token of text. Fields from ``run`` to ``torch`` are provenance.
    """

    run: str
    """Path of the run under the common folder of all compared runs."""
    row: str | None
    """Name of its row on the command line, else name of the run in training."""
    checkpoint: str
    """Path of the scored file."""
    which: str | None
    """Choice of the file: ``last``, ``best``, or None if it was named."""
    model: str
    """Class of the model."""
    model_recipe: Mapping[str, Any]
    """Class path and arguments of the model."""
    recipe: str
    """Settings, as JSON, that runs share if they differ in their seeds only."""
    reads: str
    """Rows of its data: windows, sentences or reasoning."""
    tokenizer: str
    """Name and digest of the tokenizer, without markers of sentences."""
    order: Mapping[str, Any]
    """Settings that determine the tokens of an optimiser step."""
    decoder: Mapping[str, Any]
    """Settings of its decoder that baselines usually share with a method."""
    recorded: bool
    """Whether the run has a ``config.yaml``, the source of the following fields."""
    seed_everything: int | None
    """Seed of the run."""
    precision: str | None
    """Training precision."""
    accumulate_grad_batches: int | None
    """Micro-batches of an optimiser step on each device."""
    commit: str | None
    """Version of the code, or several versions if the run was resumed with another one."""
    torch: str | None
    """Version of torch, or several."""

    parameters: int
    """Number of trainable parameters."""
    non_embedding_parameters: int
    """Number of parameters outside embeddings and output matrix."""
    steps: int
    """Optimiser steps up to the checkpoint."""
    training_tokens: int | None
    """Tokens of text in training, with repetitions."""
    flops: float | None
    """Training FLOPs so far, executed or planned."""
    training_flops: float | None
    """``flops`` of models whose training steps have constant compute, else None."""
    training_flops_per_token: float | None
    """``training_flops`` over ``training_tokens``."""
    nominal_training_flops: float | None
    """Planned ``flops`` of models whose training compute depends on the text, else None."""
    nominal_training_flops_per_token: float | None
    """``nominal_training_flops`` over ``training_tokens``."""
    training_flops_per_token_published: float | None
    """FLOPs per training token as the method's paper counts them, if it counts differently."""
    tokens_per_second: float | None
    """Median of the logged training speed on the machine of the run, without markers."""
    val_accuracy: float | None
    """Accuracy of answers at the last validation of the run, 0 to 1."""

    text: str = ""
    """Name and digest of the training text, independent of the tokenizer."""
    same_text: bool = False
    """Whether the text on disk today is the text that the checkpoint was trained on."""
    source: str = NOW
    """Whether the likelihood was measured ``NOW``, or read from the folder of the run."""
    scored: Mapping[str, Any] = field(default_factory=dict)
    """Text, split, bytes, tokens, batches and precision of the likelihood."""
    context: int = 0
    """Mean length of a scored row in tokens."""
    stride: int | None = None
    """New targets of each window if windows overlap."""
    markers: float = 1.0
    """Positions per token of text, at least 1; markers of sentences are positions too."""
    text_changes: str | None = None
    """Text that the tokenizer cannot reproduce, if any."""
    likelihood: Likelihood = "exact"
    """Kind of the likelihood: exact, lower_bound, estimate or noncausal."""
    counted: str = "all"
    """Targets that nats per token count: all, lexical or answers."""
    causal: bool = True
    """Whether no token's score depends on later tokens."""
    nats_per_token: float | None = None
    """Mean negative log-likelihood of the counted targets; not comparable across kinds."""
    bits_per_byte: float | None = None
    """Bits of all targets per UTF-8 byte of the source text; not comparable across kinds."""
    executed_steps: float | None = None
    """Mean number of additional steps of the targets."""
    expected_steps: float | None = None
    """Mean number of additional steps that a router expects."""
    inference_flops_per_token: float | None = None
    """FLOPs of generating a token."""
    scoring_flops_per_token: float | None = None
    """FLOPs of scoring a token in one pass."""
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """Scores of tasks by their names."""

    def columns(self) -> dict[str, Any]:
        """Returns the fields, and each metric under a column of its kind.

        No column mixes kinds of likelihood, kinds of targets, or metrics of different tasks.
        """
        end = "" if self.counted == "all" else f"_{self.counted}"
        bits_end = end if self.counted == ANSWERS else ""  # bits are of all targets
        nats = self.nats_per_token
        perplexity = None if nats is None else bounded_exp(nats)
        return {
            **asdict(self),
            f"{NATS}_{self.likelihood}{end}": self.nats_per_token,
            f"{PERPLEXITY_KEYS[self.likelihood]}{end}": perplexity,
            f"{BITS}_{self.likelihood}{bits_end}": self.bits_per_byte,
            **{
                f"{name}_{key}": value
                for name, task in self.tasks.items()
                for key, value in task["metrics"].items()
            },
        }


# ---- scores of tasks, from the results of the run's folder


HOW_TASK = ("examples", "of_examples", "num_fewshot", "version", "likelihood")
HOW_ASKED = ("mode", "budget", "precision", "counted")


def tasks_in(results: Iterable[Mapping[str, Any]]) -> dict[str, Task]:
    """Returns the scores of each task.

    The result with the most examples counts, and among equals the latest. Results with
    changed settings of the model (``--set``) are left out, and so are the members of a group that
    has a mean.

    Returns:
        For each task its ``metrics`` without standard errors, and the settings of the measurement,
        ``how``, which must agree for tasks to be comparable. Names end in ``_Nshot`` if a task was
        measured with several numbers of examples in the prompt.
    """
    scores: dict[tuple[str, Any], Task] = {}
    for content in results:
        task_settings, tasks = content.get("settings", {}), content.get("tasks", {})
        if task_settings.get("set"):
            continue
        means = [task for task in tasks.values() if task["metrics"]]
        grouped = {member for task in means for member in task.get("tasks", ())}
        for name, task in tasks.items():
            result = _task_result(task, task_settings)
            key = name, result["how"].get("num_fewshot")
            if not result["metrics"] or name in grouped:
                continue
            if key not in scores or _examples(result) >= _examples(scores[key]):
                scores[key] = result
    names = [name for name, _ in scores]
    return {
        name if names.count(name) == 1 else f"{name}_{shots or 0}shot": task
        for (name, shots), task in scores.items()
    }


def _examples(task: Task) -> int:
    return int(task["how"].get("examples") or 0)


def _task_result(task: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
    options = {key: task.get(key) for key in HOW_TASK} | {
        key: settings.get(key) for key in HOW_ASKED
    }
    return {
        "metrics": {
            key: value
            for key, value in task["metrics"].items()
            if is_number(value) and math.isfinite(value) and "stderr" not in key
        },
        "how": {key: value for key, value in options.items() if value is not None},
    }


# ---- amount and cost of training


FLOPS_TAG = "throughput/flops_per_token"
"""FLOPs per token of a training step, as the model counts them on its batches."""
SPEED_TAG = "throughput/tokens_per_second"
TOKENS_TAG = "train/tokens"
"""Tokens of text since the run began."""
ACCURACY_TAG = "val/accuracy"


def describe_training(
    run: RunRecord, data: LanguageDataModule, train_tokens: int | None
) -> dict[str, Any]:
    """Returns sizes and costs of a run's training, under the names of ``RunMetrics``.

    ``train_tokens`` is the number of lexical tokens in the train split, or None if unknown.
    """
    tokens, positions = _amount(run, data, train_tokens)
    outline, per_position = run.outline, _flops(run, data)
    published = outline.published_flops_per_token(outline.config.block_size)
    flops = None if positions is None or per_position is None else positions * per_position
    per_token = None if flops is None or not tokens else flops / tokens
    if published is not None:
        # from FLOPs per position to FLOPs per token
        published = published * positions / tokens if tokens and positions is not None else None
    share = tokens / positions if tokens and positions else 1.0
    speeds, answers = run.scalars.get(SPEED_TAG, {}), run.scalars.get(ACCURACY_TAG, {})
    ran, planned = (None, flops) if outline.adaptive_training else (flops, None)
    ran_each, planned_each = (None if x is None else per_token for x in (ran, planned))
    return {
        "parameters": sum(p.numel() for p in outline.parameters() if p.requires_grad),
        "non_embedding_parameters": non_embedding_parameters(outline),
        "steps": run.checkpoint.step,
        "training_tokens": tokens,
        "flops": flops,
        "training_flops": ran,
        "training_flops_per_token": ran_each,
        "nominal_training_flops": planned,
        "nominal_training_flops_per_token": planned_each,
        "training_flops_per_token_published": published,
        "tokens_per_second": statistics.median(speeds.values()) * share if speeds else None,
        "val_accuracy": answers[max(answers)] if answers else None,
    }


def _amount(
    run: RunRecord, data: LanguageDataModule, train_tokens: int | None
) -> tuple[int | None, int | None]:
    """Returns the tokens of text and the positions in a run's training, None if unknown.

    Positions, for which FLOPs are counted, include the markers of sentences.
    """
    if isinstance(data, Sentences):
        return _of_sentences(run, data)
    recipe, model, batches = run.checkpoint.data_recipe, run.outline, _micro_batches(run)
    if model.reads == "reasoning":
        return _of_questions(run)
    rows = None if recipe is None else recipe["init_args"].get("batch_size")
    stated = _order(run).get("global_batch")
    if stated is not None:
        # rows of a whole step, on any number of devices
        batches, rows = run.checkpoint.step, stated
    if rows is None or not batches or not run.checkpoint.step or model.reads != "windows":
        return None, None
    positions = batches * rows * model.config.block_size
    if not _has_markers(data.tokenizer):
        return positions, positions
    if train_tokens is None:
        return None, positions
    counts = data.counts("train")
    return round(positions * (train_tokens + counts.documents) / counts.tokens), positions


def _micro_batches(run: RunRecord) -> int:
    """Returns the number of micro-batches that all ranks have trained on, 0 if unknown."""
    value: Any = run.checkpoint.content
    for key in ("loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return int(value or 0) * _ranks(run)


def _order(run: RunRecord) -> dict[str, Any]:
    """Returns the settings that determined the rows of a run's batches or steps."""
    return dict(run.checkpoint.data_state.get("order", {}))


def _ranks(run: RunRecord) -> int:
    return int(_order(run).get("world_size", 1))


def _states_steps(run: RunRecord) -> bool:
    """Returns whether steps have the same rows on any number of devices."""
    order = _order(run)
    return any(order.get(key) is not None for key in ("global_batch", "global_batch_tokens"))


def _of_sentences(run: RunRecord, data: Sentences) -> tuple[int | None, int | None]:
    """Counts tokens and positions of sentences by building their batches again.

    For several devices the batches of as many steps on one device are counted: batches are even.
    """
    batches = _micro_batches(run)
    if _states_steps(run):
        batches = (run.checkpoint.step or 0) * data.step_batch(1).accumulate
    if not batches or run.checkpoint.data_state.get("fingerprint") != data.fingerprint:
        return None, None
    source = data.training_source()
    sums = dict.fromkeys(("lexical", "eos", "eod"), 0.0)
    for n in range(batches):
        counts = source.counts(n)
        sums = {key: value + counts[key] for key, value in sums.items()}
    text = sums["lexical"] + sums["eod"]  # windows also count the end of a document as a token
    return round(text), round(text + 2 * sums["eos"])  # BOS and EOS of every sentence


def _of_questions(run: RunRecord) -> tuple[int | None, int | None]:
    """Returns the logged tokens of questions, up to the checkpoint at the mean length so far."""
    steps = run.checkpoint.step or 0
    logged = {at: value for at, value in run.scalars.get(TOKENS_TAG, {}).items() if at < steps}
    if not logged:
        return None, None
    last = max(logged)
    tokens = round(logged[last] * steps / (last + 1))
    return tokens, tokens


def _has_markers(tokenizer: Tokenizer) -> bool:
    """Returns whether there are special tokens within documents: markers of sentences."""
    return not set(tokenizer.special_ids) <= {tokenizer.eos_id, tokenizer.text_bos_id}


def _flops(run: RunRecord, data: LanguageDataModule) -> float | None:
    """Returns the FLOPs per position of a training step.

    For windows they are computed; for other rows they are the count logged in training, or the
    count for documents of average length if there is no log.
    """
    if run.outline.reads == "windows":
        return run.outline.flops_per_token(run.outline.config.block_size, training=True)
    steps = run.checkpoint.step or math.inf  # a run may have gone on after the checkpoint
    logged = [value for at, value in run.scalars.get(FLOPS_TAG, {}).items() if at < steps]
    if logged:
        return statistics.fmean(logged)
    if run.outline.reads != "sentences":
        return None
    return run.outline.flops_per_token(data.row_tokens("train"), training=True)


# ---- likelihood of held-out text, and FLOPs of inference


NOT_A_RECIPE = frozenset(
    {
        *("cache_dir", "num_proc", "num_workers", "predict_file", "validation_split"),
        *("seed", "compile", "eval_batch_size", "eval_stride"),
        *("data_files", "val_files", "test_files"),  # the fingerprint identifies their text
    }
)
"""Keys in which runs of one recipe may differ."""


@dataclass(frozen=True)
class ScoringOptions:
    """Settings for scoring, the same for every run."""

    split: Split = "val"
    """Held-out documents to score."""
    limit_batches: int | None = None
    """Number of batches to score. Null means all."""
    batch_size: int | None = None
    """Rows per batch. Null means as trained."""
    stride: int | None = None
    """Distance in tokens between the starts of overlapping windows, so that each target has at
    least the rest of a window before it. Null means as trained, mostly without overlap. Bounds of
    whole windows and documents are scored without overlap."""
    precision: Precision = "32"
    device: Device = "auto"


def overlaps(run: RunRecord) -> bool:
    """Returns whether a run can be scored on rows that overlap."""
    recipe = run.checkpoint.data_recipe
    if recipe is None or run.outline.whole_rows:
        return False
    return bool(resolve_class(recipe["class_path"], LanguageDataModule).may_overlap)


def open_data(run: RunRecord, options: ScoringOptions) -> LanguageDataModule:
    """Prepares and returns the data that a run was trained on.

    Raises:
        ValueError: If they are missing, or have another tokenizer.
    """
    recipe = run.checkpoint.data_recipe
    if recipe is None:
        raise CheckpointError(
            f"{run.checkpoint.path} was trained without a datamodule, so it names no held-out text"
        )
    changes = {"eval_batch_size": options.batch_size}
    if overlaps(run):
        changes["eval_stride"] = options.stride
    changes = {key: value for key, value in changes.items() if value is not None}
    recipe = {**recipe, "init_args": {**recipe["init_args"], **changes}}
    data = build_data(run.checkpoint, recipe)
    check_fit(run.outline, data)
    prepare(data, run.checkpoint)
    return data


def measure(run: RunRecord, options: ScoringOptions) -> RunMetrics:
    """Computes the metrics of a run; a held-out text that was scored before is not scored again.

    Raises:
        ValueError: If its data are missing, or it cannot be scored.
    """
    data = open_data(run, options)
    content, file = score_checkpoint(
        run.checkpoint,
        data,
        device=options.device,
        split=options.split,
        precision=options.precision,
        limit_batches=options.limit_batches,
    )
    markers, text = _markers(data, options.split), _text(data)
    settings = {key: content["settings"].get(key) for key in ("batches", "of_batches", "precision")}
    sizes = {key: content[key] for key in ("bytes", "tokens")}
    return RunMetrics(
        **_provenance(run),
        **describe_training(run, data, content.get("train_tokens")),
        **describe_score(run, content, data.row_tokens(options.split), markers),
        text=text,
        same_text=run.checkpoint.data_state.get("fingerprint") == data.fingerprint,
        source=NOW if file is None else BEFORE,
        scored={"text": text, "split": options.split, **sizes, **settings},
        stride=getattr(data, "eval_stride", None),
        text_changes=data.tokenizer.text_changes,
        tasks=tasks_in(results_of(run.checkpoint)),
    )


def describe_score(
    run: RunRecord, content: Mapping[str, Any], context: int, markers: float
) -> dict[str, Any]:
    """Returns likelihood and inference FLOPs of a result, under the names of ``RunMetrics``."""
    scoring = content.get("flops_per_token")
    return {
        "context": context,
        "markers": markers,
        "likelihood": str(content["likelihood"]),
        "counted": ANSWERS if run.outline.reads == "reasoning" else str(content["counted"]),
        "causal": content["causal"],
        NATS: content[NATS],
        BITS: content[BITS],
        "executed_steps": content.get("executed_steps"),
        "expected_steps": content.get("expected_steps"),
        "inference_flops_per_token": content["generation_flops_per_token"] * markers,
        "scoring_flops_per_token": None if scoring is None else scoring * markers,
    }


def _markers(data: LanguageDataModule, split: Split) -> float:
    """Returns the positions per token of text, where the end of a document is a token too."""
    if data.rows == "reasoning" or not _has_markers(data.tokenizer):
        return 1.0
    counts = data.counts(split)
    lexical = count_lexical(data.stream(split), data.tokenizer.special_ids)
    return counts.tokens / max(1, lexical + counts.documents)


# ---- provenance


def _provenance(run: RunRecord) -> dict[str, Any]:
    path, cwd = run.checkpoint.path.resolve(), Path.cwd()
    order, states = _order(run), _states_steps(run)
    # steps with fixed rows set the accumulation themselves
    accumulated = None if states else run.record["accumulate_grad_batches"]
    if accumulated is None and run.checkpoint.step and not states:
        accumulated = round(_micro_batches(run) / _ranks(run) / run.checkpoint.step)
    order = {"rows": run.outline.reads, **order, "accumulate_grad_batches": accumulated}
    return {
        "run": run.name,
        "row": run.row,
        "checkpoint": str(path.relative_to(cwd) if path.is_relative_to(cwd) else path),
        "which": run.checkpoint.which,
        "model": type(run.outline).__name__,
        "model_recipe": run.outline.recipe(),
        "reads": run.outline.reads,
        "order": order,
        "decoder": _decoder(run.outline.config),
        "tokenizer": _tokenizer(run),
        "recipe": _recipe(run, order),
        **run.record,
        **({"accumulate_grad_batches": None} if states else {}),
    }


DECODER = (
    "norm",
    "activation",
    "bias",
    "positions",
    "rope_base",
    "tie_head",
    "init",
    "init_std",
    "residual_depth",
    "window",
    "dropout",
    "attention_dropout",
    "rotary_dim",
    "norms_queries",
    "projection_bias",
    "residual_in_parallel",
)


def _decoder(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key) for key in DECODER if hasattr(config, key)}


def _text(data: LanguageDataModule) -> str:
    """Returns the corpus and a digest of its text, independent of the tokenizer."""
    corpus = getattr(data, "corpus", data)
    meta = Store(corpus.store_dir).meta
    return _digest(type(corpus).__name__, {key: meta.get(key) for key in ("source", "origin")})


def _tokenizer(run: RunRecord) -> str:
    state = run.checkpoint.data_state
    inner = state.get("corpus")
    saved = (inner if isinstance(inner, Mapping) else state).get("tokenizer")
    if not saved:
        built = build_tokenizer(run.checkpoint)
        return _digest(built.name, built.state())
    content = {key: value for key, value in saved.items() if key != "name"}
    if saved.get("kind") != "json":  # identified by its name, not stored completely
        return str(saved.get("name") or saved.get("kind"))
    return _digest(str(saved.get("name")).rpartition("/")[2], content)


def _digest(name: str, content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return f"{name} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _recipe(run: RunRecord, order: Mapping[str, Any]) -> str:
    parts = {
        "model": _without_seed(run.checkpoint.model_recipe),
        "data": _without_seed(run.checkpoint.data_recipe),
        "fingerprint": run.checkpoint.data_state.get("fingerprint"),
        "order": {key: value for key, value in order.items() if key != "seed"},
        "steps": run.checkpoint.step,
        "precision": run.record["precision"],
    }
    return json.dumps(parts, sort_keys=True, default=str)


def _without_seed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seed(v) for key, v in value.items() if key not in NOT_A_RECIPE}
    return [_without_seed(v) for v in value] if isinstance(value, list | tuple) else value


# ---- the table: runs that differ only in the seed share a label


def runs_frame(metrics: Sequence[RunMetrics], keys: str | None = None) -> pd.DataFrame:
    """Returns the table of runs with the ``label`` and ``seed`` of each.

    Rows are sorted by kind of likelihood, then by loss; the runs of a label, which is one row of a
    report, are adjacent.

    Args:
        metrics: Metrics of at least one run, in any order.
        keys: Keys of the models' config that name the rows, see ``runs.make_labels``.

    Raises:
        ValueError: If no model has such a key.
    """
    runs = pd.DataFrame([values.columns() for values in metrics], dtype=object)
    runs = runs.sort_values("run", ignore_index=True)
    runs = runs.where(runs.notna(), None)
    rows = [row for _, row in runs.groupby(["row", "recipe", "stride"], sort=False, dropna=False)]
    heads = [row.iloc[0] for row in rows]
    names = [_name_of_row(list(row["run"]), row["model"].iloc[0]) for row in rows]
    given_names, recipes = ([first[key] for first in heads] for key in ("row", "model_recipe"))
    labels = make_labels(names, given_names, recipes, keys)
    for label, row in zip(labels, rows, strict=True):
        runs.loc[row.index, "label"] = label
    groups = sorted((group for _, group in runs.groupby("label", sort=False)), key=_rank)
    return pd.concat([group.assign(seed=_seeds(group)) for group in groups], ignore_index=True)


def _name_of_row(names: Sequence[str], model: str) -> str:
    """Returns the common prefix of the names of a row's runs, else the model's class."""
    if len(names) == 1:
        return names[0]
    shared = os.path.commonprefix(list(names))  # noqa: RUF071  letters, not folders
    shared = shared.rstrip("/-_.= 0123456789")
    return model if not shared or shared.rpartition("/")[2] == "version" else shared


def _rank(row: pd.DataFrame) -> tuple[int, bool, float, str]:
    """Returns the sort key of a row; its loss is the mean of bits per byte, else nats per token.

    A row with a run without a loss, such as a diverged one, comes last among its kind.
    """
    first, loss = row.iloc[0], row[BITS] if row[BITS].notna().all() else row[NATS]
    mean = statistics.fmean(math.inf if value is None else value for value in loss)
    likelihood = list(KINDS).index(first["likelihood"])
    return likelihood, first["counted"] == ANSWERS, mean, first["label"]


def runs_with_loss(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs of a table with a loss on text, for the figure.

    Answers to questions are not text, and a diverged run has no loss.
    """
    return runs[(runs["counted"] != ANSWERS) & runs[NATS].notna()]


def _seeds(row: pd.DataFrame) -> list[str]:
    """Returns the seed of each run of a row, with the seeds of the data order if they vary."""
    orders = [order.get("seed", "?") for order in row["order"]]
    is_seed = [not (seed is None or isinstance(seed, bool)) for seed in row["seed_everything"]]
    seeds = [str(s) if k else "?" for s, k in zip(row["seed_everything"], is_seed, strict=True)]
    if len(set(orders)) == 1:
        return seeds
    return [f"{seed} (data {order})" for seed, order in zip(seeds, orders, strict=True)]
