"""Thoughts of a model along queries, next to the thoughts that the data's steps imply.

The paper is *Latent Reasoning with Supervised Thinking States*.

=============================================  =====================================================
paper                                          where
=============================================  =====================================================
Fig. 4, thoughts within the query              ``thought_report``: ``text.txt``
Sec. 3.3, rounds and trivial states            ``rounds``, ``summary``
Sec. 4.5, where reasoning goes wrong           ``chunks``, ``thoughts``
=============================================  =====================================================

A thought is right if it is the gold one token by token. The model thinks for itself all along the
query, so after a wrong thought later ones may be wrong in consequence; the first wrong one is not.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pandas as pd

from callbacks.analysis.base import Analysis, Findings, nothing_recorded
from callbacks.analysis.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    AnalysisReport,
    Draw,
    Tables,
    draw_bars,
    draw_lines,
    finish,
    panels,
)
from callbacks.hooks import check_least
from callbacks.recorded_thoughts import (
    Recorded,
    RowThinking,
    Thought,
    insert,
    parts_of,
    thought_text,
)

CHUNK_COLUMNS = {
    "group": "int64",
    "chunk": "int64",
    "known": bool,
    "trivial": bool,
    "gold_trivial": bool,
    "right": bool,
    "order": "int64",
    "length": "int64",
}
"""Columns of a chunk's line and their types, which a table without lines does not show."""


class ThoughtTrace(Analysis):
    """Shows the thoughts of a model along queries, next to the thoughts of the data's steps.

    After validations it scores the first batches once more, the model thinking for itself, and
    reports: the share of chunks whose thought is the gold one, of all and by chunk; where the first
    wrong thought is; the number of chunks without a thought, of the model and of the gold; the
    number of rounds of reading a query; and all of these by group of queries. A few queries are
    written out with their thoughts where they are thought (Thinking States, Fig. 4).

    Scalars are ``thoughts/...``, see ``summary``; files are in ``thought_trace``, queries in
    TensorBoard, too. Queries without known steps count for rounds and trivial thoughts only.
    ``callbacks.analysis`` describes what all analyses share.

    Args:
        output: Folder of the files. If null, ``thought_trace`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation of a training. If 0, analyse only those
            of the verb validate.
        shown_rows: Number of queries that are written out.

    Raises:
        ValueError: If a number is too low.
    """

    tag = "thought_trace"
    reads = "reasoning"
    image_tag = "thoughts"
    cards = ("thoughts/accuracy", "thoughts/accuracy_nontrivial", "thoughts/rounds")

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 4,
        every_n_validations: int = 1,
        shown_rows: int = 8,
    ) -> None:
        super().__init__(every_n_validations, num_batches, output)
        check_least("shown_rows", shown_rows, 0)
        self.shown_rows = shown_rows

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        predicted, gold = Recorded(), Recorded()
        pl_module.recorded(batch, thoughts=predicted.take, gold_thoughts=gold.take)
        if predicted.rows is None:
            missing = "thoughts (no method that thinks while it reads)"
            raise nothing_recorded(pl_module, missing)
        collect_thoughts(findings, batch, predicted.rows, gold.rows, tokenizer, self.shown_rows)

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        group_name = getattr(data, "group_name", "group")
        return thought_report(findings, self.shown_rows, group_name)

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        """Returns ``thoughts``: a line a chunk of the query.

        ``chunk`` from 0, its ``text``, the ``thought`` after it as text, empty for none, and its
        ``length`` in tokens; what is left of the query after the last chunk is a line, too.
        """
        query = findings["shown"].iloc[0]
        lengths = findings["chunks"]["length"].tolist() if "chunks" in findings else []
        columns = {"text": query["parts"], "thought": [*query["thoughts"], ""]}
        table = pd.DataFrame({**columns, "length": [*lengths, 0]})
        table = table[(table["text"] != "") | (table["length"] > 0)]
        table = table.rename_axis("chunk").reset_index()
        return AnalysisReport(tables={"thoughts": table}, figures={"thoughts": text_figure})


# ---- collecting


