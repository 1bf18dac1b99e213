"""Facts and questions of sentences, and what is right about them."""

from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from callbacks import RecallAnalysis
from callbacks.analysis.base import Findings
from callbacks.analysis.recall import accuracies
from datamodules.sentences.batches import grid_batch
from lightning_models.layers import record, recording
from lightning_models.outputs import Scores

PATTERN = r"(?P<key>[A-Z])\w? (?:has|gives) (?P<answer>\w+)"
ROWS = [
    ["A has ox", "it rains", "Bo has ox", "A gives ox", "B gives elk"],
    ["C gives ox", "A gives ox"],  # the first document's facts are not its own
]


class Letters:
    """A token a character."""

    eos_id, text_bos_id = 1, None

    def decode(self, ids):
        return "".join(map(chr, ids))

    decode_continuation = decode


class Scored(SimpleNamespace):
    """A model that finds one token unlikely."""

    def recorded(self, batch, **consumers):
        greedy = torch.ones_like(batch["targets"], dtype=torch.bool)
        greedy[0, 3, 8] = False  # of "A gives ox" the x
        log_prob = torch.full(batch["targets"].shape, -0.5)
        with recording(**consumers):
            record("greedy", greedy=greedy)
        return Scores(log_prob, torch.zeros(2), torch.ones(2), "exact")


def sentences():
    tokens = torch.zeros(2, 5, 14, dtype=torch.int64)
    lengths = torch.zeros(2, 5, dtype=torch.int64)
    for r, row in enumerate(ROWS):
        for s, text in enumerate(row):
            marked = [0, *map(ord, text), 1]
            tokens[r, s, : len(marked)], lengths[r, s] = torch.tensor(marked), len(marked)
    return grid_batch(tokens, lengths, torch.zeros_like(lengths).bool(), torch.arange(2))


def collected(pattern=PATTERN):
    findings = Findings()
    model = Scored(config=SimpleNamespace(memory_size=2))
    RecallAnalysis(pattern=pattern)._collect(Letters(), model, sentences(), findings)
    return findings, model


def test_questions_are_later_sentences_about_a_key():
    """Bo, like B, is the key B; every token of an answer must be right, and its nats add up."""
    findings, _ = collected()
    expected = [(3, False, 1.0), (2, True, 1.5)]
    assert [*findings["questions"].itertuples(index=False, name=None)] == expected


def test_scalars_part_questions_at_the_memorys_end():
    findings, model = collected()
    scalars = RecallAnalysis(pattern=PATTERN)._report(None, model, findings).scalars
    assert scalars == {
        "recall/accuracy": 0.5,
        "recall/nats": 1.25,
        "recall/within_memory": 1.0,
        "recall/beyond_memory": 0.0,
    }
    model.config.memory_size = 3  # no question is later
    scalars = RecallAnalysis(pattern=PATTERN)._report(None, model, findings).scalars
    assert scalars["recall/within_memory"] == 0.5
    assert "recall/beyond_memory" not in scalars


def test_accuracies_are_means_over_the_questions_of_a_distance():
    lines = {"distance": [2, 1, 2], "right": [True, False, False], "nats": [1.0, 2.0, 3.0]}
    table = accuracies(pd.DataFrame(lines), ["distance"])
    assert table.to_dict("list") == {
        "distance": [1, 2],
        "questions": [1, 2],
        "accuracy": [0.0, 0.5],
        "nats": [2.0, 2.0],
    }


@pytest.mark.parametrize(("pattern", "word"), [("(", "not a regular"), ("(?P<key>a)", "answer")])
def test_a_pattern_that_finds_no_answers_is_refused(pattern, word):
    with pytest.raises(ValueError, match=word):
        RecallAnalysis(pattern=pattern)


# ---- windows

LEVELS = r"(?P<level>\d)(?P<answer>[A-Z]+)\."


@dataclass(frozen=True)
class Depth:
    """A config with a dial."""

    thinking_steps: int = 1


