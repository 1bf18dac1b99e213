"""The commands of ``docs/<method>.md``, which make each result of a paper.

They stand in the cells of its tables and in blocks. A shell expands them, so loops are read as they
will be run.
"""

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
_SHELL += 'make() { say make "$@"; }\nset -eu\n'
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"`((?:DATA=\S+ )?(?:python|make) [^`]+)`")


@cache
def commands_of(method: str) -> list[tuple[str, ...]]:
    """Returns the commands of a page as the words that a shell passes on, each once, in order.

    A command other than python and make is an error.
    """
    text = (DOCS / f"{method}.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    script = _SHELL + "\n".join([*_BLOCK.findall(text), *_CELL.findall("\n".join(rows))])
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
