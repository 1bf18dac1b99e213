"""Latent-Thought LM by inner steps and by way of inference, beside autoregressive controls."""

from typing import Any

from studies.study import LOGGED, Analysis, Column, Evaluation, Run, Study

SHAPE = {
    "num_layers": 3,
    "dim": 96,
    "num_heads": 4,
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rope",
    "bias": False,
    "init_std": 0.05,  # at this width GPT-2's 0.02 starts more slowly
}
LATENT = {
    **SHAPE,
    "window": 32,  # a quarter of the context, as in the paper
    "latents_per_layer": 2,
    "init_log_variance": -1.0,  # from -5 four steps do not come near the prior, whatever is read
}
FRESH: dict[str, Any] = {"noise": "resampled"}
EXTRA: dict[str, Any] = {"repeated": False, "extra": True}
LANGEVIN: dict[str, Any] = {"inference": "langevin", "inner_steps": 16}
VAE: dict[str, Any] = {"inference": "amortised", "encoder_layers": 3, "kl_annealing": 0.3}
OPTIMIZER = {"lr": 3.0e-3, "betas": [0.9, 0.95], "schedule": "cosine", "warmup": 0.05}

FLOOR = "train/kl_floor/token"
TEST = Evaluation(name="test", options={"split": "test"})
SWEEP = tuple(
    Evaluation(name=f"test_{steps}", options={"split": "test", "set.inner_steps": steps})
    for steps in (0, 4, 32)
)
INNER_NOISE = Evaluation(name="test_inner", options={"split": "test", "set.bound_noise": "inner"})
PRIOR = Evaluation(
    name="prior",
    command="quality",
    options={
        "mode": "unconditional",
        "sampling": "multinomial",
        "judge": "null",
        "samples": 64,
        "sample_tokens": 128,
        "batch_size": 64,
    },
)
POSTERIOR = Analysis(
    name="posterior_analysis",
    callback="callbacks.PosteriorAnalysis",
    options={"num_batches": 2},
    files=("*.png", "*.csv"),
)


def _run(name: str, title: str, kind: str, config: dict[str, Any], **own: Any) -> Run:
    arguments = {"config": config, "optimizer": OPTIMIZER}
    model = {"class_path": f"lightning_models.{kind}", "init_args": arguments}
    return Run(name=name, title=title, model=model, **own)


def _latent(
    name: str,
    title: str,
    cost: float,
    *more: Evaluation,
    repeated: bool = True,
    extra: bool = False,
    **changes: Any,
) -> Run:
    return _run(
        name,
        title,
        "LatentThoughtLM",
        {**LATENT, **changes},
        cost=cost,
        repeated=repeated,
        extra=extra,
        evaluations=(TEST, PRIOR, *more),
        analyses=(POSTERIOR,) if more else (),
    )


STUDY = Study(
    method="latent_thought",
    title="Latent-Thought Language Models at a small size",
    introduction=(
        "Does inferring latent vectors of each sequence by more gradient steps make a better bound "
        "(*Scalable Language Models with Posterior Inference of Latent Thought Vectors*, Fig. 4), "
        "and how do the ways of inference differ (Table 4)? Decoders of 3 layers and width 96 with "
        "a window of 32 of 128 tokens, 6 latent vectors; beside them the same decoder without "
        "latent vectors and with full attention, at as many tokens, and at as much training "
        "compute. Inference keeps the noise of its first step, as the public code does; *fresh "
        "noise* draws it anew at each inner step, as the paper's Algorithm 1; these runs are "
        "extra, `--only fresh4 --only fresh16`.\n\n"
        "*Nats/token* are minus the ELBO, drawn with noise that inference has not seen; of the "
        "autoregressive runs they are exact; of Langevin sampling they are no likelihood: its "
        "vectors have seen the text, and nothing is paid for them. *Inner noise* scores the sample "
        "that inference has adapted to, as the public code does, which is no bound. *Entropy* is "
        "that of the tokens of a sample of 128 under the prior, in nats; the paper looks for "
        "collapse there."
    ),
    runs=(
        _run("ar", "autoregressive", "TransformerLM", SHAPE, cost=0.1, evaluations=(TEST, PRIOR)),
        _run(
            "ar_compute",
            "autoregressive, equal FLOPs",
            "TransformerLM",
            SHAPE,
            length=11.4,  # what a token costs with 16 inner steps
            evaluations=(TEST, PRIOR),
        ),
        _latent("steps4", "T = 4", 0.35, inner_steps=4),
        _latent("steps16", "T = 16", 1.3, *SWEEP, INNER_NOISE, inner_steps=16),
        _latent("fresh4", "T = 4, fresh noise", 0.35, inner_steps=4, **EXTRA, **FRESH),
        _latent(
            "fresh16",
            "T = 16, fresh noise",
            1.3,
            *SWEEP,
            INNER_NOISE,
            inner_steps=16,
            **EXTRA,
            **FRESH,
        ),
        _latent("langevin", "Langevin, 16 steps", 1.0, repeated=False, **LANGEVIN),
        _latent("vae", "VAE", 0.15, repeated=False, **VAE),
    ),
    baseline="ar_compute",
    columns=(
        Column(title="nats/token", evaluation=TEST.name, key="nats_per_token", digits=3),
        Column(title="bpb", evaluation=TEST.name, digits=3),
        Column(title="KL/token", evaluation=TEST.name, key="kl_per_token", digits=3),
        Column(title="floor of KL/token", evaluation=LOGGED, key=FLOOR, digits=3),
        *(
            Column(
                title=f"nats/token, T = {run.options['set.inner_steps']}",
                evaluation=run.name,
                key="nats_per_token",
                digits=3,
            )
            for run in SWEEP
        ),
        Column(title="inner noise", evaluation=INNER_NOISE.name, key="nats_per_token", digits=3),
        Column(title="entropy", evaluation=PRIOR.name, key="multinomial_token_entropy", digits=2),
    ),
    data={
        "tokenizer": "bpe:512",
        "block_size": 128,
        "batch_size": 16,
        "val_fraction": 0.02,
        "test_fraction": 0.03,
    },
    trainer={"gradient_clip_val": 1.0},
    steps=740,
    validations=6,
)
