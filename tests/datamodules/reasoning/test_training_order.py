"""The order of training: epochs, ranks, workers, restarts, and a trainer's limits."""

import lightning as L
import pytest
import torch

from tests.datamodules.reasoning.reasoning_tasks import fake_trainer, rows_in
from tests.quiet import quiet_trainer


def test_ranks_read_what_one_would(prepared):
    whole = prepared().training_source()
    parts = [prepared(fake_trainer(rank, 2), batch_size=2).training_source() for rank in range(2)]
    for n in (0, 5, 6, 17):
        joined = [row for part in parts for row in rows_in(part.batch(n))]
        assert joined == rows_in(whole.batch(n))
        assert all(part.counts(n) == whole.counts(n) for part in parts)
        assert all(part.batch(n)["epochs"] == whole.batch(n)["epochs"] for part in parts)


# ---- epochs


def test_epochs_are_passes_over_the_split(prepared):
    source = prepared().training_source()
    assert [source.batch(n)["epochs"] for n in (0, 3, 6, 15)] == [0.0, 0.5, 1.0, 2.5]


@pytest.mark.parametrize("limit", [3, 0.5])
def test_epochs_are_those_of_a_trainer_that_makes_them_shorter(prepared, limit):
    whole, source = (prepared(fake_trainer(limit=n)).training_source() for n in (1.0, limit))
    assert [source.batch(n)["epochs"] for n in (0, 1, 3, 6)] == [0.0, 1 / 3, 1.0, 2.0]
    assert rows_in(source.batch(7)) == rows_in(whole.batch(7))  # the data go on all the same


# ---- a trainer


def rows_of(batch):
    return {"rows": len(batch["query"])}


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.counter = rows_of

    def training_step(self, batch):
        self.seen.append([batch.get("epochs"), *batch["group"].tolist()])
        assert batch["step_normalisers"]["rows"] == 8
        return self.weight * batch["query"].float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")  # advice on workers, folders, validation
def test_a_run_that_overfits_on_purpose_repeats_its_batches_without_epochs(prepared, tmp_path):
    model = Recorder()
    options = {"max_epochs": 2, "overfit_batches": 2, "limit_val_batches": 0}
    quiet_trainer(tmp_path, accumulate_grad_batches=2, **options).fit(model, prepared())
    seen = model.seen
    assert [epochs for epochs, *_ in seen] == [None] * 4
    assert seen[:2] == seen[2:]
