"""Who may import whom, read from the syntax tree of every file, functions included.

==================================  ==============================================================
file                                may import (besides the standard library)
==================================  ==============================================================
``layers/``                         torch, layers
``outputs output_layer optim``      torch, torchmetrics, numpy, safetensors, layers and each other
``base.py``                         lightning and all of those
``<room>/module.py``                the same, base, its own room, the transformer room
``<room>/baselines``                as module.py, without lightning; a file or a folder
``<room>/import_weights.py``        as other files, with its own module.py and transformers
``<room>/`` other files             no lightning, no base, no module.py: layers, losses and so on,
                                    its own room, the transformer room's network; in functions
                                    of ``backbone.py`` and ``pretrained.py`` transformers, too
``<room>/__init__.py``              its own room
``lightning_models/__init__.py``    lightning_models
``datamodules/``                    datamodules and any library, nothing else of ours
``callbacks/``                      callbacks and any library, nothing else of ours
everything else                     everything
==================================  ==============================================================

Optional packages may be imported inside functions only.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import ROOT, run

CHECKED = ("lightning_models", "datamodules", "callbacks")
OURS = {*CHECKED, "training", "evaluation", "train", "evaluate", "tests", "benchmarks", "studies"}
OURS_WITH_DOCS = (*CHECKED, "training", "evaluation", "benchmarks", "studies")
OPTIONAL = {"flash_attn", "torch_scatter", "openai"}
LEAF_LIBRARIES = {"torch", "torchmetrics", "numpy", "safetensors"}
MODULE_FILES = ("module", "baselines")
TRANSFORMERS = ("backbone", "import_weights", "pretrained")
LEAVES = {path.stem for path in (ROOT / "lightning_models").glob("*.py")} - {"__init__", "base"}


class Import(NamedTuple):
    """One imported module, by its full name."""

    module: str
    line: int
    inside_function: bool


# ---- reading


def is_module(root, name):
    """Whether a dotted name is a file or a folder of the tree."""
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def origin(root, module, name):
    """The module that ``from module import name`` really takes the name from.

    Rooms re-export their networks and their LightningModules side by side. The root package is
    not looked through: only those who may import everything may import it.
    """
    if is_module(root, f"{module}.{name}"):
        return f"{module}.{name}"
    package = root.joinpath(*module.split("."), "__init__.py")
    if module in CHECKED or module.partition(".")[0] not in OURS or not package.is_file():
        return module
    for node in ast.walk(ast.parse(package.read_text())):
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            source = absolute(node, f"{module}.__init__")
            return module if source == module else origin(root, source, name)
    return module


def absolute(node, importer):
    """The module a from-import names, dots in front resolved."""
    if not node.level:
        return node.module
    package = importer.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def dynamic(node):
    """The literal name in ``import_module("...")`` or ``__import__("...")``, if it is one."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("import_module", "__import__") or not node.args:
        return []
    first = node.args[0]
    return [first.value] if isinstance(first, ast.Constant) else []


def imports_of(root, path):
    """All imports of a file, wherever they stand."""
    importer = ".".join(path.relative_to(root).with_suffix("").parts)
    found = []

    def visit(node, inside):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, importer)
            names = [origin(root, source, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call):
            names = dynamic(node)
        found.extend(Import(name, node.lineno, inside) for name in names)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or function)

    visit(ast.parse(path.read_text()), False)
    return found


# ---- judging


