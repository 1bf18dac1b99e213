"""Thoughts of a model along queries, compared with the gold thoughts of the data.

The paper is *Latent Reasoning with Supervised Thinking States*.

=============================================  =====================================================
paper                                          code
=============================================  =====================================================
Fig. 4, thoughts within the query              ``thought_report``: ``text.txt``
Sec. 3.3, rounds and trivial states            ``rounds``, ``summary``
Sec. 4.5, position of errors                   ``chunks``, ``thoughts``
=============================================  =====================================================

A thought is correct if it equals the gold thought token by token. The model reads its own thoughts
along the query, so a wrong thought may cause later ones to be wrong, but not the first wrong one.
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
from callbacks.hooks import check_minimum
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
"""Columns of a chunk's row and their types, for tables without rows."""


class ThoughtTrace(Analysis):
    """Compares the thoughts of a model along queries with the gold thoughts of the data.

    After validations it scores the first batches again with the model's thoughts and reports
    the share of chunks with the gold thought, overall and by chunk; the position of the first wrong
    thought; the number of chunks without a thought, for the model and the gold; the number of
    rounds of reading a query; and all of these by group of queries. A few queries are printed with
    their thoughts inserted (Thinking States, Fig. 4).

    Scalars are ``thoughts/...``, see ``summary``; files are in ``thought_trace``, and queries in
    TensorBoard as well. Queries without known steps count for rounds and trivial thoughts only.
    ``callbacks.analysis`` describes what all analyses share.

    Args:
        output: Folder of the files. If null, ``thought_trace`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verb validate.
        shown_rows: Number of queries to print.

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
        check_minimum("shown_rows", shown_rows, 0)
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
        """Returns ``thoughts``, one row per chunk of the query.

        The columns are ``chunk`` from 0, its ``text``, the text of the ``thought`` after it, empty
        for none, and its ``length`` in tokens; the rest of the query is a row as well.
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
    max_shown: int,
) -> None:
    """Adds the queries of a batch, without padding rows.

    ``queries`` has one row per query, ``chunks`` one row per chunk (see ``query_tables``),
    and ``max_shown`` one row per printed query, see ``written_out``.

    ``gold`` thoughts have the same chunks as the ``predicted`` ones, and are None if the model
    records none. Up to ``max_shown`` queries in total are printed, or none without a tokenizer.
    """
    for row, thinking in enumerate(predicted):
        if not bool((batch["targets"][row] >= 0).any()):
            continue
        ids = batch["query"][row, : int(batch["query_lengths"][row])].tolist()
        has_gold = gold is not None and bool(batch["step_lengths"][row].any())
        gold_thoughts = gold[row].within(ids).thoughts if has_gold and gold is not None else None
        trace = thinking.within(ids)
        query, chunk_lines = query_tables(trace, gold_thoughts, int(batch["group"][row]))
        findings.add("queries", [query])
        findings.add("chunks", chunk_lines)
        if tokenizer is not None and len(findings["shown"]) < max_shown:
            findings.add("shown", [written_out(tokenizer, ids, trace.thoughts, gold_thoughts)])


