"""Every command of ``docs/<method>.md`` is understood, and the tables' counts are those told.

Nothing is trained or scored: configs are built on the meta device, and evaluation commands find
checkpoints without weights at the places where the pages' own commands train them.
"""

import argparse
import importlib
import re
from fnmatch import fnmatch
from functools import cache

import paper_commands
import pytest
import torch
from omegaconf import OmegaConf
from paper_commands import DOCS, METHODS, ROOT
from training_parser import parse_training, training_parser

from datamodules.reasoning import align
from evaluation.cli import build_parser
from evaluation.load import build_outline
from lightning_models.checkpoint import read_checkpoint
from studies.__main__ import configured
from studies.__main__ import parser as study_parser
from studies.study import load_study

TINY = {"thinking_states": "tiny_parity"}
ROOT_DIR = "--trainer.default_root_dir"
WRITTEN = ("--output", "--figure", "--plot", "--texts", "--answers_file")
NAMED = ("--ckpt", "--ckpts", "--ckpt_path", "--trainer.callbacks.reference_ckpt")
"""Options whose values are runs; commands of the verbs below name theirs without an option."""
RUNS_FIRST = ("compare",)
ANY_RUN = "C"
"""What pages call some run of their method."""


class Parsed(Exception):
    """A command line was understood."""


# ---- commands


