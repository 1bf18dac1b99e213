"""What a study declares is checked, and becomes runs in an order."""

from dataclasses import replace

import pytest

from studies import StudyError, Text
from studies.catalogue import STUDIES, find_study
from studies.commands import training_settings
from studies.study import LOGGED


def test_all_runs_of_a_seed_come_before_the_next(study):
    assert [run.folder for run in study.seeded()] == [
        "plain-seed0",
        "copy-seed0",
        "plain-seed1",
        "copy-seed1",
    ]


def test_only_some_runs(study):
    assert [run.folder for run in study.seeded(["copy"])] == ["copy-seed0", "copy-seed1"]
    with pytest.raises(StudyError, match=r"only \(copi\): the runs are plain, copy"):
        study.seeded(["copi"])


def test_only_the_first_seed_is_analysed(study):
    assert [len(run.analyses) for run in study.seeded()] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
        ({"epochs": 0}, r"epochs \(0\) must be at least 1"),
        ({"seeds": ()}, r"seeds \(\[\]\)"),
        ({"seeds": (1, 1)}, r"seeds \(\[1, 1\]\)"),
        ({"seeds": (-1,)}, r"seeds \(\[-1\]\)"),
        ({"baseline": "plane"}, "contain plane"),
    ],
)
def test_values_out_of_range(study, changes, message):
    with pytest.raises(StudyError, match=message):
        replace(study, **changes)


def test_tokens(study):
    assert study.units_per_step == 32
    assert study.length == "64 tokens (2 steps of 32)"
    assert replace(study, trainer={"accumulate_grad_batches": 4}).units_per_step == 128
    assert replace(study, epochs=3).length == "3 epochs"


def test_a_task_counts_questions(study):
    task = {"class_path": "datamodules.StateTracking", "init_args": {"task": "parity"}}
    asked = replace(study, task=task)
    assert asked.length == "4 questions (2 steps of 2)"
    assert training_settings(asked, asked.runs[0])["data"]["class_path"] == task["class_path"]
    other = {**task, "init_args": {"task": "vars"}}
    assert len({s.folder for s in (study, asked, replace(study, task=other))}) == 3
    with pytest.raises(StudyError, match="leave the text out"):
        replace(asked, text=Text(files=("a.txt",)))


def test_other_steps_and_other_text_have_another_folder(study):
    texts = [Text(files=("a.txt",)), Text(files=("b.txt",))]
    others = [study, replace(study, steps=3), *(replace(study, text=text) for text in texts)]
    assert len({other.folder for other in others}) == len(others)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_at_least_a_million_tokens_a_run(name):
    study = find_study(name)
    assert study.method == name
    assert study.epochs or study.task or study.steps * study.units_per_step >= 1_000_000
    assert len(study.seeds) >= 2


@pytest.mark.parametrize("name", STUDIES)
def test_every_column_has_an_evaluation(name):
    study = find_study(name)
    measured = {evaluation.name for run in study.runs for evaluation in run.evaluations}
    assert {column.evaluation for column in study.columns} - {LOGGED} == measured


def test_an_unknown_study_is_told_with_the_known_ones():
    with pytest.raises(StudyError, match="no study 'bubbles'; there are thoughtbubbles"):
        find_study("bubbles")


def test_only_made_up_texts_have_a_number_of_operations():
    with pytest.raises(StudyError, match=r"operations \(20\): ponderlm reads a text"):
        find_study("ponderlm", 20)


def test_a_run_may_be_longer_or_come_once(study):
    first, second = study.runs[0], replace(study.runs[1], repeated=False, length=2.5)
    changed = replace(study, runs=(first, second, *study.runs[2:]), seeds=(3, 4))
    folders = [run.folder for run in changed.seeded([first.name, second.name])]
    assert folders == [f"{first.name}-seed3", f"{second.name}-seed3", f"{first.name}-seed4"]
    assert changed.steps_of(second) == round(2.5 * changed.steps)
    with pytest.raises(StudyError, match="length of their own count steps"):
        replace(changed, epochs=2)


def test_extra_runs_wait_until_they_are_asked_for(study):
    plain, copy = study.runs
    changed = replace(study, runs=(plain, replace(copy, extra=True)))
    assert {run.name for run in changed.seeded()} == {"plain"}
    assert {run.name for run in changed.seeded(["copy"])} == {"copy"}
