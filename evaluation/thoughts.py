"""Per-token trace of a model reading a text, as a table.

``LoadedModel.think`` and ``evaluate.py think`` show it (`evaluation.thoughts_page`). A token's row
has its loss, and measures of the method at the token:

======================  ===========================================================================
recorded                measures of a token
======================  ===========================================================================
fork                    streams after the last fork layer; forks created, kept, deleted at each
thinking_steps, router  executed and expected steps, or recurrences; the tail w and the exits
prior_log_prob          gain from the latent vectors: loss at the prior's mean minus loss
memory_attention        age of the sentences that are read; the gates are above the text
thoughts                the thought after a chunk of a question, in words
latent_states, latents  the most likely words of each latent (Coconut, CODI); its step in words
                        where SIM-CoT's decoder says it
======================  ===========================================================================
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device

from callbacks.analysis.base import Recorder, as_float64, real_tokens
from callbacks.analysis.forks import ForkRecorder
from callbacks.analysis.gates import gates
from callbacks.analysis.report import BLUE, draw_bars, finish, panels
from callbacks.analysis.steps import StepRecorder
from callbacks.analysis.token_text import EOS, PART, pieces, short_label
from callbacks.random_state import undisturbed
from callbacks.recorded_thoughts import Recorded, thought_text
from datamodules import SentenceTokenizer, Tokenizer
from evaluation.devices import Precision, autocast
from evaluation.tables import KINDS
from evaluation.tasks.readers import Reader, Segment
from lightning_models import LanguageModel
from lightning_models.outputs import Scores, bits

MEASURES = {
    "nats": "loss (nats)",
    "streams": "streams",
    "executed": "additional steps",
    "recurrences": "recurrences",
    "expected": "expected additional steps",
    "gain": "gain from thinking (nats)",
    "age": "age of what is read (sentences)",
    "length": "tokens of the thought",
}
"""Columns of ``TokenTrace.tokens`` to colour tokens by, with their titles."""
MAX_ANSWER = 64
"""Maximum length of an answer to a question in tokens."""
MAX_STEP = 32
"""Tokens of a step that SIM-CoT's decoder says."""
WORDS = 3
"""Number of most likely tokens of a latent to show."""


@dataclass(frozen=True)
class TokenTrace:
    """Trace of a model at each token of a text.

    Attributes:
        name: Label of the model.
        text: The text, or the question.
        tokens: One row per token: ``kind`` (text, mark, thought or answer), ``id`` (-1 for
            thoughts), ``text``; ``start`` and ``end``, its characters in the text; ``nats``, the
            loss of this token, nan if it is not scored; measures, see ``MEASURES``, nan if
            missing; ``note``, more values.
        facts: Values of the whole text by name, as text.
    """

    name: str
    text: str
    tokens: pd.DataFrame = field(repr=False)
    facts: Mapping[str, str]

    @property
    def measures(self) -> list[str]:
        """Columns to colour tokens by; the method's columns come first."""
        names = [name for name in MEASURES if name in self.tokens and name != "nats"]
        return [name for name in [*names, "nats"] if self.tokens[name].notna().any()]


def losses_figure(tables: Mapping[str, pd.DataFrame]) -> Any:
    """Draws the loss of each token, for methods without other measures."""
    table = tables["tokens"].reset_index(drop=True).rename_axis("place").reset_index()
    figure, (ax,) = panels(2 + 0.22 * len(table), 3.2, 1)
    draw_bars(ax, table, "place", {"nats": (None, BLUE)})
    names = [short_label(text) for text in table["text"]]
    ax.set_xticks(table["place"], names, rotation=90, fontsize=7, parse_math=False)
    finish(ax, "", "nats")
    return figure


# ---- collecting


class TraceRecorder(Recorder):
    """Records the statistics of any method in one pass through a text."""

    def __init__(self) -> None:
        super().__init__("memory_attention", "prior_log_prob", "latent_states", "latents")
        self.forks, self.steps, self.thoughts = ForkRecorder(False), StepRecorder(), Recorded()

    def consumers(self) -> dict[str, Callable[..., None]]:
        """Returns the recording functions by name of the statistic."""
        others = self.steps.consumers() | self.forks.consumers() | {"thoughts": self.thoughts.take}
        return super().consumers() | others


