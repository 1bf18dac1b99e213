"""Every command of the papers' results and of the headings of configs is understood.

Nothing is trained or scored: configs are built on the meta device, and evaluation commands find
checkpoints without weights at the places where the pages' own commands train them.
"""

import contextlib
import csv
import importlib
import re
from fnmatch import fnmatch
from functools import cache
from itertools import chain, pairwise

import pytest
import torch
import yaml
from lm_eval._cli.harness import HarnessCLI
from omegaconf import OmegaConf
from paper_commands import DOCS, METHODS, ROOT, commands_of, functions_of, results_of
from training_parser import parse_training, training_parser

from evaluation.arguments import data_recipe
from evaluation.cli import parse
from evaluation.load import build_outline
from evaluation.runs import find_named
from lightning_models.checkpoint import read_checkpoint
from studies.__main__ import parser as study_parser
from studies.study import load_study
from training import main

ROOT_DIR = "--trainer.default_root_dir"
WRITTEN = ("--output", "--figure", "--plot", "--texts", "--answers_file", "--output_path")
RUN = ("adding-a-method", "training", "evaluation", "studies")
"""Pages whose commands other tests run."""
CORPUS = "configs/data/openwebtext.yaml"
ANY_RUN = "C"
"""What pages call some run of their method."""

each_method = pytest.mark.parametrize("method", METHODS)


# ---- commands


def value_of(words, option):
    return dict(pairwise(words)).get(option)


def without(words, option):
    pairs = pairwise(["", *words])
    return [word for before, word in pairs if option not in (before, word)]


def is_fit(words):
    return words[1:3] == ("train.py", "fit")


def runs_in(words):
    read = [word for last, word in pairwise(words) if last not in WRITTEN]
    return [word for word in read if word.startswith("runs/") or word == ANY_RUN]


@cache
def classes_in(name, package):
    return re.findall(rf"class_path: {package}\.(\w+)", (ROOT / name).read_text())


@cache
def classes_of(words):
    files = [word for word in words if word.startswith("configs/")]
    model, data = (
        next(names[0] for name in reversed(files) if (names := classes_in(name, package)))
        for package in ("lightning_models", "datamodules")
    )
    return model, value_of(words, "--data") or data


def parts_of(words):
    """What must be understood: options with values, whichever the numbers, runs and outputs."""
    if words[1] not in ("train.py", "evaluate.py"):
        return [words]
    kind = (*words[1:3], *(classes_of(words) if is_fit(words) else ()))
    parts = [kind]
    for option, value in zip(words, [*words[1:], "--"], strict=True):
        if option.startswith("-") and option != ROOT_DIR and not (option == "-c" and is_fit(words)):
            told = "" if option in WRITTEN or value in runs_in(words) else value
            owner = kind if option.startswith(("--model", "--data")) else words[1:3]
            parts.append((owner, option, re.sub(r"\d+", "0", told)))
    return parts


def commands_of_headings():
    """What headings of configs and the other pages tell people to train; tests run the rest."""
    with (DOCS / "reproducing.csv").open(newline="") as file:
        for run in csv.DictReader(file):
            yield ("python", "train.py", "fit", *run["command"].split())
    pages = {path for path in DOCS.glob("*.md") if path.stem not in (*METHODS, *RUN)}
    for path in (*sorted((ROOT / "configs").glob("*/*.yaml")), *sorted(pages)):
        text = path.read_text().replace("\\\n", "").replace(" DATA", f" {CORPUS}")
        for line in re.findall(r"^(?:#   )?(python train\.py fit [^#\n]+)", text, re.MULTILINE):
            yield tuple(line.split())


def parameters():
    """Every command; one without a part that no earlier one has is slow.

    Those of a model stand together: the parser takes long for one that it has not just read.
    """
    params, seen = [], set()
    named = [(method, words) for method in METHODS for words in commands_of(method)]
    named += [(METHODS[0], words) for words in commands_of_headings()]
    for idx, (method, words) in enumerate(named):
        marks = [pytest.mark.slow] if seen.issuperset(parts_of(words)) else []
        seen.update(parts_of(words))
        params.append(pytest.param(method, words, marks=marks, id=f"{method}-{idx}"))
    return sorted(params, key=lambda param: str(parts_of(param.values[1])[0]))


@cache
def parsed(words):
    return parse_training(without(without(words[3:], ROOT_DIR), "--ckpt_path"))


@cache
def trained(method):
    """The commands that make checkpoints, by folder; None for weights of other programs."""
    made = {}
    for words in commands_of(method):
        if is_fit(words) and (folder := value_of(words, ROOT_DIR)):
            made[folder] = words
        elif words[1:3] == ("evaluate.py", "import"):
            made[value_of(words, "--output")] = None
    return made


@cache
def recipes_of(classes):
    """Recipes of a checkpoint of these classes: those of the first training that has them."""
    fits = (words for method in METHODS for words in commands_of(method) if is_fit(words))
    config = parsed(next(words for words in fits if classes_of(words) == classes))
    recipes = {key: config[key].as_dict() for key in ("model", "data")}
    recipes["model"]["init_args"]["config"] |= {"vocab_size": 300, "block_size": 128}
    return recipes


def write_stub(path, words):
    """A checkpoint without weights, as this training would leave it in its folder."""
    recipe = {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}}
    if words:
        path = path / "log" / "version_0" / "checkpoints" / "last.ckpt"
        recipe = recipes_of(classes_of(words))
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {"best_model_path": str(path)}
    torch.save({"state_dict": {}, "recipe": recipe, "callbacks": {"own": own}}, path)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes a method's folder: configs, a file that one command leaves to another, its runs."""

    @cache
    def make(method):
        folder = tmp_path_factory.mktemp(method)
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "known.jsonl").touch()
        tiny = "tiny_parity" if method == "thinking_states" else "tiny"
        any_run = ("python", "train.py", "fit", "-c", f"configs/{method}/{tiny}.yaml")
        with contextlib.chdir(folder):
            for name, words in {**trained(method), ANY_RUN: any_run}.items():
                write_stub(folder / name, words)
        return folder

    return make


