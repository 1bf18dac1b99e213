"""Files of two-hop questions about the real world, in the two formats they are published in.

Both are csv with a header, one question a row; other columns do not matter.

`TwoHopFact.csv`, and SOCRATES, of Yang et al. (arXiv 2402.16837, 2411.16679; on the hub as
soheeyang/TwoHopFact and soheeyang/SOCRATES):

| column | holds |
|---|---|
| ``e1.value``, ``e2.value``, ``e3.value`` | names of subject, bridge and answer |
| ``e2.aliases``, ``e3.aliases`` | other names, a Python tuple of tuples of texts; may be missing |
| ``r1(e1).prompt``, ``r2(e2).prompt`` | the facts up to their objects, "The singer of X is" |
| ``r2(r1(e1)).prompt`` | the question, "The mother of the singer of X is" |

`two_hop.csv` with templates of Biran et al. (arXiv 2406.12775, "Hopping Too Late"):

| column | holds |
|---|---|
| ``e1_label``, ``e2_label``, ``e3_label`` | names of subject, bridge and answer |
| ``e2_aliases``, ``e3_aliases`` | other names, a Python list of texts; may be missing |
| ``r1_template``, ``r2_template`` | the relations with ``{}``: "the spouse of {}", "{} is led by" |
| ``source_prompt`` | the question, "the spouse of the performer of X is" |
"""

import ast
import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from datamodules.readers import not_utf8
from datamodules.reasoning.two_hop.hops import Chain, Hop

_LONGEST_FIELD = 2**24  # characters; csv's own limit is below what TwoHopFact has


@dataclass(frozen=True)
class _Columns:
    """Names of the columns of a format, made of those of e1, e2 and e3.

    Attributes:
        name: Ending of the columns with their names.
        aliases: Ending of the columns with their other names.
        first: The first fact.
        second: The second fact.
        question: The question.
        filled: Whether the facts name their entities; else they are templates.
    """

    name: str
    aliases: str
    first: str
    second: str
    question: str
    filled: bool

    @property
    def entities(self) -> tuple[str, str, str]:
        """Those of subject, bridge and answer."""
        return (f"e1{self.name}", f"e2{self.name}", f"e3{self.name}")

    @property
    def needed(self) -> tuple[str, ...]:
        """Those without which a row says nothing."""
        return (*self.entities, self.first, self.second, self.question)


_PROMPTS = _Columns(
    name=".value",
    aliases=".aliases",
    first="r1(e1).prompt",
    second="r2(e2).prompt",
    question="r2(r1(e1)).prompt",
    filled=True,
)
_TEMPLATES = _Columns(
    name="_label",
    aliases="_aliases",
    first="r1_template",
    second="r2_template",
    question="source_prompt",
    filled=False,
)


def check_csv(path: Path) -> None:
    """Raises a ValueError for another suffix than csv."""
    if path.suffix.lower() != ".csv":
        raise ValueError(f"{path}: two-hop questions are read from csv files. Convert the file.")


def read_chains(path: Path) -> Iterator[Chain]:
    """Yields the questions of a csv file in either format.

    Raises:
        ValueError: It is not UTF-8, has other columns, no rows, or a row lacks a value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.start) from error
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.DictReader(io.StringIO(text, newline=""))
    columns = _format(path, rows.fieldnames or ())
    empty = True
    for row in rows:
        empty = False
        yield _chain(row, columns, f"{path}, line {rows.line_num}")
    if empty:
        raise ValueError(f"{path} has no questions. Remove it from the files, or fill it.")


def _format(path: Path, names: object) -> _Columns:
    there = set(names) if isinstance(names, list | tuple) else set()
    for columns in (_PROMPTS, _TEMPLATES):
        if there.issuperset(columns.needed):
            return columns
    raise ValueError(
        f"{path}: the columns are those of neither format: {', '.join(_PROMPTS.needed)} "
        f"(TwoHopFact), or {', '.join(_TEMPLATES.needed)} (Hopping Too Late)."
    )


def _chain(row: Mapping[str, str | None], columns: _Columns, where: str) -> Chain:
    def value(name: str) -> str:
        text = (row.get(name) or "").strip()
        if not text:
            raise ValueError(f"{where}: the column {name!r} is empty. Fix or remove the row.")
        return text

    subject, bridge, answer = map(value, columns.entities)
    first, second = value(columns.first), value(columns.second)
    if not columns.filled:
        first, second = _filled(first, subject, where), _filled(second, bridge, where)
    others = [_aliases(row.get(f"{entity}{columns.aliases}")) for entity in ("e2", "e3")]
    return Chain(
        question=value(columns.question),
        first=Hop(first, first, subject, bridge, others[0]),
        second=Hop(second, second, bridge, answer, others[1]),
    )


def _filled(template: str, subject: str, where: str) -> str:
    """Returns the statement of a template, up to its object.

    A relation after its entity ends in its verb already: "{} is led by".
    """
    before, braces, behind = template.partition("{}")
    if not braces:
        raise ValueError(f"{where}: the template {template!r} has no {{}} for the entity.")
    return before + subject + (behind or " is")


def _aliases(written: str | None) -> tuple[str, ...]:
    """Returns the names in a Python literal, whatever its nesting; none where it is none."""
    try:
        return tuple(dict.fromkeys(_texts(ast.literal_eval(written or "()"))))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
