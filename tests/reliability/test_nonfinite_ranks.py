"""nan on one rank only: all ranks agree, one of them speaks."""

import pytest
import torch

from tests.programs import ROOT
from tests.reliability.runs import Run, finished

SCHEDULE = (
    "--model=poisoned_model.PoisonedLM",
    "--trainer.devices=2",
    "--trainer.strategy=ddp",
    "--trainer.max_steps=8",
    "--trainer.accumulate_grad_batches=2",
    "--checkpoint.every_n_train_steps=2",
    "--trainer.limit_val_batches=0",
)
HERE = {"PYTHONPATH": str(ROOT / "tests" / "reliability"), "POISON": "1:9"}


@pytest.fixture
def run(text_file, tmp_path):
    run = Run(text_file, tmp_path / "run", *SCHEDULE, **HERE)
    run.name = "PoisonedLM"
    return run


def test_two_ranks_stop_with_one_message(run):
    errors = finished(run.start(), code=3)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: step 5, lr ")
    assert "rank 1: the loss of batch 9 is nan (terms: nll nan), sequence_ids 76, 77," in line
    assert f"The last good checkpoint is {run.last}." in line
    assert "Traceback" not in errors
    content = torch.load(run.last, weights_only=True)
    assert content["global_step"] == 4
    assert all(value.isfinite().all() for value in content["state_dict"].values())


@pytest.mark.slow
def test_two_ranks_refuse_a_checkpoint_of_weights_that_are_not_finite(run):
    """No loss shows them, and on rank 0, which writes, they are finite."""
    run.environment |= {"POISON": "", "OVERFLOW": "1:3"}
    errors = finished(run.start(), code=3)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the weights are not finite after step 4: ")
    assert "in 1 parameters (first: network.spare). They are not saved. " in line
    assert f"The last good checkpoint is {run.last}." in line
    assert "Traceback" not in errors
    assert torch.load(run.last, weights_only=True)["global_step"] == 2


@pytest.mark.slow
def test_two_ranks_skip_the_same_step(run):
    errors = finished(run.start("--nonfinite.action=skip"))
    assert errors.count("is skipped (1 so far)") == 1
    content = torch.load(run.last, weights_only=True)
    assert content["global_step"] == 8
    steps = {int(state["step"]) for state in content["optimizer_states"][0]["state"].values()}
    assert steps == {7}
    assert all(value.isfinite().all() for value in content["state_dict"].values())