def under(module, *packages):
    """Whether a module is one of the packages or lies inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_leaf(module):
    """Whether it is layers or one of the plain files next to base.py."""
    parts = module.split(".")
    return parts[0] == "lightning_models" and len(parts) > 1 and parts[1] in {"layers", *LEAVES}


def network_of(module, room):
    """Whether it is a file of the room that knows no Lightning."""
    prefix = f"lightning_models.{room}."
    return module.startswith(prefix) and module.removeprefix(prefix).split(".")[0] not in (
        *MODULE_FILES,
        "import_weights",
    )


def room_allows(room, name, found):
    """The rule for a file of a method's room."""
    module, library = found.module, found.module.partition(".")[0]
    own = under(module, f"lightning_models.{room}")
    if name == "__init__":
        return own
    if name in MODULE_FILES:
        ours = own or is_leaf(module) or under(module, "lightning_models.base")
        libraries = LEAF_LIBRARIES | (set() if name == "baselines" else {"lightning"})
        return ours or under(module, "lightning_models.transformer") or library in libraries
    if is_leaf(module) or library in LEAF_LIBRARIES:
        return True
    if name in TRANSFORMERS and library == "transformers":
        return found.inside_function
    if name == "import_weights":
        return own
    plain = network_of(module, room) or network_of(module, "transformer")
    return plain or (module == "lightning_models.transformer" and room != "transformer")


def allows(parts, found):
    """Whether the file at these path parts may have this import."""
    module, library = found.module, found.module.partition(".")[0]
    if library in sys.stdlib_module_names:
        return True
    if parts[0] in ("datamodules", "callbacks"):
        return library not in OURS or library == parts[0]
    if library in OPTIONAL and found.inside_function:
        return True
    name = parts[-1].removesuffix(".py")
    if len(parts) == 2 and name == "__init__":
        return library == "lightning_models" or module == "evaluation.api"  # of ``load``, lazily
    if len(parts) == 2:
        ours = is_leaf(module) or library in LEAF_LIBRARIES
        return ours or (name == "base" and library == "lightning")
    if parts[1] == "layers":
        return library == "torch" or under(module, "lightning_models.layers")
    if len(parts) > 3:  # a folder of the room, by what it is called
        name = parts[2] if parts[2] in MODULE_FILES else ""
    return room_allows(parts[1], name, found)


def breaches(root):
    """One line for each import that breaks a rule."""
    lines = []
    for path in sorted(path for package in CHECKED for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).parts
        lines += [
            f"{'/'.join(parts)}:{found.line} imports {found.module}"
            for found in imports_of(root, path)
            if not allows(parts, found)
        ]
    return lines


# ---- the project, and the checker itself


def test_nobody_imports_what_it_may_not():
    assert breaches(ROOT) == []


def test_the_checker_reads_the_files_that_are_there():
    attention = imports_of(ROOT, ROOT / "lightning_models/layers/attention.py")
    where = {(found.module, found.inside_function) for found in attention}
    assert {("torch", False), ("flash_attn", True)} <= where
    base = {found.module for found in imports_of(ROOT, ROOT / "lightning_models/base.py")}
    assert {"lightning", "lightning_models.optim"} <= base
    everything = {path.name for package in CHECKED for path in (ROOT / package).rglob("*.py")}
    assert {"base.py", "generation.py", "network.py", "zero_shot.py"} <= everything


