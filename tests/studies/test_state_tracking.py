"""Studies of state tracking: lengths of texts, and curricula that are shares of the training."""

from dataclasses import replace

import pytest

from lightning_models.thinking_states.baselines.curricula import StepStages, TokenStages
from studies import StudyError
from studies.catalogue import find_study
from studies.commands import training_settings

STUDIES = ("thinking_states", "thinking_states_vars")


def configs(study):
    """The model config of each run, by its name."""
    settings = {run.name: training_settings(study, run) for run in study.runs}
    return {name: value["model"]["init_args"]["config"] for name, value in settings.items()}


@pytest.mark.parametrize("name", STUDIES)
def test_the_declared_curricula(name):
    declared = configs(find_study(name))
    assert declared["coconut"]["epochs_per_stage"] == 0.4
    assert declared["icot"]["remove_per_epoch"] == 24
    assert "remove_per_epoch" not in declared["cot"]


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("steps", [30, 1500, 20_000])
def test_chains_are_gone_behind_two_thirds_of_any_training(name, steps):
    study = replace(find_study(name), steps=steps)
    epochs = steps * study.data["batch_size"] / study.data["train_examples"]
    found = configs(study)
    coconut, icot = found["coconut"], found["icot"]
    curricula = [
        StepStages(coconut["epochs_per_stage"], coconut["max_latent_stage"]),
        TokenStages(icot["remove_per_epoch"], icot["remove_all_beyond"], None),
    ]
    for curriculum in curricula:
        assert curriculum.at(0.5 * epochs) < curriculum.final
        assert curriculum.at(0.75 * epochs) == curriculum.final


@pytest.mark.parametrize(("operations", "beyond"), [(10, (11, 40)), (20, (21, 80)), (40, (41, 99))])
def test_longer_texts_are_tested(operations, beyond):
    study = find_study("thinking_states", operations)
    assert study.task["init_args"]["operations"] == [1, operations]
    tested = {e.name: e.options["data.test_operations"] for e in study.runs[0].evaluations}
    assert tested == {
        "in": f"[1,{operations}]",
        "beyond": "[{},{}]".format(*beyond),
        "far": "[100,100]",
    }
    assert [column.title for column in study.columns][:2] == [
        f"1 to {operations} operations",
        "{} to {}".format(*beyond),
    ]


def test_variants_share_no_folder():
    studies = [find_study("thinking_states", n) for n in (None, 10, 20, 40)]
    assert [study.typed for study in studies[1:]] == ["", "--operations 20", "--operations 40"]
    assert studies[0].folder == studies[1].folder
    assert len({study.folder for study in studies}) == 3


@pytest.mark.parametrize("operations", [0, 99])
def test_lengths_that_leave_nothing_to_test(operations):
    with pytest.raises(StudyError, match=rf"operations \({operations}\) must be from 1 to 98"):
        find_study("thinking_states", operations)


def test_only_questions_can_pace_a_run(study):
    paced = replace(study.runs[0], paced={"dim": lambda epochs: 8})
    with pytest.raises(StudyError, match="takes the questions of a task"):
        replace(study, runs=(paced, *study.runs[1:]))
