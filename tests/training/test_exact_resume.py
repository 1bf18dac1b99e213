"""A stopped and resumed run ends with the same bits as one that was never stopped."""

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.training.conftest import checkpoint_folder, load

# Epochs of 7 micro-batches, steps of 2: the last step of each epoch has one micro-batch only.
SCHEDULE = (
    "--trainer.limit_train_batches=7",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.max_steps=10",
    "--trainer.gradient_clip_val=0.5",
    "--trainer.val_check_interval=3",
    "--checkpoint.save_top_k=-1",
)


def same(a, b) -> bool:
    """Whether two nested structures are equal, tensors in every bit."""
    (ours, tree), (theirs, other_tree) = tree_flatten(a), tree_flatten(b)
    return tree == other_tree and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(ours, theirs, strict=True)
    )


def assert_equal_end(ours, theirs):
    a, b = load(ours), load(theirs)
    assert a["global_step"] == b["global_step"] == 10
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "resume_state"):
        assert same(a[key], b[key]), key


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture
def whole_run(fit, uninterrupted):
    """Checkpoints of a run of ten steps, one after each step and each validation."""
    folder = checkpoint_folder(uninterrupted)
    if not folder.exists():
        assert fit(uninterrupted, *SCHEDULE, "--checkpoint.every_n_train_steps=1") == 0
    return folder


@pytest.mark.parametrize("step", [1, 3, 4, 6, 9])
def test_resumed_from_any_step_equals_uninterrupted(fit, whole_run, tmp_path, step):
    start = f"--ckpt_path={whole_run}/step={step}.ckpt"
    assert fit(tmp_path, *SCHEDULE, start) == 0
    assert_equal_end(checkpoint_folder(tmp_path) / "last.ckpt", whole_run / "last.ckpt")


def test_resumed_between_accumulated_batches_equals_uninterrupted(fit, whole_run, tmp_path):
    """The validation after batch 3 falls between the two micro-batches of step 2."""
    validated_only = (*SCHEDULE, "--checkpoint.train_time_interval=null")
    assert fit(tmp_path / "a", *validated_only) == 0
    start = checkpoint_folder(tmp_path / "a") / "step=1.ckpt"
    saved = load(start)["resume_state"]
    assert saved["unfinished_step"]
    assert saved["gradients"]
    assert fit(tmp_path / "b", *validated_only, f"--ckpt_path={start}") == 0
    assert_equal_end(checkpoint_folder(tmp_path / "b") / "last.ckpt", whole_run / "last.ckpt")


def test_validation_and_samples_do_not_change_training(fit, whole_run, tmp_path):
    other = ("--trainer.val_check_interval=1", "--samples.every_n_validations=1")
    assert fit(tmp_path, *SCHEDULE, *other, "--trainer.num_sanity_val_steps=2") == 0
    assert_equal_end(checkpoint_folder(tmp_path) / "last.ckpt", whole_run / "last.ckpt")


def test_the_comparison_sees_dropout(fit, whole_run, tmp_path):
    """Another seed of the same data order ends elsewhere, so equality above means something."""
    assert fit(tmp_path, *SCHEDULE, "--seed_everything=4321") == 0
    end = checkpoint_folder(tmp_path) / "last.ckpt"
    assert not same(load(end)["state_dict"], load(whole_run / "last.ckpt")["state_dict"])
