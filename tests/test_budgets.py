"""The cost of runs at paper scale: rows of a step are the paper's, and validation is cheap.

Commands of the docs are read as a shell reads them; files and options are added up here.
"""

import csv
import math
import re
import runpy
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import paper_commands
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import OmegaConf
from training_parser import parse_training, training_parser

from callbacks import LastStageStopping
from datamodules.sources import divide_rows
from studies.study import load_study
from training.listing import SENTENCE_SLOTS, SENTENCES

ROOT = Path(__file__).parent.parent
SMALL = re.compile(r"^(\w+_)?(tiny|small)(_|$)")
LTM_SMALL = re.compile(r"^ltm_small(_|$)")  # a size of the paper


def is_paper_scale(path):
    return bool(LTM_SMALL.match(path.stem)) or not SMALL.match(path.stem)


METHODS = ("transformer", "recurrent_depth", *paper_commands.METHODS)
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for method in METHODS
    for path in (ROOT / "configs" / method).glob("*.yaml")
    if is_paper_scale(path)
)

PUBLISHED = list(csv.DictReader((ROOT / "docs/reproducing.csv").open(newline="")))
"""The runs of the papers, with the rows of their steps (of sentences lexical tokens)."""


@cache
def rows_of_papers():
    rows = {}
    for run in PUBLISHED:
        (file,) = {*run["command"].split()} & {*FILES}
        rows.setdefault(file, set()).add(int(run["paper_batch"]))
    return rows


def rows_of_paper(file):
    (rows,) = rows_of_papers()[file]  # of every run of the file
    return rows


# ---- commands


@cache
def trainings():
    """The trainings at paper scale that docs name: where each stands, and its words."""
    found = [("reproducing", run["command"]) for run in PUBLISHED]
    for method in paper_commands.METHODS:
        commands = paper_commands.commands_of(method)
        found += [(method, " ".join(words[3:])) for words in commands if words[2:3] == ("fit",)]
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.stem not in paper_commands.METHODS:
            text = page.read_text().replace("\\\n", " ")
            found += [(page.stem, line) for line in re.findall(r"train\.py fit ([^#`\n]+)", text)]
    return [
        (page, tuple(shlex.split(line)))
        for page, line in dict.fromkeys(found)
        if any(file in line.split() for file in FILES)
    ]


load = cache(OmegaConf.load)
"""The content of a file, to be read only."""


@cache
def settings_of(words):
    """Values of files and options of a command, later ones above earlier ones; to be read only."""
    content = OmegaConf.create()
    for option, value in pairwise(words):
        if option == "-c":
            content = OmegaConf.merge(content, load(ROOT / value))
    for option, value in zip(words, [*words[1:], "--"], strict=True):
        key = re.sub(r"^data\.(init_args\.)?", "data.init_args.", option.removeprefix("--"))
        if option.startswith("--") and not value.startswith("--") and "+" not in key:
            value = None if value == "null" else OmegaConf.create([value])[0]
            OmegaConf.update(content, key, value, force_add=True)
    return content


def number(content, key, default=None):
    value = OmegaConf.select(content, key)
    return default if value is None else float(value)


MACHINE = ("accumulate_grad_batches", "val_check_interval")
"""Options of the trainer that count micro-batches, which differ from machine to machine."""


def devices_of(content):
    devices = OmegaConf.select(content, "trainer.devices", default=1)
    nodes = number(content, "trainer.num_nodes", 1)
    return int(nodes * (8 if devices == "auto" else float(devices)))  # a whole node


def rows_per_step(content):
    """Rows of a step, of sentences lexical tokens, as stated, if devices can share it."""
    data, devices = content.data.init_args, devices_of(content)
    if "global_batch_tokens" in data:
        return data.global_batch_tokens
    return divide_rows(data.global_batch, devices, data.batch_size).size


@pytest.mark.parametrize("file", FILES)
def test_a_file_states_the_rows_of_its_paper(file):
    content = settings_of(("-c", file))
    assert rows_per_step(content) == rows_of_paper(file)
    assert not {*MACHINE} & {*content.trainer}


def test_commands_of_the_docs_have_the_rows_of_their_paper():
    wrong = {}
    for page, words in trainings():
        (file,) = [word for word in words if word in FILES]
        content = settings_of(words)
        if rows_per_step(content) != rows_of_paper(file) or {*MACHINE} & {*content.trainer}:
            wrong[page, " ".join(words)] = f"not {rows_of_paper(file)} rows"
    assert wrong == {}


