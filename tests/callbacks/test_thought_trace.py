"""What a model thinks along queries, within real trainings and validations, and by hand."""

import math
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import ThoughtTrace
from callbacks.analysis import files
from callbacks.reasoning.thinking import RowThinking, Thought, thought_text, told
from callbacks.thought_trace import measures
from callbacks.thought_trace.findings import Findings, Row, ShownRow, ShownThought
from callbacks.thought_trace.page import page
from callbacks.thought_trace.report import Report
from datamodules import load_tokenizer
from lightning_models import (
    NoCoTConfig,
    NoCoTLM,
    OptimizerConfig,
    ThinkingStatesConfig,
    ThinkingStatesLM,
)
from lightning_models.layers import record
from lightning_models.thinking_states.thoughts import ChunkThought as Recorded
from lightning_models.thinking_states.thoughts import Trace
from tests.callbacks.written import (
    check_second_validation,
    check_training_is_the_same,
    scalars,
    table,
)

SIZES = {"vocab_size": 257, "block_size": 96, "num_layers": 3, "dim": 16, "num_heads": 2}
THINKING = {**SIZES, "chunk_size": 4, "max_thought_tokens": 3}
TABLES = {f"{name}.csv" for name in ("scalars", "chunks", "thoughts", "rounds", "groups")}
PICTURES = {f"{name}.png" for name in ("chunks", "thoughts", "rounds", "groups")}
TEXTS = {"text.html", "text.txt"}
ALL = {"limit_val_batches": 1.0}


class MadeUp(ThinkingStatesLM):
    """Its thoughts are the gold ones, but for an "x" after the first chunk of every query."""

    def score(self, batch):
        scores, gold = super().score(batch), self.layout.gold_trace(batch)
        own = [[Recorded([120], row[0].end), *row[1:]] if row else [] for row in gold.rows]
        record("thoughts", trace=Trace(own, [len(row) for row in own]))
        return scores


def build(kind=ThinkingStatesLM, config=ThinkingStatesConfig, **changes):
    torch.manual_seed(0)
    sizes = THINKING if config is ThinkingStatesConfig else SIZES
    return kind(config(**{**sizes, **changes}), OptimizerConfig(schedule="constant", warmup=0))


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(files, "as_png", lambda figure: b"")
    monkeypatch.setattr(Report, "pictures", lambda report: {})


@pytest.fixture
def data(make_reasoning):
    """Six questions with one assignment or two, in batches of four."""
    module = make_reasoning()
    module.prepare_data()
    module.setup("validate")
    return module


# ---- what is written


def test_everything_is_written_behind_every_nth_validation(data, make_trainer, tmp_path):
    callback = ThoughtTrace(every_n_validations=2, shown_rows=2)
    options = {"logger": TensorBoardLogger(tmp_path), "max_steps": 3, "val_check_interval": 1}
    make_trainer(callback, **options, **ALL).fit(build(), data)
    log = tmp_path / "lightning_logs" / "version_0"
    folder = log / "thought_trace"
    files = TABLES | PICTURES | TEXTS
    events = check_second_validation(log, "thought_trace", "thoughts/", files)
    (written,) = events.Tensors("thought_trace/text_summary")
    (text,) = written.tensor_proto.string_val
    shown = (folder / "val-step=2-text.txt").read_text().strip().split("\n\n")
    assert len(shown) == 2
    assert text.decode() == "\n\n---\n\n".join(f"    {query}" for query in shown)


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
    html = (folder / "val-step=0-text.html").read_text()
    assert html.count('class="s2" title="after chunk 0&#10;gold: nothing">[x]<') == 6
    assert html.count('class="s1" title="after chunk') == sum(
        len(query.split("[T: ")) - 2 for query in queries
    )


