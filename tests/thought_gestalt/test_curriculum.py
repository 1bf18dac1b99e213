"""Streams that are cut again between epochs, in a run that is stopped and goes on."""

import lightning as L
import pytest
import torch

from callbacks import ResumeState
from tests.methods import METHODS
from tests.quiet import quiet_trainer

EPOCHS = 3
LENGTHS = {"max_sentences": 2, "curriculum_step": 2, "curriculum_epochs": 1, "batch_size": 48}


class Seen(L.Callback):
    """Notes the sentences of every training batch, and the longest stream of each epoch."""

    def __init__(self):
        self.batches, self.longest = [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["tokens"])
        most = int((batch["lengths"] > 0).sum(dim=1).max())
        epoch = trainer.current_epoch
        self.longest[epoch] = max(most, self.longest.get(epoch, 0))


@pytest.fixture
def train(make_sentences, tmp_path):
    def run(ckpt_path=None, *callbacks):
        (method,) = (m for m in METHODS if m.name == "thought-gestalt")
        seen = Seen()
        limits = {"max_epochs": EPOCHS, "limit_val_batches": 0}
        saves = {"enable_checkpointing": bool(callbacks), **limits}
        trainer = quiet_trainer(tmp_path, ResumeState(), seen, *callbacks, **saves)
        torch.manual_seed(5)
        model = method.build()
        data = make_sentences(**LENGTHS)
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
        return model, trainer, seen

    return run


def test_a_resumed_run_cuts_streams_as_the_whole_one(train, tmp_path):
    """Stopped one batch before an epoch's end, at it, and one batch into the next."""
    kept = L.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    whole, trainer, all_seen = train(None, kept)
    steps = trainer.num_training_batches
    assert steps > 2
    assert [all_seen.longest[e] for e in range(EPOCHS)] == [2, 4, 6]
    for stop in (steps - 1, steps, 2 * steps + 1):
        resumed, _, seen = train(str(tmp_path / f"step={stop}.ckpt"))
        assert len(seen.batches) == EPOCHS * steps - stop
        for mine, theirs in zip(seen.batches, all_seen.batches[stop:], strict=True):
            assert torch.equal(mine, theirs)
        weights = zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in weights)