TREE = {
    "lightning_models/__init__.py": "from lightning_models.base import LanguageModel\n"
    "from lightning_models.transformer import TransformerLM",
    "lightning_models/base.py": "import lightning as L\nfrom lightning_models.optim import build",
    "lightning_models/optim.py": "import torch",
    "lightning_models/output_layer.py": "import numpy\nfrom lightning_models.layers import attend",
    "lightning_models/layers/__init__.py": "from lightning_models.layers.attention import attend",
    "lightning_models/layers/attention.py": "def f():\n    import flash_attn",
    "lightning_models/transformer/__init__.py": "from .module import TransformerLM\n"
    "from lightning_models.transformer.network import TransformerNetwork",
    "lightning_models/transformer/network.py": "from ..layers import attend",
    "lightning_models/transformer/module.py": "from lightning_models.base import LanguageModel\n"
    "from .network import TransformerNetwork\nfrom lightning_models import output_layer",
    "lightning_models/transformer/import_weights.py": "from .module import TransformerLM\n"
    "def f():\n    import transformers",
    "lightning_models/ponderlm/__init__.py": "from .module import PonderLM",
    "lightning_models/ponderlm/network.py": "from lightning_models.transformer import "
    "TransformerNetwork\nfrom lightning_models.ponderlm.jacobi import solve",
    "lightning_models/ponderlm/jacobi.py": "import torch.nn as nn",
    "lightning_models/ponderlm/module.py": "import lightning\n"
    "from lightning_models.ponderlm.network import X\n"
    "from lightning_models.transformer import TransformerLM",
    "lightning_models/ponderlm/baselines.py": "from .module import PonderLM",
    "lightning_models/thinking_states/network.py": "from .backbone import Backbone",
    "lightning_models/thinking_states/backbone.py": "def f():\n    import transformers",
    "lightning_models/thinking_states/module.py": "import lightning",
    "datamodules/__init__.py": "from datamodules.base import Data",
    "datamodules/base.py": "import lightning\nimport datasets\nfrom . import windows",
    "datamodules/windows.py": "import json",
    "callbacks/samples.py": "import lightning as L\nfrom callbacks.throughput import clock",
    "callbacks/throughput.py": "import time",
    "training/cli.py": "import callbacks, datamodules, lightning_models, evaluation",
    "evaluation/report.py": "import lightning_models.layers",
    "train.py": "from training import cli",
}
"""A tree that keeps every rule."""


def plant(root):
    """Writes the tree."""
    for name, source in TREE.items():
        add(root / name, source)


