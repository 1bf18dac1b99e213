"""All that is known of one run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.checkpoint.corpus import build_tokenizer
from evaluation.compare.found import Run
from evaluation.compare.results import ResultFile, TaskResult, results_beside, tasks_in
from evaluation.compare.scoring import How, Score, open_data, score
from evaluation.compare.training import (
    Training,
    describe_order,
    describe_training,
    read_source,
)

ANSWERS = "answers"
"""What is counted where models are asked questions: targets are answers, and no text."""


@dataclass(frozen=True)
class Measured:
    """A run with its sizes, costs and likelihood."""

    run: Run
    training: Training
    score: Score
    tasks: Mapping[str, TaskResult]
    """Results of tasks, by their names."""
    text: str
    """What it was trained on: name of the corpus, digest of all that identifies the text."""
    tokenizer: str
    """The same of the tokenizer, without the markers of sentences."""
    order: Mapping[str, Any]
    """What decides which tokens an optimiser step has."""
    same_text: bool
    """Whether the text that is there today is what the checkpoint was trained on."""

    @property
    def name(self) -> str:
        """What tells the run from the others."""
        return self.run.name

    @property
    def counted(self) -> str:
        """Which targets nats per token are of: all, lexical ones, or those of answers."""
        return ANSWERS if self.run.outline.reads == "reasoning" else self.score.counted

    @property
    def likelihood(self) -> str:
        """Kind of its likelihood."""
        return self.score.likelihood


def measure(run: Run, how: How, named: Sequence[ResultFile]) -> Measured:
    """Returns what is known of a run; its held-out text is scored unless a result file has that.

    Args:
        run: which.
        how: split and settings of the scoring.
        named: result files that the command line names; those beside the run are looked for.

    Raises:
        ValueError: if its data are not there or it cannot be scored.
    """
    data = open_data(run, how)
    path = run.checkpoint.path.resolve()
    results = [*results_beside(run), *(file for file in named if file.checkpoint == path)]
    scored = score(run, data, how, reversed(results))  # what is named first
    return Measured(
        run=run,
        training=describe_training(run, data, scored.content.get("train_tokens")),
        score=scored,
        tasks=tasks_in(results),
        text=_digest(data_name(run), read_source(data)),
        tokenizer=_tokenizer(run),
        order=describe_order(run),
        same_text=run.checkpoint.data_state.get("fingerprint") == data.fingerprint,
    )


def data_name(run: Run) -> str:
    """Returns the class of the corpus that a run was trained on."""
    recipe: Mapping[str, Any] = run.checkpoint.data_recipe or {}
    inner = recipe.get("init_args", {}).get("corpus")
    chosen = inner if isinstance(inner, Mapping) and "class_path" in inner else recipe
    return str(chosen.get("class_path", "")).rpartition(".")[2]


def _tokenizer(run: Run) -> str:
    state = run.checkpoint.data_state
    inner = state.get("corpus")
    saved = (inner if isinstance(inner, Mapping) else state).get("tokenizer")
    if not saved:
        built = build_tokenizer(run.checkpoint)
        return _digest(built.name, built.state())
    content = {key: value for key, value in saved.items() if key != "name"}
    if saved.get("kind") != "json":  # one that is not stored whole is what its name says
        return str(saved.get("name") or saved.get("kind"))
    return _digest(str(saved.get("name")).rpartition("/")[2], content)


def _digest(name: str, content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return f"{name} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"
