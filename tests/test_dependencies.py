"""pyproject.toml, constraints.txt and environment.yml name the same packages."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = {"pytorch_scatter": "torch-scatter", "pytorch": "torch", "flash-attn": "flash-attn"}
UNPINNED = {"gpu", "quality", "wandb", "mlflow"}  # not installed where the tests run
PRODUCT = ("lightning_models", "datamodules", "callbacks", "training", "evaluation")
MODULES = {"lm-eval": "lm_eval", "mauve-text": "mauve"}
"""What is imported, where it is not the package's name with underscores."""
# jsonargparse needs it for --print_config=comments
INDIRECT = {"ruamel-yaml"}


def requirements(lines):
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def conda_lines():
    environment = YAML(typ="safe").load(ROOT / "environment.yml")
    lines = environment["dependencies"]
    (pip,) = [entry["pip"] for entry in lines if isinstance(entry, dict)]
    binaries = [line for line in lines if isinstance(line, str) and line.split(">")[0] in CONDA]
    for theirs, ours in CONDA.items():
        binaries = [line.replace(theirs, ours) for line in binaries]
    return [*binaries, *pip]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(
        re.fullmatch(r"([\w.-]+)==(\S+)", line).groups() for line in lines if line[0] != "#"
    )


def test_environment_names_every_dependency_with_its_range():
    everything = PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra]
    ours, conda = requirements(everything), requirements(conda_lines())
    assert {name: str(r) for name, r in conda.items()} == {n: str(r) for n, r in ours.items()}


def test_every_dependency_of_the_product_is_imported():
    lines = PROJECT["dependencies"] + EXTRAS["gpu"] + EXTRAS["quality"] + EXTRAS["openai"]
    sources = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    names = {name: MODULES.get(name, name.replace("-", "_")) for name in requirements(lines)}
    unused = {
        name
        for name, module in names.items()
        if not re.search(rf"^\s*(import|from) {module}\b", text, re.M)
    }
    assert unused == INDIRECT


def test_constraints_pin_every_installed_dependency_inside_its_range():
    pinned = {canonicalize_name(name): Version(version) for name, version in pins().items()}
    lines = PROJECT["dependencies"] + [
        line for extra, some in EXTRAS.items() if extra not in UNPINNED for line in some
    ]
    for name, requirement in requirements(lines).items():
        assert name in pinned, f"{name} is not in constraints.txt"
        assert pinned[name] in requirement.specifier, f"{name}=={pinned[name]}"


def test_the_python_floor_is_the_same_everywhere():
    environment = YAML(typ="safe").load(ROOT / "environment.yml")
    assert f"python{PROJECT['requires-python']}" in environment["dependencies"]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
