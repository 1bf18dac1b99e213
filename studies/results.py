"""What finished runs left behind: evaluations, curves, times, sizes."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.runs.events import FLOPS_TAG, read_scalars
from studies.runner import RunFolder
from studies.study import LOGGED, Analysis, Run, Study

SPEED_TAG = "throughput/tokens_per_second"


@dataclass(frozen=True)
class Result:
    """A trained run and what was measured on it."""

    run: Run
    parameters: int
    """Trainable numbers."""
    seconds: float
    """Wall time of training, whole processes: start-up and validations included."""
    sittings: int
    """Processes that the training took; more than 1 where it was stopped and resumed."""
    speed: float | None
    """Median tokens per second of training; None where too few steps were logged."""
    training_flops: float | None
    """FLOPs per token of a training step; None as above."""
    tokens: int
    """Tokens, or questions, that the run was trained on; 0 where they are not known."""
    curve: list[tuple[int, float]]
    """Tokens, or questions, trained on, and the study's ``curve``."""
    evaluations: dict[str, dict[str, Any]]
    """Content of the JSON files by evaluation."""
    versions: dict[str, str]
    """Of what the run was trained with, by name."""
    files: dict[str, list[Path]] = field(default_factory=dict)
    """Files of each analysis that go beside the report."""


def collect(study: Study, folder: Path) -> list[Result]:
    """Returns the results of all runs that are trained, extra ones too, in the study's order.

    Args:
        study: which runs.
        folder: that of ``runner.run_study``.
    """
    places = [(run, RunFolder(folder / run.folder)) for run in study.seeded(study.names)]
    return [_read(study, run, place) for run, place in places if place.trained]


def _read(study: Study, run: Run, place: RunFolder) -> Result:
    checkpoint = place.checkpoint
    assert checkpoint is not None  # the run is trained
    scalars = read_scalars(checkpoint.parent.parent)
    flops, speeds = scalars.get(FLOPS_TAG, {}), scalars.get(SPEED_TAG, {})
    record = place.record["train"]
    evaluations = {
        evaluation.name: json.loads(place.output(evaluation).read_text())
        for evaluation in run.evaluations
        if place.output(evaluation).is_file()
    }
    evaluations[LOGGED] = {tag: values[max(values)] for tag, values in scalars.items() if values}
    tokens, losses = _tokens(study, run, evaluations), scalars.get(study.curve, {})
    steps = 1 + max(losses, default=0) if study.epochs is not None else study.steps_of(run)
    return Result(
        run=run,
        parameters=count_parameters(checkpoint),
        seconds=record["seconds"],
        sittings=record["sittings"],
        speed=statistics.median(speeds.values()) if speeds else None,
        training_flops=next(iter(flops.values()), None),
        tokens=tokens,
        curve=[
            (tokens * (step + 1) // steps, value)  # steps are logged from 0
            for step, value in sorted(losses.items())
        ],
        evaluations=evaluations,
        versions=read_versions(checkpoint.parent.parent / "config.yaml"),
        files={
            analysis.name: _files(analysis, place.analysis(analysis), own=bool(study.text.files))
            for analysis in run.analyses
        },
    )


def _tokens(study: Study, run: Run, evaluations: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns how many tokens, or questions, a run was trained on.

    Epochs leave out at most a batch each.
    """
    if study.epochs is None:
        return study.steps_of(run) * study.units_per_step
    once = next((content.get("train_tokens") for content in evaluations.values()), None)
    return study.epochs * int(once or 0)


def _files(analysis: Analysis, folder: Path, *, own: bool) -> list[Path]:
    found = {path for pattern in analysis.files for path in folder.rglob(pattern)}
    if own:
        found -= {path for pattern in analysis.quoting for path in folder.rglob(pattern)}
    return sorted(found)


def read_versions(record: Path) -> dict[str, str]:
    """Returns the versions on top of the ``config.yaml`` of a training run; empty without one."""
    versions = {}
    for line in record.read_text(encoding="utf-8").splitlines() if record.is_file() else []:
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not (colon and line.startswith("# ")):
            break
        if name not in ("run", "command"):
            versions[name] = value
    return versions


def count_parameters(checkpoint: Path) -> int:
    """Returns how many trainable numbers the model in a checkpoint has."""
    from evaluation.checkpoint.rebuild import build_model
    from lightning_models.checkpoint import read_checkpoint

    model = build_model(read_checkpoint(checkpoint))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
