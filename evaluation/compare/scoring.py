"""The likelihood of held-out text under a run's model, and what inference costs it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from datamodules import LanguageDataModule
from evaluation.arguments import Split
from evaluation.checkpoint.corpus import build_data, check_fit, prepare
from evaluation.checkpoint.device import Device, Precision, pick_device
from evaluation.checkpoint.provenance import count_lexical
from evaluation.checkpoint.rebuild import build_model
from evaluation.compare.found import Run
from evaluation.compare.results import ResultFile
from evaluation.compare.training import has_markers
from evaluation.perplexity import measure_perplexity
from lightning_models.checkpoint import CheckpointError

NOW = "measured now"
SAME_RECIPE = frozenset({"cache_dir", "num_proc", "num_workers", "predict_file"})
"""Arguments of data that change nothing of what is scored."""


@dataclass(frozen=True)
class How:
    """How every run is scored."""

    split: Split = "val"
    limit_batches: int | None = None
    batch_size: int | None = None
    """Rows a batch; None: as trained."""
    precision: Precision = "32"
    device: Device = "auto"


@dataclass(frozen=True)
class Score:
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


def open_data(run: Run, how: How) -> LanguageDataModule:
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


def score(run: Run, data: LanguageDataModule, how: How, results: Iterable[ResultFile]) -> Score:
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
    return Score(content, source, context, _markers(data, how.split), float(generation))


def _measured(run: Run, data: LanguageDataModule, how: How) -> dict[str, Any]:
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
    run: Run, data: LanguageDataModule, how: How, results: Iterable[ResultFile]
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
    if data.rows == "reasoning" or not has_markers(data):
        return 1.0
    counts = data.counts(split)
    lexical = count_lexical(data.stream(split), data.tokenizer.special_ids)
    return counts.tokens / max(1, lexical + counts.documents)
