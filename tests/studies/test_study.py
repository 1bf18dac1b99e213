"""Declarations: every file of configs/studies, and files that are wrong."""

from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch
import yaml

import lightning_models
from evaluation.arguments import data_recipe
from evaluation.cli import parse
from lightning_models.checkpoint import read_checkpoint
from lightning_models.layers import DecoderConfig
from lightning_models.thinking_states.baselines.curricula import StepStages, TokenStages
from studies.runner import analyse_command, analysis_config, evaluate_command, train_command
from studies.study import LOGGED, Figure, Search, StudyError, load_study, study_names
from tests.studies.conftest import load_declared
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
        study = load_declared(name)
        for run in {run.model["class_path"]: run for run in study.runs.values()}.values():
            marks = [pytest.mark.slow] if run.model["class_path"] in seen else []
            seen.add(run.model["class_path"])
            yield pytest.param(study, run, marks=marks, id=f"{name}-{run.name}")


def declared_evaluations():
    """Each set of options of ``evaluate.py``, with a run that has it; of dials, one a class."""
    found = {}
    for name in study_names():
        study = load_declared(name)
        for run in study.runs.values():
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
    study = load_declared(name)
    assert study.name == name
    assert len(study.seeds) >= 2
    assert study.epochs or study.task or study.steps * study.units_per_step >= 1_000_000
    folders = [run.folder for run in study.seeded(list(study.runs))]
    assert len(set(folders)) == len(folders) >= len(study.runs) + len(study.seeds) - 1
    if study.columns:
        measured = {key for run in study.runs.values() for key in run.evaluations}
        shown = {key.strip("`").partition(".")[0] for key in study.columns.values()}
        assert shown - {LOGGED} == measured
        assert all(run.evaluations for run in study.runs.values())


@pytest.mark.parametrize("name", study_names())
def test_runs_differ_in_the_model_the_reading_and_the_seed_only(name):
    study = load_declared(name)
    configs = [study.train_config(run) for run in study.seeded()]
    space = study.search.space if study.search and name in SUITES else ()  # each row has its own
    searched = {key.rpartition(".")[2] for key in space}
    optimizers = [config["model"]["init_args"]["optimizer"] for config in configs]
    for run, optimizer in zip(study.seeded(), optimizers, strict=True):
        _, named, rate = run.title.partition(", rate ")
        expected = {**optimizers[0], "lr": float(rate)} if named else optimizers[0]
        assert {**optimizer, **dict.fromkeys(searched)} == {**expected, **dict.fromkeys(searched)}
    corpora = [config["data"]["init_args"].get("corpus", config["data"]) for config in configs]
    assert all(corpus == corpora[0] for corpus in corpora)
    run = next(iter(study.runs.values()))
    first, second = (study.train_config(replace(run, seed=seed)) for seed in (0, 1))
    assert second == {**first, "seed_everything": 1}


@pytest.mark.parametrize("name", study_names())
def test_runs_differ_in_no_default_of_their_classes(name):
    """A difference between runs is declared, since the classes' defaults follow their papers."""
    defaults: dict[str, dict[str, object]] = {}
    for run in load_declared(name).runs.values():
        declared = run.model["init_args"].get("config", {})
        model = getattr(lightning_models, run.model["class_path"].rpartition(".")[2])
        kind = get_type_hints(model.__init__)["config"]
        for field in fields(DecoderConfig):
            if field.name not in declared and hasattr(kind, field.name):
                defaults.setdefault(field.name, {})[run.name] = getattr(kind, field.name)
    assert {key: found for key, found in defaults.items() if len(set(found.values())) > 1} == {}


@pytest.mark.parametrize(("study", "run"), list(declared_runs()))
def test_train_accepts_a_run_and_its_analyses(study, run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(study.train_config(run)))
    command = train_command(config, tmp_path, resume=False)
    program = LatentCLI([*command[3:], *ON_CPU], run=False)
    assert f"lightning_models.{type(program.model).__name__}" == run.model["class_path"]
    for analysis in run.analyses.values():
        settings = analysis_config(analysis, tmp_path, seed=0)
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
    options = run.evaluations[name]
    argv = evaluate_command(checkpoint, tmp_path / "out.json", options)[2:]
    verb = options.get("command", "perplexity")
    command, settings = parse(argv)
    assert command == verb
    if settings.get("data"):
        assert data_recipe(settings, read_checkpoint(checkpoint))