@pytest.mark.parametrize(("method", "words"), parameters())
def test_a_command_is_understood(method, words, folder_of, monkeypatch, capsys):
    monkeypatch.chdir(folder_of(method))
    match words:
        case (_, "train.py", "fit", *_):
            check_fit(words)
        case (_, "train.py", "validate", *rest):
            with pytest.raises(SystemExit) as end:
                main(["validate", *rest, "--print_config"])
            assert end.value.code == 0
            printed = yaml.safe_load(capsys.readouterr().out)
            saved = read_checkpoint(value_of(words, "--ckpt_path")).model_recipe
            assert printed["model"]["class_path"] == saved["class_path"]
            added = printed["trainer"]["callbacks"]
            added = added[0] if isinstance(added, list) else added
            assert added["class_path"].startswith("callbacks.")
        case (_, "evaluate.py", *argv):
            check_evaluation(argv)
        case ("make", "study", *settings):
            check_study(settings)
        case (_, "-m", "lm_eval", *rest):
            chosen = HarnessCLI()._parser.parse_args(["run", *rest])
            names = value_of(words, "--tasks").split(",")
            assert all((ROOT / chosen.include_path / f"{name}.yaml").is_file() for name in names)
        case (_, script) if script.startswith("docs/papers/"):  # run by the tests of their results
            assert (ROOT / script).is_file()
        case (_, "-m", module, *rest):
            assert importlib.import_module(module).build_parser().parse_args(list(rest))
        case _:
            pytest.fail("no such command")


def check_fit(words):
    objects = training_parser().instantiate_classes(parsed(words))
    objects.model.check_data(objects.data)
    assert objects.model.config.vocab_size >= 1
    if any(word.startswith("--model.") for word in words):  # tests/test_configs.py builds files
        with torch.device("meta"):
            objects.model.configure_model()
        assert sum(parameter.numel() for parameter in objects.model.parameters()) > 0


def check_evaluation(argv):
    command, chosen = parse(argv)
    assert command == argv[0]
    if chosen.get("data"):
        named = chosen.get("ckpts") or chosen.ckpt
        named = find_named([named] if isinstance(named, str) else named, "ckpt", chosen.which)
        assert data_recipe(chosen, named[0][1])
    if chosen.get("set") and chosen.get("ckpt"):
        outline = build_outline(read_checkpoint(chosen.ckpt), chosen["set"])
        assert all(str(getattr(outline.config, k)) == str(v) for k, v in chosen["set"].items())


def check_study(settings):
    values = dict(setting.split("=", 1) for setting in settings)
    assert re.search(r"^study:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(values) <= {"METHOD", "TEXT", "TEXT_NAME", "JOBS", "OPERATIONS", "ARGS"}
    operations = values.get("OPERATIONS")
    study = load_study(values["METHOD"], operations=operations and int(operations))
    assert study.seeded(study_parser().parse_args(["_", *values.get("ARGS", "").split()]).only)


# ---- commands of a page fit each other


@each_method
def test_cells_of_the_results_name_commands_and_pages(method):
    known = "|".join(functions_of(method))
    cell = re.compile(rf"(entropy: )?(({known})\b|`|nothing is measured|missing: )")
    for row in results_of(method):
        for column in ("paper scale", "small scale"):
            assert cell.match(row[column]), row
            assert {*re.findall(r"\bafter (\w+)", row[column])} <= {*functions_of(method)}
        assert all((DOCS / page).is_file() for page in row["results page"].split()), row


@each_method
def test_files_and_runs_that_commands_name_are_there(method):
    commands = commands_of(method)
    files = {word for words in commands for word in words if "configs/" in word}
    assert files
    assert sorted(name for name in files if not (ROOT / name).exists()) == []
    folders = [
        folder for words in commands if is_fit(words) if (folder := value_of(words, ROOT_DIR))
    ]
    assert len(folders) == len(set(folders)) > 0  # no two trainings write to the same folder
    for name in chain.from_iterable(runs_in(words) for words in commands if not is_fit(words)):
        assert name == ANY_RUN or any(
            fnmatch(folder, name) or name.startswith(f"{folder}/") for folder in trained(method)
        ), f"nothing on the page trains {name}"


def test_the_large_ltm_is_scored_at_the_checkpoint_of_table_1():
    """0.9 B tokens: a step at which its run keeps a checkpoint, in the folder that it makes."""
    (scored,) = (
        value_of(words, "--ckpt")
        for words in commands_of("latent_thought")
        if words[2:3] == ("zero_shot",) and value_of(words, "--ckpt").startswith("runs/ltm/large")
    )
    fit = trained("latent_thought")["runs/ltm/large"]
    (path,) = [word for word in fit if word.startswith("configs/latent_thought/")]
    config = OmegaConf.load(ROOT / path)
    data = config.data.init_args
    tokens_per_step = data.global_batch * data.block_size
    folder = "runs/ltm/large/LatentThoughtLM/version_0/checkpoints"
    step = int(re.fullmatch(rf"{folder}/step=(\d+)\.ckpt", scored)[1])
    assert step * tokens_per_step == pytest.approx(0.9e9, rel=0.01)
    assert step % int(value_of(fit, "--checkpoint.every_n_train_steps")) == 0
    assert value_of(fit, "--checkpoint.save_top_k") == "-1"
