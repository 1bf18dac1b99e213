"""Batches of reasoning rows: what is in them, in which order, and what they are counted by."""

import pickle
import warnings
from itertools import chain
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.reasoning import Example
from datamodules.reasoning.batches import RowOrder
from tests.datamodules.reasoning_tasks import OWN, FewQuestions

TEXT = {"query", "query_lengths", "steps", "step_lengths", "step_places", "targets"}
KEYS = TEXT | {"sequence_id", "group", "num_bytes"}
EOS = 256


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Returns a function that makes prepared data of 25 training examples."""
    cache = str(tmp_path_factory.mktemp("reasoning"))

    def build(trainer=None, **options) -> FewQuestions:
        data = FewQuestions(**{"cache_dir": cache, "batch_size": 4, "repeats": 5, **options})
        data.prepare_data()
        data.setup()
        data.trainer = trainer
        return data

    return build


def fake_trainer(rank=0, world_size=1, accumulate=1, counter=None):
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulate,
        limit_train_batches=1.0,
        callbacks=[],
        lightning_module=SimpleNamespace(counter=counter) if counter else SimpleNamespace(),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(
                batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0))
            )
        ),
    )


def batches_of(source):
    return [source.batch(n) for n in range(len(source))]


def rows_in(batch):
    """The used part of each row, as plain values."""
    found = []
    for b in range(len(batch["query"])):
        lengths = batch["step_lengths"][b].tolist()
        found.append(
            {
                "query": batch["query"][b, : batch["query_lengths"][b]].tolist(),
                "steps": [batch["steps"][b, r, :n].tolist() for r, n in enumerate(lengths) if n],
                "places": [p for p in batch["step_places"][b].tolist() if p >= 0],
                "targets": [t for t in batch["targets"][b].tolist() if t >= 0],
                "group": int(batch["group"][b]),
            }
        )
    return found


def equal(first, second):
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


# ---- what is in a batch


def test_a_row_is_its_example(make):
    batches = batches_of(make(repeats=1, eval_batch_size=2).evaluation_source("train"))
    rows = [row for batch in batches for row in rows_in(batch)]
    for row, (number, (marked, steps, answer)) in zip(rows, enumerate(OWN["train"]), strict=False):
        example = Example.from_marked(marked, steps, answer)
        assert row["query"] == [EOS, *example.query.encode()]
        assert row["steps"] == [list(step.encode()) for step in steps]
        assert row["targets"] == [*answer.encode(), EOS]
        assert row["group"] == number
        assert len(row["places"]) == len(steps)
    assert [row["places"] for row in rows[:5]] == [[3, 11], [0, 5, 5, 5], [], [3], [9, 15]]


def test_shapes_types_and_padding(make):
    for batch in batches_of(make(repeats=1, eval_batch_size=2).evaluation_source("train")):
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


def test_bytes_are_those_of_the_answer(make):
    batches = batches_of(make(repeats=1, eval_batch_size=5).evaluation_source("train"))
    assert batches[0]["num_bytes"].tolist() == [len(a.encode()) for _, _, a in OWN["train"]]


def test_rows_without_steps_have_one_empty_place(make):
    batch = make(repeats=1, eval_batch_size=1).evaluation_source("train").batch(2)
    assert batch["steps"].tolist() == [[[EOS]]]
    assert (batch["step_lengths"].tolist(), batch["step_places"].tolist()) == ([[0]], [[-1]])


def test_filling_rows_hold_nothing(make):
    batch = make(repeats=1, eval_batch_size=2).evaluation_source("val").batch(1)
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


def test_a_batch_of_filling_rows_only(make):
    data = make(fake_trainer(rank=2, world_size=3), repeats=1, eval_batch_size=2)
    batch = data.evaluation_source("val").batch(0)
    assert batch["query"].tolist() == [[EOS], [EOS]]
    assert batch["targets"].tolist() == [[-100], [-100]]
    assert batch["steps"].shape == (2, 1, 1)


# ---- evaluation


@pytest.mark.parametrize(("world_size", "rows"), [(1, 1), (1, 4), (2, 2), (3, 4), (4, 5)])
def test_every_example_is_evaluated_once_at_any_world_size(make, world_size, rows):
    seen, lengths = [], set()
    for rank in range(world_size):
        data = make(fake_trainer(rank, world_size), eval_batch_size=rows)
        source = data.evaluation_source("val")
        lengths.add(len(source))
        for batch in batches_of(source):
            real = batch["targets"][:, 0] >= 0
            seen += list(
                zip(batch["sequence_id"][real].tolist(), batch["group"][real].tolist(), strict=True)
            )
            assert len(real) == rows
            assert "epochs" not in batch
    assert sorted(seen) == [(i, i) for i in range(15)]
    assert len(lengths) == 1


def test_a_row_of_evaluation_does_not_depend_on_its_batch(make):
    alone = [
        row
        for b in batches_of(make(eval_batch_size=1).evaluation_source("val"))
        for row in rows_in(b)
    ]
    three = [
        row
        for b in batches_of(make(eval_batch_size=3).evaluation_source("val"))
        for row in rows_in(b)
    ]
    assert alone == three


# ---- the order of training


@pytest.mark.parametrize("order", ["packed", "random"])
def test_the_same_batches_with_any_number_of_workers_and_after_a_restart(make, order):
    runs = [list(make(train_windows=order, num_workers=w).train_dataloader()) for w in (0, 2)]
    assert len(runs[0]) == 6
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))
    loader = make(train_windows=order).train_dataloader()
    loader.load_state_dict({"next_batch": 3})
    assert all(equal(a, b) for a, b in zip(loader, runs[0][3:], strict=True))


@pytest.mark.parametrize("order", ["packed", "random"])
def test_ranks_read_what_one_would(make, order):
    whole = make(train_windows=order).training_source()
    parts = [
        make(fake_trainer(rank, 2), batch_size=2, train_windows=order).training_source()
        for rank in range(2)
    ]
    for n in (0, 5, 6, 17):
        joined = [row for part in parts for row in rows_in(part.batch(n))]
        assert joined == rows_in(whole.batch(n))
        assert all(part.counts(n) == whole.counts(n) for part in parts)
        assert all(part.batch(n)["epochs"] == whole.batch(n)["epochs"] for part in parts)


def test_an_epoch_has_every_example_once_in_a_new_order(make):
    source = make(repeats=5).training_source()  # 25 examples, 6 batches of 4
    groups = [source.batch(n)["group"].tolist() for n in range(18)]
    epochs = [list(chain(*groups[e : e + 6])) for e in (0, 6, 12)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    left_out = [set(range(25)) - set(epoch) for epoch in epochs]
    assert left_out[0] != left_out[1] or left_out[1] != left_out[2]
    assert source.batch(7)["sequence_id"].tolist() == [28, 29, 30, 31]


def test_seed_and_order_decide(make):
    def groups(**options):
        source = make(**options).training_source()
        return [source.batch(n)["group"].tolist() for n in range(6)]

    assert groups() != groups(seed=1)
    assert groups() != groups(train_windows="random")
    assert groups(train_windows="random") != groups(train_windows="random", seed=1)
    drawn = np.concatenate(groups(train_windows="random", batch_size=20, repeats=40)[:5])
    assert 60 < len(set(drawn)) < 100  # of 200, with replacement


def test_epochs_count_passes_over_the_split(make):
    source = make().training_source()
    assert [source.batch(n)["epochs"] for n in (0, 3, 6, 15)] == [0.0, 0.5, 1.0, 2.5]


@pytest.mark.parametrize("order", ["packed", "random"])
def test_a_source_survives_another_process(make, order):
    source = make(train_windows=order).training_source()
    source.batch(0)
    source.counts(0)
    pickled = pickle.dumps(source)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert all(equal(again.batch(n), source.batch(n)) for n in (0, 13))
    assert again.counts(13) == source.counts(13)


def test_rows_are_a_function_of_their_number():
    for order in ("packed", "random"):
        rows = RowOrder(11, order=order, rows_per_batch=3, seed=5)
        whole = rows.examples(np.arange(40))
        again = RowOrder(11, order=order, rows_per_batch=3, seed=5)
        assert [int(again.examples(np.array([n]))[0]) for n in reversed(range(40))] == whole[
            ::-1
        ].tolist()
        assert whole.min() >= 0
        assert whole.max() <= 10


# ---- counts


def test_targets_are_counted_over_all_ranks(make):
    sources = [make(fake_trainer(rank, 2), batch_size=3).training_source() for rank in range(2)]
    for n in range(5):
        counted = sum(int((source.batch(n)["targets"] >= 0).sum()) for source in sources)
        assert [source.counts(n) for source in sources] == [{"targets": float(counted)}] * 2


def counter(batch):
    """What a model may count; it can be pickled."""
    thoughts = int(batch["step_lengths"].sum())
    return {"thoughts": thoughts, "rows": len(batch["query"]), "late": batch["epochs"] >= 0.5}


def test_the_model_says_what_is_counted(make):
    sources = [
        make(fake_trainer(rank, 2, counter=counter), batch_size=3).training_source()
        for rank in range(2)
    ]
    assert len(sources[0]) == 4
    for n in range(4):
        steps = sum(int(source.batch(n)["step_lengths"].sum()) for source in sources)
        expected = {"thoughts": steps, "rows": 6, "late": n >= 2}
        assert sources[0].counts(n) == sources[1].counts(n) == expected
        assert all(isinstance(value, float) for value in sources[0].counts(n).values())
    again = pickle.loads(pickle.dumps(sources[0]))
    assert again.counts(3) == sources[0].counts(3)


def test_counts_are_those_of_the_optimiser_step(make):
    data = make(fake_trainer(accumulate=4, counter=counter))
    batches = list(data.train_dataloader())
    assert len(batches) == 6
    own = [int(batch["step_lengths"].sum()) for batch in batches]
    for group in (range(4), range(4, 6)):
        expected = {"micro_batches": len(group), "thoughts": sum(own[n] for n in group)}
        expected |= {"rows": 4 * len(group), "late": sum(n >= 3 for n in group)}
        assert all(batches[n]["step_normalisers"] == expected for n in group)


def test_a_model_that_counts_nothing_gets_the_targets(make):
    batch = next(iter(make(fake_trainer()).train_dataloader()))
    targets = float((batch["targets"] >= 0).sum())
    assert batch["step_normalisers"] == {"micro_batches": 1.0, "targets": targets}
    assert set(batch) == KEYS | {"step_normalisers", "epochs"}


def test_each_batch_is_counted_once(make):
    counted = []

    def counting(batch):
        counted.append(batch["epochs"])
        return {"targets": 1.0}

    list(make(fake_trainer(accumulate=3, counter=counting)).train_dataloader())
    assert len(counted) == 6


# ---- a trainer


class Recorder(L.LightningModule):
    """Remembers the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.counter = counter

    def training_step(self, batch):
        self.seen.append([batch["epochs"], *batch["group"].tolist()])
        assert batch["step_normalisers"]["rows"] == 8
        return self.weight * batch["query"].float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, folder, ckpt_path=None, **options):
    model = Recorder()
    saving = ModelCheckpoint(folder, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
        accumulate_grad_batches=2,
        limit_val_batches=0,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers, folders, validation
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=False)
    return model.seen