def options_of(words):
    """The options with their values, in order; of an option alone the value is empty."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return [(a, "" if b.startswith("--") else b) for a, b in pairs if a.startswith(("--", "-c"))]


def value_of(words, option):
    return dict(options_of(words)).get(option)


def without(words, *options):
    """The words but for these options and their values."""
    before = zip(["", *words], words, strict=False)
    return [word for last, word in before if not {word, last} & set(options)]


def is_fit(words):
    return words[1:3] == ("train.py", "fit")


@cache
def classes_in(name, package):
    """Names of the classes of a package in a config."""
    return re.findall(rf"class_path: {package}\.(\w+)", (ROOT / name).read_text())


def classes_of(words):
    """The model and the data of a training, by their classes."""
    files = [word for word in words if word.startswith("configs/")]
    model, data = (
        next(found for name in reversed(files) if (found := classes_in(name, package)))
        for package in ("lightning_models", "datamodules")
    )
    return model[0], value_of(words, "--data") or data[0]


def runs_named(words):
    """The runs that an evaluation names, as they are written."""
    if words[2] in RUNS_FIRST:
        rest = words[3:]
        end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        yield from rest[:end]
    inside = False
    for word in words[3:]:
        if word.startswith("--"):
            inside = word in NAMED
        if inside and not word.startswith("--"):
            yield word


def training_parts(words):
    """What must be understood of a training: options of its model, of its data, and the others."""
    model, data = classes_of(words)
    yield model, data
    for option, value in options_of(words):
        owner = {"--model": model, "--data": data}.get(option.partition(".")[0])
        if option not in ("-c", ROOT_DIR):
            yield owner, option, re.sub(r"\d+", "0", value)


def evaluation_parts(words):
    """The same of other commands, whichever runs they read and whatever they write."""
    yield words[1:3]
    for option, value in options_of(words):
        told = "" if option in (*NAMED, *WRITTEN) else re.sub(r"\d+", "0", value)
        yield words[1:3], option, told


def parameters(chosen, parts_of):
    """The commands that ``chosen`` picks; those without a part that no other one has are slow.

    Those of a model stand together: the parser takes long for one that it has not just read.
    """
    found, seen = [], set()
    for method in METHODS:
        for number, words in enumerate(filter(chosen, paper_commands.commands_of(method))):
            parts = set(parts_of(words))
            marks = [pytest.mark.slow] if parts <= seen else []
            seen |= parts
            found.append(pytest.param(method, words, marks=marks, id=f"{method}-{number}"))
    return sorted(found, key=lambda each: str(next(parts_of(each.values[1]))))


# ---- training


@cache
def parsed(words):
    return parse_training(without(words[3:], ROOT_DIR))


@cache
def recipes_of(classes):
    """Recipes of a checkpoint of these classes: those of the first training that has them."""
    fits = (words for method in METHODS for words in paper_commands.commands_of(method))
    config = parsed(next(w for w in fits if is_fit(w) and classes_of(w) == classes))
    recipes = {key: config[key].as_dict() for key in ("model", "data")}
    recipes["model"]["init_args"]["config"] |= {"vocab_size": 300, "block_size": 128}
    return recipes


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path_factory):
    """Where commands are understood: the configs, and a file that one command leaves to another."""
    folder = tmp_path_factory.getbasetemp() / "docs_commands"
    if not folder.exists():
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "known.jsonl").touch()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(("method", "words"), parameters(is_fit, training_parts))
def test_a_training_is_understood_and_its_model_builds(method, words):
    objects = training_parser().instantiate_classes(parsed(words))
    objects.model.check_data(objects.data)
    assert objects.model.config.vocab_size >= 1
    if any(word.startswith("--model.") for word in words):  # tests/test_configs.py builds files
        with torch.device("meta"):
            objects.model.configure_model()
        assert sum(parameter.numel() for parameter in objects.model.parameters()) > 0


@pytest.mark.parametrize("method", METHODS)
def test_files_of_configs_exist(method):
    named = {w for words in paper_commands.commands_of(method) for w in words if "configs/" in w}
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("method", METHODS)
def test_no_two_trainings_write_to_the_same_folder(method):
    fits = [words for words in paper_commands.commands_of(method) if is_fit(words)]
    folders = [folder for words in fits if (folder := value_of(words, ROOT_DIR))]
    assert folders
    assert sorted({folder for folder in folders if folders.count(folder) > 1}) == []


# ---- what is trained is what is evaluated


@cache
def trained(method):
    """The commands that make checkpoints, by where; None for weights of other programs."""
    made = {}
    for words in paper_commands.commands_of(method):
        if is_fit(words) and (folder := value_of(words, ROOT_DIR)):
            made[folder] = words
        elif words[1:3] == ("evaluate.py", "import"):
            made[value_of(words, "--output")] = None
    return made


def is_evaluation(words):
    return words[1] == "evaluate.py" or words[1:3] == ("train.py", "validate")


@pytest.mark.parametrize("method", METHODS)
def test_runs_that_are_evaluated_are_trained_on_the_page(method):
    made = trained(method)
    for words in filter(is_evaluation, paper_commands.commands_of(method)):
        for name in runs_named(words):
            found = name == ANY_RUN or any(
                fnmatch(folder, name) or name.startswith(f"{folder}/") for folder in made
            )
            assert found, f"nothing on the page trains {name}: {' '.join(words)}"


def test_the_large_ltm_is_scored_at_the_checkpoint_of_table_1():
    """0.9 B tokens: a step at which its run keeps a checkpoint, in the folder that it makes."""
    (scored,) = (
        value_of(words, "--ckpt")
        for words in paper_commands.commands_of("latent_thought")
        if words[2] == "zero_shot" and value_of(words, "--ckpt").startswith("runs/ltm/large")
    )
    fit = trained("latent_thought")["runs/ltm/large"]
    (path,) = [word for word in fit if word.startswith("configs/latent_thought/")]
    config = OmegaConf.load(ROOT / path)
    data, trainer = config.data.init_args, config.trainer
    tokens_per_step = data.batch_size * data.block_size * trainer.accumulate_grad_batches
    folder = "runs/ltm/large/LatentThoughtLM/version_0/checkpoints"
    step = int(re.fullmatch(rf"{folder}/step=(\d+)\.ckpt", scored)[1])
    assert step * tokens_per_step == pytest.approx(0.9e9, rel=0.01)
    assert step % int(value_of(fit, "--checkpoint.every_n_train_steps")) == 0
    assert value_of(fit, "--checkpoint.save_top_k") == "-1"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder for each method, with checkpoints as its commands would leave them, unweighted."""
    root = tmp_path_factory.mktemp("runs")
    written = set()

    def place(method):
        if method not in written:
            written.add(method)
            for folder, words in trained(method).items():
                write_stub(root / method / folder, words)
            tiny = f"configs/{method}/{TINY.get(method, 'tiny')}.yaml"
            write_stub(root / method / ANY_RUN, ("python", "train.py", "fit", "-c", tiny))
        return root / method

    return place


def write_stub(path, words):
    if words is None:
        recipe = {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}}
    else:
        recipe = recipes_of(classes_of(words))
        path = path / "log" / "version_0" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {"best_model_path": str(path)}
    torch.save({"state_dict": {}, "recipe": recipe, "callbacks": {"own": own}}, path)


def is_evaluate(words):
    return words[1] == "evaluate.py"


