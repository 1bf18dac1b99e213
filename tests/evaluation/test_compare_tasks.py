"""Results of tasks in a comparison: of the model as trained, and told where asked otherwise."""

from types import SimpleNamespace

from evaluation.report import _tasks
from evaluation.run_metrics import ResultFile, tasks_in

ASKED = {"mode": "blockwise", "precision": "32", "set": {}}


def result(accuracy, examples=10, name="piqa_local", settings=ASKED, **more):
    task = {"metrics": {"acc": accuracy}, "examples": examples, "of_examples": 100, **more}
    return ResultFile("x.json", {"checkpoint": "c", "settings": settings, "tasks": {name: task}})


def test_the_file_with_the_most_examples_counts():
    files = [result(0.5, examples=100), result(0.9, examples=5)]
    for order in (files, files[::-1]):
        assert tasks_in(order)["piqa_local"].metrics == {"acc": 0.5}


def test_changed_models_are_left_out():
    assert tasks_in([result(0.5, settings={**ASKED, "set": {"inner_steps": 0}})]) == {}


def test_tasks_of_a_group_with_a_mean_are_left_out():
    content = {
        "blimp": {"metrics": {"acc": 0.6}, "tasks": ["island", "agreement"]},
        "island": {"metrics": {"acc": 0.5}},
        "agreement": {"metrics": {"acc": 0.7}},
        "no_mean": {"metrics": {}, "tasks": ["other"]},
        "other": {"metrics": {"acc": 0.1}},
    }
    file = ResultFile("x.json", {"checkpoint": "c", "settings": ASKED, "tasks": content})
    assert set(tasks_in([file])) == {"blimp", "other"}


def test_runs_that_were_asked_otherwise_are_told():
    def run(name, **asked):
        return SimpleNamespace(name=name, tasks=tasks_in([result(0.5, **asked)]))

    (check,) = _tasks([run("one"), run("other", examples=5)])
    assert (check.what, check.state) == ("task piqa_local", "differs")
    assert "examples 5 (other)" in check.detail
    (check,) = _tasks([run("one"), run("other"), SimpleNamespace(name="none", tasks={})])
    assert check.state == "matched"
