"""A line for each run, with the time left."""

import pytest

from studies.console import Progress, clock


@pytest.fixture
def progress(study, monkeypatch):
    """A progress with a clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr("studies.console.time.monotonic", lambda: now[0])
    shown = Progress(study.seeded())

    def run(place, seconds, **how):
        shown.begin(study.seeded()[place])
        shown.step(study.seeded()[place], "train")
        now[0] += seconds
        shown.end(study.seeded()[place], did_nothing=how.get("did_nothing", False))

    return shown, run


def test_the_time_left_follows_costs_then_measured_times(progress, capsys):
    shown, run = progress
    run(0, 60.0)
    assert shown.left() == 60.0 * (3 + 1 + 3)
    run(1, 120.0)
    assert shown.left() == 60.0 + 120.0
    run(2, 60.0)
    run(3, 120.0)
    assert shown.left() is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[1/4] plain, seed 0 ... train: 1:00; about 7 min left"
    assert lines[3] == "[4/4] copy, seed 1 ... train: 2:00"


def test_runs_that_were_done_before_tell_nothing_about_time(progress, capsys):
    shown, run = progress
    run(0, 0.1, did_nothing=True)
    assert shown.left() is None
    assert capsys.readouterr().out == "[1/4] plain, seed 0 ... train: done before\n"


def test_several_runs_at_a_time_have_whole_lines(study, capsys):
    shown, (first, second, *_) = Progress(study.seeded(), jobs=2), study.seeded()
    shown.begin(first)
    shown.begin(second)
    shown.step(first, "train")
    shown.end(first, did_nothing=True)
    shown.end(second, did_nothing=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[1/4] plain, seed 0 ... train", "[1/4] plain, seed 0: done before"]
    assert lines[2] == "[2/4] copy, seed 0: done before"


def test_clock():
    assert [clock(s) for s in (0.4, 59.6, 725)] == ["0:00", "1:00", "12:05"]
