"""The tables of ``docs/<method>.md``: for each result of a paper the commands that make it.

A page says in the section ``HEADING`` what there is, and lists commands in its cells or in blocks
below headings that the cells link to. A shell expands them, so loops are read as they will be run.
"""

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = ("thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm", "thinking_states")
HEADING = "## Every table and figure"
NOTHING, MISSING, NONE = "nothing is measured", "missing: ", "-"
_SHELL = "say() { printf '%s\x1f' \"$@\"; printf '\x1e'; }\npython() { say python \"$@\"; }\n"
_SHELL += 'make() { say make "$@"; }\nset -eu\n'


class Row(NamedTuple):
    """A table, figure or ablation of a paper."""

    paper: str
    what: str
    paper_scale: str
    small_scale: str
    ours: str
    published: str


def table_below(text: str, heading: str) -> list[list[str]]:
    """Returns the rows of the first table below a heading, without its header and rule."""
    table = re.search(r"(?:^\|.*\n)+", text.partition(f"{heading}\n")[2], re.MULTILINE)
    assert table, f"there is no table below {heading}"
    return [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in table[0].splitlines()[2:]
    ]


@cache
def rows_of(method: str) -> list[Row]:
    """Returns the rows of a page's table."""
    return [Row(*cells) for cells in table_below((DOCS / f"{method}.md").read_text(), HEADING)]


@cache
def blocks_of(method: str) -> dict[str, str]:
    """Returns the shell blocks of a page by the anchor of the heading above them, joined."""
    blocks: dict[str, str] = {}
    text = (DOCS / f"{method}.md").read_text()
    for part in re.split(r"^#{1,4} ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        blocks[anchor] = "".join(re.findall(r"^```bash\n(.*?)^```", body, re.M | re.DOTALL))
    return blocks


def commands_in(cell: str) -> list[str]:
    """Returns the commands that stand in a cell."""
    return re.findall(r"`((?:DATA=\S+ )?(?:python|make) [^`]+)`", cell)


@cache
def commands_of(method: str) -> list[tuple[str, ...]]:
    """Returns the commands of a page as the words that a shell passes on, each once, in order.

    A command other than python and make is an error.
    """
    cells = [
        command
        for row in rows_of(method)
        for cell in (row.paper_scale, row.small_scale)
        for command in commands_in(cell)
    ]
    script = _SHELL + "\n".join([*blocks_of(method).values(), *cells])
    shell = shutil.which("bash")
    assert shell, "bash is needed to read the commands"
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [shell, "--noprofile", "--norc", "-c", script],
            cwd=empty,
            env={"PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\x1e")[:-1]
    return list(dict.fromkeys(tuple(line.split("\x1f")[:-1]) for line in lines))
