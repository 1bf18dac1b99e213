"""Thinking States and what it is compared with on state tracking, trained short and tested long."""

from functools import partial
from typing import Any

from studies.study import Analysis, Column, Evaluation, Run, Study, StudyError

BACKBONE: dict[str, Any] = {"num_layers": 3, "dim": 96, "num_heads": 4}
OPTIMIZER = {
    "lr": 2.0e-3,
    "betas": [0.9, 0.98],
    "weight_decay": 0.01,
    "schedule": "cosine",
    "warmup": 0.03,
}
OPERATIONS = 10
"""N, most operations of a training text, where nothing else is asked for."""
FAR = 100
"""Operations of the longest test texts."""
CHAIN = {"parity": 4, "vars": 6}
"""Tokens of a step of a written chain, at most, its separator counted."""
CURRICULUM = 2 / 3
"""Share of a training behind which nothing is left of a chain that is taken away."""
LATENT_STAGES = 3
"""Coconut's stages that take a step each; a stage without steps follows."""
C_THOUGHT = 2
"""Coconut's latents for a step."""
REMOVED_BEYOND = 39
"""Removed tokens from which on iCoT removes the whole chain, at N = 10; in proportion to N."""
TRACE = Analysis(
    name="thought_trace",
    callback="callbacks.ThoughtTrace",
    options={"num_batches": 4},
    files=("*.png", "*.csv", "*.html"),
)

Lengths = dict[str, tuple[int, int]]
"""Least and most operations of texts, by the name of the evaluation."""


def state_tracking(
    method: str, task: str, tokenizer: str, chunk_size: int, operations: int = OPERATIONS
) -> Study:
    """Returns the study of a task: Parity or Vars (Thinking States, Table 1).

    Args:
        method: names the study.
        task: parity or vars.
        tokenizer: trained on the texts, large enough for whole words.
        chunk_size: c, about an operation.
        operations: N, most operations of a training text.

    Raises:
        StudyError: if no lengths are left between N and the longest texts.
    """
    lengths = _lengths(operations)
    return Study(
        method=method,
        title=f"Thinking States on {task.capitalize()} at a small size",
        introduction=_introduction(task, chunk_size, lengths),
        runs=_runs(task, chunk_size, lengths),
        baseline="cot",
        columns=_columns(lengths),
        task={
            "class_path": "datamodules.StateTracking",
            "init_args": {"task": task, "operations": list(lengths["in"])},
        },
        data={
            "tokenizer": tokenizer,
            "block_size": 1024,
            "batch_size": 32,
            "train_examples": 20_000,
            "val_examples": 400,
            "test_examples": 600,
        },
        trainer={"gradient_clip_val": 1.0, "limit_val_batches": 4},
        reading="whole texts; the same texts in the same order in every run",
        curve="val/accuracy",
        steps=1500,
        validations=6,
        typed="" if operations == OPERATIONS else f"--operations {operations}",
    )


def _lengths(operations: int) -> Lengths:
    """Returns the lengths of training, up to four times as many operations, and the longest."""
    if not 1 <= operations <= FAR - 2:
        raise StudyError(
            f"operations ({operations}) must be from 1 to {FAR - 2}, so that longer texts are left "
            "to test on"
        )
    beyond = (operations + 1, min(4 * operations, FAR - 1))
    return {"in": (1, operations), "beyond": beyond, "far": (FAR, FAR)}


def _introduction(task: str, chunk_size: int, lengths: Lengths) -> str:
    (least, most), (first, last) = lengths["in"], lengths["beyond"]
    return (
        "Which way of thinking, learned on short texts, goes on with longer ones (Thinking "
        f"States, Table 1)? {task.capitalize()}: texts of {least} to {most} operations train, "
        f"longer ones test. All methods read the same texts in the same order, with a backbone "
        f"of {BACKBONE['num_layers']} layers and width {BACKBONE['dim']} from random weights "
        f"(the paper: Qwen2.5-0.5B). Chunks have {chunk_size} tokens.\n\n"
        "Accuracies are shares of exactly right answers, written greedily. *ms a "
        f"question* is the time of one question at a time, of {first} to {last} operations, "
        "thinking and answer together, in a process of its own each; *rounds* are passes of the "
        "backbone over the query."
    )


