"""Thoughtbubbles (arXiv 2510.00219) against the plain decoder and against copied tokens."""

from typing import Any

from studies.study import Analysis, CheckpointOf, Column, Evaluation, Run, Study

SHAPE = {
    "num_layers": 4,
    "dim": 128,
    "num_heads": 4,
    "positions": "rope",
    "bias": False,
    "init_std": 0.05,  # at this width GPT-2's 0.02 starts more slowly
}
OPTIMIZER = {"lr": 2.0e-3, "schedule": "cosine", "warmup": 20}
POSITIONS = 2048
"""Targets that are scored from their prefixes, the same for all runs."""

BLOCKWISE = Evaluation(name="blockwise")
PREFIXES = {"mode": "autoregressive", "positions": POSITIONS}
DYNAMIC = Evaluation(name="autoregressive", options={**PREFIXES, "budget": "dynamic"})
NO_BUDGET = Evaluation(name=DYNAMIC.name, options=PREFIXES)
FIXED = Evaluation(name="autoregressive_fixed", options={**PREFIXES, "budget": "fixed"})
THRESHOLD = Evaluation(name="threshold", options={"set.eval_allocation": "threshold"})
FORKS = Analysis(
    name="fork_analysis",
    callback="callbacks.ForkAnalysis",
    options={"num_batches": 4, "reference_ckpt": CheckpointOf("plain")},
    files=("*-layers.png", "*-entropy.png", "*-tokens.png", "*-scalars.csv", "*-windows.csv"),
    quoting=("*-tokens.png",),
)


def _model(kind: str, **own: Any) -> dict[str, Any]:
    """Returns class path and arguments of a model of the common shape."""
    arguments = {"config": {**SHAPE, **own}, "optimizer": OPTIMIZER}
    return {"class_path": f"lightning_models.{kind}", "init_args": arguments}


def _bubbles(kappa: int, cost: float) -> Run:
    return Run(
        name=f"bubbles{kappa}",
        title=f"Thoughtbubbles, kappa {kappa}L",
        model=_model("ThoughtbubblesLM", fork_layers=[1, 2, 3], kappa=f"{kappa}L"),
        cost=cost,
        evaluations=(BLOCKWISE, DYNAMIC, FIXED, THRESHOLD),
        analyses=(FORKS,),
    )


STUDY = Study(
    method="thoughtbubbles",
    title="Thoughtbubbles at a small size",
    introduction=(
        "Does it help to let residual streams fork (arXiv 2510.00219), against the plain decoder "
        "of the same shape and against copying every token, which spends FLOPs without choosing? "
        "Decoders of 4 layers and width 128; Thoughtbubbles forks before the blocks 1, 2 and 3.\n\n"
        "*Blockwise* scores whole windows in one pass: under the top-k over the whole sequence "
        "the streams of a token depend on later tokens, so this is not causal. *Autoregressive* "
        f"scores {POSITIONS:,} sampled targets, each from its prefix alone: strictly causal for "
        "every model. Its budget is *dynamic* (in proportion to the prefix, App. E.1) or *fixed* "
        "(kappa of a whole window). Numbers on the sample compare with each other, not with those "
        "on all held-out tokens; the table has the difference to blockwise on the same targets. "
        "*Threshold* is blockwise and causal: trained with the top-k, scored with the running "
        "mean of its border."
    ),
    runs=(
        Run(
            name="plain",
            title="plain decoder",
            model=_model("TransformerLM"),
            evaluations=(BLOCKWISE, NO_BUDGET),
        ),
        Run(
            name="copy3",
            title="copy-3",
            model=_model("CopyLM", copies=3),
            cost=3.6,
            evaluations=(BLOCKWISE, NO_BUDGET),
        ),
        _bubbles(2, cost=2.4),
        _bubbles(4, cost=4.2),
    ),
    baseline="plain",
    columns=(
        Column(title="bpb, blockwise", evaluation=BLOCKWISE.name),
        Column(title="bpb, autoregressive, dynamic", evaluation=DYNAMIC.name),
        Column(title="bpb, autoregressive, fixed", evaluation=FIXED.name),
        Column(title="bpb, threshold", evaluation=THRESHOLD.name),
        Column(
            title="nats/token, dynamic minus blockwise (same positions)",
            evaluation=DYNAMIC.name,
            key="difference.nats_per_token",
        ),
    ),
    data={"tokenizer": "bpe:1024", "block_size": 128, "batch_size": 16},
    trainer={
        "gradient_clip_val": 1.0,
        "limit_val_batches": 20,  # 40,960 tokens for the curves; evaluations take all
    },
)