def query_tables(
    predicted: RowThinking, gold: Sequence[Thought] | None, group: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the row of a query, and the rows of its chunks.

    The query has ``group``; ``rounds``; ``known``, whether it has gold thoughts; ``nontrivial``,
    the number of chunks with a thought; ``first_wrong``, the chunk of the first wrong thought, nan
    for none. A chunk has ``group``; its index ``chunk``; ``known``; ``trivial`` and
    ``gold_trivial``, whether it has no thought; ``right``, whether the thought is correct;
    ``order``, the position of the gold thought in the query from 1, or 0 for none; ``length`` of
    the thought in tokens.

    ``gold`` is None if the data have no steps; ``group`` is a property of the query, e.g. its
    number of operations.
    """
    rows, order, first_wrong = [], 0, math.nan
    for chunk, (thought, gold_thought) in enumerate(
        zip(predicted.thoughts, predicted.thoughts if gold is None else gold, strict=True)
    ):
        right = thought.tokens == gold_thought.tokens
        order += bool(gold_thought.tokens)
        first_wrong = chunk if not right and math.isnan(first_wrong) else first_wrong
        rows.append(
            {
                "group": group,
                "chunk": chunk,
                "known": gold is not None,
                "trivial": not thought.tokens,
                "gold_trivial": not gold_thought.tokens,
                "right": right,
                "order": order if gold_thought.tokens else 0,
                "length": len(thought.tokens),
            }
        )
    query = {"group": group, "rounds": predicted.rounds, "known": gold is not None}
    return query | {"nontrivial": predicted.nontrivial, "first_wrong": float(first_wrong)}, rows


def written_out(
    tokenizer: Any, ids: Sequence[int], predicted: Sequence[Thought], gold: Sequence[Thought] | None
) -> dict[str, Any]:
    """Returns a query with its thoughts inserted, and the gold thoughts next to wrong ones.

    ``ids`` are the tokens of the query, ``predicted`` the model's thoughts in order; ``gold`` is
    None if the data have no steps.

    Returns:
        ``text``; ``parts``, the text of each chunk and the rest after the last one; ``thoughts``,
        the text of each chunk's thought, empty for none.
    """
    parts = parts_of(tokenizer, ids, [thought.end for thought in predicted])
    marks = []
    for model_thought, gold_thought in zip(
        predicted, predicted if gold is None else gold, strict=True
    ):
        thought, gold_text = (
            thought_text(tokenizer, row.tokens) if row.tokens else "nothing"
            for row in (model_thought, gold_thought)
        )
        right = model_thought.tokens == gold_thought.tokens
        if right and not model_thought.tokens:
            marks.append("")
        else:
            marks.append(f"[T: {thought}]" if right else f"[T: {thought} | not {gold_text}]")
    return {
        "text": "".join(map(insert, parts, [*marks, ""])).strip(),
        "parts": parts,
        "thoughts": [thought_text(tokenizer, thought.tokens) for thought in predicted],
    }


# ---- tables


def summary(queries: pd.DataFrame, chunk_lines: pd.DataFrame) -> dict[str, float]:
    """Returns means over chunks and over queries, at least one.

    Over chunks: ``accuracy``, the share with a correct thought; ``accuracy_nontrivial``, the same
    for chunks with a gold thought; ``missed``, the share of these without a thought; ``invented``,
    the share of the other chunks with a thought; ``trivial`` and ``gold_trivial``, the share of
    chunks without a thought. Over queries: ``all_right``, the share without a wrong thought;
    ``rounds``; ``nontrivial``, chunks with a thought. ``longest`` is the length of the longest
    thought in tokens (the model truncates thoughts at max_thought_tokens). Shares of nothing are
    nan.

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
    """Returns a table with one row per index of a chunk within its query.

    The columns are ``rows``, the number of queries with this chunk and gold thoughts; ``accuracy``;
    ``trivial`` and ``gold_trivial``; ``first_wrong``, the number of queries whose first wrong
    thought is here, and their share.
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
    """Returns a table with one row per position of a gold thought in the query, from 1.

    The columns are ``rows``, the number of such thoughts, and ``accuracy``, the share that the
    model has in the same chunk.
    """
    rows = chunk_lines[chunk_lines["known"] & (chunk_lines["order"] > 0)]
    grouped = rows.groupby("order")["right"]
    table = pd.DataFrame({"rows": grouped.size(), "accuracy": grouped.mean()})
    return table.rename_axis("thought").reset_index()


def rounds(queries: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one row per number of rounds: ``rows`` and their ``share``.

    ``nontrivial`` is their mean number of chunks with a thought; speculation takes at most one
    round more.
    """
    grouped = queries.groupby("rounds")
    columns = {"rows": grouped.size(), "share": grouped.size() / len(queries)}
    return pd.DataFrame({**columns, "nontrivial": grouped["nontrivial"].mean()}).reset_index()


def groups(queries: pd.DataFrame, chunk_lines: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one row per group of queries: ``rows`` and values of ``summary``."""
    rows = []
    for group, part in queries.groupby("group"):
        values = summary(part, chunk_lines[chunk_lines["group"] == group])
        names = ("accuracy", "accuracy_nontrivial", "all_right", "rounds", "nontrivial")
        rows.append({"group": group, "rows": len(part), **{name: values[name] for name in names}})
    return pd.DataFrame(rows)


# ---- the report


def thought_report(
    findings: Findings, shown_rows: int, group_name: str = "group"
) -> AnalysisReport:
    """Returns the report of an analysis; scalars are under ``thoughts/``, see :func:`summary`.

    There must be at least one query, which may be too short for a chunk. ``group_name`` names the
    property that groups queries.
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
    examples = findings["shown"][:shown_rows]
    texts, markdown = {}, {}
    if len(examples):
        texts["text.txt"] = "\n\n".join(examples["text"]) + "\n"
        markdown["thought_trace"] = "\n\n---\n\n".join(map(_verbatim, examples["text"]))
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
    for y, row in zip(rows, table.to_dict("records"), strict=True):
        text = f" {row['thought']}" if row["thought"] else " nothing"
        ax.text(row["length"], y, text, va="center", fontsize=7, parse_math=False)
    labels = [text.replace("\n", " ").strip() for text in table["text"]]
    ax.set_yticks(rows, labels, parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.6 * max(1, table["length"].max()))  # room for the texts
    finish(ax, "tokens of the thought after each chunk", whole=True)
    return figure


def chunks_figure(tables: Tables) -> Any:
    """Draws accuracy, share without a thought, and share of first errors by chunk."""
    table = tables["chunks"]
    figure, (accuracy, trivial, wrong) = panels(12, 3.6, 3)
    draw_lines(accuracy, table, "chunk", {"accuracy": (None, BLUE)})
    columns = {"trivial": ("model", BLUE), "gold_trivial": ("gold", GREY)}
    draw_lines(trivial, table, "chunk", columns)
    draw_bars(wrong, table, "chunk", {"first_wrong_share": (None, ORANGE)})
    rest = 1 - table["first_wrong_share"].sum()
    wrong.set_title(f"{rest:.1%} of the queries have none", fontsize=10)
    labels = {
        accuracy: "share of correct thoughts",
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
    finish(ax, "gold thought, in the query's order", "accuracy", whole=True)
    return figure


def rounds_figure(tables: Tables) -> Any:
    """Draws the number of rounds that queries take."""
    table = tables["rounds"]
    figure, (ax,) = panels(5.6, 3.6, 1)
    draw_bars(ax, table, "rounds", {"share": (None, BLUE)})
    finish(ax, "rounds of reading a query", "share of queries", whole=True)
    return figure


def groups_figure(tables: Tables, name: str = "group") -> Any:
    """Draws accuracy and rounds by group; ``name`` is the property that groups queries."""
    table = tables["groups"]
    figure, (accuracy, passes) = panels(9, 3.6, 2)
    columns = {
        "accuracy_nontrivial": ("gold thoughts", BLUE),
        "all_right": ("whole queries", ORANGE),
    }
    draw_lines(accuracy, table, "group", columns)
    accuracy.set_ylim(-0.03, 1.03)
    draw_lines(passes, table, "group", {"rounds": ("rounds", BLUE)})
    draw_lines(passes, table, "group", {"nontrivial": ("thoughts", GREY)}, "o--")
    finish(accuracy, name, "accuracy", whole=True)
    finish(passes, name, "per query", whole=True)
    return figure


FIGURES: dict[str, Draw] = {
    "chunks": chunks_figure,
    "thoughts": thoughts_figure,
    "rounds": rounds_figure,
    "groups": groups_figure,
}