def test_a_resumed_run_goes_on_with_the_next_batch(make, tmp_path):
    whole = fit(make(), tmp_path / "whole", max_epochs=2)
    assert len(whole) == 12
    first = fit(make(), tmp_path / "part", max_steps=4)
    rest = fit(make(), tmp_path, max_epochs=2, ckpt_path=tmp_path / "part" / "step=4.ckpt")
    assert first + rest == whole


# ---- errors


def test_too_few_examples_for_a_batch(make):
    with pytest.raises(ValueError, match="takes 50 examples, the train split has only 25"):
        make(batch_size=50).train_dataloader()


def test_predict_says_what_to_do_instead(make, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Two and two make?\n")
    with pytest.raises(ValueError, match=r"only the answers are scored. .*evaluate.py reason"):
        make(predict_file=str(prompts)).predict_dataloader()


def test_other_data_or_another_order_than_the_checkpoints_warn(make):
    state = make().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(num_workers=2, eval_batch_size=9, block_size=400).load_state_dict(state)
    with pytest.warns(UserWarning, match="batch_size was 4, is 2"):
        make(batch_size=2).load_state_dict(state)
    with pytest.warns(UserWarning, match="train_windows was packed, is random"):
        make(train_windows="random").load_state_dict(state)
    with pytest.warns(UserWarning, match="trained on the data"):
        make(repeats=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0, "batch_size": -1}, "batch_size=-1 .*; block_size=0 "),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"train_windows": "shuffled"}, "'shuffled' must be 'packed' or 'random'"),
        ({"answer_prefix": ""}, "answer_prefix='' must not be empty"),
        ({"step_separator": ""}, "step_separator='' must not be empty"),
        ({"tokenizer": "gpt5"}, "tokenizer='gpt5' is not known"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        FewQuestions(**options)
