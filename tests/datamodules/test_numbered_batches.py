"""What holds for every task of reasoning and every corpus of sentences: one line adds a module.

Batch n is a pure function of (seed, n, rank, world size); ranks share an epoch; evaluation scores
every target once; data are prepared once, and rebuilt from plain values.
"""

import io
import json
import pickle

import pytest
import torch

from datamodules import LocalText, ReasoningGSM8K, Sentences, SentenceWindows, StateTracking, TwoHop
from tests.datamodules.reasoning.reasoning_tasks import fake_trainer

STATES = {"train_examples": 40, "val_examples": 9, "test_examples": 7, "block_size": 1500}
STREAMS = {"batch_tokens": 150, "max_sentences": 4, "curriculum_step": 3, "curriculum_epochs": 1}
WORLD = {"works": 6, "people": 8, "companies": 4, "cities": 4, "countries": 3}

MODULES = {
    "parity": (StateTracking, STATES),
    "vars": (StateTracking, {**STATES, "task": "vars", "tokenizer": "bpe:270"}),
    "two_hop": (TwoHop, WORLD),
    "gsm8k": (ReasoningGSM8K, {"data_files": "problems.jsonl", "test_fraction": 0.1}),
    "sentences": (Sentences, STREAMS),
    "spans": (Sentences, {**STREAMS, "splitter": "spans:9", "max_sentence_tokens": 9}),
    "marked windows": (SentenceWindows, {"block_size": 48}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Problems, stories and the cache."""
    path = tmp_path_factory.mktemp("modules")
    steps = "Sum: {0}+1=<<{0}+1={1}>>\n#### {1}"
    problems = [
        {"question": f"Ann has {n} cats and a dog. How many?", "answer": steps.format(n, n + 1)}
        for n in range(60)
    ]
    stories = [
        {"text": f"Story {i}. " + "He ran. It was \u00fcber! " * (i % 7 + 1)} for i in range(60)
    ]
    for name, rows in (("problems", problems), ("stories", stories)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=MODULES)
def build(request, folder):
    """Returns a function that makes a prepared module."""
    kind, options = MODULES[request.param]

    def make(trainer=None, **more):
        given = {"batch_size": 4, "val_fraction": 0.2, "test_fraction": 0.1, **options, **more}
        cache = str(folder / "cache")
        if "data_files" in given:
            given["data_files"] = str(folder / given["data_files"])
        if issubclass(kind, Sentences | SentenceWindows):
            shares = {key: given.pop(key) for key in ("val_fraction", "test_fraction")}
            stories = str(folder / "stories.jsonl")
            given["corpus"] = LocalText(data_files=stories, cache_dir=cache, **shares)
        else:
            given["cache_dir"] = cache
        data = kind(**given)
        data.prepare_data()
        data.setup()
        data.trainer = trainer
        return data

    return make


def equal(first, second):
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


def test_batch_n_is_a_pure_function_of_n(build):
    source = build().training_source()
    epoch = len(source)
    numbers = [epoch + 1, 0, 3 * epoch + 2, 1]
    batches = [source.batch(n) for n in numbers]
    pickled = pickle.dumps(source)
    assert len(pickled) < 10_000
    for again in (build().training_source(), source, pickle.loads(pickled)):
        assert all(
            equal(again.batch(n), b) for n, b in zip(numbers[::-1], batches[::-1], strict=True)
        )
    assert not equal(source.batch(0), source.batch(epoch))
    assert not equal(source.batch(0), build(seed=1).training_source().batch(0))


def test_loaders_go_on_anywhere_and_workers_change_nothing(build):
    whole = list(build().train_dataloader())
    assert len(whole) == len(build().training_source()) > 3
    loader = build(num_workers=2).train_dataloader()
    loader.load_state_dict({"next_batch": 2})
    assert all(equal(a, b) for a, b in zip(loader, whole[2:], strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_epoch_and_count_alike(build, world_size):
    ranks = [
        build(fake_trainer(r, world_size), batch_size=2).training_source()
        for r in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    seen = []
    for n in range(len(ranks[0]), 2 * len(ranks[0])):
        batches = [rank.batch(n) for rank in ranks]
        seen += [i for batch in batches for i in batch["sequence_id"].tolist()]
        targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
        assert {rank.counts(n)["targets"] for rank in ranks} == {float(targets)}
        assert len({batch.get("sentence_steps") for batch in batches}) == 1
    assert len(seen) == len(set(seen))


def test_normalisers_are_those_of_the_optimiser_step(build):
    data = build(fake_trainer(accumulate=3))
    source, batches = data.training_source(), list(data.train_dataloader())
    for n, batch in enumerate(batches):
        group = range(n - n % 3, min(n - n % 3 + 3, len(batches)))
        expected = {"micro_batches": float(len(group))}
        for name in source.counts(0):
            expected[name] = sum(source.counts(m)[name] for m in group)
        assert batch["step_normalisers"] == expected


def test_evaluation_scores_every_target_once(build):
    found = []
    for world_size in (1, 2, 5):
        sources = [
            build(fake_trainer(rank, world_size), eval_batch_size=3).evaluation_source("train")
            for rank in range(world_size)
        ]
        assert len({len(source) for source in sources}) == 1
        rows = {}
        for source in sources:
            for batch in (source.batch(n) for n in range(len(source))):
                for number, targets in zip(
                    batch["sequence_id"].tolist(), batch["targets"], strict=True
                ):
                    if (targets >= 0).any():
                        assert number not in rows
                        rows[number] = targets[targets >= 0].tolist()
        found.append(rows)
    assert found[0] == found[1] == found[2]


def test_data_are_prepared_once_whatever_does_not_decide_them(build, folder):
    data = build()

    def stamps():
        return {p: p.stat().st_mtime_ns for p in (folder / "cache").rglob("*") if p.is_file()}

    before = stamps()
    others = [
        build(**{key: value})
        for key, value in {"seed": 5, "batch_size": 3, "num_workers": 1}.items()
    ]
    assert {other.fingerprint for other in others} == {data.fingerprint}
    assert stamps() == before


def test_recipe_hparams_and_state_are_plain_and_rebuild_the_data(build):
    data = build(seed=5)
    file = io.BytesIO()
    torch.save([data.recipe(), dict(data.hparams), data.state_dict()], file)
    file.seek(0)
    recipe, *_ = torch.load(file, weights_only=True)
    assert recipe["class_path"] == f"datamodules.{type(data).__name__}"
    again = type(data)(**recipe["init_args"])
    assert (again.fingerprint, again.recipe(), again.seed) == (data.fingerprint, recipe, 5)
    again.setup()
    assert equal(again.training_source().batch(1), data.training_source().batch(1))


def test_another_order_than_the_checkpoints_warns(build, recwarn):
    state = build().state_dict()
    recwarn.clear()
    build(num_workers=1).load_state_dict(state)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"batch_size was 4, is 3.*seed was 0, is 1"):
        build(batch_size=3, seed=1).load_state_dict(state)
    with pytest.warns(UserWarning, match="another text, split or tokenizer"):
        build().load_state_dict({**state, "fingerprint": "other"})
