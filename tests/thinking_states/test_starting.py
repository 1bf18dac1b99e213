"""Backbones from the checkpoint of another model."""

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_models.checkpoint import CheckpointError
from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.curricula import load_backbone
from tests.thinking_states.questions import Questions, V, build, quiet_trainer

STAGES = {"max_latent_stage": 2, "epochs_per_stage": 1}


def checkpoint_of(folder, name, **changes):
    """A checkpoint of a model that was not trained, and its backbone's weights."""
    model, path = build(name, double=False, seed=1, **changes), folder / "taught.ckpt"
    trainer = quiet_trainer(folder)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path)
    return str(path), model.network.backbone.state_dict()


def test_training_starts_with_the_backbone_of_another_model(tmp_path):
    (path, taught), seen = checkpoint_of(tmp_path, "cot"), {}

    class Look(L.Callback):
        def on_train_start(self, trainer, model):
            weights = model.network.backbone.state_dict()
            seen.update({name: value.clone() for name, value in weights.items()})

    changes = {**STAGES, "first_stage": 1, "start_from": path, "special_rows_from": 7}
    student = build("coconut", double=False, optimizer=OptimizerConfig(), **changes)
    trainer = quiet_trainer(tmp_path, Look(), max_steps=1, limit_val_batches=0)
    trainer.fit(student, Questions())
    for name, value in taught.items():
        torch.testing.assert_close(seen[name][: len(value)], value)
    embedding = seen["model.embed_tokens.weight"]
    assert (embedding[V : V + 3] == embedding[7]).all()
    resumed = tmp_path / "resumed.ckpt"
    trainer.save_checkpoint(resumed)
    Path(path).unlink()
    again = build("coconut", double=False, optimizer=OptimizerConfig(), **changes)
    trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(again, Questions(), ckpt_path=str(resumed), weights_only=True)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("taught", "key"),
    [
        ({"dim": 8}, "embed_tokens"),
        ({"ffn_dim": 32}, "mlp"),
        ({"num_layers": 1}, "layers.1"),
        ({"num_layers": 3}, "layers.2"),
        ({"tie_head": False}, "head.weight"),
    ],
)
def test_a_backbone_of_another_shape_is_refused(taught, key, tmp_path):
    path, _ = checkpoint_of(tmp_path, "cot", **taught)
    student = build("coconut", double=False)
    with pytest.raises(CheckpointError, match=rf"start_from .*{key}.* is in one of the two only"):
        load_backbone(student.network, student.config, path)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_added_tokens_are_not_those_of_the_checkpoint(tied, tmp_path):
    """Their ids may mean something else there, or nothing."""
    path, taught = checkpoint_of(tmp_path, "coconut", tie_head=tied)
    student = build("coconut", double=False, tie_head=tied)
    before = {k: v.clone() for k, v in student.network.backbone.state_dict().items()}
    load_backbone(student.network, student.config, path)
    for key, value in student.network.backbone.state_dict().items():
        by_token = key.endswith(("embed_tokens.weight", "head.weight"))
        rows = V if by_token else len(value)
        assert torch.equal(value[:rows], taught[key][:rows])
        assert torch.equal(value[rows:], before[key][rows:])
        assert not by_token or not torch.equal(value[rows:], taught[key][rows:])