def trace_text(
    model: LanguageModel, tokenizer: Tokenizer, reader: Reader, text: str, precision: Precision
) -> TokenTrace:
    """Reads a text with a model, and returns its trace.

    The text is read in one pass, followed by the end of the document. A model that answers
    questions reads it as a question, and decodes its answer greedily. Neither the model's mode nor
    random states change.

    Args:
        model: The model on its device.
        tokenizer: The tokenizer that the model was trained with.
        reader: Reader from ``tasks.readers.reader_of`` with ``documents``.
        text: A text of at least one token that fits the model's context.
        precision: Precision of the matrix products.
    """
    recorder, asks = TraceRecorder(), model.reads == "reasoning"
    with undisturbed(model), autocast(model.device, precision):
        piece, chain = reader.document(text), ""
        if asks:
            piece, chain = _answered(model, tokenizer, text)
        batch = move_data_to_device(reader.batch([piece], whole=True), model.device)
        scores = model.recorded(batch, **recorder.consumers())
        latents = _latent_words(model, tokenizer, recorder, batch)
    table = (_question_table if asks else _text_table)(tokenizer, batch, scores)
    if asks:
        thoughts = [*_thoughts(model, tokenizer, recorder, batch), *latents]
        if chain:
            last = int(batch["query_lengths"][0]) - 1
            thoughts.append({"at": last, "text": chain, "note": "written before the answer"})
        table = _with_thoughts(table, thoughts)
    elif recorder.forks.forked:
        table = table.join(_forks(recorder, batch))
    elif recorder.steps.executed is not None:
        table = table.join(_steps(model, recorder, batch))
    elif recorder.recorded("memory_attention"):
        table = table.join(_memory(recorder, batch))
    elif recorder.recorded("prior_log_prob"):
        nats = as_float64(recorder.latest("prior_log_prob")["log_prob"])[0]
        table["gain"] = _shifted(-nats[real_tokens(batch)[0]], len(table)) - table["nats"]
    table["note"] = table["note"].fillna("") if "note" in table else ""
    table = table.join(_characters(table, text))
    return TokenTrace(
        type(model).__name__, text, table, _facts(model, tokenizer, text, table, scores)
    )


def _answered(model: Any, tokenizer: Tokenizer, question: str) -> tuple[Segment, str]:
    """Returns a question with the model's answer, and the chain of steps before it."""
    query = tokenizer.prompt_ids(question)
    (generated,) = model.generate_ids(
        [query], tokenizer=tokenizer, max_new_tokens=MAX_ANSWER, temperature=0
    )
    answer = model.answer_tokens(generated)
    chain = tokenizer.decode_continuation(generated[: len(generated) - len(answer)])
    while answer and answer[-1] in tokenizer.stop_ids:
        answer = answer[:-1]
    return Segment.of(query, [*answer, tokenizer.eos_id]), chain.strip()


def _shifted(values: np.ndarray, count: int) -> np.ndarray:
    """Aligns losses of next tokens with the tokens themselves; the first one has none."""
    return np.concatenate(([math.nan], values, np.full(count, math.nan)))[:count]


def _text_table(tokenizer: Tokenizer, batch: dict[str, Any], scores: Scores) -> pd.DataFrame:
    """Returns ``kind``, ``id``, ``text`` and ``nats`` of the tokens of a text."""
    real = real_tokens(batch)  # (1, T), or (1, S, U) of sentences
    ids, targets = (batch[key].cpu().numpy()[real] for key in ("tokens", "targets"))
    nats = np.where(targets >= 0, -as_float64(scores.log_prob)[real], math.nan)
    if targets[-1] >= 0:
        ids = np.append(ids, targets[-1])
    marks = np.isin(ids, tokenizer.special_ids)
    texts = np.full(len(ids), EOS, dtype=object)
    texts[~marks] = pieces(tokenizer, ids[~marks])
    kinds = np.where(marks, "mark", "text")
    columns = {"kind": kinds, "id": ids, "text": texts, "nats": _shifted(nats, len(ids))}
    return pd.DataFrame(columns)


def _question_table(tokenizer: Tokenizer, batch: dict[str, Any], scores: Scores) -> pd.DataFrame:
    """Returns ``kind``, ``id``, ``text`` and ``nats`` of the tokens of question and answer."""
    scored = batch["targets"][0] >= 0
    query, answer = batch["query"][0].tolist(), batch["targets"][0][scored].tolist()
    nats = -as_float64(scores.log_prob)[0][scored.cpu().numpy()]
    texts = [*pieces(tokenizer, query), *pieces(tokenizer, answer, begins=False)]
    kinds = np.array(["text"] * len(query) + ["answer"] * len(answer))
    kinds[[text == EOS for text in texts]] = "mark"
    columns = {"kind": kinds, "id": [*query, *answer], "text": texts}
    return pd.DataFrame({**columns, "nats": [math.nan] * len(query) + nats.tolist()})


# ---- measures, by recorded statistic; one row per token that was read