def test_settings_name_the_users_text_by_its_files(tmp_path):
    """By names and sizes, so that a table of one machine is continued on another."""
    digests = []
    for folder, text in (("here", "a"), ("there", "a"), ("longer", "ab")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "book.txt").write_text(text)
        study = load_study("ponderlm", files=(str(tmp_path / folder / "*.txt"),))
        digests.append(study.settings_digest(study.runs["deep"]))
    assert digests[0] == digests[1] != digests[2]
    declared = load_study("ponderlm")
    assert declared.settings_digest(declared.runs["deep"]) not in digests


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
    suite = load_declared(name)
    counted = {run.name: parameters(suite, run) for run in suite.runs.values()}
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
    runs = study.runs
    coconut, icot = (runs[name].model["init_args"]["config"] for name in ("coconut", "icot"))
    curricula = {
        "coconut": StepStages(coconut["epochs_per_stage"], coconut["max_latent_stage"]),
        "icot": TokenStages(icot["remove_per_epoch"], icot["remove_all_beyond"], None),
    }
    for run, curriculum in curricula.items():
        read = round(steps * runs[run].length) * study.data["batch_size"]
        epochs = read / study.data["train_examples"]
        assert curriculum.at(0.5 * epochs) < curriculum.final
        assert curriculum.at(0.75 * epochs) == curriculum.final


@pytest.mark.parametrize(
    ("operations", "beyond"), [(None, (11, 40)), (10, (11, 40)), (20, (21, 80)), (40, (41, 99))]
)
def test_longer_texts_are_tested(operations, beyond):
    study = load_study("thinking_states", operations=operations)
    assert study.operations == (operations or 10)
    assert study.task["init_args"]["operations"] == [1, operations or 10]
    evaluations = study.runs["thinking_states"].evaluations
    asked = {name: each["data.test_operations"] for name, each in evaluations.items()}
    assert asked["in"] == f"[1,{operations or 10}]"
    assert asked["beyond"] == "[{},{}]".format(*beyond)
    assert asked["far"] == "[100,100]"
    whole = operations in (None, 10)
    assert (study.folder == load_declared("thinking_states").folder) == whole


# ---- order, length, text


def test_runs_come_seed_by_seed(study, study_file):
    assert [run.folder for run in study.seeded()] == [
        *("plain-seed0", "copy-seed0", "plain-seed1", "copy-seed1")
    ]
    assert [run.folder for run in study.seeded(["copy"])] == ["copy-seed0", "copy-seed1"]
    assert [len(run.analyses) for run in study.seeded()] == [0, 1, 0, 0]
    figure = Figure(analysis="looks", table="*.csv", x="at", y="share")
    assert [len(run.analyses) for run in replace(study, figure=figure).seeded()] == [0, 1, 0, 1]
    with pytest.raises(StudyError, match=r"figure.analysis \(look\) must be .* a run: looks$"):
        replace(study, figure=replace(figure, analysis="look"))
    copy = replace(study.runs["copy"], seeds="first", length=2.5, extra=True)
    changed = replace(study, runs={**study.runs, "copy": copy})
    assert {run.name for run in changed.seeded()} == {"plain"}
    assert [run.folder for run in changed.seeded(["copy"])] == ["copy-seed0"]
    config = changed.train_config(copy)
    assert config["trainer"]["max_steps"] == 5
    with pytest.raises(StudyError, match=r"only \(copi\): the runs are plain, copy"):
        study.seeded(["copi"])


def test_steps_and_epochs_replace_each_other(study_file):
    path = str(study_file())
    steps, epochs = load_study(path, steps=20), load_study(path, epochs=3)
    assert load_study(str(study_file(epochs=3)), steps=20).epochs is None
    trainer = steps.train_config(steps.runs["plain"])["trainer"]
    assert (trainer["max_steps"], trainer["val_check_interval"]) == (20, 2)
    trainer = epochs.train_config(epochs.runs["plain"])["trainer"]
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
    plain = study.runs["plain"]
    text = study.train_config(plain)["data"]
    data = study.train_config(replace(plain, data=own))["data"]
    assert data["init_args"] == {"splitter": "rules", "corpus": text}


# ---- arithmetic, and files that are wrong


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("${values.n}", 10),
        ("${add:${values.n},1}", 11),
        ("${sub:${values.n},1}", 9),
        ("${floordiv:${mul:39,${values.n}},4}", 97),
        ("${max:1,${round:${div:${values.n},4}}}", 2),
        ("${round:${div:${values.n},3},2}", 3.33),
        ("${min:${mul:4,${values.n}},39}", 39),
        ("1 to ${values.n}: ${values.name}", "1 to 10: Parity"),
        ("${passes:${....length}}", 1.5),
    ],
)
def test_arithmetic(study_file, text, result):
    """Each value is worked out by hand; 6 steps of 2 rows twice over read 16 examples 1.5 times."""
    settings = {
        "class_path": "lightning_models.TransformerLM",
        "init_args": {"config": {"x": text}},
    }
    content = {
        "values": {"n": 10, "name": "Parity"},
        "runs": {"one": {"length": 2.0, "model": settings}},
        "data": {"block_size": 16, "batch_size": 2, "train_examples": 16},
        "steps": 6,
    }
    study = load_study(str(study_file(**content)))
    assert study.runs["one"].model["init_args"]["config"] == {"x": result}


MODEL = {"class_path": "lightning_models.TransformerLM", "init_args": {}}


