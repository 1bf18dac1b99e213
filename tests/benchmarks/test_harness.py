"""Rivals are timed in turn; a table's rows are printed as they come."""

import pytest
import torch

from benchmarks.harness import compare, in_turn, options_parser, run


def test_every_round_has_all_runs_in_turn():
    seen = []
    times = in_turn([lambda: seen.append("a"), lambda: seen.append("b")], rounds=3)
    kept = [name for name, before in zip(seen, [None, *seen], strict=False) if name != before]
    assert kept == ["a", "b"] * 4, "one round comes first and is not counted"
    assert [len(own) for own in times] == [3, 3]
    assert all(taken >= 0 for own in times for taken in own)


def test_ratios_are_taken_pair_by_pair(monkeypatch):
    taken = iter([9.0, 1.0, 2.0, 1.0, 6.0, 3.0, 50.0, 10.0])
    monkeypatch.setattr("benchmarks.harness.seconds", lambda run, **clock: next(taken))
    found = compare(lambda: None, lambda: None, rounds=3)
    assert found == (6.0, 3.0, 2.0)


def test_kernels_are_chosen_first_and_rows_stay_if_a_later_one_fails(monkeypatch, capsys):
    torch.backends.cuda.enable_cudnn_sdp(True)

    def rows(options):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        yield {"width": options.rounds}
        raise ValueError("width (4) is too large")

    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "3"])
    with pytest.raises(SystemExit) as caught:
        run(options_parser(None), rows)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert "| width |\n|--:|\n| 3 |" in shown.out
    assert "width (4) is too large" in shown.err
