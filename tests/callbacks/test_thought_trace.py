"""What the analysis of thoughts finds: in validations, and by hand."""

import math

import numpy as np
import pytest
import torch

from callbacks import ThoughtTrace
from callbacks.analysis.base import Findings
from callbacks.analysis.thought_trace import (
    chunks,
    collect_thoughts,
    groups,
    query_tables,
    rounds,
    summary,
    thought_report,
    thoughts,
)
from callbacks.recorded_thoughts import RowThinking, Thought, query_with_thoughts, thought_text
from datamodules import load_tokenizer
from lightning_models import OptimizerConfig, ThinkingStatesConfig, ThinkingStatesLM
from lightning_models.layers import record
from lightning_models.thinking_states.thoughts import ChunkThought as Recorded
from lightning_models.thinking_states.thoughts import Trace
from tests.callbacks.written import scalars, table

SIZES = {"vocab_size": 257, "block_size": 96, "num_layers": 3, "dim": 16, "num_heads": 2}
THINKING = {**SIZES, "chunk_size": 4, "max_thought_tokens": 3}
ALL = {"limit_val_batches": 1.0}


class MadeUp(ThinkingStatesLM):
    """Its thoughts are the gold ones, but for an "x" after the first chunk of every query."""

    def score(self, batch):
        scores, gold = super().score(batch), self.layout.gold_trace(batch)
        own = [[Recorded([120], row[0].end), *row[1:]] if row else [] for row in gold.rows]
        record("thoughts", trace=Trace(own, [len(row) for row in own]))
        return scores


def build(kind=ThinkingStatesLM):
    torch.manual_seed(0)
    optimizer = OptimizerConfig(schedule="constant", warmup=0)
    return kind(ThinkingStatesConfig(**THINKING), optimizer)


@pytest.fixture
def data(make_reasoning):
    """Six questions with one assignment or two, in batches of four."""
    module = make_reasoning()
    module.prepare_data()
    module.setup("validate")
    return module


def test_numbers_are_those_of_the_recorded_thoughts(data, make_trainer, tmp_path, undrawn):
    """Counted again from the model, batch by batch."""
    model = build()
    with torch.no_grad():
        make_trainer(ThoughtTrace(), **ALL).validate(model, data, verbose=False)
        for parameter in model.parameters():  # far from where it thinks the same everywhere
            parameter.mul_(3)
    make_trainer(ThoughtTrace(), **ALL).validate(model, data, verbose=False)
    own, gold, rounds = [], [], []
    source = data.evaluation_source("val")
    for batch in map(source.batch, range(len(source))):
        seen = {}
        model.eval().recorded(
            batch,
            thoughts=lambda trace, seen=seen: seen.update(own=trace),
            gold_thoughts=lambda trace, seen=seen: seen.update(gold=trace),
        )
        for row, length in enumerate(batch["query_lengths"].tolist()):
            if length > 1:  # others fill up
                own += [thought.tokens for thought in seen["own"].rows[row] if thought.end < length]
                gold += [t.tokens for t in seen["gold"].rows[row] if t.end < length]
                rounds.append(seen["own"].rounds[row])
    pairs = list(zip(own, gold, strict=True))
    found = scalars(tmp_path / "thought_trace")
    assert len(rounds) == 6
    assert found["thoughts/accuracy"] == pytest.approx(
        np.mean([a == b for a, b in pairs]), rel=1e-5
    )
    assert found["thoughts/trivial"] == pytest.approx(np.mean([not a for a in own]), rel=1e-5)
    assert found["thoughts/gold_trivial"] == pytest.approx(np.mean([not b for b in gold]), rel=1e-5)
    assert found["thoughts/missed"] == pytest.approx(
        np.mean([not a for a, b in pairs if b]), rel=1e-5
    )
    assert found["thoughts/rounds"] == pytest.approx(np.mean(rounds), rel=1e-5)
    assert 0 < found["thoughts/gold_trivial"] < 1
    lines = table(tmp_path / "thought_trace", "chunks")
    assert sum(int(line["rows"]) for line in lines) == len(pairs)


