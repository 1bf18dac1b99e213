"""Declarations: every file of configs/studies, and files that are wrong."""

from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
import yaml

import lightning_models
from evaluation.cli import build_parser
from lightning_models.thinking_states.baselines.curricula import StepStages, TokenStages
from studies.runner import analyse_command, analysis_config, evaluate_command, train_command
from studies.study import LOGGED, StudyError, calculate, load_study, render, study_names
from training import LatentCLI

STUDIES = [name for name in study_names() if not name.startswith("suite_")]
SUITES = ["suite_cpu", "suite_h200", "suite_paper"]
ON_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
VOCABULARIES = {"bpe:1024": 1024, "gpt2": 50257}
MARKERS, SLOTS = 3, 67


def declared_runs():
    """A run of each model class in each study; a class that another study has is slow."""
    seen = set()
    for name in study_names():
        study = load_study(name)
        for run in {run.model["class_path"]: run for run in study.runs}.values():
            marks = [pytest.mark.slow] if run.model["class_path"] in seen else []
            seen.add(run.model["class_path"])
            yield pytest.param(study, run, marks=marks, id=f"{name}-{run.name}")


def declared_evaluations():
    """Each set of options of ``evaluate.py``, with a run that has it; of dials, one a class."""
    found = {}
    for name in study_names():
        study = load_study(name)
        for run in study.runs:
            for key, options in run.evaluations.items():
                dials = any(option.startswith("set.") for option in options)
                found[str(options), dials and run.model["class_path"]] = (study, run, key)
    return [pytest.param(*each, id="-".join((each[1].name, each[2]))) for each in found.values()]


def test_all_studies_are_there():
    assert {"thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm"} < set(STUDIES)
    assert {"thinking_states", "thinking_states_vars"} < set(STUDIES)
    assert [name for name in study_names() if name not in STUDIES] == SUITES


@pytest.mark.parametrize("name", study_names())
def test_every_study_declares_what_it_reports(name):
    study = load_study(name)
    assert study.name == name
    assert len(study.seeds) >= 2
    assert study.epochs or study.task or study.steps * study.units_per_step >= 1_000_000
    folders = [run.folder for run in study.seeded(study.names)]
    assert len(set(folders)) == len(folders) >= len(study.runs) + len(study.seeds) - 1
    if study.columns:
        measured = {key for run in study.runs for key in run.evaluations}
        assert {column.evaluation for column in study.columns} - {LOGGED} == measured
        assert all(run.evaluations for run in study.runs)


@pytest.mark.parametrize("name", study_names())
def test_runs_differ_in_the_model_the_reading_and_the_seed_only(name):
    study = load_study(name)
    configs = [study.train_config(run) for run in study.seeded()]
    arguments = [config["model"]["init_args"] for config in configs]
    space = study.search.space if study.search and name in SUITES else ()  # each row has its own
    searched = {key.rpartition(".")[2] for key in space}
    optimizers = [
        {key: value for key, value in each["optimizer"].items() if key not in searched}
        for each in arguments
    ]
    assert all(optimizer == optimizers[0] for optimizer in optimizers)
    corpora = [config["data"]["init_args"].get("corpus", config["data"]) for config in configs]
    assert all(corpus == corpora[0] for corpus in corpora)
    run = study.runs[0]
    first, second = (study.train_config(replace(run, seed=seed)) for seed in (0, 1))
    assert second == {**first, "seed_everything": 1}


@pytest.mark.parametrize(("study", "run"), list(declared_runs()))
def test_train_accepts_a_run_and_its_analyses(study, run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(study.train_config(run)))
    command = train_command(config, tmp_path, resume=False)
    program = LatentCLI([*command[3:], *ON_CPU], run=False)
    assert f"lightning_models.{type(program.model).__name__}" == run.model["class_path"]
    for analysis in run.analyses.values():
        settings = analysis_config(analysis, tmp_path, lambda name: None)
        config.write_text(yaml.safe_dump(settings))
        words = analyse_command(config, tmp_path)[3:-2]
        trainer = LatentCLI([*words, *ON_CPU], run=False).trainer
        name = analysis.class_path.rpartition(".")[2]
        assert name in {type(callback).__name__ for callback in trainer.callbacks}


@pytest.mark.parametrize(("study", "run", "name"), declared_evaluations())
def test_evaluate_accepts_the_options(study, run, name, tmp_path):
    config = study.train_config(run)
    checkpoint = tmp_path / "last.ckpt"
    recipe = {key: dict(config[key]) for key in ("model", "data")}
    torch.save({"state_dict": {}, "recipe": recipe}, checkpoint)
    options = dict(run.evaluations[name])
    verb = options.pop("command", "perplexity")
    given = {"ckpt": checkpoint, "output": tmp_path / "out.json", **options}
    argv = evaluate_command(verb, (), given)[2:]
    assert build_parser(argv).parse_args(argv).command == verb


# ---- suites


