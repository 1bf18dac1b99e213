"""Rivals are timed in turn; files are whole, and tried before anything is timed."""

import json

import pytest
import torch

from benchmarks.harness import compare, in_turn, options_parser, run


def test_every_round_has_all_runs_in_turn():
    seen = []
    times = in_turn([lambda: seen.append("a"), lambda: seen.append("b")], rounds=3)
    assert seen == ["a", "b"] * 4, "one round comes first and is not counted"
    assert [len(own) for own in times] == [3, 3]
    assert all(taken >= 0 for own in times for taken in own)


def test_ratios_are_taken_pair_by_pair(monkeypatch):
    taken = iter([9.0, 1.0, 2.0, 1.0, 6.0, 3.0, 50.0, 10.0])
    monkeypatch.setattr("benchmarks.harness.seconds", lambda run: next(taken))
    found = compare(lambda: None, lambda: None, rounds=3)
    assert found == (6.0, 3.0, 2.0)


def test_the_file_is_tried_first_and_written_whole(monkeypatch, tmp_path, capsys):
    seen = []

    torch.backends.cuda.enable_cudnn_sdp(True)

    def table(options):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        seen.append(options.rounds)
        yield {"width": 3}

    def bench(output):
        monkeypatch.setattr("sys.argv", ["bench", "--output", str(output)])
        run(options_parser(None), {"one": table})

    with pytest.raises(SystemExit) as caught:
        bench(tmp_path / "missing" / "out.json")
    assert caught.value.code == 2
    assert "missing does not exist; create it" in capsys.readouterr().err
    assert not seen
    bench(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["tables"] == {"one": [{"width": 3}]}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