class Deep(torch.nn.Module):
    """A model of windows that finds an answer's letters unlikely until it thinks long enough."""

    def __init__(self):
        super().__init__()
        self.config = Depth()

    def recorded(self, batch, **consumers):
        level = batch["level"]  # of the answer that each target belongs to, 0 for others
        greedy = level <= self.config.thinking_steps
        with recording(**consumers):
            record("greedy", greedy=greedy)
        return Scores(-level.double(), torch.zeros(2), torch.ones(2), "exact")


def windows():
    """Two rows, of which the first begins within an answer and the second ends within one."""
    texts = ["A.2BC.1D.", "1EF.\x013G"]
    levels = ["00220010", "110003"]  # of the targets
    ids = torch.zeros(2, 9, dtype=torch.int64)
    level = torch.zeros(2, 8, dtype=torch.int64)
    for row, (text, of) in enumerate(zip(texts, levels, strict=True)):
        ids[row, : len(text)] = torch.tensor([*map(ord, text)])
        level[row, : len(of)] = torch.tensor([*map(int, of)])
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
    return {"tokens": ids[:, :-1], "targets": targets, "level": level}


def test_answers_in_windows_by_level_and_dial():
    """The answer 3G has no full stop, so it is no question."""
    findings, model = Findings(), Deep()
    analysis = RecallAnalysis(pattern=LEVELS, dial="thinking_steps", values=[0, 2])
    analysis._collect(Letters(), model, windows(), findings)
    lines = [*findings["questions"].itertuples(index=False, name=None)]
    assert lines == [(2, False, 4.0), (1, True, 1.0), (1, True, 2.0)]
    report = analysis._report(None, model, findings)
    tables = report.tables
    assert report.scalars == {
        "recall/accuracy": 2 / 3,
        "recall/nats": 7 / 3,
        "recall/level1/accuracy": 1.0,
        "recall/level2/accuracy": 0.0,
    }
    assert report.drawn().keys() == {"level", "dial"}
    assert tables["level"]["accuracy"].tolist() == [1.0, 0.0]
    assert tables["dial"][["thinking_steps", "level", "accuracy"]].values.tolist() == [
        [0, 1, 0.0],
        [0, 2, 0.0],
        [2, 1, 1.0],
        [2, 2, 1.0],
    ]
    assert model.config == Depth(1)


@pytest.mark.parametrize(
    ("steps", "scalars", "by_level"),
    [
        ([3, 1, 0], {"recall/steps": 4 / 3, "recall/steps_correlation": 15 / 252**0.5}, [0.5, 3]),
        (
            [1.5, 0.5, 0],
            {"recall/steps": 2 / 3, "recall/steps_correlation": 15 / 252**0.5},
            [0.25, 1.5],
        ),
        ([1, 1, 1], {"recall/steps": 1.0}, [1, 1]),  # without a correlation
    ],
)
def test_steps_of_a_question_are_taken_by_the_token_before_its_answer(steps, scalars, by_level):
    class Stepping(Deep):
        def recorded(self, batch, **consumers):
            executed = torch.full((2, 8), 9.0)  # forks are averaged over blocks
            executed[0, 2], executed[0, 6], executed[1, 0] = steps  # of the levels 2, 1 and 1
            with recording(**consumers):
                record("thinking_steps", executed=executed, most=9)
            return super().recorded(batch, **consumers)

    findings, model, analysis = Findings(), Stepping(), RecallAnalysis(pattern=LEVELS)
    analysis._collect(Letters(), model, windows(), findings)
    report = analysis._report(None, model, findings)
    of_levels = {f"recall/level{n}/steps": steps for n, steps in enumerate(by_level, start=1)}
    of_steps = {k: v for k, v in report.scalars.items() if "steps" in k}
    assert of_steps == pytest.approx(scalars | of_levels)
    assert report.tables["level"]["steps"].tolist() == by_level


def test_a_dial_needs_values():
    with pytest.raises(ValueError, match="go together"):
        RecallAnalysis(pattern=LEVELS, dial="thinking_steps")
