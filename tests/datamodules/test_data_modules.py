"""The contract of every data module, from tests/data_modules.py."""

import json
from itertools import chain, combinations, islice
from types import SimpleNamespace

import pytest
import torch
from data_modules import DATA_MODULES, write_files

import datamodules
from datamodules.recipe import build as build_recipe
from datamodules.store import SPLITS

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
def build(folder, monkeypatch):
    """Returns a function that makes a prepared data module."""
    monkeypatch.chdir(folder)

    def make(case, **options):
        data = case.build(**options)
        data.prepare_data()
        data.setup()
        return data

    return make


def loader_of(data, case):
    return data.train_dataloader() if case.trains else data.val_dataloader()


def rank_of_two(data, rank):
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=2,
        accumulate_grad_batches=1,
        limit_train_batches=1.0,
        callbacks=[],
        lightning_module=SimpleNamespace(),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data.train_dataloader().source


def equal(a, b):
    """Whether two batches, or two values of batches, are the same."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def texts(data, split):
    """What a split is made of, as text."""
    if isinstance(data, datamodules.ReasoningDataModule):
        return [repr(example) for example in data.examples(split)]
    return list(data.questions(split) if hasattr(data, "questions") else data.documents(split))


@every
def test_prepared_once(build, case):
    def stamps(store):
        return {path.name: path.stat().st_mtime_ns for path in store.iterdir()}

    first = build(case)
    before = stamps(first.store_dir)
    second = build(case)
    assert second.store_dir == first.store_dir
    assert stamps(second.store_dir) == before
    assert second.state_dict() == first.state_dict()


@every
def test_batch_n_is_a_function_of_seed_and_n(build, case):
    numbers = range(5)
    source = loader_of(build(case), case).source
    batches = [source.batch(n) for n in numbers]
    again = loader_of(build(case), case).source
    assert all(equal(again.batch(n), batches[n]) for n in reversed(numbers))
    if case.trains:
        other = loader_of(build(case, seed=1), case).source
        assert not all(equal(other.batch(n), batches[n]) for n in numbers)


@trained
def test_ranks_have_batches_of_their_own_and_one_step(build, case):
    first, second = (rank_of_two(build(case), rank) for rank in range(2))
    assert len(first) == len(second) > 0
    for n in range(3):
        here, there = first.batch(n), second.batch(n)
        assert here["step_normalisers"] == there["step_normalisers"]
        assert not equal(here, there)
        assert equal(rank_of_two(build(case), 1).batch(n), there)


@trained
def test_a_run_goes_on_at_any_batch(build, case):
    whole = list(islice(build(case).train_dataloader(), 6))
    for start in range(len(whole)):
        loader = build(case).train_dataloader()
        loader.load_state_dict({"next_batch": start})
        assert all(map(equal, loader, whole[start:]))
        assert loader.state_dict()["next_batch"] > start


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
def test_the_recipe_rebuilds_it_in_another_folder(folder, tmp_path, monkeypatch, case):
    monkeypatch.chdir(folder)
    first = case.build()
    recipe, fingerprint = json.loads(json.dumps(first.recipe())), first.fingerprint
    assert recipe["class_path"] == f"datamodules.{case.kind}"
    monkeypatch.chdir(tmp_path)
    again = build_recipe(recipe, datamodules.LanguageDataModule, "data")
    assert again.fingerprint == fingerprint
    assert again.recipe()["init_args"].keys() == recipe["init_args"].keys()
