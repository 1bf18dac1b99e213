"""What train.py and evaluate.py are asked is what they understand."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from evaluation.cli import build_parser
from studies import CheckpointOf, Text
from studies.commands import (
    analyse_command,
    analysis_settings,
    evaluate_command,
    train_command,
    training_settings,
)
from studies.thoughtbubbles import FORKS, STUDY
from training import LatentCLI

ROOT = Path(__file__).parents[2]
ON_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]


def built(study, run, folder):
    """What train.py makes of the config of a run."""
    config = folder / f"{run.folder}.yaml"
    config.write_text(yaml.safe_dump(training_settings(study, run), sort_keys=False))
    command = train_command(config, folder, resume=False)
    return LatentCLI([*command[3:], *ON_CPU], run=False)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Thoughtbubbles' runs, as train.py understands them."""
    folder = tmp_path_factory.mktemp("programs")
    return {run.name: built(STUDY, run, folder) for run in STUDY.runs}


def test_thoughtbubbles_runs_are_what_their_names_say(programs):
    kinds = {name: type(program.model).__name__ for name, program in programs.items()}
    assert kinds == {
        "plain": "TransformerLM",
        "copy3": "CopyLM",
        "bubbles2": "ThoughtbubblesLM",
        "bubbles4": "ThoughtbubblesLM",
    }
    assert programs["copy3"].model.config.copies == 3
    assert [programs[f"bubbles{n}"].model.config.kappa for n in (2, 4)] == ["2L", "4L"]
    assert programs["bubbles2"].model.config.fork_layers == (1, 2, 3)


def test_runs_differ_in_nothing_but_the_model(programs, tmp_path):
    plain = asdict(programs["plain"].model.config)
    demo = LatentCLI(["-c", str(ROOT / "configs/transformer/tiny.yaml"), *ON_CPU], run=False)
    assert plain == asdict(demo.model.config)
    for program in programs.values():
        config = asdict(program.model.config)
        assert {key: config[key] for key in plain} == plain
        assert program.model.optimizer_config == demo.model.optimizer_config
        assert program.datamodule.recipe() == programs["plain"].datamodule.recipe()
        assert program.trainer.gradient_clip_val == demo.trainer.gradient_clip_val


def test_the_seed_changes_the_seed_alone():
    first, second = (training_settings(STUDY, replace(STUDY.runs[0], seed=n)) for n in (0, 1))
    assert second == {**first, "seed_everything": 1}
    assert "seed" not in first["data"]["init_args"]


def test_the_last_step_is_validated_and_saved(programs):
    trainer = programs["plain"].trainer
    assert trainer.max_steps == STUDY.steps == 10 * trainer.val_check_interval
    few = training_settings(replace(STUDY, steps=5), STUDY.runs[0])
    assert few["trainer"]["val_check_interval"] == few["checkpoint"]["every_n_train_steps"] == 1


def test_epochs_take_the_place_of_steps(study, tmp_path):
    counted = replace(study, epochs=3)
    settings = training_settings(counted, counted.runs[0])
    assert settings["trainer"]["max_epochs"] == 3
    assert "max_steps" not in settings["trainer"]
    trainer = built(counted, counted.runs[0], tmp_path).trainer
    assert (trainer.max_epochs, trainer.check_val_every_n_epoch) == (3, 1)


@pytest.mark.parametrize(("epochs", "checks"), [(1, 10), (3, 4), (10, 1), (40, 1)])
def test_short_trainings_are_validated_within_epochs(study, epochs, checks):
    counted = replace(study, epochs=epochs, validations=10)
    settings = training_settings(counted, counted.runs[0])
    assert settings["trainer"]["val_check_interval"] == 1 / checks


def test_data_of_its_own_take_the_text_as_their_corpus(study):
    own = {"class_path": "datamodules.Sentences", "init_args": {"splitter": "rules"}}
    run = replace(study.runs[0], data=own)
    text = training_settings(study, study.runs[0])["data"]
    data = training_settings(study, run)["data"]
    assert data["class_path"] == "datamodules.Sentences"
    assert data["init_args"] == {"splitter": "rules", "corpus": text}


def test_a_run_may_be_watched(study):
    watch = {"class_path": "callbacks.GateAnalysis", "init_args": {"every_n_validations": 0}}
    watched = replace(study.runs[0], callbacks=(watch,))
    assert training_settings(study, watched)["trainer"]["callbacks"] == [watch]
    assert "callbacks" not in training_settings(study, study.runs[0])["trainer"]


def test_own_text(text_file, tmp_path):
    study = replace(STUDY, text=Text(files=(str(text_file),), separator="@"))
    data = built(study, study.runs[0], tmp_path).datamodule
    assert type(data).__name__ == "LocalText"
    assert data.recipe()["init_args"]["data_files"] == [str(text_file)]
    assert data.block_size == 128


def test_resuming_names_the_last_checkpoint():
    command = train_command(Path("c.yaml"), Path("there"), resume=True)
    assert command[1:] == [
        str(ROOT / "train.py"),
        *("fit", "-c", "c.yaml", "--trainer.default_root_dir", "there", "--ckpt_path", "last"),
    ]


EVALUATIONS = {
    (evaluation.name, str(evaluation.options)): evaluation
    for run in STUDY.runs
    for evaluation in run.evaluations
}


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=lambda e: e.name)
def test_evaluate_understands_the_options(evaluation, monkeypatch):
    monkeypatch.setattr("evaluation.arguments.checkpoint_in", lambda argv: None)
    argv = evaluate_command(evaluation, Path("last.ckpt"), Path("out.json"))[2:]
    settings = build_parser(argv).parse_args(argv)[evaluation.command]
    assert settings.ckpt == "last.ckpt"
    assert settings.output == "out.json"
    for key, value in evaluation.options.items():
        assert settings[key] if "." not in key else settings["set"][key[4:]] == value


def test_an_analysis_knows_the_checkpoint_of_another_run(tmp_path):
    there = {"plain": tmp_path / "plain.ckpt"}
    (callback,) = analysis_settings(FORKS, tmp_path, there.get)["trainer"]["callbacks"]
    assert callback["init_args"]["reference_ckpt"] == str(tmp_path / "plain.ckpt")
    (callback,) = analysis_settings(FORKS, tmp_path, lambda name: None)["trainer"]["callbacks"]
    assert callback["init_args"]["reference_ckpt"] is None
    assert FORKS.options["reference_ckpt"] == CheckpointOf("plain")


def test_train_understands_the_analysis(tmp_path):
    config = tmp_path / "config.yaml"
    settings = analysis_settings(FORKS, tmp_path, lambda name: None)
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    command = analyse_command(config, Path("last.ckpt"))
    assert command[2:] == ["validate", "-c", str(config), "--ckpt_path", "last.ckpt"]
    trainer = LatentCLI(["-c", str(config), *ON_CPU], run=False).trainer
    assert "ForkAnalysis" in {type(callback).__name__ for callback in trainer.callbacks}
