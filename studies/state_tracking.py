"""Thinking States and what it is compared with on state tracking, trained short and tested long."""

from typing import Any

from studies.study import Analysis, Column, Evaluation, Run, Study

BACKBONE: dict[str, Any] = {"num_layers": 3, "dim": 96, "num_heads": 4}
OPTIMIZER = {
    "lr": 2.0e-3,
    "betas": [0.9, 0.98],
    "weight_decay": 0.01,
    "schedule": "cosine",
    "warmup": 0.03,
}
TRAINED = (1, 10)
"""Operations of training texts."""
TESTED = {"in": TRAINED, "beyond": (11, 40), "far": (100, 100)}
"""Operations of test texts, by the name of the evaluation."""
CHAIN = {"parity": 4, "vars": 6}
"""Tokens of a step of a written chain, at most, its separator counted."""


def _asked(name: str) -> Evaluation:
    least, most = TESTED[name]
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


def _run(name: str, title: str, kind: str, cost: float, config: Any = (), **own: Any) -> Run:
    arguments = {"config": {**BACKBONE, **dict(config)}, "optimizer": OPTIMIZER}
    return Run(
        name=name,
        title=title,
        model={"class_path": f"lightning_models.{kind}", "init_args": arguments},
        callbacks=({"class_path": "callbacks.AnswerAccuracy", "init_args": {"by_group": False}},),
        cost=cost,
        evaluations=tuple(_asked(name) for name in TESTED),
        **own,
    )


def _column(title: str, evaluation: str, key: str = "accuracy", **form: Any) -> Column:
    return Column(title=title, evaluation=evaluation, key=f"results.0.{key}", **form)


def state_tracking(method: str, task: str, tokenizer: str, chunk_size: int) -> Study:
    """Returns the study of a task: Parity or Vars (Thinking States, Table 1).

    Args:
        method: names the study.
        task: parity or vars.
        tokenizer: trained on the texts, large enough for whole words.
        chunk_size: c, about an operation.
    """
    name = task.capitalize()
    chain = (TESTED["far"][1] + 2) * CHAIN[task]
    thoughts = {"chunk_size": chunk_size, "max_thought_tokens": 16}
    latents = {
        "c_thought": 2,
        "max_latent_stage": 3,
        "epochs_per_stage": 0.4,  # of 2.4 in all 1500 steps: 0.8 are left without steps
        "reset": "stage",
        "max_chain_tokens": chain,
    }
    removal = {
        "remove_per_epoch": 24,  # so that the chain is gone behind 1.6 epochs
        "remove_all_beyond": 39,
        "max_chain_tokens": chain,
    }
    trace = Analysis(
        name="thought_trace",
        callback="callbacks.ThoughtTrace",
        options={"num_batches": 4},
        files=("*.png", "*.csv", "*.html"),
    )
    return Study(
        method=method,
        title=f"Thinking States on {name} at a small size",
        introduction=(
            "Which way of thinking, learned on short texts, goes on with longer ones (Thinking "
            f"States, Table 1)? {name}: texts of {TRAINED[0]} to {TRAINED[1]} operations train, "
            f"longer ones test. All methods read the same texts in the same order, with a backbone "
            f"of {BACKBONE['num_layers']} layers and width {BACKBONE['dim']} from random weights "
            f"(the paper: Qwen2.5-0.5B). Chunks have {chunk_size} tokens.\n\n"
            "Accuracies are shares of exactly right answers, written greedily. *Seconds a "
            "question* are those of one question at a time, of 11 to 40 operations, thinking and "
            "answer together, in a process of its own each; *rounds* are passes of the backbone "
            "over the query."
        ),
        runs=(
            _run("no_cot", "no CoT", "NoCoTLM", 0.5),
            _run("cot", "CoT", "CoTLM", 1.2, {"max_chain_tokens": chain}),
            _run("coconut", "Coconut, 6 latents", "CoconutLM", 1.5, latents),
            _run(
                "thinking_states",
                "Thinking States",
                "ThinkingStatesLM",
                1.0,
                thoughts,
                analyses=(trace,),
            ),
            _run("icot", "iCoT", "ICoTLM", 1.0, removal, repeated=False, extra=True),
        ),
        baseline="cot",
        columns=(
            _column("1 to 10 operations", "in", digits=3),
            _column("11 to 40", "beyond", digits=3),
            _column("100", "far", digits=3),
            _column("tokens written", "beyond", "written_tokens", digits=1),
            _column("rounds", "beyond", "rounds", digits=1),
            _column("ms a question", "beyond", "seconds_per_question", digits=1, unit=1e-3),
        ),
        task={
            "class_path": "datamodules.StateTracking",
            "init_args": {"task": task, "operations": list(TRAINED)},
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
    )