def _forks(recorder: TraceRecorder, batch: dict[str, Any]) -> pd.DataFrame:
    tokens, fates = recorder.forks.tokens(batch), recorder.forks.fates(batch)
    streams = tokens.filter(like="streams_layer")
    notes = []
    for values, fate in zip(tokens.to_dict("records"), fates.to_dict("records"), strict=True):
        parts = []
        for layer in range(1, streams.shape[1] + 1):
            counts = {n: fate[f"{n}_layer{layer}"] for n in ("created", "kept", "deleted")}
            summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            parts.append(f"fork layer {layer}: {summary or 'none'}")
        parts.append(f"P of the original {values['score_original']:.3g}")
        if not math.isnan(values["score_forks"]):
            parts.append(f"of its forks {values['score_forks']:.3g}")
        notes.append("; ".join(parts))
    return pd.DataFrame({"streams": streams.iloc[:, -1], "note": notes})


def _steps(model: Any, recorder: TraceRecorder, batch: dict[str, Any]) -> pd.DataFrame:
    steps, real = recorder.steps, real_tokens(batch)
    assert steps.executed is not None
    executed, columns = steps.executed[real].astype(float), dict[str, Any]()
    notes = [list[str]() for _ in executed]
    if hasattr(model.config, "recurrence"):
        columns["recurrences"] = executed + 1
    else:
        columns["executed"] = executed
    log_exits = steps.latest("router").get("log_steps")
    if steps.tail is not None and log_exits is not None:
        columns["expected"] = steps.tail[real][:, 1:].sum(axis=1)
        tail, exits = steps.tail[real], np.exp(as_float64(log_exits))[real]
        for note, w, p in zip(notes, tail, exits, strict=True):
            note += [f"w {_numbers(w)}", f"stops after each step with p {_numbers(p)}"]
    if steps.losses is not None:
        losses = steps.losses[real]
        gain = np.where(batch["targets"].cpu().numpy()[real] >= 0, losses[:, 0] - losses[:, -1], 0)
        columns["gain"] = _shifted(gain, len(gain))
        for note, by_step in zip(notes[1:], losses, strict=False):
            note.append(f"loss after each step {_numbers(by_step)}")
    return pd.DataFrame({**columns, "note": list(map("; ".join, notes))})


def _memory(recorder: TraceRecorder, batch: dict[str, Any]) -> pd.DataFrame:
    """Returns the mean age of each slot's attention to memory, and the weights of each layer.

    Each layer records once per sentence, from the second one on, with the slots in order.
    """
    lengths = batch["lengths"][0].tolist()
    ages = [np.full(length, 0.0) for length in lengths]
    notes = [[list[str]() for _ in range(length)] for length in lengths]
    seen: dict[int, int] = {}
    records = recorder.recorded("memory_attention")
    for record in records:
        sentence = seen[record["layer"]] = seen.get(record["layer"], 0) + 1
        weights = as_float64(record["weights"])[:, ::-1]  # (P, M_t), the youngest first
        ages[sentence] += weights @ np.arange(1, weights.shape[1] + 1)
        for note, w in zip(notes[sentence], weights, strict=True):
            note.append(f"layer {record['layer']} reads 1, 2, ... sentences back {_numbers(w)}")
    mean = np.concatenate(ages) / len(seen)
    first = lengths[0]
    mean[:first] = math.nan  # memory is empty
    flat = [["the memory is empty"]] * first + [note for part in notes[1:] for note in part]
    return pd.DataFrame({"age": mean, "note": list(map("; ".join, flat))})


# ---- thoughts, by their position