def add(path, source):
    """Adds lines to a file, which may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(source + "\n")


LM = "lightning_models"
BREACHES = [
    ("layers/attention.py", "import numpy", "numpy"),
    ("layers/attention.py", "import flash_attn", "flash_attn"),
    ("layers/attention.py", "def g():\n    import lightning.pytorch", "lightning.pytorch"),
    ("layers/attention.py", "from lightning_models.output_layer import x", f"{LM}.output_layer"),
    ("layers/attention.py", "from .. import output_layer", f"{LM}.output_layer"),
    ("layers/attention.py", "from lightning_models import LanguageModel", LM),
    ("layers/attention.py", "from ..transformer.network import X", f"{LM}.transformer.network"),
    ("output_layer.py", "import lightning", "lightning"),
    ("output_layer.py", "from lightning_models.base import Term", f"{LM}.base"),
    (
        "output_layer.py",
        "from lightning_models.transformer import network",
        f"{LM}.transformer.network",
    ),
    ("output_layer.py", "import datamodules.windows", "datamodules.windows"),
    ("output_layer.py", "import transformers", "transformers"),
    (
        "base.py",
        "from lightning_models.transformer import TransformerLM",
        f"{LM}.transformer.module",
    ),
    ("base.py", "async def f():\n    import evaluation.report", "evaluation.report"),
    ("base.py", "from train import main", "train"),
    ("base.py", "import datamodules", "datamodules"),
    ("ponderlm/__init__.py", "from lightning_models.base import X", f"{LM}.base"),
    ("ponderlm/network.py", "import lightning", "lightning"),
    ("ponderlm/network.py", "def f():\n    from lightning.pytorch import X", "lightning.pytorch"),
    ("ponderlm/network.py", "from lightning_models.base import X", f"{LM}.base"),
    ("ponderlm/network.py", "from .module import PonderLM", f"{LM}.ponderlm.module"),
    ("ponderlm/network.py", "from . import PonderLM", f"{LM}.ponderlm.module"),
    ("ponderlm/network.py", "import transformers", "transformers"),
    (
        "ponderlm/network.py",
        "import lightning_models.ponderlm.baselines",
        f"{LM}.ponderlm.baselines",
    ),
    (
        "ponderlm/network.py",
        "from lightning_models.transformer import TransformerLM",
        f"{LM}.transformer.module",
    ),
    ("ponderlm/deep/router.py", "from lightning_models.base import X", f"{LM}.base"),
    ("ponderlm/jacobi.py", "import_module('lightning')", "lightning"),
    ("ponderlm/jacobi.py", "importlib.import_module('lightning_models.base')", f"{LM}.base"),
    ("ponderlm/jacobi.py", "if TYPE_CHECKING:\n    import lightning", "lightning"),
    ("ponderlm/jacobi.py", "x = lambda: __import__('lightning')", "lightning"),
    ("ponderlm/baselines.py", "import lightning", "lightning"),
    (
        "ponderlm/module.py",
        "from lightning_models.thinking_states.network import X",
        f"{LM}.thinking_states.network",
    ),
    ("ponderlm/module.py", "from ..thinking_states import X", f"{LM}.thinking_states"),
    ("ponderlm/module.py", "from lightning_models import LanguageModel", LM),
    ("ponderlm/module.py", "from callbacks import samples", "callbacks.samples"),
    ("transformer/network.py", "from .module import TransformerLM", f"{LM}.transformer.module"),
    ("transformer/network.py", "from . import TransformerLM", f"{LM}.transformer.module"),
    ("transformer/import_weights.py", "import lightning", "lightning"),
    ("transformer/import_weights.py", "import transformers", "transformers"),
    ("transformer/module.py", "from ..ponderlm.network import X", f"{LM}.ponderlm.network"),
    ("thinking_states/rows.py", "import transformers", "transformers"),
    ("thinking_states/backbone.py", "import transformers", "transformers"),
    ("__init__.py", "from callbacks import samples", "callbacks.samples"),
    ("__init__.py", "from evaluation import report", "evaluation.report"),
    ("../datamodules/base.py", "import lightning_models", LM),
    (
        "../datamodules/base.py",
        "def f():\n    from lightning_models import output_layer",
        f"{LM}.output_layer",
    ),
    ("../datamodules/base.py", "from callbacks import throughput", "callbacks.throughput"),
    ("../callbacks/samples.py", "from lightning_models.generation import x", f"{LM}.generation"),
    ("../callbacks/samples.py", "class A:\n    from lightning_models import B", LM),
    ("../callbacks/samples.py", "import datamodules.base as d", "datamodules.base"),
    ("../callbacks/samples.py", "from training import cli", "training.cli"),
    ("../callbacks/samples.py", "def f():\n    import evaluation.tasks", "evaluation.tasks"),
]


def test_planted_breaches_are_found(tmp_path):
    plant(tmp_path)
    expected = []
    for name, source, module in BREACHES:
        path = f"lightning_models/{name}".replace("lightning_models/../", "")
        add(tmp_path / path, source)
        expected.append((path, module))
    found = [tuple(re.split(r":\d+ imports ", line)) for line in breaches(tmp_path)]
    assert sorted(found) == sorted(expected)


ALLOWED = [
    ("lightning_models/layers/attention.py", "import math\nfrom . import attention"),
    ("lightning_models/output_layer.py", "from .optim import x\nimport torchmetrics"),
    ("lightning_models/base.py", "from lightning_models import output_layer"),
    ("lightning_models/ponderlm/jacobi.py", "def f():\n    import torch_scatter"),
    ("lightning_models/ponderlm/jacobi.py", "from lightning_models.output_layer import x"),
    ("lightning_models/ponderlm/module.py", "from . import jacobi, network"),
    ("lightning_models/ponderlm/jacobi.py", "import_module(name)"),
    ("callbacks/samples.py", "import torch, matplotlib.pyplot"),
    ("evaluation/report.py", "import train, training, callbacks, datamodules"),
]


def test_what_is_allowed_is_not_a_breach(tmp_path):
    plant(tmp_path)
    assert breaches(tmp_path) == []
    for name, source in ALLOWED:
        add(tmp_path / name, source)
    assert breaches(tmp_path) == []


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
    """``inspect.getdoc`` finds the docstring of an overridden method."""
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
                if not inspect.getdoc(getattr(cls, name))
            ]
    assert undocumented == []
