"""The contract of every data module, from tests/data_modules.py.

Batch n is a pure function of (seed, n, rank, world size); ranks share an epoch; evaluation scores
every target once; data are prepared once, and rebuilt from plain values.
"""

import io
import pickle
from itertools import chain, combinations

import pytest
import torch
from data_modules import DATA_MODULES, write_files

import datamodules
from datamodules.store import SPLITS
from lightning_models.recipe import build as build_recipe
from tests.datamodules.reasoning.reasoning_tasks import fake_trainer

TRAINED = [case for case in DATA_MODULES if case.trains]


def name_of(case):
    return f"{case.kind}-{DATA_MODULES.index(case)}"


every = pytest.mark.parametrize("case", DATA_MODULES, ids=name_of)
trained = pytest.mark.parametrize("case", TRAINED, ids=name_of)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the files, and the stores of all cases."""
    path = tmp_path_factory.mktemp("data_modules")
    write_files(path)
    return path


@pytest.fixture
def build(folder, little_documentation, monkeypatch):
    monkeypatch.chdir(folder)

    def make(case, trainer=None, **options):
        data = case.build(**options)
        data.prepare_data()
        data.setup()
        data.trainer = trainer
        return data

    return make


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        for key, value in a.items()
    )


def texts(data, split):
    if isinstance(data, datamodules.ReasoningDataModule):
        return [repr(example) for example in data.examples(split)]
    return list(data.questions(split) if hasattr(data, "questions") else data.documents(split))


@every
def test_prepared_once_whatever_does_not_decide_the_text(build, folder, case):
    def stamps():
        files = (folder / "cache").rglob("*")
        return {path: path.stat().st_mtime_ns for path in files if path.is_file()}

    data, before = build(case), stamps()
    others = [build(case, **{key: 3}) for key in ("seed", "batch_size", "eval_batch_size")]
    others.append(build(case, validation_split="test"))
    assert {other.store_dir for other in others} == {data.store_dir}
    assert stamps() == before


@trained
def test_batch_n_is_a_pure_function_of_n(build, case):
    source = build(case).training_source()
    epoch = len(source)
    numbers = [epoch + 1, 0, 3 * epoch + 2, 1]
    batches = {n: source.batch(n) for n in numbers}
    pickled = pickle.dumps(source)
    assert len(pickled) < 10_000
    for again in (build(case).training_source(), source, pickle.loads(pickled)):
        assert all(equal(again.batch(n), batches[n]) for n in reversed(numbers))
    assert not equal(source.batch(0), source.batch(epoch))
    assert not equal(source.batch(0), build(case, seed=1).training_source().batch(0))


@trained
def test_loaders_go_on_anywhere_and_workers_change_nothing(build, case):
    whole = list(build(case).train_dataloader())
    assert len(whole) == len(build(case).training_source()) > 3
    for start, workers in ((2, 2), (len(whole) - 1, 0)):
        loader = build(case, num_workers=workers).train_dataloader()
        loader.load_state_dict({"next_batch": start})
        assert all(equal(a, b) for a, b in zip(loader, whole[start:], strict=True))


def test_a_loader_is_saved_between_two_batches(build):
    case = TRAINED[0]
    first = build(case).train_dataloader()
    batches = iter(first)
    seen = [next(batches), next(batches)]
    state = first.state_dict()
    assert state == {"next_batch": 2}
    second = build(case).train_dataloader()
    second.load_state_dict(state)
    whole = list(build(case).train_dataloader())
    assert all(equal(a, b) for a, b in zip([*seen, *second], whole, strict=True))


@trained
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_epoch_and_count_alike(build, case, world_size):
    ranks = [
        build(case, fake_trainer(rank, world_size), batch_size=2).training_source()
        for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    seen = []
    for n in range(len(ranks[0]), min(2 * len(ranks[0]), len(ranks[0]) + 100)):
        batches = [rank.batch(n) for rank in ranks]
        seen += [i for batch in batches for i in batch["sequence_id"].tolist()]
        targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
        assert {rank.counts(n)["targets"] for rank in ranks} == {float(targets)}
        assert len({batch.get("sentence_steps") for batch in batches}) == 1
    assert len(seen) == len(set(seen))


STATED = {"global_batch": 4}
LAYOUTS = ((1, {"batch_size": 4}), (1, {"batch_size": 3}), (2, {"batch_size": 9}), (4, {}))
STATED_OF_SENTENCES = {"global_batch": 4, "global_batch_tokens": 150}
LAYOUTS_OF_SENTENCES = (
    (1, {"batch_tokens": 150}),
    (2, {"batch_tokens": 110}),
    (1, {"batch_tokens": 90, "batch_size": 2}),
    (3, {"batch_tokens": 150}),
    (4, {"batch_tokens": 70}),
)
"""Devices, and what each takes at once."""


def steps_of(build, case, stated, devices, most):
    """The rows of each step of an epoch and a half, its normalisers, and all of its batches."""
    ranks = [build(case, fake_trainer(rank, devices), **stated, **most) for rank in range(devices)]
    step = ranks[0].step_batch(devices)
    for data in ranks:
        data.trainer.accumulate_grad_batches = step.accumulate
    loaders = [data.train_dataloader() for data in ranks]
    assert len(loaders[0]) % step.accumulate == 0
    epoch = len(loaders[0]) // step.accumulate
    found = []
    for s in range(min(epoch + epoch // 2 + 1, 40)):
        numbers = range(s * step.accumulate, (s + 1) * step.accumulate)
        batches = [loader.source.batch(n) for n in numbers for loader in loaders]
        found.append(batches)
    return epoch, found


@trained
def test_a_step_has_the_same_rows_on_any_number_of_devices(build, case):
    of_sentences = case.kind == "Sentences"
    stated = STATED_OF_SENTENCES if of_sentences else STATED
    seen = []
    for devices, most in LAYOUTS_OF_SENTENCES if of_sentences else LAYOUTS:
        epoch, steps = steps_of(build, case, stated, devices, most)
        found = []
        for batches in steps:
            targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
            normalisers = [batch["step_normalisers"] for batch in batches]
            assert all(each == normalisers[0] for each in normalisers)
            assert normalisers[0]["targets"] == targets
            words = [int(batch.get("lexical", torch.zeros(0)).sum()) for batch in batches]
            assert max(words) <= most.get("batch_tokens", 150)
            rows = {
                number: batch["targets"][row][batch["targets"][row] >= 0].tolist()
                for batch in batches
                for row, number in enumerate(batch["sequence_id"].tolist())
            }
            rows.pop(-1, None)  # a device without streams
            if of_sentences:  # runs of sentences, of which a long one may be cut
                rows = sorted(token for row in rows.values() for token in row)
            found.append((rows, targets, {batch.get("epochs") for batch in batches}))
        seen.append((epoch, found))
    assert all(each == seen[0] for each in seen)
    assert len(seen[0][1]) > 2


def test_streams_are_cut_only_where_one_does_not_fit_into_a_device(build):
    case = next(case for case in TRAINED if case.kind == "Sentences")
    seen = []
    for devices in (1, 2, 4):
        _, steps = steps_of(build, case, STATED_OF_SENTENCES, devices, {"batch_tokens": 150})
        lengths = [
            {
                number: batch["lengths"][row].tolist()
                for batch in batches
                for row, number in enumerate(batch["sequence_id"].tolist())
                if number >= 0
            }
            for batches in steps
        ]
        seen.append(
            [{number: [n for n in each if n] for number, each in step.items()} for step in lengths]
        )
    assert seen[0] == seen[1] == seen[2]
    assert max(len(step) for step in seen[0]) > 1


@trained
def test_normalisers_are_those_of_the_optimiser_step(build, case):
    data = build(case, fake_trainer(accumulate=3))
    source, batches = data.training_source(), list(data.train_dataloader())
    for n, batch in enumerate(batches):
        group = range(n - n % 3, min(n - n % 3 + 3, len(batches)))
        expected = {"micro_batches": float(len(group))}
        for name in source.counts(0):
            expected[name] = sum(source.counts(m)[name] for m in group)
        assert batch["step_normalisers"] == expected


@every
def test_evaluation_scores_every_target_once(build, case):
    found = []
    for world_size in (1, 2, 5):
        sources = [
            build(case, fake_trainer(rank, world_size), eval_batch_size=3).evaluation_source("val")
            for rank in range(world_size)
        ]
        assert len({len(source) for source in sources}) == 1
        rows = {}
        for batch in (source.batch(n) for source in sources for n in range(len(source))):
            for number, targets in zip(
                batch["sequence_id"].tolist(), batch["targets"], strict=True
            ):
                if (targets >= 0).any():
                    assert number not in rows
                    rows[number] = targets[targets >= 0].tolist()
        found.append(rows)
    assert found[0] == found[1] == found[2] != {}


@every
def test_training_validates_on_the_split_that_is_asked_for(build, case):
    data = build(case)
    for split in ("val", "test"):
        batches = list(build(case, validation_split=split).val_dataloader())
        source = data.evaluation_source(split) if data.expects(split) else ()
        assert len(batches) == len(source)
        assert all(equal(batch, source.batch(n)) for n, batch in enumerate(batches))
    with pytest.raises(ValueError, match="validation_split='train'"):
        case.build(validation_split="train")


@every
def test_no_text_is_in_two_splits(build, case):
    data = build(case)
    found = {split: set(texts(data, split)) for split in SPLITS}
    assert all(found[split] for split in SPLITS if data.expects(split))
    assert not any(found[a] & found[b] for a, b in combinations(SPLITS, 2))


@pytest.mark.parametrize(
    ("case", "options"),
    list(chain.from_iterable([(case, bad) for bad in case.bad] for case in DATA_MODULES)),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.kind,
)
def test_an_option_out_of_range_is_named_in_one_line(folder, monkeypatch, case, options):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=rf"\b{next(iter(options))}=") as error:
        case.build(**options)
    assert "\n" not in str(error.value)


@every
def test_plain_values_rebuild_it_in_another_folder(build, tmp_path, monkeypatch, case):
    data = build(case, seed=5)
    file = io.BytesIO()
    torch.save([data.recipe(), dict(data.hparams), data.state_dict()], file)
    file.seek(0)
    recipe, *_ = torch.load(file, weights_only=True)
    assert recipe["class_path"] == f"datamodules.{case.kind}"
    again = build_recipe(recipe, datamodules.LanguageDataModule)
    assert (again.recipe(), again.seed) == (recipe, 5)
    monkeypatch.chdir(tmp_path)
    moved = build_recipe(recipe, datamodules.LanguageDataModule)
    assert moved.fingerprint == data.fingerprint


@every
def test_another_order_than_the_checkpoints_warns(build, case, recwarn):
    state = build(case).state_dict()
    recwarn.clear()
    build(case, num_workers=1, eval_batch_size=9).load_state_dict(state)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"batch_size was \d+, is 3.*seed was 0, is 1"):
        build(case, batch_size=3, seed=1).load_state_dict(state)
    with pytest.warns(UserWarning, match="another text, split or tokenizer"):
        build(case).load_state_dict({**state, "fingerprint": "other"})
