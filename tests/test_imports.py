"""Who may import whom, read from the syntax tree of every file; and what an import costs.

The rules stand in ``RULES``. Entry points, ``training/``, ``evaluation/``, benchmarks, studies and
tests may import everything. Optional packages are imported inside functions only.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.programs import ROOT, run

CHECKED = ("lightning_models", "datamodules", "callbacks")
OURS = {*CHECKED, "training", "evaluation", "train", "evaluate", "tests", "benchmarks", "studies"}
OURS_WITH_DOCS = (*CHECKED, "training", "evaluation", "benchmarks", "studies")
UPWARD = {
    "lightning_models/__init__.py imports evaluation.api.load",
    "callbacks/__init__.py imports evaluation.tasks.callback.TaskScores",
}
"""The lazy public names that live in a package above."""

KERNELS = "(flash_attn) (torch_scatter)"
OPTIONAL = f"{KERNELS} (mauve) (peft) (openai) (optuna) (wandb) (mlflow)"
LEAVES = {path.stem for path in (ROOT / "lightning_models").glob("*.py")} - {"__init__", "base"}
LEAVES |= {"checkpoint"}
LEAF = "torch torchmetrics numpy safetensors lightning_models.layers "
LEAF += " ".join(f"lightning_models.{name}" for name in sorted(LEAVES))
METHOD = f"{LEAF} lightning_models.base lightning_models.ROOM lightning_models.transformer"
NETWORKS = " ".join(  # of the room and of the plain decoder: the files that know no Lightning
    f"lightning_models.{room}. -lightning_models.{room}.module -lightning_models.{room}.baselines"
    f" -lightning_models.{room}.import_weights"
    for room in ("ROOM", "transformer")
)
SHARED = "lightning_models.atomic_files lightning_models.checkpoint lightning_models.recipe"
"""The one writer of files, the one reader of checkpoints, the one builder of what they name."""
RULES = (
    (r"lightning_models/__init__", "lightning_models"),
    (r"lightning_models/layers/.*", "torch lightning_models.layers"),
    (r"lightning_models/base", f"{LEAF} lightning"),
    (r"lightning_models/\w+", LEAF),
    (r"lightning_models/(\w+)/__init__", "lightning_models.ROOM"),
    (r"lightning_models/(\w+)/module(/.*)?", f"{METHOD} lightning"),
    (r"lightning_models/(\w+)/baselines(/.*)?", METHOD),
    (r"lightning_models/(\w+)/import_weights", f"{LEAF} lightning_models.ROOM (transformers)"),
    (
        r"lightning_models/(\w+)/(architectures|backbone|pretrained)",
        f"{LEAF} {NETWORKS} (transformers)",
    ),
    (r"lightning_models/(\w+)/adapters", f"{LEAF} {NETWORKS} (peft)"),
    (r"lightning_models/(\w+)/.*", f"{LEAF} {NETWORKS}"),
    (r"datamodules/.*", f"* datamodules {SHARED}"),
    (r"callbacks/.*", f"* callbacks {SHARED}"),
    (r".*", f"* {' '.join(OURS)}"),
)
"""The first rule whose pattern fits a file, without ``.py``, says what the file may import.

An entry is a module with all inside it, or, with a dot at its end, only what is inside. A minus
takes away from a wider entry; parentheses stand for "inside functions".
"""


# ---- the checker


def imports_in(source, importer):
    """Yields (dotted name, whether inside a function) for each import, wherever it stands.

    Literal names in ``import_module`` calls and the lazy names in ``_NAMES`` are imports, too.
    """

    def visit(node, inside):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, inside) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = importer.split(".")[:-level] if level else []
                origin = ".".join([*package, *([module] if module else [])])
                yield from ((f"{origin}.{alias.name}", inside) for alias in names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
                    yield name, inside
            case ast.Assign(targets=[ast.Name(id="_NAMES")]):
                table = ast.literal_eval(node.value).items()
                yield from ((f"{m}.{name}", True) for m, names in table for name in names.split())
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside or is_function)

    return visit(ast.parse(source), False)


@cache
def exports(package):
    """The names that the ``__init__`` of a room takes from its files, with their dotted names."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    if package in CHECKED or not path.is_file():
        return {}
    found = imports_in(path.read_text(), f"{package}.__init__")
    return {name.rpartition(".")[2]: name for name, _ in found}


def resolve(name):
    """The name in the file that defines it: rooms re-export networks next to LightningModules."""
    package, _, last = name.rpartition(".")
    origin = exports(package).get(last, name)
    return name if origin == name else resolve(origin)


def covers(entry, name):
    if entry == "*":
        return name.partition(".")[0] not in OURS
    return name == entry or name.startswith(f"{entry.rstrip('.')}.")


def allows(rule, name, inside):
    """Whether the narrowest entry that covers the name allows it."""
    optional = OPTIONAL if rule.startswith("*") else KERNELS
    entries = sorted(f"{rule} {optional}".split(), key=lambda entry: len(entry.strip("-()")))
    covering = [entry for entry in entries if covers(entry.strip("-()"), name)]
    if not covering or covering[-1][0] == "-":
        return False
    return inside or covering[-1][0] != "("


