"""PonderLM-3 (arXiv 2603.02023) beside its predecessors and what else computes as much."""

from typing import Any

from studies.study import Analysis, Column, Evaluation, Run, Study

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "dim": 96,
    "num_heads": 4,
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rope",
    "bias": False,
    "tie_head": False,
    "init": "ponderlm",
}
STEPS = 2
"""K of all runs but one."""
OPTIMIZER = {
    "lr": 2.0e-3,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "schedule": "cosine",
    "warmup": 0.05,
}

TEST = Evaluation(name="test", options={"split": "test"})
SEQUENTIAL = Evaluation(name="sequential", options={"split": "test", "set.inference": "sequential"})
ALLOCATION = Analysis(
    name="step_allocation",
    callback="callbacks.StepAllocation",
    options={"num_batches": 4},
    files=("*.png", "*.csv", "*.html"),
    quoting=("*text.html", "*tokens.*"),
)


def _run(name: str, title: str, kind: str, cost: float, config: dict[str, Any], **own: Any) -> Run:
    arguments = {"config": {**SHAPE, **config}, "optimizer": OPTIMIZER}
    model = {"class_path": f"lightning_models.{kind}", "init_args": arguments}
    return Run(name=name, title=title, model=model, cost=cost, **{"evaluations": (TEST,), **own})


def _steps(name: str, title: str, kind: str, cost: float) -> Run:
    """Returns a run that computes its additional steps in passes over the text."""
    return _run(name, title, kind, cost, {"thinking_steps": STEPS})


def _slots(name: str, title: str, kind: str, cost: float, steps: int = STEPS, **own: Any) -> Run:
    """Returns a run that iterates over slots, which is scored slot by slot too."""
    own = {"evaluations": (TEST, SEQUENTIAL), "analyses": (ALLOCATION,), **own}
    return _run(name, title, kind, cost, {"thinking_steps": steps}, **own)


STUDY = Study(
    method="ponderlm",
    title="PonderLM-3 at a small size",
    introduction=(
        "What do K additional computation steps a token buy, and does a router that decides how "
        "many of them each token takes (PonderLM-3, arXiv 2603.02023, Fig. 3) keep that while "
        "executing fewer? Decoders of 3 layers and width 96, trained on as many tokens with one "
        f"optimiser; K = {STEPS} but for one run. Beside PonderLM-3: the fixed steps of PonderLM-2 "
        "and PonderLM-1, loops, pause tokens, and the plain decoder, once of the same shape and "
        f"once of {STEPS + 1} times the depth.\n\n"
        "*FLOPs/token, inference* are those of scoring, which for PonderLM-2 and -3 iterates over "
        "all slots several times; *generating* counts a token that is written slot by slot with "
        "the steps it executes, the plain decoder's is its inference. *6 N (1 + steps)* is the "
        "paper's count. *Nats/token* are exact for the parallel computation with three "
        "iterations, *slot by slot* for generation; the two differ by what the iterations leave. "
        "Runs have seen equally many tokens, not spent equal compute: training FLOPs say how much."
    ),
    runs=(
        _run("vanilla", "plain decoder", "TransformerLM", 0.06, {}),
        _run(
            "deep",
            f"plain decoder, {STEPS + 1} x depth",
            "TransformerLM",
            0.17,
            {"num_layers": SHAPE["num_layers"] * (STEPS + 1)},
        ),
        _steps("looped", f"{STEPS + 1} loops", "LoopedLM", 0.17),
        _steps("pause", f"{STEPS} pause tokens", "PauseLM", 0.2),
        _steps("ponderlm1", "PonderLM-1", "PonderLM1", 0.2),
        _slots("ponderlm2", "PonderLM-2", "PonderLM2", 1.0),
        _slots("ponderlm3", "PonderLM-3", "PonderLM", 1.05),
        _slots("ponderlm3_k1", "PonderLM-3, K = 1", "PonderLM", 0.6, 1, repeated=False),
    ),
    baseline="vanilla",
    columns=(
        Column(title="nats/token", evaluation=TEST.name, key="nats_per_token", digits=3),
        Column(
            title="nats/token, slot by slot",
            evaluation=SEQUENTIAL.name,
            key="nats_per_token",
            digits=3,
        ),
        Column(title="perplexity", evaluation=TEST.name, key="perplexity", digits=2),
        Column(title="bpb", evaluation=TEST.name, digits=3),
        Column(title="executed steps", evaluation=TEST.name, key="executed_steps", digits=2),
        Column(
            title="MFLOPs/token, generating",
            evaluation=TEST.name,
            key="generation_flops_per_token",
            digits=2,
            unit=1e6,
        ),
        Column(
            title="6 N (1 + steps), M",
            evaluation=TEST.name,
            key="flops_per_token_6nd",
            digits=2,
            unit=1e6,
        ),
    ),
    data={
        "tokenizer": "bpe:512",
        "block_size": 128,
        "batch_size": 16,
        "val_fraction": 0.02,
        "test_fraction": 0.03,
    },
    trainer={"gradient_clip_val": 1.0},
    steps=490,
    validations=6,
)