def test_the_page_of_published_runs_adds_up_its_table():
    page = runpy.run_path(str(ROOT / "docs/reproducing.py"))["page"](PUBLISHED)
    assert page == (ROOT / "docs/reproducing.md").read_text()
    runs = re.findall(r"^\| [^|]* \| (\d+) \| [\d-]", page, re.MULTILINE)
    assert sum(map(int, runs)) == len(PUBLISHED)
    hours = [float(run["gpu_hours"]) for run in PUBLISHED if run["paper"] == "Thoughtbubbles"]
    assert f"| 0.212 to 43.9 | {sum(hours):.0f} |" in page


CODE = {
    "lr": 1e-4,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "schedule": "constant",
    "warmup": 0,
}
"""AdamW of Coconut's public code; it neither warms up nor clips gradients."""


BY_ITS_CODE = sorted(
    {
        word
        for run in PUBLISHED
        for word in run["command"].split()
        if word in FILES and "32 rows on each of 4 devices" in run["batch_source"]
    }
)


@pytest.mark.parametrize("file", BY_ITS_CODE)
def test_what_the_paper_ran_by_coconuts_code_has_its_optimiser(file):
    content = settings_of(("-c", file))
    optimizer = content.model.init_args.optimizer
    assert {key: optimizer[key] for key in CODE} == CODE
    assert "gradient_clip_val" not in content.trainer
    assert number(content, "trainer.max_epochs") <= 25


def test_coconut_by_its_code_starts_from_the_best_of_a_chain_of_thought():
    """The first 3 of 25 epochs, stage 0, are left to it (``resume: 3`` of its configuration)."""
    runs = [settings_of(tuple(shlex.split(run["command"]))) for run in PUBLISHED]
    kinds = {kind: [] for kind in ("CoTLM", "CoconutLM")}
    for run, row in zip(runs, PUBLISHED, strict=True):
        kind = run.model.class_path.rpartition(".")[2]
        if kind in kinds and "32 rows on each of 4 devices" in row["batch_source"]:
            kinds[kind].append(run)
    taught = {OmegaConf.select(run, "trainer.default_root_dir"): run for run in kinds["CoTLM"]}
    assert len(kinds["CoconutLM"]) >= 8
    for run in kinds["CoconutLM"]:
        config = run.model.init_args.config
        assert (config.start_which, int(config.first_stage), config.reset) == ("best", 1, "epoch")
        assert number(run, "trainer.max_epochs") == 22
        teacher = taught[config.start_from]
        assert teacher.checkpoint.monitor == "val/accuracy"
        assert teacher.trainer.max_epochs == 25
        assert teacher.data.class_path == run.data.class_path
        assert teacher.model.init_args.config.backbone == config.backbone


STATE_TRACKING = [file for file in FILES if re.search("0.5b_(parity|vars)", file)]


@pytest.mark.parametrize("file", STATE_TRACKING)
def test_state_tracking_is_trained_until_all_answers_are_right(file):
    """Thinking States, Table 1: 100 % in distribution; iCoT and Coconut in their last stage."""
    kinds = {"callbacks.LastStageStopping": LastStageStopping}
    kinds["lightning.pytorch.callbacks.EarlyStopping"] = EarlyStopping
    (rule,) = (
        kinds[callback.class_path](**callback.init_args)
        for callback in settings_of(("-c", file)).trainer.callbacks
        if callback.class_path in kinds
    )
    assert isinstance(rule, LastStageStopping) == bool(re.search("icot|coconut", file))
    assert rule.monitor == "val/accuracy"
    for accuracy, ends in ((0.0, False), (0.999, False), (1.0, True)):
        assert rule._evaluate_stopping_criteria(torch.tensor(accuracy))[0] is ends


# ---- validation

MOST = 0.02
HELD_OUT = {
    "WikiText": 0.25e6 / 12e6,  # tokens of the 60 articles, of the smallest subset (section 3.2)
    "StateTracking": 500 / 20_000,
    "Questions": 0.025 / 0.925,  # where files have no validation split of their own
}
"""Rows of a validation against the rows of an epoch, where the whole split is read."""


ANSWERS = "callbacks.AnswerAccuracy"
"""Writes as many tokens as are scored, where answers and chains are right."""


