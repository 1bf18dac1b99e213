"""The table of runs: a line a run with its provenance, sizes, training cost, likelihood and tasks.

``measure`` makes a line, ``runs_frame`` the table. Its columns are the numbers of ``runs.csv``
under their keys, and where they come from; cells are None where something is not known.

=====================  ===========================================================================
provenance             what it is
=====================  ===========================================================================
``text tokenizer``     name and digest of the training text, and of the tokenizer without markers
``order``              dict: what decides which tokens an optimiser step has
``same_text``          whether the text that is there today is what the checkpoint was trained on
``reads``              rows of its data: windows, sentences, reasoning
``scored``             dict: text, split, bytes, batches ... of the score
``context stride``     tokens of a row, and targets that it adds where rows overlap
``source``             file that the scores come from, or ``NOW``
``markers``            positions per token of text, at least 1: markers of sentences are computed
``tasks``              dict: metrics of each task, and how they were measured
``flops``              of the training, whether they ran or are planned
``nats_per_token ...`` the loss whatever its kind, for what draws and orders
``recipe``             what runs that differ in the seed have in common, as text
``model_recipe row``   what makes the label: config of the model, name on the command line
``recorded ...``       see ``runs.read_record``
=====================  ===========================================================================
"""

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from datamodules import LanguageDataModule, Sentences, Store, Tokenizer
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
from evaluation.output import read_json
from evaluation.perplexity import measure_perplexity
from evaluation.runs import RunRecord, is_number, label_rows, matching
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import KINDS
from lightning_models.checkpoint import CheckpointError
from lightning_models.recipe import resolve_class

# ---- result files


ABOVE = 2
"""How many folders above its log folder results of a run may lie: below the root of the run."""
ResultFile = tuple[Path, Mapping[str, Any]]
"""A file, and what a command wrote to it about a checkpoint."""


def named_results(words: Sequence[str], runs: Sequence[RunRecord]) -> list[ResultFile]:
    """Returns the result files that the command line names.

    ``words`` are files or patterns.

    Raises:
        ValueError: if a file is missing or no result, or is about none of the runs.
    """
    compared = {run.checkpoint.path.resolve() for run in runs}
    results = []
    for word in words:
        paths = matching(Path(word).expanduser())
        if not paths:
            raise ValueError(f"results ({word}): there is no such file")
        for path in paths:
            content = _read_result(path)
            if _subject(content) not in compared:
                raise ValueError(
                    f"results ({path}) is about {content['checkpoint']}, which is not compared; "
                    "name that run, too, or leave the file out"
                )
            results.append((path, content))
    return results


def results_nearby(run: RunRecord) -> list[ResultFile]:
    """Returns the results in the folders of a run that are about its checkpoint and not older."""
    path = run.checkpoint.path.resolve()
    folders = [path.parent]
    if run.log is not None:
        log = run.log.resolve()
        folders += [log, *log.parents[:ABOVE]]
    results: list[ResultFile] = []
    files = [sorted(folder.glob("*.json")) for folder in dict.fromkeys(folders)]
    for file in itertools.chain(*files):
        if not file.is_file() or file.stat().st_mtime < path.stat().st_mtime:
            continue
        with suppress(ValueError):
            content = _read_result(file)
            results += [(file, content)] if _subject(content) == path else []
    return results


def _read_result(path: Path) -> Mapping[str, Any]:
    content = read_json(path, "results")
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), str):
        raise ValueError(
            f"results ({path}) names no checkpoint; give results of evaluate.py tasks or "
            "perplexity --output"
        )
    return content


def _subject(content: Mapping[str, Any]) -> Path:
    """Returns the checkpoint that a result is about."""
    return Path(content["checkpoint"]).expanduser().resolve()


HOW_TASK = ("examples", "of_examples", "num_fewshot", "version", "likelihood")
HOW_ASKED = ("mode", "budget", "precision", "counted")