def _thoughts(
    model: Any, tokenizer: Tokenizer, recorder: TraceRecorder, batch: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns one row per thought after a chunk of the question or answer."""
    query_length, rows = int(batch["query_lengths"][0]), []
    for row in recorder.thoughts.rows or ():
        for thought in row.thoughts:
            # an answer follows the prefix, which is not shown
            prefix_length = len(model.config.answer_prefix) if thought.end >= query_length else 0
            text = thought_text(tokenizer, thought.tokens)
            index = max(thought.end - prefix_length, min(thought.end, query_length - 1))
            rows.append({"at": index, "text": text, "length": len(thought.tokens)})
    return [row for row in rows if row["length"]]


def _latent_words(
    model: Any, tokenizer: Tokenizer, recorder: TraceRecorder, batch: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns a row for each latent with the most likely words of its state.

    With a decoder of steps, the last latent of each step has the step as its text.
    """
    states = recorder.latest("latent_states").get("states")
    if states is None:
        return []
    matrix = model.network.output_matrix
    logits = (states[0] @ matrix.to(states.dtype).T)[:, : tokenizer.vocab_size]  # (m, V)
    best = logits.double().softmax(dim=-1).topk(WORDS)
    rows = []
    for p, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        texts = pieces_alone(tokenizer, ids)
        summary = ", ".join(
            f"{text!r} {probability:.2f}" for text, probability in zip(texts, p, strict=True)
        )
        rows.append({"at": int(batch["query_lengths"][0]) - 1, "text": texts[0], "note": summary})
    if rows and model.network.decoder is not None:
        size = model.layout.latents_per_step
        fed = torch.stack(recorder.latest("latents")["states"], dim=1)[0]  # (m, D)
        groups = fed[: len(fed) // size * size].unflatten(0, (-1, size))  # (G, c, D)
        steps = model.network.write_steps(groups, MAX_STEP, tokenizer.vocab_size).tolist()
        for row, ids in zip(rows[size - 1 :: size], steps, strict=True):
            ended = next((i for i, token in enumerate(ids) if token in tokenizer.stop_ids), None)
            row["text"] = tokenizer.decode_continuation(ids[:ended]).strip()
            row["note"] = f"a step said by the decoder; most likely words {row['note']}"
    return rows


def pieces_alone(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Decodes each id separately; the end of a document is a mark."""
    return [EOS if i == tokenizer.eos_id else tokenizer.decode_continuation([i]) for i in ids]


def _with_thoughts(table: pd.DataFrame, thoughts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Inserts a row for each thought after the row with the index ``at``."""
    if not thoughts:
        return table
    rows = pd.DataFrame(
        [{"kind": "thought", "id": -1, "nats": math.nan, **row} for row in thoughts]
    )
    order = rows.pop("at") + 0.5
    return pd.concat([table, rows.set_index(order)]).sort_index(kind="stable", ignore_index=True)


def _numbers(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.2f}" for value in values)


# ---- characters and facts


def _characters(table: pd.DataFrame, text: str) -> pd.DataFrame:
    """Returns ``start`` and ``end`` of each token in the text, equal if it has no characters.

    A character that spans several tokens belongs to each of them. If a tokenizer changes the text,
    tokens are aligned by matching the changed text with the original.
    """
    pieces = [
        piece if token_kind == "text" and piece not in (PART, EOS) else ""
        for token_kind, piece in zip(table["kind"], table["text"], strict=True)
    ]
    ends = np.cumsum([0, *map(len, pieces)])
    joined = "".join(pieces)
    if joined != text:
        blocks = difflib.SequenceMatcher(None, joined, text, autojunk=False).get_matching_blocks()
        anchors = sorted({(a + n, b + n) for a, b, n in blocks} | {(0, 0)})
        joined_offsets, text_offsets = np.array(anchors).T
        ends = np.interp(ends, joined_offsets, text_offsets).round().astype(int)
    starts, ends = ends[:-1].copy(), ends[1:].copy()
    for i in reversed(range(len(table) - 1)):
        if table["text"].iloc[i] == PART:
            ends[i] = ends[i + 1]
    return pd.DataFrame({"start": starts, "end": ends}, index=table.index)


def _facts(
    model: Any, tokenizer: Tokenizer, text: str, table: pd.DataFrame, scores: Scores
) -> dict[str, str]:
    """Returns values of the whole text by name, as text."""
    scored = "answer" if model.reads == "reasoning" else "text"
    nats = table.loc[table["kind"] == scored, "nats"].dropna()
    of_text = -scores.sequence_total().item()
    total, kind_name = nats.sum() + of_text, KINDS[scores.kind]
    facts = {"model": type(model).__name__, "tokens": f"{(table['kind'] == 'text').sum()}"}
    if len(nats):
        facts["loss"] = f"{total / len(nats):.3f} nats per token ({kind_name})"
    # bits per byte are undefined with marks, which have nats but no bytes
    if scored == "text" and not isinstance(tokenizer, SentenceTokenizer):
        facts["bits per byte"] = f"{bits(total) / len(text.encode()):.3f}"
    if of_text:
        facts["of which KL"] = f"{of_text:.3f} nats"
    facts |= {f"gate of layer {layer}": f"{g:.3g}" for (layer, _), g in gates(model).items()}
    for name in [name for name in MEASURES if name in table and name != "nats"]:
        if table[name].notna().any():
            facts[f"mean {MEASURES[name]}"] = f"{table[name].mean():.3g}"
    thoughts = "thoughts" if (table["kind"] == "thought").any() else ""
    others = {"streams", "executed", "recurrences", "gain", "age"} & set(table)
    if not thoughts and not others:
        facts["thinking"] = "no thoughts" if scored == "answer" else "none, loss only"
    return facts