def collect_thoughts(
    findings: Findings,
    batch: dict[str, Any],
    predicted: Sequence[RowThinking],
    gold: Sequence[RowThinking] | None,
    tokenizer: Any,
    shown: int,
) -> None:
    """Adds the queries of a batch; rows that only fill it up are left out.

    ``queries`` has a line a query, ``chunks`` a line a chunk (see ``query_tables``), and ``shown``
    a line a query that is written out, see ``written_out``.

    ``gold`` thoughts have the same chunks as the model's ``predicted`` ones, and are None if the
    model does not say. Without a tokenizer nothing is written out, else up to ``shown`` queries in
    all.
    """
    for row, thinking in enumerate(predicted):
        if not bool((batch["targets"][row] >= 0).any()):
            continue
        ids = batch["query"][row, : int(batch["query_lengths"][row])].tolist()
        has_gold = gold is not None and bool(batch["step_lengths"][row].any())
        theirs = gold[row].within(ids).thoughts if has_gold and gold is not None else None
        mine = thinking.within(ids)
        query, chunk_lines = query_tables(mine, theirs, int(batch["group"][row]))
        findings.add("queries", [query])
        findings.add("chunks", chunk_lines)
        if tokenizer is not None and len(findings["shown"]) < shown:
            findings.add("shown", [written_out(tokenizer, ids, mine.thoughts, theirs)])