def tasks_in(results: Iterable[ResultFile]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Returns the result of each task; of several the one with the most examples.

    Of two with as many the later one. What was measured with other settings of the model than it
    was trained with (``--set``) is left out, and so are the tasks that a group consists of where
    the group has a mean.

    Returns:
        By task its ``metrics`` without standard errors, and ``how`` they were measured: what must
        be the same for two of them to be compared.
    """
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for _, content in results:
        asked, tasks = content.get("settings", {}), content.get("tasks")
        if not isinstance(tasks, Mapping) or asked.get("set"):
            continue
        grouped = {member for task in tasks.values() for member in _members(task)}
        for name, task in tasks.items():
            one = _task_result(task, asked)
            if one["metrics"] and name not in grouped:
                before = found.get(str(name))
                if before is None or _examples(one) >= _examples(before):
                    found[str(name)] = one
    return found


def _examples(task: Mapping[str, Mapping[str, Any]]) -> int:
    return int(task["how"].get("examples") or 0)


def _members(task: Any) -> Sequence[str]:
    """Returns the tasks of a group that has numbers of its own."""
    if not isinstance(task, Mapping) or not task.get("metrics"):
        return ()
    members: Sequence[str] = task.get("tasks", ())
    return members


def _task_result(task: Any, asked: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    content = task if isinstance(task, Mapping) else {}
    metrics = content.get("metrics", content)
    numbers = metrics.items() if isinstance(metrics, Mapping) else ()
    how = {key: content.get(key) for key in HOW_TASK} | {key: asked.get(key) for key in HOW_ASKED}
    return {
        "metrics": {
            key: value
            for key, value in numbers
            if is_number(value) and math.isfinite(value) and "stderr" not in key
        },
        "how": {key: value for key, value in how.items() if value is not None},
    }


# ---- amount and cost of training


FLOPS_TAG = "throughput/flops_per_token"
"""FLOPs per token of a training step, by the model's own count on the batches it met."""
SPEED_TAG = "throughput/tokens_per_second"
ACCURACY_TAG = "val/accuracy"
POINT = ("steps", "tokens", "flops")
"""Training up to a logged value: steps done, tokens of text and FLOPs of training on them."""


def training_cost(run: RunRecord) -> dict[str, Any]:
    """Returns sizes and costs of a run that is not scored; its data are opened where needed.

    Tokens of windows are known from the checkpoint, unless some of them mark sentences.

    Raises:
        ValueError: if data are needed and are not there.
    """
    windows = run.outline.reads == "windows"
    if windows and not _has_markers(build_tokenizer(run.checkpoint)):
        return describe_training(run, None, None)
    data = open_data(run, ScoringOptions())
    return describe_training(run, data, count_train_tokens(run.checkpoint, data))


def describe_training(
    run: RunRecord, data: LanguageDataModule | None, train_tokens: int | None
) -> dict[str, Any]:
    """Returns sizes and costs of a run under the keys of ``runs.csv``, and ``flops``.

    FLOPs per token are per token of text. They are ``nominal_...`` where texts decide what a step
    computes, and then those that the configuration plans.

    Args:
        run: which.
        data: its own, prepared; None: not needed, as it reads windows without markers.
        train_tokens: lexical tokens of the train split, each counted once; None: not known.
    """
    tokens, positions = _amount(run, data, train_tokens)
    outline, per_position = run.outline, _flops(run, data)
    published = outline.published_flops_per_token(outline.config.block_size)
    flops = None if positions is None or per_position is None else positions * per_position
    per_token = None if flops is None or not tokens else flops / tokens
    if published is not None:  # per position, as FLOPs are
        published = published * positions / tokens if tokens and positions is not None else None
    share = tokens / positions if tokens and positions else 1.0
    speeds, answers = run.scalars.get(SPEED_TAG, {}), run.scalars.get(ACCURACY_TAG, {})
    planned = "nominal_" if outline.adaptive_training else ""
    return {
        "parameters": sum(p.numel() for p in outline.parameters() if p.requires_grad),
        "non_embedding_parameters": non_embedding_parameters(outline),
        "steps": run.checkpoint.step,
        "training_tokens": tokens,
        "flops": flops,
        f"{planned}training_flops": flops,
        f"{planned}training_flops_per_token": per_token,
        "training_flops_per_token_published": published,
        "tokens_per_second": statistics.median(speeds.values()) * share if speeds else None,
        "val_accuracy": answers[max(answers)] if answers else None,
    }


def logged_points(
    training: Mapping[str, Any], logged: Mapping[int, float], name: str
) -> pd.DataFrame:
    """Returns a logged value over tokens and FLOPs, which are taken to be even over the steps.

    ``training`` is of ``describe_training``, at the run's checkpoint; values are by step, from 0,
    and ``name`` is their column.

    Returns:
        ``POINT`` and the value, in the order of the steps; empty where tokens or FLOPs are not
        known.
    """
    tokens, flops, steps = (training[key] for key in ("training_tokens", "flops", "steps"))
    points = []
    if tokens is not None and flops is not None and steps:
        shares = [((step + 1) / steps, step + 1, value) for step, value in sorted(logged.items())]
        points = [(done, share * tokens, share * flops, value) for share, done, value in shares]
    return pd.DataFrame(points, columns=[*POINT, name], dtype=object)


def _amount(
    run: RunRecord, data: LanguageDataModule | None, train_tokens: int | None
) -> tuple[int | None, int | None]:
    """Returns tokens of text that a run was trained on, each time, and positions; None: not known.

    Positions are tokens with the markers of sentences: what FLOPs are counted on.
    """
    if isinstance(data, Sentences):
        return _of_sentences(run, data)
    recipe, model, number = run.checkpoint.data_recipe, run.outline, _micro_batches(run)
    rows = None if recipe is None else recipe["init_args"].get("batch_size")
    if rows is None or not number or not run.checkpoint.step or model.reads != "windows":
        return None, None
    positions = number * rows * model.config.block_size
    if data is None or not _has_markers(data.tokenizer):
        return positions, positions
    if train_tokens is None:
        return None, positions
    counts = data.counts("train")
    return round(positions * (train_tokens + counts.documents) / counts.tokens), positions


def _micro_batches(run: RunRecord) -> int:
    """Returns the micro-batches that all ranks have trained on; 0 where it is not known."""
    value: Any = run.checkpoint.content
    for key in ("loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return int(value or 0) * _ranks(run)


def _ranks(run: RunRecord) -> int:
    ranks: int = run.checkpoint.data_state.get("order", {}).get("world_size", 1)
    return ranks


def _of_sentences(run: RunRecord, data: Sentences) -> tuple[int | None, int | None]:
    """Returns tokens and positions of sentences, by dealing them again.

    On several devices the batches of as many steps on one of them are counted, which are even.
    """
    number = _micro_batches(run)
    if not number or run.checkpoint.data_state.get("fingerprint") != data.fingerprint:
        return None, None
    source = data.training_source()
    sums = dict.fromkeys(("lexical", "eos", "eod"), 0.0)
    for n in range(number):
        counts = source.counts(n)
        sums = {key: value + counts[key] for key, value in sums.items()}
    text = sums["lexical"] + sums["eod"]  # the end of a document is a token of windows, too
    return round(text), round(text + 2 * sums["eos"])  # BOS and EOS of every sentence


def _has_markers(tokenizer: Tokenizer) -> bool:
    """Whether other tokens than those around documents are no text: markers of sentences."""
    return not set(tokenizer.special_ids) <= {tokenizer.eos_id, tokenizer.text_bos_id}


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


# ---- likelihood of held-out text, and FLOPs of inference


ANSWERS = "answers"
"""What is counted where models are asked questions: targets are answers, and no text."""
BITS, NATS = "bits_per_byte", "nats_per_token"
NOW = "measured now"
SAME_RECIPE = frozenset(
    {"cache_dir", "num_proc", "num_workers", "predict_file", "validation_split"}
)
"""Arguments of data that change nothing of what is scored."""
SCORED = ("batches", "of_batches", "precision")


@dataclass(frozen=True)
class ScoringOptions:
    """How every run is scored."""

    split: Split = "val"
    limit_batches: int | None = None
    batch_size: int | None = None
    """Rows a batch; None: as trained."""
    stride: int | None = None
    """Targets that a window adds, of models that score any part of a window; None: as trained."""
    precision: Precision = "32"
    device: Device = "auto"


def overlaps(run: RunRecord) -> bool:
    """Returns whether a run can be scored on rows that overlap."""
    recipe = run.checkpoint.data_recipe
    if recipe is None or run.outline.whole_rows:
        return False
    return bool(resolve_class(recipe["class_path"], LanguageDataModule).may_overlap)


def open_data(run: RunRecord, options: ScoringOptions) -> LanguageDataModule:
    """Returns the data that a run was trained on, prepared.

    Raises:
        ValueError: if they are not there, or are not those of its tokenizer.
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


def score(
    run: RunRecord, data: LanguageDataModule, options: ScoringOptions, results: Iterable[ResultFile]
) -> tuple[Mapping[str, Any], str]:
    """Returns the result of ``evaluate.py perplexity`` on a split of a run's data, and its source.

    The first of ``results`` that was measured in the same way is taken over. Data are the run's
    own, prepared.

    Raises:
        ValueError: if the split is empty or the weights do not fit.
    """
    taken = _taken_over(run, data, options, results)
    if taken is not None:
        file, content = taken
        return content, file.name
    result = measure_perplexity(
        run.checkpoint,
        build_model(run.checkpoint).to(pick_device(options.device)),
        data,
        split=options.split,
        precision=options.precision,
        limit_batches=options.limit_batches,
    )
    return result, NOW


def _taken_over(
    run: RunRecord, data: LanguageDataModule, options: ScoringOptions, results: Iterable[ResultFile]
) -> ResultFile | None:
    """Returns the first result that was measured as it would be now."""
    of_batches = len(data.evaluation_source(options.split))
    limit = options.limit_batches
    wanted = {
        "mode": "blockwise",
        "split": options.split,
        "fingerprint": data.fingerprint,
        "recipe": _as_json(data.recipe()),
        "batches": of_batches if limit is None else min(limit, of_batches),
        "batch_size": data.eval_batch_size,
        "precision": options.precision,
        "device": pick_device(options.device).type,
        "set": {},
    }
    for file, content in results:
        if _subject(content) != run.checkpoint.path.resolve() or _facts(content) != wanted:
            continue
        if run.outline.adaptive and "nominal_steps" not in content:
            continue  # of a version that gave the nominal costs as those that ran
        if not data.tokenizer.exact_bytes and "text_changes" not in content:
            continue  # of a version that counted bytes of tokens, not of the text
        return file, content
    return None


def _facts(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a result must share to be taken over; None if it is of another command."""
    data, settings = content.get("data"), content.get("settings")
    if not (isinstance(data, Mapping) and isinstance(settings, Mapping)):
        return None
    if not isinstance(content.get(NATS), float):  # null where nothing was scored
        return None
    return {
        "mode": content.get("mode"),
        "split": data.get("split"),
        "fingerprint": data.get("fingerprint"),
        "recipe": _as_json(data.get("recipe")),
        "device": str(settings.get("device")).partition(":")[0],
        **{key: settings.get(key) for key in ("batches", "batch_size", "precision", "set")},
    }


def _as_json(recipe: Any) -> Any:
    """Returns a recipe as JSON has it, without what changes nothing."""
    if isinstance(recipe, Mapping):
        kept = {k: v for k, v in recipe.items() if k not in SAME_RECIPE and v is not None}
        # rows a batch are compared by themselves
        return {key: _as_json(v) for key, v in kept.items() if key != "eval_batch_size"}
    return json.loads(json.dumps(recipe))


def _markers(data: LanguageDataModule, split: Split) -> float:
    """Returns the positions per token of text; the end of a document is one."""
    if data.rows == "reasoning" or not _has_markers(data.tokenizer):
        return 1.0
    counts = data.counts(split)
    lexical = count_lexical(data.stream(split), data.tokenizer.special_ids)
    return counts.tokens / max(1, lexical + counts.documents)


def describe_score(
    run: RunRecord, content: Mapping[str, Any], context: int, markers: float
) -> dict[str, Any]:
    """Returns likelihood and inference FLOPs, no key of which has two kinds of likelihood.

    ``content`` is a result of ``evaluate.py perplexity``, ``context`` the tokens of a row on
    average, ``markers`` the positions per token of text.
    """
    kind = str(content["likelihood"])
    counted = ANSWERS if run.outline.reads == "reasoning" else str(content["counted"])
    end = "" if counted == "all" else f"_{counted}"
    bits_end = end if counted == ANSWERS else ""  # bits are of all targets
    scoring, generating = (
        content.get(key) for key in ("flops_per_token", "generation_flops_per_token")
    )
    if generating is None:
        generating = run.outline.generation_flops(context)
    return {
        "likelihood": kind,
        "counted": counted,
        "causal": content["causal"],
        NATS: content[NATS],
        BITS: content[BITS],
        f"{NATS}_{kind}{end}": content[NATS],
        f"{PERPLEXITY_KEYS[kind]}{end}": content[PERPLEXITY_KEYS[kind]],
        f"{BITS}_{kind}{bits_end}": content[BITS],
        "executed_steps": content.get("executed_steps"),
        "expected_steps": content.get("expected_steps"),
        "inference_flops_per_token": float(generating) * markers,
        "scoring_flops_per_token": None if scoring is None else scoring * markers,
    }


# ---- the line of a run


NOT_A_RECIPE = SAME_RECIPE | {
    "seed",
    "compile",
    "eval_batch_size",
    "eval_stride",
    "data_files",  # what the text is, its fingerprint says
    "val_files",
    "test_files",
}
"""Keys in which runs of one recipe may differ."""


def measure(run: RunRecord, options: ScoringOptions, named: Sequence[ResultFile]) -> dict[str, Any]:
    """Returns the line of a run; its held-out text is scored unless a result file has that.

    ``named`` are result files that the command line names; those next to the run are looked for.

    Raises:
        ValueError: if its data are not there or it cannot be scored.
    """
    data, path = open_data(run, options), run.checkpoint.path.resolve()
    results = [*results_nearby(run), *(pair for pair in named if _subject(pair[1]) == path)]
    content, source = score(run, data, options, reversed(results))  # what is named first
    context, markers = data.row_tokens(options.split), _markers(data, options.split)
    tasks, text = tasks_in(results), _digest(data_name(run), read_source(data))
    settings = {key: content["settings"].get(key) for key in SCORED}
    sizes = {key: content[key] for key in ("bytes", "tokens")}
    return {
        **_provenance(run),
        "text": text,
        "same_text": run.checkpoint.data_state.get("fingerprint") == data.fingerprint,
        "source": source,
        "scored": {"text": text, "split": options.split, **sizes, **settings},
        "context": context,
        "stride": getattr(data, "eval_stride", None),
        "markers": markers,
        "text_changes": data.tokenizer.text_changes,
        **describe_training(run, data, content.get("train_tokens")),
        **describe_score(run, content, context, markers),
        "tasks": tasks,
        **{f"{t}_{key}": v for t, task in tasks.items() for key, v in task["metrics"].items()},
    }


def _provenance(run: RunRecord) -> dict[str, Any]:
    """Returns what is known of a run without its data."""
    path, here = run.checkpoint.path.resolve(), Path.cwd()
    order = describe_order(run)
    return {
        "run": run.name,
        "row": run.row,
        "checkpoint": str(path.relative_to(here) if path.is_relative_to(here) else path),
        "which": run.checkpoint.which,
        "model": run.model,
        "model_recipe": run.outline.recipe(),
        "reads": run.outline.reads,
        "order": order,
        "tokenizer": _tokenizer(run),
        "recipe": _recipe(run, order),
        **run.record,
    }


def describe_order(run: RunRecord) -> dict[str, Any]:
    """Returns what decides, for a given text, which tokens an optimiser step has, in its order."""
    order: Mapping[str, Any] = run.checkpoint.data_state.get("order", {})
    accumulated = run.record["accumulate_grad_batches"]
    if accumulated is None and run.checkpoint.step:
        accumulated = round(_micro_batches(run) / _ranks(run) / run.checkpoint.step)
    return {"rows": run.outline.reads, **order, "accumulate_grad_batches": accumulated}


def data_name(run: RunRecord) -> str:
    """Returns the class of the corpus that a run was trained on."""
    recipe: Mapping[str, Any] = run.checkpoint.data_recipe or {}
    inner = recipe.get("init_args", {}).get("corpus")
    chosen = inner if isinstance(inner, Mapping) and "class_path" in inner else recipe
    return str(chosen.get("class_path", "")).rpartition(".")[2]


def read_source(data: LanguageDataModule) -> dict[str, Any]:
    """Returns what identifies the text of prepared data, whatever it was tokenised with."""
    corpus = getattr(data, "corpus", data)
    meta = Store(corpus.store_dir).meta
    return {"source": meta.get("source"), "origin": meta.get("origin")}


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


def _recipe(run: RunRecord, order: Mapping[str, Any]) -> str:
    """Returns what runs of different seeds have in common, as text."""
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


# ---- the table: runs that differ in the seed only share a label


def runs_frame(lines: Sequence[Mapping[str, Any]], keys: str | None = None) -> pd.DataFrame:
    """Returns the table of runs with ``label`` and ``seed`` of each.

    Rows are ordered by kind of likelihood and by loss within each; the seeds of a label, which is
    one row of a report, follow one another.

    Args:
        lines: of ``measure``, in any order, at least one.
        keys: of the models' config that name the rows, separated by commas; None: what the command
            line names them, else the class of the model, and what rows of one class differ in.

    Raises:
        ValueError: if no model has such a key.
    """
    runs = pd.DataFrame(list(lines), dtype=object).sort_values("run", ignore_index=True)
    runs = runs.where(runs.notna(), None)
    row = runs.groupby(["row", "recipe", "stride"], sort=False, dropna=False).ngroup()
    labels = label_rows(runs[~row.duplicated()], keys)
    runs["label"] = [labels[number] for number in row]
    groups = sorted((group for _, group in runs.groupby("label", sort=False)), key=_rank)
    return pd.concat([group.assign(seed=_seeds(group)) for group in groups], ignore_index=True)


def _rank(row: pd.DataFrame) -> tuple[int, bool, float, str]:
    """Orders rows; their loss is the mean of bits per byte, else of nats per token.

    Rows in which a run has no loss, as one that has diverged, are the last ones of their kind.
    """
    first, loss = row.iloc[0], row[BITS] if row[BITS].notna().all() else row[NATS]
    mean = statistics.fmean(math.inf if value is None else value for value in loss)
    place = list(KINDS).index(first["likelihood"])
    return place, first["counted"] == ANSWERS, mean, first["label"]


def runs_with_loss(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs of a table that have a loss of text, which is what the figure draws.

    Answers to questions are no text; a run that has diverged has no loss.
    """
    return runs[(runs["counted"] != ANSWERS) & runs[NATS].notna()]


def _seeds(row: pd.DataFrame) -> list[str]:
    """Returns the seed of each run of a row, with that of its data order where those differ."""
    orders = [order.get("seed", "?") for order in row["order"]]
    known = [not (seed is None or isinstance(seed, bool)) for seed in row["seed_everything"]]
    seeds = [str(s) if k else "?" for s, k in zip(row["seed_everything"], known, strict=True)]
    if len(set(orders)) == 1:
        return seeds
    return [f"{seed} (data {order})" for seed, order in zip(seeds, orders, strict=True)]
