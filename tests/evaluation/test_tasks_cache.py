"""A run that was stopped goes on from its file of answers, which belongs to one model."""

import contextlib
import json
import sqlite3

import pytest
from task_data import write_folder, write_task

from lightning_models import TransformerLM


@pytest.fixture
def ask(checkpoint_path, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(write_folder(tmp_path / "data")))
    target = tmp_path / "result.json"
    words = ["tasks", "--ckpt", checkpoint_path, "--tasks", "lambada_local,piqa_local"]
    words += ["--batch_size", 1, "--cache", tmp_path / "answers.db", "--output", target]
    return [str(word) for word in words], target


@pytest.fixture
def scored(monkeypatch):
    """Counts batches, and may stop a run after so many of them."""
    own, counts = TransformerLM.score, {"batches": 0, "stop": None}

    def score(self, batch):
        if counts["batches"] == counts["stop"]:
            raise KeyboardInterrupt
        counts["batches"] += 1
        return own(self, batch)

    monkeypatch.setattr(TransformerLM, "score", score)
    return counts


def numbers(target):
    tasks = json.loads(target.read_text())["tasks"]
    return {name: {**task, "seconds": None} for name, task in tasks.items()}


def test_a_stopped_run_goes_on(ask, scored):
    from evaluation.cli import main

    words, target = ask
    scored["stop"] = 4
    assert main(words) == 130
    assert not target.exists()
    scored["stop"] = None
    assert main(words) == 0
    assert scored["batches"] == 3 + 4  # one a request, each once
    first = numbers(target)
    assert main(words) == 0
    assert scored["batches"] == 7
    assert numbers(target) == first
    assert main([*words, "--cache", str(target.with_name("other.db"))]) == 0
    assert scored["batches"] == 14
    assert numbers(target) == first


REPEATS = """
repeats: 3
generation_kwargs: {{until: [], max_gen_toks: 6, {}}}
filter_list: [{{name: all, filter: [{{function: take_first_k, k: 3}}]}}]
process_results: !function length.of
"""
LENGTH = "def of(doc, results): return {'length': float(len(results[0]))}"


@pytest.mark.parametrize(
    "how",
    [
        "temperature: 2.0",  # which samples, as do_sample does
        "do_sample: true, temperature: 2.0",
        "temperature: 2.0, streams: example",
    ],
)
def test_each_repeat_keeps_its_text(ask, how, tmp_path, monkeypatch):
    """A run that was stopped and one that has all its answers give the texts of a run without."""
    from evaluation.cli import main
    from evaluation.tasks import adapter

    words, _ = ask
    more = REPEATS.format(how)
    write_task(tmp_path / "repeated.yaml", "generate_until", "length", "the", "a", more=more)
    (tmp_path / "length.py").write_text(LENGTH)
    samples = tmp_path / "samples.jsonl"
    words += ["--tasks", "repeated", "--include_path", str(tmp_path), "--samples", str(samples)]

    def texts():
        return [row["texts"] for row in map(json.loads, samples.open())]

    assert main([*words, "--cache", str(tmp_path / "never_again.db")]) == 0
    expected, counts, own = texts(), {"written": 0, "stop": 4}, adapter.write
    assert all(len(set(three)) == 3 for three in expected)
    same = expected[0] == expected[1]  # all three examples have the same prompt
    assert same is ("streams" not in how)

    def write(*args):
        if counts["written"] == counts["stop"]:
            raise KeyboardInterrupt
        counts["written"] += 1
        return own(*args)

    monkeypatch.setattr(adapter, "write", write)
    assert main(words) == 130
    counts["stop"] = None
    for _ in range(2):
        assert main(words) == 0
        assert texts() == expected
    assert counts["written"] == (4 if same else 9)  # one a try; the four have the three of all


def test_a_cache_of_another_model_is_refused(ask, fails, latent_path):
    from evaluation.cli import main

    words, _ = ask
    assert main(words) == 0
    for other in (["--ckpt", str(latent_path)], ["--precision", "bf16"], ["--seed", "1"]):
        line = fails(*words, *other)
        assert "answers.db" in line
        assert "another model" in line


def test_damaged_caches_and_other_files_are_refused(ask, fails, tmp_path):
    words, _ = ask
    path = tmp_path / "answers.db"
    path.write_text("no database, but text that is long enough")
    line = fails(*words)
    assert "answers.db) is damaged, or not a file of answers" in line
    assert "delete it" in line
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table answers (key text, value blob)")
        database.executemany("insert into answers values (?, ?)", [("k", b"v" * 3000)] * 9)
        database.commit()
    path.write_bytes(path.read_bytes()[:9000])
    assert "answers.db) is damaged" in fails(*words)