def _runs(task: str, chunk_size: int, lengths: Lengths) -> tuple[Run, ...]:
    """Returns a run a method; the curricula of two of them are shares of the training."""
    chain = {"max_chain_tokens": (FAR + 2) * CHAIN[task]}
    latents = {**chain, "c_thought": C_THOUGHT, "max_latent_stage": LATENT_STAGES, "reset": "stage"}
    beyond = REMOVED_BEYOND * lengths["in"][1] // OPERATIONS
    removal = {**chain, "remove_all_beyond": beyond}
    thoughts = {"chunk_size": chunk_size, "max_thought_tokens": 16}
    by_stages = {"epochs_per_stage": _epochs_per_stage}
    by_tokens = {"remove_per_epoch": partial(_tokens_per_epoch, beyond)}
    run = partial(_run, evaluations=tuple(_asked(name, span) for name, span in lengths.items()))
    title = f"Coconut, {LATENT_STAGES * C_THOUGHT} latents"
    return (
        run("no_cot", "no CoT", "NoCoTLM", 0.5),
        run("cot", "CoT", "CoTLM", 1.2, chain),
        run("coconut", title, "CoconutLM", 1.5, latents, paced=by_stages),
        run(
            "thinking_states",
            "Thinking States",
            "ThinkingStatesLM",
            1.0,
            thoughts,
            analyses=(TRACE,),
        ),
        run("icot", "iCoT", "ICoTLM", 1.0, removal, paced=by_tokens, repeated=False, extra=True),
    )


def _epochs_per_stage(epochs: float) -> float:
    """Returns the epochs of a stage, so that all stages with steps end with the curriculum."""
    return round(CURRICULUM * epochs / (LATENT_STAGES + 1), 6)


def _tokens_per_epoch(beyond: int, epochs: float) -> int:
    """Returns how many tokens go in an epoch, so that ``beyond`` are gone at the curriculum's end.

    Whole numbers only: of many epochs the end lies somewhat before or behind it.
    """
    return max(1, round(beyond / (CURRICULUM * epochs)))


def _run(name: str, title: str, kind: str, cost: float, config: Any = (), **own: Any) -> Run:
    arguments = {"config": {**BACKBONE, **dict(config)}, "optimizer": OPTIMIZER}
    return Run(
        name=name,
        title=title,
        model={"class_path": f"lightning_models.{kind}", "init_args": arguments},
        callbacks=({"class_path": "callbacks.AnswerAccuracy", "init_args": {"by_group": False}},),
        cost=cost,
        **own,
    )


def _asked(name: str, lengths: tuple[int, int]) -> Evaluation:
    least, most = lengths
    options = {
        "split": "test",
        "data.test_operations": f"[{least},{most}]",
        "data.test_examples": 300 if name == "far" else 600,
        "data.eval_batch_size": 100,
        "timing_batch_size": 1,
        "timing_batches": 32,
        "rounds": 3 if name == "beyond" else 0,
    }
    return Evaluation(name=name, command="reason", options=options)


def _columns(lengths: Lengths) -> tuple[Column, ...]:
    (least, most), (first, last) = lengths["in"], lengths["beyond"]
    return (
        _column(f"{least} to {most} operations", "in", digits=3),
        _column(f"{first} to {last}", "beyond", digits=3),
        _column(f"{FAR}", "far", digits=3),
        _column("tokens written", "beyond", "written_tokens", digits=1),
        _column("rounds", "beyond", "rounds", digits=1),
        _column("ms a question", "beyond", "seconds_per_question", digits=1, unit=1e-3),
    )


def _column(title: str, evaluation: str, key: str = "accuracy", **form: Any) -> Column:
    return Column(title=title, evaluation=evaluation, key=f"results.0.{key}", **form)
