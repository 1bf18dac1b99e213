"""The maps from paper to code name every file of the room."""

import re
from pathlib import Path

import pytest

import lightning_models.thinking_states as room
from lightning_models.thinking_states import baselines

DOCS = Path(__file__).parents[2] / "docs" / "thinking_states.md"


@pytest.mark.parametrize("package", [room, baselines], ids=["room", "baselines"])
def test_docstrings_name_all_files(package):
    files = {path.stem for path in Path(package.__file__).parent.glob("[!_]*.py")}
    assert files - set(re.findall(r"``(\w+)", package.__doc__)) == set()


def test_the_documentation_names_all_files():
    folder = Path(room.__file__).parent
    table = DOCS.read_text().split("| file of")[1].split("\n\n")[0]
    named = re.findall(r"`(?:baselines/)?([\w*]+\.py)`", table)
    files = {path.name for path in folder.rglob("[!_]*.py")}
    matched = {file for file in files for name in named if Path(file).match(name)}
    assert files - matched == set()
