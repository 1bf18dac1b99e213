"""The contract of every analysis: what it writes, and that it leaves training alone.

One line of ``analyses.CASES`` adds an analysis.
"""

import math
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.analysis.base import Findings
from callbacks.random_state import undisturbed
from evaluation.runs import read_scalars
from lightning_models.checkpoint import WITHIN
from tests.callbacks.analyses import BY_NAME, CASES
from tests.callbacks.written import columns, names, read_csv, scalars

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture
def data_of(request):
    """The data of such a model; a new datamodule each time."""
    return lambda case: request.getfixturevalue(case.data)()


@EACH
def test_everything_is_written_after_every_nth_validation(case, data_of, make_trainer, tmp_path):
    """Files, pictures and scalars of the second of three; sweeps are left to the verb validate."""
    trainer = make_trainer(
        case.make(every_n_validations=2),
        logger=TensorBoardLogger(tmp_path),
        max_steps=3,
        val_check_interval=1,
        limit_val_batches=2,
    )
    trainer.fit(case.build(), data_of(case))
    log = tmp_path / "lightning_logs" / "version_0"
    folder = log / case.name
    of_run = case.files(case.of_run)
    expected = case.files(case.tables) | case.more | {"scalars.csv"}
    assert names(folder, 2) == expected
    assert {path.name for path in folder.iterdir()} == of_run | {
        f"val-step=2-{n}" for n in expected
    }
    for name, head in case.tables.items():
        assert columns(folder, name, 2) == head.split()
    for name, head in case.of_run.items():
        assert columns(folder, f"{name}.csv") == head.split()
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(log)).Reload()
    tags, found = events.Tags(), scalars(folder, 2)
    pictures = {name.removesuffix(".png") for name in expected | of_run if name.endswith(".png")}
    tiles = {tag.rpartition("/")[0] for tag in tags["images"]}
    assert tiles == {f"{WITHIN}{case.kind.image_tag}/{name}" for name in pictures}
    of_analysis = tuple(WITHIN + prefix for prefix in case.prefix.split())
    details = {tag for tag in tags["scalars"] if tag.startswith(WITHIN)}
    shown = {tag for tag in details if tag.startswith(of_analysis)}
    assert shown
    assert shown <= {WITHIN + name for name in found}
    kinds = [set(tags["scalars"]), set(tags["images"])]
    assert len(set.union(*kinds)) == sum(map(len, kinds))  # TensorBoard shows one kind a tag
    assert max(tags["scalars"], key=str.lower).startswith(WITHIN)  # behind loss and learning rate
    assert {"val/loss", "lr"} < {tag for tag in tags["scalars"] if tag < WITHIN}
    assert len(details) + len(tags["images"]) <= 10
    for tag in shown:
        (event,) = events.Scalars(tag)
        assert event.step == 2  # as in the names of the files
        assert event.value == pytest.approx(found[tag.removeprefix(WITHIN)], rel=1e-4)
    logged = read_scalars(log)
    assert {tag.removeprefix(WITHIN) for tag in details} <= set(logged)
    for tag in tags["images"]:
        image = events.Images(tag)[0]  # those of the run come once more at its end
        assert image.step == 2
        assert image.width <= 800  # can be read in a tile


@EACH
def test_a_validation_alone_sweeps_too(case, data_of, make_trainer, tmp_path, undrawn):
    model = case.build()
    config = model.config
    trainer = make_trainer(case.make(), limit_val_batches=2)
    trainer.validate(model, data_of(case), verbose=False)
    folder = tmp_path / case.name
    tables = case.tables | case.swept
    more = {name for name in case.more if not name.endswith(".png")}
    assert names(folder) == case.files(tables, drawn=False) | more | {"scalars.csv"}
    for name, head in tables.items():
        assert columns(folder, name) == head.split()
    recorded = {name: read_csv(folder, name) for name in tables}
    for name, draw in case.figures.items():
        if name not in case.of_run:
            assert draw(recorded).axes  # figures need nothing but what is written
    if case.swept:
        assert model.config is model.network.config is config


@EACH
def test_training_is_the_same_with_and_without(case, data_of, make_trainer, undrawn):
    """Weights, metrics, draws and modes; the analysis' own scalars aside."""
    ends = []
    for callbacks in ((), (case.make(**({"sweep_every_n_validations": 1} if case.swept else {})),)):
        random.seed(0)
        np.random.seed(0)
        options = {"accumulate_grad_batches": 2, "val_check_interval": 1}  # also within steps
        trainer = make_trainer(*callbacks, max_steps=2, **options)
        model = case.build(**BY_NAME[case.method].noise)
        trainer.fit(model, data_of(case))
        draws = torch.rand(1).item(), np.random.rand(), random.random()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        modes = [child.training for child in model.modules()]
        counts = getattr(model, "sentence_steps", None)
        ends.append((model.state_dict(), metrics, draws, modes, counts))
    (weights, *rest), (weights_with, *rest_with) = ends
    assert rest_with == rest
    assert weights_with.keys() == weights.keys()
    assert all(torch.equal(weights_with[name], weight) for name, weight in weights.items())


@EACH
def test_a_model_without_the_statistics_is_reported_once(case, request, make_trainer, tmp_path):
    data = request.getfixturevalue(case.data_without)()
    trainer = make_trainer(case.make(), max_steps=2, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(BY_NAME[case.without].build(), data)
    reported = [str(warning.message) for warning in caught]
    (line,) = [text for text in reported if text.startswith(case.name.replace("_", " "))]
    assert BY_NAME[case.without].model.__name__ in line
    assert not (tmp_path / case.name).exists()


@EACH
def test_findings_of_ranks_add_up(case):
    """Each rank collects a batch of its own; the report is that of one process with both."""
    method, model = BY_NAME[case.method], case.build().eval()
    analysis, together, merged = case.make(), Findings(), Findings()
    for seed, rows in enumerate((3, 2)):
        own = Findings()
        for findings in (own, together):
            with undisturbed(model):
                analysis._collect(None, model, method.batch(rows, 24, seed), findings)
        merged.append(own)
    trainer = SimpleNamespace(datamodule=None)
    first, second = (analysis._report(trainer, model, each).files() for each in (together, merged))
    assert second == first
    assert "scalars.csv" in first


@EACH
def test_half_precision(case, data_of, make_trainer, tmp_path, undrawn):
    found = []
    for precision in ("32-true", "bf16-mixed"):
        trainer = make_trainer(case.make(), precision=precision)
        trainer.validate(case.build(), data_of(case), verbose=False)
        found.append(scalars(tmp_path / case.name))
    full, half = found
    assert half.keys() <= full.keys()  # what is all rounding is not fitted
    assert all(math.isfinite(value) for value in half.values())
    for name, share in case.steady.items():
        assert half[name] == pytest.approx(full[name], rel=share)


COMPILED = [
    pytest.param(case, marks=[pytest.mark.slow] if case.swept else [], id=case.name)
    for case in CASES
    if case.name in ("fork_analysis", "posterior_analysis")
]


@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_network_changes_no_number(case, data_of, make_trainer, tmp_path, undrawn):
    found, graphs = [], []
    for model in (case.build(), case.build()):
        if found:
            model.network.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        make_trainer(case.make()).validate(model, data_of(case), verbose=False)
        found.append(scalars(tmp_path / case.name))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert graphs  # the validation itself ran compiled
