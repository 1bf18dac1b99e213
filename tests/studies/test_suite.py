"""Suites: files that list models of several methods, and the comparison of them."""

from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import yaml

import lightning_models
from studies import suite as suites
from studies.commands import training_settings
from studies.study import StudyError

ROOT = Path(__file__).parents[2]
NAMES = [path.stem for path in sorted(suites.SUITES.glob("*.yaml"))]
METHODS = {"plain", "deep", "thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm"}
CLOSE = 0.05
VOCABULARIES = {"bpe:1024": 1024, "gpt2": 50257}
MARKERS, SLOTS = 3, 67


@pytest.fixture(params=NAMES)
def suite(request):
    return suites.load_suite(suites.find_suite(request.param))


@pytest.fixture
def small(tmp_path):
    """A suite of two models, as a file."""
    model = {"class_path": "lightning_models.TransformerLM", "init_args": {"config": {"dim": 8}}}
    content = {
        "title": "Two of a kind",
        "introduction": "",
        "data": {"tokenizer": "bytes", "block_size": 16, "batch_size": 2},
        "trainer": {},
        "steps": 2,
        "seeds": [0, 1],
        "shape": {"anything": "for anchors"},
        "runs": {
            "one": {"model": model, "title": "One, small"},
            "other": {"model": model, "seeds": "first"},
        },
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def changed(path, **changes):
    """The file with other entries; None removes one."""
    content = yaml.safe_load(path.read_text()) | changes
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    return path


def parameters(suite, run):
    """How many numbers the model of a run has."""
    kind = getattr(lightning_models, run.model["class_path"].split(".")[1])
    config = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in run.model["init_args"]["config"].items()
    }
    sizes = {
        "vocab_size": VOCABULARIES[suite.data["tokenizer"]],
        "block_size": suite.data["block_size"],
    }
    if run.data is not None:
        sizes = {"vocab_size": sizes["vocab_size"] + MARKERS, "block_size": SLOTS}
    model = kind(get_type_hints(kind.__init__)["config"](**config, **sizes))
    with torch.device("meta"):
        model.configure_model()
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_project_has_a_suite_for_each_machine():
    assert NAMES == ["cpu", "h200", "paper"]


def test_suites_have_the_plain_decoder_and_the_four_methods(suite):
    assert set(suite.names) == METHODS
    seeds = {(run.name, run.seed) for run in suite.seeded()}
    assert {("plain", 0), ("plain", 1), ("deep", 0)} <= seeds
    assert ("deep", 1) not in seeds


def test_parameters_are_matched_but_for_the_deeper_one(suite):
    counted = {run.name: parameters(suite, run) for run in suite.runs}
    plain = counted.pop("plain")
    assert counted.pop("deep") > 1.3 * plain
    for name, number in counted.items():
        assert abs(number / plain - 1) < CLOSE, name


def test_runs_read_the_same_text_with_one_optimiser(suite):
    settings = [training_settings(suite, run) for run in suite.seeded()]
    optimisers = [each["model"]["init_args"]["optimizer"] for each in settings]
    assert all(optimiser == optimisers[0] for optimiser in optimisers)
    corpora = [each["data"]["init_args"].get("corpus", each["data"]) for each in settings]
    assert all(corpus == corpora[0] for corpus in corpora)
    assert all(each["trainer"]["max_epochs"] == suite.epochs for each in settings)


def test_seeds_of_a_run_may_be_the_first_alone(small):
    found = [(run.name, run.seed) for run in suites.load_suite(small).seeded()]
    assert found == [("one", 0), ("other", 0), ("one", 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": None}, "is no suite"),
        ({"runs": {}}, "runs is empty"),
        ({"runs": {"one": {"title": "x"}}}, "runs.one must have a model"),
        ({"runs": {"one": {"model": {}, "modle": {}}}}, "has no key modle"),
        ({"title": None}, "title"),
        ({"runs": {"one": {"title": "K = 2", "model": {}}}}, r"title \(K = 2\) must not contain ="),
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
    ],
)
def test_bad_files_are_told(small, changes, message):
    with pytest.raises(StudyError, match=message):
        suites.load_suite(changed(small, **changes))


def test_an_unknown_suite_is_one_line(capsys):
    assert suites.main(["cpuu"]) == 2
    assert "there are cpu, h200, paper" in capsys.readouterr().err


def test_a_suite_trains_and_compares(small, tmp_path, monkeypatch, capsys):
    """Commands are noted in place of being run; runs that are there are not trained again."""
    commands = []

    def note(command, log, threads=None):
        commands.append(command)
        if "train.py" in command[1]:
            folder = Path(command[command.index("--trainer.default_root_dir") + 1])
            checkpoints = folder / "LM" / "version_0" / "checkpoints"
            checkpoints.mkdir(parents=True)
            (checkpoints / "last.ckpt").touch()
        else:
            Path(command[command.index("--output") + 1]).mkdir(exist_ok=True)

    monkeypatch.setattr(suites, "executor", lambda jobs: note)
    monkeypatch.setattr(suites, "execute", note)
    words = [str(small), "--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "report")]
    assert suites.main(words) == 0
    assert [Path(command[1]).name for command in commands] == ["train.py"] * 3 + ["evaluate.py"]
    compare = commands[-1]
    assert compare[2] == "compare"
    assert [(word.split("=")[0], Path(word).parent.name) for word in compare[3:6]] == [
        ("One, small", "one-seed0"),
        ("other", "other-seed0"),
        ("One, small", "one-seed1"),
    ]
    assert compare[compare.index("--title") + 1] == "Two of a kind"
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "one-seed0.yaml",
        "one-seed1.yaml",
        "other-seed0.yaml",
    }
    assert suites.main(words) == 0
    assert [command[2] for command in commands[4:]] == ["compare"]
    assert "report" in capsys.readouterr().out


def test_steps_take_the_place_of_epochs(small, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(suites, "run_study", lambda suite, *_, **__: seen.append(suite))
    monkeypatch.setattr(suites, "compare", lambda *_: None)
    monkeypatch.setattr(suites.shutil, "copyfile", lambda *_: None)
    small = changed(small, steps=None, epochs=2)
    assert suites.main([str(small), "--steps", "3", "--folder", str(tmp_path)]) == 0
    assert (seen[0].steps, seen[0].epochs) == (3, None)


def test_own_text_takes_the_place_of_the_corpus(small, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    corpus = {"class_path": "datamodules.PythonDocs", "init_args": {}}
    suite = suites.load_suite(changed(small, corpus=corpus))
    assert suite.source == corpus
    options = suites.parser().parse_args([str(small), "--text", str(tmp_path / "*.txt")])
    typed = suites.configured(suites._opened(suite, options), options)
    assert typed.source["class_path"] == "datamodules.LocalText"
