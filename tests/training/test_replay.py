"""``fit --replay STEP``: the step's batches and losses, from the checkpoint before it."""

import json

import pytest

from tests.reliability.runs import logged
from tests.training.conftest import checkpoint_folder
from training import main

SETTINGS = (
    "--trainer.max_steps=9",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.val_check_interval=8",
    "--trainer.gradient_clip_val=0.5",
)


@pytest.fixture(scope="module")
def run(data_arguments, model_arguments, quick, tmp_path_factory):
    """A run with checkpoints of the steps 3, 4, 6, 8 and 9: its folder and command."""
    root = tmp_path_factory.mktemp("replayed")
    command = ["fit", *data_arguments, *model_arguments, *quick, *SETTINGS]
    command.append(f"--trainer.default_root_dir={root}")
    kept = ("--checkpoint.save_top_k=-1", "--checkpoint.every_n_train_steps=3")
    assert main([*command, *kept]) == 0
    return root, command


@pytest.mark.parametrize("step", [6, 9])
def test_it_is_the_step_of_the_run(run, step, tmp_path):
    root, command = run
    before = sorted(root.rglob("*"))
    arguments = ("--ckpt_path=last", f"--checkpoint.dirpath={checkpoint_folder(root)}")
    arguments += (f"--trainer.default_root_dir={tmp_path}",)
    assert main([*command, *arguments, f"--replay={step}"]) == 0
    found = json.loads((tmp_path / f"replay-step={step}.json").read_text())
    values = logged(next(root.rglob("version_0")))
    objectives = [micro["objective"] for micro in found["batches"]]
    assert sum(objectives) == pytest.approx(values["train/loss", step - 1], rel=1e-6)
    assert [micro["number"] for micro in found["batches"]] == [2 * step - 2, 2 * step - 1]
    numbers = [row["sequence_id"] for micro in found["batches"] for row in micro["rows"]]
    assert numbers == list(range(8 * step - 8, 8 * step))
    # dropout is off where rows are scored
    nats = [row["nats"] for micro in found["batches"] for row in micro["rows"]]
    assert sum(nats) / len(nats) == pytest.approx(sum(objectives), rel=0.1)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(("step", "checkpoint"), [(10, "last"), (0, "last"), (3, "last")])
def test_a_step_that_cannot_be_shown(run, step, checkpoint, capsys):
    _, command = run
    assert main([*command, f"--ckpt_path={checkpoint}", f"--replay={step}"]) == 2
    assert f"replay ({step})" in capsys.readouterr().err