def breaches(path, source):
    module = path.removesuffix(".py")
    fits = ((re.fullmatch(pattern, module), rule) for pattern, rule in RULES)
    match, rule = next(pair for pair in fits if pair[0])
    rule = rule.replace("ROOM", match[1] if match.re.groups else "")
    return [
        name
        for found, inside in imports_in(source, module.replace("/", "."))
        if (name := resolve(found)).partition(".")[0] not in sys.stdlib_module_names
        if not allows(rule, name, inside)
    ]


def test_nobody_imports_what_it_may_not():
    packages = (*CHECKED, "training", "evaluation")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    paths = {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}
    found = {f"{path} imports {name}" for path in paths for name in breaches(path, paths[path])}
    assert found == UPWARD


PLANTED = """
LM/layers/attention           | import numpy; from . import blocks     | numpy
LM/layers/attention           | from .. import output_layer            | LM.output_layer
LM/layers/attention           | import flash_attn                      | flash_attn
LM/layers/attention           | def f(): import flash_attn, wandb      | wandb
LM/output_layer               | from .optim import x; import lightning | lightning
LM/base                       | import lightning; from train import main | train.main
LM/base                       | async def f(): import evaluation.load  | evaluation.load
LM/__init__                   | _NAMES = {"training": "A B"}           | training.A training.B
LM/ponderlm/network           | from . import PonderLM                 | LM.ponderlm.module.PonderLM
LM/ponderlm/network           | if TYPE_CHECKING: import lightning     | lightning
LM/ponderlm/network           | importlib.import_module("lightning")   | lightning
LM/ponderlm/network           | x = lambda: __import__("lightning")    | lightning
LM/ponderlm/network           | from ..transformer import TransformerNetwork |
LM/ponderlm/module            | from ..thinking_states import reading  | LM.thinking_states.reading
LM/ponderlm/baselines/x       | import lightning, callbacks.samples    | lightning callbacks.samples
LM/transformer/import_weights | import transformers                    | transformers
LM/thinking_states/backbone   | def f(): import transformers           |
datamodules/base              | from lightning_models.base import X    | LM.base.X
callbacks/samples             | import lightning, datamodules.text     | datamodules.text
evaluation/compare            | import mauve, train, lightning_models  | mauve
"""
"""A file, what is added to it, and the imports that must be found; ``LM``: lightning_models."""


@pytest.mark.parametrize("row", PLANTED.strip().splitlines())
def test_planted_breaches_are_found_and_nothing_else(row):
    path, source, expected = (cell.strip() for cell in row.split("|"))
    found = breaches(f"{path}.py".replace("LM/", "lightning_models/"), source)
    names = [name.replace("lightning_models", "LM") for name in found]
    assert names == expected.split()


# ---- what is imported


SCRIPT = """
import json, sys
from training import LatentCLI, main
run, ours = map(json.loads, sys.argv[1:])
assert main(["fit", "-c", "configs/transformer/tiny.yaml", *run]) == 0
count = len([name for name in sys.modules if name.partition(".")[0] in ours])
names = ["--model=ICoTLM", "--data=StateTracking", "--trainer.callbacks+=StepAllocation"]
program = LatentCLI([*names, "--data.task=parity", "--trainer.accelerator=cpu"], run=False)
parts = [program.model, program.datamodule, program.trainer.callbacks[0]]
print(json.dumps([count, *(type(part).__name__ for part in parts)]))
"""


def test_a_run_imports_its_own_rooms_only_and_short_names_are_found(text_file, tmp_path):
    options = [
        "--data=datamodules.LocalText",
        f"--data.data_files={text_file}",
        f"--data.cache_dir={tmp_path}",
        "--data.tokenizer=bytes",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
    ]
    done = run("-c", SCRIPT, json.dumps(options), json.dumps(sorted(OURS)))
    assert done.returncode == 0, done.stderr
    count, *names = json.loads(done.stdout.splitlines()[-1])
    assert 40 < count < 150
    assert names == ["ICoTLM", "StateTracking", "StepAllocation"]


@pytest.mark.parametrize("package", CHECKED)
def test_public_names_are_those_that_the_type_checker_sees(package):
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in OURS
        for alias in node.names
    }
    outside = {name: home for name, home in module._MODULES.items() if name not in seen}
    assert {**seen, **outside} == module._MODULES
    assert outside == (
        {"TaskScores": "evaluation.tasks.callback"} if package == "callbacks" else {}
    )
    assert all(getattr(module, name).__name__ == name for name in module.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", OURS_WITH_DOCS)
def test_every_public_method_has_a_docstring_or_inherits_one(package):
    """A base class of ours or of Lightning may hold it; torch's ``forward`` says no shapes."""
    package = importlib.import_module(package)
    undocumented = []
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for cls in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(cls) or cls.__module__ != module.name:
                continue
            undocumented += [
                f"{module.name}.{cls.__name__}.{name}"
                for name, member in vars(cls).items()
                if not name.startswith(("_", "on_")) and not cls.__name__.startswith("_")
                if inspect.isroutine(member) or isinstance(member, property)
                if not any(
                    getattr(vars(base).get(name), "__doc__", None)
                    for base in cls.__mro__
                    if base.__module__.partition(".")[0] in (*OURS_WITH_DOCS, "lightning")
                )
            ]
    assert undocumented == []