def query_tables(
    predicted: RowThinking, gold: Sequence[Thought] | None, group: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the line of a query, and the lines of its chunks.

    Of the query: ``group``; ``rounds``; whether gold thoughts are ``known``; ``nontrivial``, its
    chunks with a thought; ``first_wrong``, the chunk of its first wrong thought, nan for none.
    Of a chunk: ``group``; its number ``chunk`` from 0; ``known``; whether it is ``trivial``
    (nothing is thought) and ``gold_trivial``; whether the thought is ``right``; ``order`` of the
    gold thought in the query, from 1, 0 for none; ``length`` of the thought in tokens.

    ``gold`` is None where the data know no steps; ``group`` is what queries are grouped by, e.g.
    the number of operations.
    """
    lines, order, first_wrong = [], 0, math.nan
    for chunk, (mine, theirs) in enumerate(
        zip(predicted.thoughts, predicted.thoughts if gold is None else gold, strict=True)
    ):
        right = mine.tokens == theirs.tokens
        order += bool(theirs.tokens)
        first_wrong = chunk if not right and math.isnan(first_wrong) else first_wrong
        lines.append(
            {
                "group": group,
                "chunk": chunk,
                "known": gold is not None,
                "trivial": not mine.tokens,
                "gold_trivial": not theirs.tokens,
                "right": right,
                "order": order if theirs.tokens else 0,
                "length": len(mine.tokens),
            }
        )
    query = {"group": group, "rounds": predicted.rounds, "known": gold is not None}
    return query | {"nontrivial": predicted.nontrivial, "first_wrong": float(first_wrong)}, lines


def written_out(
    tokenizer: Any, ids: Sequence[int], predicted: Sequence[Thought], gold: Sequence[Thought] | None
) -> dict[str, Any]:
    """Returns a query with all thoughts where they are thought; with wrong ones the gold.

    ``ids`` are the tokens of the query, ``predicted`` the model's thoughts in order; ``gold`` is
    None if the data know no steps.

    Returns:
        ``text``; ``parts``, the text of each chunk and what is left after the last; ``thoughts``,
        the text of each chunk's thought, empty for none.
    """
    parts = parts_of(tokenizer, ids, [thought.end for thought in predicted])
    marks = []
    for mine, theirs in zip(predicted, predicted if gold is None else gold, strict=True):
        thought, wanted = (
            thought_text(tokenizer, each.tokens) if each.tokens else "nothing"
            for each in (mine, theirs)
        )
        right = mine.tokens == theirs.tokens
        if right and not mine.tokens:
            marks.append("")
        else:
            marks.append(f"[T: {thought}]" if right else f"[T: {thought} | not {wanted}]")
    return {
        "text": "".join(map(insert, parts, [*marks, ""])).strip(),
        "parts": parts,
        "thoughts": [thought_text(tokenizer, each.tokens) for each in predicted],
    }


# ---- tables


def summary(queries: pd.DataFrame, chunk_lines: pd.DataFrame) -> dict[str, float]:
    """Returns means over all chunks, or all queries, of at least one.

    Of chunks: ``accuracy``, the share whose thought is right; ``accuracy_nontrivial``, of those
    with a gold thought; ``missed``, the share of these after which nothing is thought;
    ``invented``, the share of the others after which anything is; ``trivial`` and
    ``gold_trivial``, the share of chunks without a thought. Of queries: ``all_right``, the share
    without a wrong thought; ``rounds``; ``nontrivial``, chunks with a thought; ``longest``, tokens
    of the longest thought of all (the model cuts those above max_thought_tokens). nan without what
    it is the share of.

    Both tables come from ``query_tables`` for the same queries.
    """
    judged = chunk_lines[chunk_lines["known"]]
    with_gold, without = judged[~judged["gold_trivial"]], judged[judged["gold_trivial"]]
    means = {
        "accuracy": judged["right"].mean(),
        "accuracy_nontrivial": with_gold["right"].mean(),
        "missed": with_gold["trivial"].mean(),
        "invented": (~without["trivial"]).mean(),
        "trivial": chunk_lines["trivial"].mean(),
        "gold_trivial": judged["gold_trivial"].mean(),
        "all_right": queries.loc[queries["known"], "first_wrong"].isna().mean(),
        "rounds": queries["rounds"].mean(),
        "nontrivial": queries["nontrivial"].mean(),
        "longest": chunk_lines["length"].max() if len(chunk_lines) else 0,
    }
    return {name: float(value) for name, value in means.items()}


def chunks(queries: pd.DataFrame, chunk_lines: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one line a chunk, numbered from the query's beginning.

    ``rows`` that have that many chunks and gold; ``accuracy``; ``trivial`` and ``gold_trivial``;
    ``first_wrong``, queries whose first wrong thought this is, and their share of all of them.
    """
    judged, judged_queries = chunk_lines[chunk_lines["known"]], queries[queries["known"]]
    grouped = judged.groupby("chunk")
    table = (
        grouped[["right", "trivial", "gold_trivial"]].mean().rename(columns={"right": "accuracy"})
    )
    table.insert(0, "rows", grouped.size())
    wrong = judged_queries["first_wrong"].value_counts()
    table["first_wrong"] = wrong.reindex(table.index, fill_value=0).astype(int)
    table["first_wrong_share"] = table["first_wrong"] / len(judged_queries)
    return table.reset_index()


def thoughts(chunk_lines: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one line a gold thought, by its order in the query, from 1.

    ``rows`` that have that many; ``accuracy``, the share of which is thought so in its chunk.
    """
    lines = chunk_lines[chunk_lines["known"] & (chunk_lines["order"] > 0)]
    grouped = lines.groupby("order")["right"]
    table = pd.DataFrame({"rows": grouped.size(), "accuracy": grouped.mean()})
    return table.rename_axis("thought").reset_index()


def rounds(queries: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one line a number of rounds: ``rows`` that took them, their ``share``.

    ``nontrivial``: their chunks with a thought, on average; speculation takes one round more at
    most.
    """
    grouped = queries.groupby("rounds")
    columns = {"rows": grouped.size(), "share": grouped.size() / len(queries)}
    return pd.DataFrame({**columns, "nontrivial": grouped["nontrivial"].mean()}).reset_index()


def groups(queries: pd.DataFrame, chunk_lines: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one line a group of queries: ``rows`` and numbers of ``summary``."""
    lines = []
    for group, part in queries.groupby("group"):
        values = summary(part, chunk_lines[chunk_lines["group"] == group])
        names = ("accuracy", "accuracy_nontrivial", "all_right", "rounds", "nontrivial")
        lines.append({"group": group, "rows": len(part), **{name: values[name] for name in names}})
    return pd.DataFrame(lines)


# ---- the report


def thought_report(
    findings: Findings, shown_rows: int, group_name: str = "group"
) -> AnalysisReport:
    """Returns the report of an analysis; scalars are below ``thoughts/``, see :func:`summary`.

    There is at least one query, which may be too short for a chunk; ``group_name`` names what a
    group counts.
    """
    queries = findings["queries"]
    chunk_lines = findings["chunks"].reindex(columns=list(CHUNK_COLUMNS)).astype(CHUNK_COLUMNS)
    by_group = groups(queries, chunk_lines)
    tables = {
        "chunks": chunks(queries, chunk_lines),
        "thoughts": thoughts(chunk_lines),
        "rounds": rounds(queries),
        "groups": by_group if len(by_group) > 1 else by_group[:0],
    }
    shown = findings["shown"][:shown_rows]
    texts, markdown = {}, {}
    if len(shown):
        texts["text.txt"] = "\n\n".join(shown["text"]) + "\n"
        markdown["thought_trace"] = "\n\n---\n\n".join(map(_verbatim, shown["text"]))
    values = summary(queries, chunk_lines)
    return AnalysisReport(
        scalars={f"thoughts/{name}": value for name, value in values.items()},
        tables=tables,
        figures=FIGURES | {"groups": partial(groups_figure, name=group_name)},
        texts=texts,
        markdown=markdown,
    )


def _verbatim(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])


def text_figure(tables: Tables) -> Any:
    """Draws the chunks of a query from top to bottom, with the length and text of thoughts."""
    table = tables["thoughts"]
    figure, (ax,) = panels(9, 1.2 + 0.28 * len(table), 1)
    rows = range(len(table))
    ax.barh(rows, table["length"], 0.7, color=BLUE)
    for y, line in zip(rows, table.to_dict("records"), strict=True):
        text = f" {line['thought']}" if line["thought"] else " nothing"
        ax.text(line["length"], y, text, va="center", fontsize=7, parse_math=False)
    labels = [text.replace("\n", " ").strip() for text in table["text"]]
    ax.set_yticks(rows, labels, parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.6 * max(1, table["length"].max()))  # room for the texts
    finish(ax, "tokens of the thought after each chunk", whole=True)
    return figure


def chunks_figure(tables: Tables) -> Any:
    """Draws the accuracy of each chunk, how often it has no thought, and where errors begin."""
    table = tables["chunks"]
    figure, (accuracy, trivial, wrong) = panels(12, 3.6, 3)
    draw_lines(accuracy, table, "chunk", {"accuracy": (None, BLUE)})
    shown = {"trivial": ("model", BLUE), "gold_trivial": ("gold", GREY)}
    draw_lines(trivial, table, "chunk", shown)
    draw_bars(wrong, table, "chunk", {"first_wrong_share": (None, ORANGE)})
    rest = 1 - table["first_wrong_share"].sum()
    wrong.set_title(f"{rest:.1%} of the queries have none", fontsize=10)
    labels = {
        accuracy: "share of right thoughts",
        trivial: "share without a thought",
        wrong: "share of queries: first wrong thought",
    }
    for ax, label in labels.items():
        finish(ax, "chunk of the query", label, whole=True)
    for ax in (accuracy, trivial):
        ax.set_ylim(-0.03, 1.03)
    return figure


def thoughts_figure(tables: Tables) -> Any:
    """Draws the accuracy of gold thoughts by their order in the query."""
    table = tables["thoughts"]
    figure, (ax,) = panels(5.6, 3.6, 1)
    draw_lines(ax, table, "thought", {"accuracy": (None, GREEN)})
    ax.set_ylim(-0.03, 1.03)
    finish(ax, "gold thought, in the query's order", "share that is thought so", whole=True)
    return figure


def rounds_figure(tables: Tables) -> Any:
    """Draws the number of rounds that queries take."""
    table = tables["rounds"]
    figure, (ax,) = panels(5.6, 3.6, 1)
    draw_bars(ax, table, "rounds", {"share": (None, BLUE)})
    finish(ax, "rounds of reading a query", "share of queries", whole=True)
    return figure


def groups_figure(tables: Tables, name: str = "group") -> Any:
    """Draws accuracy and rounds by group; ``name`` says what a group counts."""
    table = tables["groups"]
    figure, (accuracy, passes) = panels(9, 3.6, 2)
    shown = {"accuracy_nontrivial": ("gold thoughts", BLUE), "all_right": ("whole queries", ORANGE)}
    draw_lines(accuracy, table, "group", shown)
    accuracy.set_ylim(-0.03, 1.03)
    draw_lines(passes, table, "group", {"rounds": ("rounds", BLUE)})
    draw_lines(passes, table, "group", {"nontrivial": ("thoughts", GREY)}, "o--")
    finish(accuracy, name, "share that is right", whole=True)
    finish(passes, name, "per query", whole=True)
    return figure


FIGURES: dict[str, Draw] = {
    "chunks": chunks_figure,
    "thoughts": thoughts_figure,
    "rounds": rounds_figure,
    "groups": groups_figure,
}
