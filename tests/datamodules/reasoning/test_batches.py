"""What is in a batch of reasoning rows, and what it is counted by."""

import pickle

import torch

from datamodules.reasoning import Example
from tests.datamodules.reasoning.reasoning_tasks import OWN, batches_of, fake_trainer, rows_in

TEXT = {"query", "query_lengths", "steps", "step_lengths", "step_places", "targets"}

KEYS = TEXT | {"sequence_id", "group", "num_bytes"}

EOS = 256


# ---- what is in a batch


def test_a_row_is_its_example(prepared):
    batches = batches_of(prepared(repeats=1, eval_batch_size=2).evaluation_source("train"))
    rows = [row for batch in batches for row in rows_in(batch)]
    for row, (number, (marked, steps, answer)) in zip(rows, enumerate(OWN["train"]), strict=False):
        example = Example.from_marked(marked, steps, answer)
        assert row["query"] == [EOS, *example.query.encode()]
        assert row["steps"] == [list(step.encode()) for step in steps]
        assert row["targets"] == [*answer.encode(), EOS]
        assert row["group"] == number
        assert len(row["places"]) == len(steps)
    assert [row["places"] for row in rows[:5]] == [[3, 11], [0, 5, 5, 5], [], [3], [9, 15]]


def test_shapes_types_and_padding(prepared):
    for batch in batches_of(prepared(repeats=1, eval_batch_size=2).evaluation_source("train")):
        assert set(batch) == KEYS
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert all(value.is_contiguous() for value in batch.values())
        B, R, Z = batch["steps"].shape
        assert batch["step_lengths"].shape == batch["step_places"].shape == (B, R)
        assert batch["query"].shape == (B, batch["query_lengths"].max())
        assert max(1, batch["step_lengths"].max()) == Z
        width = torch.arange(batch["query"].shape[1])
        assert (batch["query"][width >= batch["query_lengths"][:, None]] == EOS).all()
        assert (batch["steps"][torch.arange(Z) >= batch["step_lengths"][..., None]] == EOS).all()
        assert torch.equal(batch["step_places"] >= 0, batch["step_lengths"] > 0)
        scored = batch["targets"] >= 0
        assert torch.equal(scored, torch.arange(scored.shape[1]) < scored.sum(1)[:, None])
        assert (scored.sum(1).max() == scored.shape[1]).item()


def test_rows_without_steps_have_one_empty_place(prepared):
    batch = prepared(repeats=1, eval_batch_size=1).evaluation_source("train").batch(2)
    assert batch["steps"].tolist() == [[[EOS]]]
    assert (batch["step_lengths"].tolist(), batch["step_places"].tolist()) == ([[0]], [[-1]])


def test_filling_rows_hold_nothing(prepared):
    batch = prepared(repeats=1, eval_batch_size=2).evaluation_source("val").batch(1)
    assert rows_in(batch)[1] == {
        "query": [EOS],
        "steps": [],
        "places": [],
        "targets": [],
        "group": -1,
    }
    assert batch["query_lengths"].tolist() == [1 + len("Val three"), 1]
    assert batch["num_bytes"].tolist()[1] == 0
    assert (batch["targets"][1] == -100).all()


# ---- counts


def counter(batch):
    thoughts = int(batch["step_lengths"].sum())
    return {"thoughts": thoughts, "rows": len(batch["query"]), "late": batch["epochs"] >= 0.5}


def test_the_model_says_what_is_counted(prepared):
    ranks = [
        prepared(fake_trainer(rank, 2, counter=counter), batch_size=3).training_source()
        for rank in range(2)
    ]
    again = pickle.loads(pickle.dumps(ranks[0]))
    for n in range(4):
        steps = sum(int(source.batch(n)["step_lengths"].sum()) for source in ranks)
        expected = {"thoughts": float(steps), "rows": 6.0, "late": float(n >= 2)}
        assert [source.counts(n) for source in (*ranks, again)] == [expected] * 3


def test_each_batch_is_counted_once(prepared):
    counted = []

    def counting(batch):
        counted.append(batch["epochs"])
        return {"targets": 1.0}

    list(prepared(fake_trainer(accumulate=3, counter=counting)).train_dataloader())
    assert len(counted) == 6
