"""Rivals are timed in turn."""

from benchmarks.harness import compare, in_turn


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