def test_a_wrong_thought_is_found_where_it_is(data, make_trainer, tmp_path, undrawn):
    make_trainer(ThoughtTrace(shown_rows=6), **ALL).validate(build(MadeUp), data, verbose=False)
    folder = tmp_path / "thought_trace"
    found, (first, *rest) = scalars(folder), table(folder, "chunks")
    assert (first["accuracy"], first["first_wrong"], first["first_wrong_share"]) == ("0", "6", "1")
    assert {line["accuracy"] for line in rest} == {"1"}
    assert {line["first_wrong"] for line in rest} == {"0"}
    chunks = sum(int(line["rows"]) for line in (first, *rest))
    assert found["thoughts/accuracy"] == pytest.approx(1 - 6 / chunks, rel=1e-5)
    assert found["thoughts/all_right"] == 0
    assert found["thoughts/accuracy_nontrivial"] == 1  # nothing is to be thought so early
    assert found["thoughts/invented"] > 0
    assert {line["accuracy"] for line in table(folder, "thoughts")} == {"1"}
    groups = {line["group"]: line for line in table(folder, "groups")}
    assert (groups["1"]["rows"], groups["2"]["rows"]) == ("3", "3")
    queries = (folder / "val-step=0-text.txt").read_text().strip().split("\n\n")
    for query, example in zip(queries, data.examples("val"), strict=True):
        assert "[T: x | not nothing]" in query
        right = [part.split("]")[0] for part in query.split("[T: ")[1:] if " | not " not in part]
        assert "; ".join(right) == "; ".join(example.steps)
        plain = "".join(part.split("] ")[-1].split("]")[-1] for part in query.split(" [T: "))
        assert plain.replace(" ", "") == example.query.replace(" ", "")


# ---- by hand

A, B, C = (1,), (2, 3), (4,)


def thinking(*tokens, rounds=0):
    """What is thought after each chunk; empty: nothing."""
    return RowThinking(tuple(Thought(end, each) for end, each in enumerate(tokens, 1)), rounds)


def findings_of(*rows):
    """Findings of queries: own thoughts, gold ones or None, and the group."""
    findings = Findings()
    for own, gold, group in rows:
        query, lines = query_tables(own, None if gold is None else thinking(*gold).thoughts, group)
        findings.add("queries", [query])
        findings.add("chunks", lines)
    return findings


ROWS = [
    (thinking((), A, (), B, rounds=2), ((), A, (), B), 1),
    (thinking((), A, C, (), rounds=3), ((), B, C, C), 2),
    (thinking(C, (), rounds=2), ((), ()), 2),
    (thinking(A, (), rounds=5), None, 1),
]
"""Of ten chunks with gold seven are right; the data know no steps of the last row."""


def tables(*rows):
    found = findings_of(*rows)
    return found["queries"], found["chunks"]


def lines_of(frame):
    return frame.to_dict("records")


def test_summary():
    expected = {
        "accuracy": 7 / 10,
        "accuracy_nontrivial": 3 / 5,
        "missed": 1 / 5,
        "invented": 1 / 5,
        "trivial": 6 / 12,
        "gold_trivial": 5 / 10,
        "all_right": 1 / 3,
        "rounds": 12 / 4,
        "nontrivial": 6 / 4,
        "longest": 2,
    }
    assert summary(*tables(*ROWS)) == pytest.approx(expected)
    unknown = summary(*tables(ROWS[-1]))
    assert math.isnan(unknown["accuracy"])
    assert unknown["trivial"] == 0.5