def parameters(study, run):
    """Number of parameters of the model of a run."""
    kind = getattr(lightning_models, run.model["class_path"].split(".")[1])
    config = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in run.model["init_args"]["config"].items()
    }
    vocabulary, length = VOCABULARIES[study.data["tokenizer"]], study.data["block_size"]
    if run.data is not None:
        vocabulary, length = vocabulary + MARKERS, SLOTS
    types = get_type_hints(kind.__init__)
    model = kind(types["config"](**config, vocab_size=vocabulary, block_size=length))
    with torch.device("meta"):
        model.configure_model()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SUITES)
def test_parameters_of_a_suite_are_matched_but_for_larger_controls(name):
    suite = load_study(name)
    counted = {run.name: parameters(suite, run) for run in suite.runs}
    plain, untied = counted.pop("plain"), counted.pop("untied", None)
    assert counted.pop("deep") > 1.3 * plain
    if name == "suite_cpu":
        assert counted.pop("wide") > 1.3 * plain
    control = {"ponderlm": untied or plain}
    assert set(counted) == {"thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm"}
    for other, number in counted.items():
        assert abs(number / control.get(other, plain) - 1) < 0.05, other


# ---- state tracking


@pytest.mark.parametrize("name", ["thinking_states", "thinking_states_vars"])
@pytest.mark.parametrize("steps", [30, 1500, 20_000])
def test_chains_are_gone_after_two_thirds_of_any_training(name, steps):
    study = load_study(name, steps=steps)
    runs = {run.name: run for run in study.runs}
    coconut, icot = (runs[name].model["init_args"]["config"] for name in ("coconut", "icot"))
    curricula = {
        "coconut": StepStages(coconut["epochs_per_stage"], coconut["max_latent_stage"]),
        "icot": TokenStages(icot["remove_per_epoch"], icot["remove_all_beyond"], None),
    }
    for run, curriculum in curricula.items():
        read = study.steps_of(runs[run]) * study.data["batch_size"]
        epochs = read / study.data["train_examples"]
        assert curriculum.at(0.5 * epochs) < curriculum.final
        assert curriculum.at(0.75 * epochs) == curriculum.final


@pytest.mark.parametrize(
    ("operations", "beyond", "options"),
    [
        (None, (11, 40), ""),
        (10, (11, 40), ""),
        (20, (21, 80), "--operations 20"),
        (40, (41, 99), "--operations 40"),
    ],
)
def test_longer_texts_are_tested(operations, beyond, options):
    study = load_study("thinking_states", operations=operations)
    assert study.task["init_args"]["operations"] == [1, operations or 10]
    evaluations = study.runs[0].evaluations
    asked = {name: each["data.test_operations"] for name, each in evaluations.items()}
    assert asked["in"] == f"[1,{operations or 10}]"
    assert asked["beyond"] == "[{},{}]".format(*beyond)
    assert asked["far"] == "[100,100]"
    assert study.options == options
    assert (study.folder == load_study("thinking_states").folder) == (not options)


# ---- order, length, text


def test_runs_come_seed_by_seed(study, study_file):
    assert [run.folder for run in study.seeded()] == [
        *("plain-seed0", "copy-seed0", "plain-seed1", "copy-seed1")
    ]
    assert [run.folder for run in study.seeded(["copy"])] == ["copy-seed0", "copy-seed1"]
    assert [len(run.analyses) for run in study.seeded()] == [0, 1, 0, 0]
    plain, copy = study.runs
    changed = replace(study, runs=(plain, replace(copy, seeds="first", length=2.5, extra=True)))
    assert {run.name for run in changed.seeded()} == {"plain"}
    assert [run.folder for run in changed.seeded(["copy"])] == ["copy-seed0"]
    config = changed.train_config(changed.runs[1])
    assert config["trainer"]["max_steps"] == 5
    with pytest.raises(StudyError, match=r"only \(copi\): the runs are plain, copy"):
        study.seeded(["copi"])


def test_steps_and_epochs_replace_each_other(study_file):
    path = str(study_file())
    steps, epochs = load_study(path, steps=20), load_study(path, epochs=3)
    assert load_study(str(study_file(epochs=3)), steps=20).epochs is None
    trainer = steps.train_config(steps.runs[0])["trainer"]
    assert (trainer["max_steps"], trainer["val_check_interval"]) == (20, 2)
    trainer = epochs.train_config(epochs.runs[0])["trainer"]
    assert trainer["max_epochs"] == 3
    assert "max_steps" not in trainer
    assert trainer["val_check_interval"] == 1 / 4  # at least ten validations


def test_texts_and_lengths_have_folders_of_their_own(study_file):
    path = str(study_file())
    task = {"class_path": "datamodules.StateTracking", "init_args": {"task": "parity"}}
    variants = [{}, {"steps": 3}, {"epochs": 2}, {"files": ("a",)}, {"files": ("b",)}]
    variants += [{"files": ("a",), "separator": "@"}, {"corpus": task}]
    assert len({load_study(path, **typed).folder for typed in variants}) == len(variants)


