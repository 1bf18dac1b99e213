"""The commands that make each result of a paper, as a shell expands them.

They stand in blocks of ``docs/<method>.md``, in functions of ``docs/papers/<method>.sh`` and in
cells of ``docs/papers/<method>.csv``.
"""

import csv
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = ("thoughtbubbles", "thought_gestalt", "latent_thought", "ponderlm", "thinking_states")
_SHELL = "say() { printf '%s\x1f' \"$@\"; printf '\x1e'; }\npython() { say python \"$@\"; }\n"
_SHELL += 'make() { say make "$@"; }\n'
_SHELL += f'bash() {{ source "{ROOT}/$1" "${{@:2}}"; }}\nset -eu\n'
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"`((?:DATA=\S+ )?(?:python|make) [^`]+)`")
_FUNCTION = re.compile(r"^(\w+)\(\) \{$", re.MULTILINE)


def functions_of(method: str) -> list[str]:
    """Names of the functions of a method's shell file."""
    return _FUNCTION.findall((DOCS / "papers" / f"{method}.sh").read_text())


def results_of(method: str) -> list[dict[str, str]]:
    """Rows of a method's table of results."""
    with (DOCS / "papers" / f"{method}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def commands_of(method: str) -> list[tuple[str, ...]]:
    """Returns the commands of a method as the words that a shell passes on, each once, in order.

    A command other than python and make is an error.
    """
    text = (DOCS / f"{method}.md").read_text()
    cells = [cell for row in results_of(method) for cell in row.values()]
    recipes = f"source {DOCS}/papers/{method}.sh {' '.join(functions_of(method))}"
    script = _SHELL + "\n".join([*_BLOCK.findall(text), recipes, *_CELL.findall("\n".join(cells))])
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