def validation_share(content, flops_ratio):
    """FLOPs of validation as a share of the FLOPs of training."""
    every, rows = (number(content, f"validation.{key}") for key in ("every_n_train_steps", "rows"))
    data = content.data.init_args
    if every is None:  # the whole split after each epoch
        assert content.trainer.limit_val_batches == 1.0
        kind = content.data.class_path.removeprefix("datamodules.")
        default = "Questions" if kind in ("ReasoningGSM8K", "TwoHop") else "WikiText"
        callbacks = content.trainer.get("callbacks") or []
        passes = 1 + any(callback.class_path == ANSWERS for callback in callbacks)
        return passes * HELD_OUT.get(kind, HELD_OUT[default]) / flops_ratio
    at_once = devices_of(content) * number(data, "eval_batch_size", number(data, "batch_size"))
    evaluated = at_once * math.ceil(rows / at_once)
    assert number(content, "trainer.max_steps") // every >= 2, "hardly ever validated"
    return evaluated / (every * rows_per_step(content)) / flops_ratio


@cache
def flops_ratio(file):
    """FLOPs per token of training against FLOPs of scoring, by the method's own count."""
    model = training_parser().instantiate_classes(parse_training([f"--config={ROOT / file}"])).model
    if hasattr(model.config, "lora_rank"):  # counted without peft, which may not be there
        model.config = replace(model.config, lora_rank=None)
    with torch.device("meta"):
        model.configure_model()
    context = model.config.block_size
    if model.reads == "sentences":
        context = SENTENCES * SENTENCE_SLOTS
    return model.flops_per_token(context, training=True) / model.flops_per_token(context)


@pytest.mark.parametrize("file", FILES)
def test_validation_takes_little_of_the_flops(file):
    content = settings_of(("-c", file))
    assert validation_share(content, flops_ratio(file)) <= MOST


OPENWEBTEXT = 9.04e9 / 8_013_769
"""Tokens of a document by GPT-2's tokenizer, as nanoGPT's preparation counts them."""
STUDIES = {
    "suite_paper": lambda data: data["val_documents"] * OPENWEBTEXT / data["train_tokens"],
    "suite_h200": lambda data: 0.25e6 / data["train_tokens"],  # WikiText's 60 articles
}
"""Tokens of a validation against those of an epoch, from the arguments of the text."""


@pytest.mark.parametrize("name", STUDIES)
def test_validations_of_studies_at_paper_scale_take_little_of_the_flops(name, tmp_path):
    study, shares = load_study(name), {}
    for run in study.runs.values():
        content = study.train_config(run)
        file = tmp_path / f"{run.name}.yaml"
        file.write_text(yaml.safe_dump(content))
        checks = 1 / content["trainer"]["val_check_interval"]  # an epoch
        data = content["data"]["init_args"]
        held_out = STUDIES[name](data.get("corpus", {}).get("init_args", data))
        shares[run.name] = checks * held_out / flops_ratio(str(file))
        assert checks >= 2, "hardly ever validated"
    assert len(shares) > 5
    assert {name: share for name, share in shares.items() if share > MOST} == {}


def test_validations_of_the_docs_commands_take_little_of_the_flops():
    wrong = {}
    for page, words in trainings():
        (file,) = [word for word in words if word in FILES]
        # Commands that change the inner steps: never less than one forward pass more.
        ratio = 1.0 if "latent_thought" in file else flops_ratio(file)
        share = validation_share(settings_of(words), ratio)
        if share > MOST:
            wrong[page, " ".join(words)] = share
    assert wrong == {}


def test_the_piles_validation_split_is_as_long_as_the_papers_analyses_need():
    """PonderLM-3, section 4.3: on the order of 1e7 tokens, of a run on 10 B."""
    pile = OmegaConf.load(ROOT / "configs/data/pile.yaml").data.init_args
    caps = [
        number(content, "data.init_args.train_tokens", math.inf)  # null: the whole of it
        for _, words in trainings()
        if "configs/data/pile.yaml" in words and (content := settings_of(words))
    ]
    assert min(caps) == 10e9
    assert pile.val_fraction * min(caps) >= 1e7
    (analysed,) = (
        int(words[words.index("--trainer.callbacks.num_batches") + 1])
        for words in paper_commands.commands_of("ponderlm")
        if "--trainer.callbacks.num_batches" in words and "runs/ponder_410m/ponderlm3" in words
    )
    assert 0.9e7 < analysed * 4 * 2048 < pile.val_fraction * min(caps)
