"""pyproject.toml, constraints.txt and environment.yml name the same packages."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from tests.programs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = YAML(typ="safe").load(ROOT / "environment.yml")["dependencies"]
CONDA_NAMES = {"pytorch": "torch", "pytorch_scatter": "torch-scatter", "flash-attn": "flash-attn"}
UNPINNED = {"gpu", "quality", "wandb", "mlflow"}  # not installed where the tests run
PRODUCT = ("lightning_models", "datamodules", "callbacks", "training", "evaluation")
MODULES = {"lm-eval": "lm_eval", "mauve-text": "mauve"}
"""What is imported, where it is not the package's name with underscores."""
INDIRECT = {"ruamel-yaml"}  # jsonargparse needs it for --print_config=comments


def requirements(lines):
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def of_extras(names):
    return requirements([*PROJECT["dependencies"], *(x for name in names for x in EXTRAS[name])])


def test_environment_names_every_dependency_with_its_range():
    (pip,) = [entry["pip"] for entry in CONDA if isinstance(entry, dict)]
    lines = [line for line in CONDA if isinstance(line, str)]
    names = {line: re.split("[>=<]", line)[0] for line in lines}
    binaries = [
        line.replace(name, CONDA_NAMES[name]) for line, name in names.items() if name in CONDA_NAMES
    ]
    conda = {name: str(entry) for name, entry in requirements([*binaries, *pip]).items()}
    assert conda == {name: str(entry) for name, entry in of_extras(EXTRAS).items()}
    assert f"python{PROJECT['requires-python']}" in lines


def test_every_dependency_of_the_product_is_imported():
    sources = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    imported = set(
        re.findall(
            r"^\s*(?:import|from) (\w+)", "\n".join(path.read_text() for path in sources), re.M
        )
    )
    names = of_extras(["gpu", "quality", "openai", "lora"])
    unused = {name for name in names if MODULES.get(name, name.replace("-", "_")) not in imported}
    assert unused == INDIRECT


@pytest.mark.parametrize("name", sorted(of_extras(set(EXTRAS) - UNPINNED)))
def test_constraints_pin_an_installed_dependency_inside_its_range(name):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    (version,) = [version for pinned, version in pins if canonicalize_name(pinned) == name]
    assert version in of_extras(EXTRAS)[name].specifier