@pytest.mark.parametrize(("method", "words"), parameters(is_evaluate, evaluation_parts))
def test_an_evaluation_is_understood(method, words, places, monkeypatch):
    monkeypatch.chdir(places(method))
    argv = list(words[2:])
    settings = build_parser(argv).parse_args(argv)
    assert settings.command == argv[0]
    chosen = settings[settings.command]
    if chosen.get("set") and chosen.get("ckpt"):
        outline = build_outline(read_checkpoint(chosen.ckpt), chosen["set"])
        assert all(str(getattr(outline.config, k)) == str(v) for k, v in chosen["set"].items())


def is_validate(words):
    return words[1:3] == ("train.py", "validate")


@pytest.mark.parametrize(("method", "words"), parameters(is_validate, evaluation_parts))
def test_an_analysis_is_understood(method, words, places):
    folder = places(method) / value_of(words, "--ckpt_path")
    recipe = read_checkpoint(folder).content["recipe"]
    config = parse_training(without(words[3:], "--ckpt_path"), saved=recipe)
    added = config.trainer.callbacks
    assert (added[0] if isinstance(added, list) else added).class_path.startswith("callbacks.")


# ---- other commands


def is_other(words):
    return words[1] not in ("train.py", "evaluate.py")


@pytest.mark.parametrize(("method", "words"), parameters(is_other, lambda words: iter([words])))
def test_other_commands_are_understood(method, words, monkeypatch):
    if words[0] == "make":
        check_study(*words[1:])
    elif words[2] == "studies":
        options = study_parser().parse_args(words[3:])
        assert configured(options).seeded(options.only)
    elif words[2] == "datamodules.reasoning.align":
        assert align.build_parser().parse_args(list(words[3:])).command
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop(words[3:]))
        assert words[2].startswith("benchmarks.")
        with pytest.raises(Parsed):
            importlib.import_module(words[2]).main()


def check_study(target, *settings):
    values = dict(setting.split("=", 1) for setting in settings)
    assert target == "study"
    assert re.search(r"^study:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(values) <= {"METHOD", "TEXT", "TEXT_NAME", "JOBS", "OPERATIONS"}
    operations = values.get("OPERATIONS")
    assert load_study(values["METHOD"], operations=operations and int(operations)).runs


def parse_and_stop(words):
    parse = argparse.ArgumentParser.parse_args

    def stop(self, *_):
        parse(self, list(words))
        raise Parsed

    return stop


# ---- tables


@pytest.mark.parametrize("method", METHODS)
def test_every_row_has_commands_or_says_why_not(method):
    blocks = paper_commands.blocks_of(method)
    for row in paper_commands.rows_of(method):
        for cell in row.scales:
            if paper_commands.has_command(cell):
                anchors = [name for name in paper_commands.linked(cell) if blocks.get(name)]
                assert paper_commands.in_cell(cell) or anchors, row
            elif cell.startswith(paper_commands.MISSING):
                assert len(cell) > len(paper_commands.MISSING), row
            else:
                assert row.paper_scale.startswith(paper_commands.NOTHING), row
                assert row.small_scale.startswith(paper_commands.NOTHING), row


@pytest.mark.parametrize("method", METHODS)
def test_links_of_rows_lead_somewhere(method):
    anchors = paper_commands.blocks_of(method)
    for row in paper_commands.rows_of(method):
        for name in re.findall(r"\]\(([^)]+)\)", " ".join((*row.scales, row.ours))):
            exists = name[1:] in anchors if name.startswith("#") else (DOCS / name).is_file()
            assert exists, f"{row.paper}: {name}"
        if not row.ours.startswith(paper_commands.NONE):
            assert re.search(r"\]\((results/|#)", row.ours), f"{row.paper}: no source of ours"


def test_the_index_counts_what_is_there():
    text = (DOCS / "index.md").read_text()
    header, *rows = paper_commands.table_below(text, "## What can be reproduced")
    assert tuple(header) == ("page", *paper_commands.COUNTED)
    found = {method: paper_commands.counts(method) for method in METHODS}
    totals = [sum(column) for column in zip(*found.values(), strict=True)]
    told = {re.sub(r"\[(\w+)\.md\]\(\1\.md\)", r"\1", name): list(map(int, n)) for name, *n in rows}
    assert told == {**found, "all": totals}


def test_the_index_names_every_page():
    text = (DOCS / "index.md").read_text()
    pages = set(re.findall(r"\]\((\w[\w./-]+\.md)\)", text))
    written = [*DOCS.glob("*.md"), *(DOCS / "results").glob("*.md")]
    there = {path.relative_to(DOCS).as_posix() for path in written} - {"index.md"}
    assert sorted(there - pages) == []