RUN = {"model": MODEL}
LOOK = {"class_path": "callbacks.RecallAnalysis"}
BAD_FILES = [
    ({"runs": None}, "runs"),
    ({"runs": {}}, "runs"),
    ({"runs": [1]}, "runs"),
    ({"runs": {"one": None}}, "runs.one"),
    ({"runs": {"one": 3}}, "runs.one"),
    ({"runs": {"one": {"title": "x"}}}, "runs.one.model"),
    ({"runs": {"one": {**RUN, "modle": {}}}}, "runs.one.modle"),
    ({"runs": {"one": {"model": "TransformerLM"}}}, "runs.one.model"),
    ({"runs": {"one": {**RUN, "title": "K = 2"}}}, "runs.one.title"),
    ({"runs": {"one": {**RUN, "seeds": "second"}}}, "runs.one.seeds"),
    ({"runs": {"one": {**RUN, "length": 2}}, "epochs": 2}, "runs.one"),
    ({"runs": {"one": {**RUN, "length": "${epochz}"}}}, "runs.one.length"),
    ({"runs": {"one": {**RUN, "length": "${mul:1}"}}}, "runs.one.length"),
    ({"runs": {"one": {**RUN, "length": "${pow:1,2}"}}}, "runs.one.length"),
    ({"runs": {"one": {**RUN, "length": "${div:1,0}"}}}, "runs.one.length"),
    ({"runs": {"one": {**RUN, "evaluations": {"a": 3}}}}, "runs.one.evaluations.a"),
    ({"runs": {"one": {**RUN, "analyses": {"a": 3}}}}, "runs.one.analyses.a"),
    ({"runs": {"one": {**RUN, "name": "two"}}}, "runs.one.name"),
    ({"runs": {"one": {**RUN, "length": 0}}}, "runs.one.length"),
    ({"runs": {"one": {**RUN, "title": "a"}, "two": {**RUN, "title": "a"}}}, "runs.one.title"),
    ({"runs": {"one": {**RUN, "evaluations": {"record": {}}}}}, "record"),
    ({"runs": {"one": {**RUN, "analyses": {"train": LOOK}}}}, "train"),
    ({"runs": {"one": {**RUN, "evaluations": {"a": {}}, "analyses": {"a": LOOK}}}}, "of their own"),
    ({"paired": {"bpb": "other"}}, "paired"),
    ({"paired": {"bits": "plain"}}, "paired"),
    ({"title": None}, "title"),
    ({"data": {"block_size": 1, "tokenizer": "bytes"}}, "data.batch_size"),
    ({"data": {"block_size": "x", "batch_size": 1}}, "data.block_size"),
    ({"epoch": 3}, "epoch"),
    ({"columns": 3}, "columns"),
    ({"steps": 0}, "steps"),
    ({"validations": 0}, "validations"),
    ({"epochs": 0}, "epochs"),
    ({"seeds": []}, "seeds"),
    ({"seeds": [1, 1]}, "seeds"),
    ({"seeds": [-1]}, "seeds"),
    ({"seeds": "0"}, "seeds"),
    ({"extends": "missing"}, "missing"),
    ({"extends": "pair"}, "pair"),
    ({"operations": "x"}, "operations"),
]


@pytest.mark.parametrize(("changes", "key"), BAD_FILES)
def test_bad_files_name_the_key_in_one_line(study_file, changes, key):
    with pytest.raises(StudyError) as refused:
        load_study(str(study_file(**changes)))
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_study_extends_another(study_file, tmp_path):
    base = study_file(budget=9)
    text = "extends: pair\nsteps: 7\nruns: {copy: {length: 2}}\n"
    text += "search: {trials: 1, tokens: 8, space: {lr: {low: 1e-3, high: 1}}}\n"
    (tmp_path / "longer.yaml").write_text(text)
    study, longer = load_study(str(base)), load_study(str(tmp_path / "longer.yaml"))
    copy = replace(study.runs["copy"], length=2.0)
    search = Search(trials=1, tokens=8, space={"lr": {"low": 0.001, "high": 1}})
    runs = {**study.runs, "copy": copy}
    new = {"name": "longer", "steps": 7, "budget": None, "search": search, "runs": runs}
    assert study.budget == 9
    assert longer == replace(study, **new)


@pytest.mark.parametrize(
    ("name", "typed", "key"),
    [
        ("bubbles", {}, "thoughtbubbles"),
        ("ponderlm", {"operations": 20}, "operations (20)"),
        ("thinking_states", {"operations": 0}, "operations (0)"),
        ("thinking_states", {"operations": 99}, "operations (99)"),
        ("thinking_states", {"files": ("a",)}, "text"),
        ("latent_thought", {"epochs": 2}, "epochs (2)"),
    ],
)
def test_studies_refuse_what_they_cannot_do(name, typed, key):
    with pytest.raises(StudyError) as refused:
        load_study(name, **typed)
    assert key in str(refused.value)
