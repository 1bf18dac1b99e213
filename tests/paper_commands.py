"""The tables of ``docs/<method>.md``: for each result of a paper the commands that make it.

A page says in the section ``HEADING`` what there is, and lists commands in its cells or in blocks
below headings that the cells link to. A shell expands them, so loops are read as they will be run.
"""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = ("thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm", "thinking_states")
HEADING = "## Every table and figure"
NOTHING, MISSING, NONE = "nothing is measured", "missing: ", "-"
COLUMNS = (
    "paper",
    "what",
    "command, paper scale",
    "command, small scale",
    "ours (small scale)",
    "paper's",
)
COUNTED = (
    "rows",
    "of these drawings, settings",
    "command, paper scale",
    "missing, paper scale",
    "command, small scale",
    "missing, small scale",
    "our result",
)
_CODE = re.compile(r"`((?:DATA=\S+ )?(?:python|make) [^`]+)`")
_WORD, _END = "\x1f", "\x1e"
_SHELL = "say() { printf '%s\x1f' \"$@\"; printf '\x1e'; }\npython() { say python \"$@\"; }\n"
_SHELL += 'make() { say make "$@"; }\nset -eu\n'

Words = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A table, figure or ablation of a paper."""

    method: str
    paper: str
    what: str
    paper_scale: str
    small_scale: str
    ours: str
    published: str

    @property
    def scales(self) -> tuple[str, str]:
        """The two cells with commands."""
        return self.paper_scale, self.small_scale


def text_of(method: str) -> str:
    """Returns the page of a method."""
    return (DOCS / f"{method}.md").read_text()


def cells_of(line: str) -> list[str]:
    """Returns the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def table_below(text: str, heading: str) -> list[list[str]]:
    """Returns the rows of the first table below a heading, its header first, without the rule."""
    _, _, rest = text.partition(f"{heading}\n")
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table, f"there is no table below {heading}"
    rows = [cells_of(line) for line in table[0].splitlines()]
    return [rows[0], *rows[2:]]


@cache
def rows_of(method: str) -> list[Row]:
    """Returns the rows of a page's table; its form is checked."""
    header, *rows = table_below(text_of(method), HEADING)
    assert tuple(header) == COLUMNS
    assert all(len(row) == len(COLUMNS) for row in rows), method
    return [Row(method, *row) for row in rows]


def anchor(heading: str) -> str:
    """Returns what links to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def blocks_of(method: str) -> dict[str, str]:
    """Returns the shell blocks of a page by the anchor of the heading above them, joined."""
    blocks: dict[str, str] = {}
    for part in re.split(r"^#{1,4} ", text_of(method), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        found = re.findall(r"^```bash\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
        blocks[anchor(heading)] = "".join(found)
    return blocks


def in_cell(cell: str) -> list[str]:
    """Returns the commands that stand in a cell."""
    return _CODE.findall(cell)


def linked(cell: str) -> list[str]:
    """Returns the anchors of the page that a cell links to."""
    return re.findall(r"\]\(#([^)]+)\)", cell)


def has_command(cell: str) -> bool:
    """Whether a cell says how its result is made."""
    return not cell.startswith((NOTHING, MISSING))


def counts(method: str) -> list[int]:
    """Returns the numbers of ``COUNTED`` for a page."""
    rows = rows_of(method)
    told = []
    for index in range(2):
        cells = [row.scales[index] for row in rows]
        told += [sum(has_command(c) for c in cells), sum(c.startswith(MISSING) for c in cells)]
    nothing = sum(row.paper_scale.startswith(NOTHING) for row in rows)
    ours = sum(not row.ours.startswith(NONE) for row in rows)
    return [len(rows), nothing, *told, ours]


@cache
def commands_of(method: str) -> list[Words]:
    """Returns the commands of a page as the words that a shell passes on, each once, in order."""
    cells = [command for row in rows_of(method) for cell in row.scales for command in in_cell(cell)]
    return list(dict.fromkeys(expand("\n".join([*blocks_of(method).values(), *cells]))))


def expand(script: str) -> list[Words]:
    """Returns the commands that a shell would run; any but python and make is an error."""
    shell = shutil.which("bash")
    assert shell, "bash is needed to read the commands"
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [shell, "--noprofile", "--norc", "-c", _SHELL + script],
            cwd=empty,
            env={"PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split(_END)[:-1]
    return [tuple(line.split(_WORD)[:-1]) for line in lines]