def test_a_model_without_thoughts_is_told_of_once(data, make_trainer, tmp_path):
    trainer = make_trainer(ThoughtTrace(), max_steps=2, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(build(NoCoTLM, NoCoTConfig), data)
    told_of = [str(w.message) for w in caught if "thought trace" in str(w.message)]
    assert len(told_of) == 1
    assert "NoCoTLM records no thoughts" in told_of[0]
    assert not (tmp_path / "thought_trace").exists()


def test_training_is_the_same_with_and_without(data, make_trainer, undrawn):
    def train(added):
        model, callbacks = build(attention_dropout=0.2), [ThoughtTrace(num_batches=1)]
        callbacks = callbacks if added else []
        trainer = make_trainer(*callbacks, max_steps=2, val_check_interval=1)
        trainer.fit(model, data)
        return trainer, model

    check_training_is_the_same(train)


@pytest.mark.parametrize(
    ("name", "value"), [("num_batches", 0), ("every_n_validations", -1), ("shown_rows", -1)]
)
def test_values_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least"):
        ThoughtTrace(**{name: value})


# ---- by hand

A, B, C = (1,), (2, 3), (4,)
ROWS = [
    Row(own=((), A, (), B), gold=((), A, (), B), rounds=2, group=1),
    Row(own=((), A, C, ()), gold=((), B, C, C), rounds=3, group=2),
    Row(own=(C, ()), gold=((), ()), rounds=2, group=2),
    Row(own=(A, ()), gold=None, rounds=5, group=1),
]
"""Of ten chunks with gold six are right; the data know no steps of the last row."""


def test_summary():
    found = measures.summary(ROWS)
    assert found["accuracy"] == 7 / 10
    assert found["accuracy_nontrivial"] == 3 / 5
    assert found["missed"] == 1 / 5
    assert found["invented"] == 1 / 5
    assert found["trivial"] == 6 / 12
    assert found["gold_trivial"] == 5 / 10
    assert found["all_right"] == 1 / 3
    assert found["rounds"] == 12 / 4
    assert found["nontrivial"] == 6 / 4
    assert found["longest"] == 2
    unknown = measures.summary(ROWS[-1:])
    assert math.isnan(unknown["accuracy"])
    assert unknown["trivial"] == 0.5


def test_chunks():
    lines = measures.chunks(ROWS)
    assert [line["rows"] for line in lines] == [3, 3, 2, 2]
    assert [line["accuracy"] for line in lines] == [2 / 3, 2 / 3, 1, 1 / 2]
    assert [line["trivial"] for line in lines] == [2 / 3, 1 / 3, 1 / 2, 1 / 2]
    assert [line["gold_trivial"] for line in lines] == [1, 1 / 3, 1 / 2, 0]
    assert [line["first_wrong"] for line in lines] == [1, 1, 0, 0]
    assert [line["first_wrong_share"] for line in lines] == [1 / 3, 1 / 3, 0, 0]
    assert [row.first_wrong for row in ROWS] == [None, 1, 0, None]
    assert measures.chunks(ROWS[-1:]) == []


def test_thoughts_rounds_and_groups():
    assert measures.thoughts(ROWS) == [
        {"thought": 1, "rows": 2, "accuracy": 1 / 2},
        {"thought": 2, "rows": 2, "accuracy": 1},
        {"thought": 3, "rows": 1, "accuracy": 0},
    ]
    assert measures.rounds(ROWS) == [
        {"rounds": 2, "rows": 2, "share": 0.5, "nontrivial": 1.5},
        {"rounds": 3, "rows": 1, "share": 0.25, "nontrivial": 2},
        {"rounds": 5, "rows": 1, "share": 0.25, "nontrivial": 1},
    ]
    first, second = measures.groups(ROWS)
    assert (first["group"], first["rows"], first["accuracy"], first["all_right"]) == (1, 2, 1, 1)
    assert (second["group"], second["accuracy"], second["rounds"]) == (2, 3 / 6, 2.5)


def test_findings_of_ranks_are_merged():
    one, two = Findings(ROWS[:1]), Findings(ROWS[1:])
    one.merge(two)
    assert measures.summary(one.rows) == measures.summary(ROWS)
    assert not Findings()


def test_batches_are_read_as_they_are():
    """A query of five tokens and a filling row; the answer's chunk does not count."""
    batch = {
        "query": torch.tensor([[256, 97, 98, 32, 99], [256] * 5]),
        "query_lengths": torch.tensor([5, 1]),
        "step_lengths": torch.tensor([[1], [0]]),
        "targets": torch.tensor([[100, 256], [-100, -100]]),
        "group": torch.tensor([7, -1]),
    }
    thoughts = (Thought(1, (101,)), Thought(4, (102, 258, 103)), Thought(6, (104,)))
    gold = RowThinking((Thought(1, ()), *thoughts[1:]))
    found, tokenizer = Findings(), load_tokenizer("bytes")
    filling = RowThinking((Thought(0, ()),), 1)
    found.add(batch, [RowThinking(thoughts, 2), filling], [gold, filling], tokenizer, 5)
    assert found.rows == [Row(((101,), (102, 258, 103)), ((), (102, 258, 103)), 2, 7)]
    (shown,) = found.shown
    assert shown.told() == "a [T: e | not nothing]b c [T: f; g]"
    batch["step_lengths"][:] = 0  # nothing is known, so nothing is wrong
    found = Findings()
    found.add(batch, [RowThinking(thoughts, 2), filling], [gold, filling], tokenizer, 5)
    assert found.rows[0].gold is None
    assert found.shown[0].told() == "a [T: e]b c [T: f; g]"


def test_thoughts_stand_where_they_are_thought():
    tokenizer = load_tokenizer("bytes")
    query = tokenizer.prompt_ids("Bob flips. \u00e9 now")
    thinking = RowThinking((Thought(2, ()), Thought(10, (104, 105)), Thought(11, (105,))), 2)
    assert told(tokenizer, query, thinking) == "Bob flips. [T: hi] [T: i] \u00e9 now"
    assert thought_text(tokenizer, (257, 104, 257, 258, 105)) == "h; i"


def test_the_page_says_what_was_wrong():
    shown = ShownRow(
        ["a<b", " c", ""], [ShownThought("x", None, False), ShownThought(None, None, True)]
    )
    html = page("Thoughts & more", measures.chunks(ROWS), [shown])
    assert "<title>Thoughts &amp; more</title>" in html
    assert "Row 1, 2 chunks" in html
    assert 'title="chunk 0">a&lt;b</span><span class="s2"' in html
    assert "gold: nothing" in html