def test_chunks():
    queries, chunk_lines = tables(*ROWS)
    found = chunks(queries, chunk_lines).to_dict("list")
    assert found["rows"] == [3, 3, 2, 2]
    assert found["accuracy"] == pytest.approx([2 / 3, 2 / 3, 1, 1 / 2])
    assert found["trivial"] == pytest.approx([2 / 3, 1 / 3, 1 / 2, 1 / 2])
    assert found["gold_trivial"] == pytest.approx([1, 1 / 3, 1 / 2, 0])
    assert found["first_wrong"] == [1, 1, 0, 0]
    assert found["first_wrong_share"] == [1 / 3, 1 / 3, 0, 0]
    assert queries["first_wrong"].fillna(-1).tolist() == [-1, 1, 0, -1]
    assert len(chunks(*tables(ROWS[-1]))) == 0


def test_queries_too_short_for_a_chunk_are_reported():
    for gold in (None, ()):
        found = findings_of((thinking(rounds=1), gold, 3), (thinking(rounds=2), gold, 4))
        report = thought_report(found, 1)
        assert report.finite["thoughts/rounds"] == 1.5
        assert "thoughts/accuracy" not in report.finite
        assert report.tables["groups"]["group"].tolist() == [3, 4]
        assert set(report.files()) == {"scalars.csv", "rounds.csv", "groups.csv"}
        assert set(report.drawn()) == {"rounds", "groups"}


def test_thoughts_rounds_and_groups():
    queries, chunk_lines = tables(*ROWS)
    assert lines_of(thoughts(chunk_lines)) == [
        {"thought": 1, "rows": 2, "accuracy": 1 / 2},
        {"thought": 2, "rows": 2, "accuracy": 1},
        {"thought": 3, "rows": 1, "accuracy": 0},
    ]
    assert lines_of(rounds(queries)) == [
        {"rounds": 2, "rows": 2, "share": 0.5, "nontrivial": 1.5},
        {"rounds": 3, "rows": 1, "share": 0.25, "nontrivial": 2},
        {"rounds": 5, "rows": 1, "share": 0.25, "nontrivial": 1},
    ]
    first, second = lines_of(groups(queries, chunk_lines))
    assert (first["group"], first["rows"], first["accuracy"], first["all_right"]) == (1, 2, 1, 1)
    assert (second["group"], second["accuracy"], second["rounds"]) == (2, 3 / 6, 2.5)


def test_batches_are_read_as_they_are():
    """A query of five tokens and a filling row; the answer's chunk does not count."""
    batch = {
        "query": torch.tensor([[256, 97, 98, 32, 99], [256] * 5]),
        "query_lengths": torch.tensor([5, 1]),
        "step_lengths": torch.tensor([[1], [0]]),
        "targets": torch.tensor([[100, 256], [-100, -100]]),
        "group": torch.tensor([7, -1]),
    }
    own = (Thought(1, (101,)), Thought(4, (102, 258, 103)), Thought(6, (104,)))
    gold = RowThinking((Thought(1, ()), *own[1:]))
    filling = RowThinking((Thought(0, ()),), 1)
    for known, right, text in (
        (True, [False, True], "a [T: e | not nothing]b c [T: f; g]"),
        (False, [True, True], "a [T: e]b c [T: f; g]"),  # nothing is known, so nothing is wrong
    ):
        batch["step_lengths"][0] = int(known)
        found, tokenizer = Findings(), load_tokenizer("bytes")
        pair = [RowThinking(own, 2), filling], [gold, filling]
        collect_thoughts(found, batch, *pair, tokenizer, 5)
        (query,) = lines_of(found["queries"])
        assert (query["group"], query["rounds"], query["known"]) == (7, 2, known)
        assert found["chunks"]["right"].tolist() == right
        assert found["chunks"]["length"].tolist() == [1, 3]
        assert found["shown"]["text"].tolist() == [text]


def test_thoughts_stand_where_they_are_thought():
    tokenizer = load_tokenizer("bytes")
    query = tokenizer.prompt_ids("Bob flips. \u00e9 now")
    thinking = RowThinking((Thought(2, ()), Thought(10, (104, 105)), Thought(11, (105,))), 2)
    assert query_with_thoughts(tokenizer, query, thinking) == "Bob flips. [T: hi] [T: i] \u00e9 now"
    assert thought_text(tokenizer, (257, 104, 257, 258, 105)) == "h; i"