def test_own_text_replaces_the_corpus(study_file):
    corpus = {"class_path": "datamodules.WikiText103", "init_args": {"level": "raw"}}
    path = str(study_file(corpus=corpus))
    assert load_study(path).source == corpus
    source = load_study(path, files=("/a.txt",), separator="@").source
    assert source["class_path"] == "datamodules.LocalText"
    assert source["init_args"] == {"data_files": ["/a.txt"], "separator": "@"}


def test_data_of_a_run_take_the_text_as_their_corpus(study):
    own = {"class_path": "datamodules.Sentences", "init_args": {"splitter": "rules"}}
    text = study.train_config(study.runs[0])["data"]
    data = study.train_config(replace(study.runs[0], data=own))["data"]
    assert data["init_args"] == {"splitter": "rules", "corpus": text}


# ---- expressions, and files that are wrong


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{ n }}", 10),
        ("{{ 39 * n // 10 }}", 39),
        ("{{ min(4 * n, 39) - 1 }}", 38),
        ("{{ max(1, round(n / 4)) }}", 2),
        ("1 to {{ n }}: {{ name }}", "1 to 10: Parity"),
        ("{{ n }}{{ n }}", "1010"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
    ],
)
def test_expressions(text, result):
    assert render({"key": [text]}, {"n": 10, "name": "Parity"}) == {"key": [result]}


@pytest.mark.parametrize(
    "text", ["m", "1 +", "n / 0", "n ** 2", "n.real", "open('x')", "round(n, ndigits=1)", "[1]"]
)
def test_other_expressions_are_refused(text):
    with pytest.raises(StudyError, match="values: n"):
        calculate(text, {"n": 10})


MODEL = {"class_path": "lightning_models.TransformerLM", "init_args": {}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"runs": None}, "runs"),
        ({"runs": {}}, "runs"),
        ({"runs": [1]}, "runs"),
        ({"runs": {"one": None}}, "runs.one"),
        ({"runs": {"one": {"title": "x"}}}, "runs.one.* model"),
        ({"runs": {"one": {"model": MODEL, "modle": {}}}}, "modle"),
        ({"runs": {"one": {"model": "TransformerLM"}}}, "runs.one.model"),
        ({"runs": {"one": {"model": MODEL, "title": "K = 2"}}}, "runs.one.title"),
        ({"runs": {"one": {"model": MODEL, "seeds": "second"}}}, "runs.one.seeds"),
        ({"runs": {"one": {"model": MODEL, "length": 2}}, "epochs": 2}, "runs.one.* length"),
        ({"runs": {"one": {"model": MODEL, "cost": "{{ epochs }}"}}}, "cost|epochs"),
        ({"runs": {"one": {"model": MODEL, "evaluations": {"a": 3}}}}, "runs.one.evaluations.a"),
        ({"runs": {"one": {"model": MODEL, "analyses": {"a": 3}}}}, "runs.one.analyses.a"),
        ({"title": None}, "title"),
        ({"data": {"block_size": 1, "tokenizer": "bytes"}}, "batch_size"),
        ({"epoch": 3}, "epoch"),
        ({"columns": 3}, "columns"),
        ({"columns": [{"title": "x"}]}, "columns.0.* evaluation"),
        ({"steps": 0}, "steps"),
        ({"epochs": 0}, "epochs"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"seeds": [-1]}, "seeds"),
        ({"seeds": "0"}, "seeds"),
        ({"extends": "missing"}, "missing.yaml"),
        ({"extends": "pair"}, r"extends \(pair\)"),
        ({"runs": {"one": 3}}, "runs.one"),
        ({"data": {"block_size": "x", "batch_size": 1}}, "data.block_size"),
        ({"values": 3}, "values"),
        ({"operations": 3}, "operations"),
        ({"operations": {"default": 1, "least": "x", "most": 2}}, "operations.least"),
        ({"corpus": {"class_path": "datamodules.PythonDocs"}}, "corpus"),
    ],
)
def test_bad_files_name_the_key(study_file, changes, key):
    with pytest.raises(StudyError, match=key):
        load_study(str(study_file(**changes)))


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("bubbles", {}, "no study 'bubbles'; there are .*thoughtbubbles"),
        ("ponderlm", {"operations": 20}, r"operations \(20\)"),
        ("thinking_states", {"operations": 0}, r"operations \(0\) must be from 1 to 98"),
        ("thinking_states", {"operations": 99}, r"operations \(99\) must be from 1 to 98"),
        ("thinking_states", {"files": ("a",)}, "leave the text out"),
        ("latent_thought", {"epochs": 2}, "use --steps"),
    ],
)
def test_studies_refuse_what_they_cannot_do(name, typed, message):
    with pytest.raises(StudyError, match=message):
        load_study(name, **typed)
