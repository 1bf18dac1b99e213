"""Analysis of inferred latent vectors (Latent-Thought Language Models).

The paper is *Scalable Language Models with Posterior Inference of Latent Thought Vectors* (Kong et
al.).

===============================================  ===================================================
paper                                            code
===============================================  ===================================================
eq. 5 over the steps of fast learning            ``inner_steps``
section 2.2, posterior collapse                  ``layers``, after Burda et al. 2016
T_fast at test time (Figs. 4 and 5 vary it in    ``sweep``
training)
===============================================  ===================================================
"""

import math
from typing import Any

import lightning as L
import numpy as np
import pandas as pd

from callbacks.analysis.base import Analysis, Findings, Recorder, as_float64, nothing_recorded
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
    scalars_of,
    shades,
)
from callbacks.dials import dialled, has_dial
from callbacks.hooks import check_minimum

DIAL = "inner_steps"
"""Field of a configuration that the sweep changes."""
ACTIVE_VARIANCE = 0.01
"""Variance of the posterior mean over texts above which a coordinate is active (Burda et al.)."""
ACTIVE_KL = 0.01
"""Mean KL divergence above which a latent vector is active, in nats per sequence."""
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}

SCORED = ("nll_other", "kl_floor")
"""Values that exist for the scored sample only."""
PARTS = {"nll": ("NLL", BLUE), "kl": ("KL", ORANGE)}
GRADIENTS = {
    "mean_gradient": ("mean", BLUE),
    "log_variance_gradient": ("log-variance", ORANGE),
}


class PosteriorAnalysis(Analysis):
    """Analyses the inference of latent vectors, and their information (Latent-Thought LM).

    After validations it scores the first batches again and reports ELBO, KL and NLL over the
    inner steps, with the norms of their gradients; the NLL given the latent vectors of another text
    of the batch, and the floor of the KL divergence; the KL divergence of each layer and its active
    latents; the variances of the posterior (``posterior/...``, see ``posterior_report``). In the
    verb validate, or in training as often as configured, it also scores the batches with other
    numbers of inner steps: the bound against T_fast and against FLOPs per token.

    Files are in ``posterior_analysis``. Values that an inference method does not have are left out:
    KL and variances of a chain, steps of an encoder. ``callbacks.analysis`` describes what all
    analyses share.

    Args:
        output: Folder of the files. If null, ``posterior_analysis`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verb validate.
        steps: Numbers of inner steps at which to score the same batches, or none. Each costs as
            much as a validation of the batches with that T_fast.
        sweep_every_n_validations: Score with other numbers of steps at every n-th
            analysed validation during training. If 0, only under the verb validate.
    """

    tag = "posterior_analysis"
    image_tag = "posterior"
    cards = ("posterior/elbo", "posterior/nll", "posterior/nll_other", "posterior/kl")

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 2,
        every_n_validations: int = 1,
        steps: tuple[int, ...] = (0, 4, 16, 32),
        sweep_every_n_validations: int = 0,
    ) -> None:
        super().__init__(every_n_validations, num_batches, output, sweep_every_n_validations)
        check_minimum("steps", min(steps, default=None), 0)
        self.steps = tuple(steps)

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        recorder = PosteriorRecorder()
        pl_module.recorded(batch, **recorder.consumers())
        if not recorder.inferred:
            missing = "posterior (no method that infers latent vectors)"
            raise nothing_recorded(pl_module, missing)
        collect_posterior(findings, recorder)
        if self._sweeps and not self._unable_to_sweep:
            self._sweep(pl_module, batch, findings)

    def _sweep(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> None:
        for steps in sorted(set(self.steps), reverse=True):
            row = self._score_with(pl_module, batch, steps)
            if row is None:
                self._give_up_sweeps(
                    f"{type(pl_module).__name__} takes no inner steps with this configuration, so "
                    "there is no sweep over their number"
                )
                return
            findings.add("sweep", [row] if row["tokens"] else [])

    def _score_with(
        self, pl_module: Any, batch: dict[str, Any], steps: int
    ) -> dict[str, float] | None:
        """Returns a row of ``sweep``, or None if the number of inner steps cannot be set."""
        if not has_dial(pl_module, DIAL):
            return None
        recorder = PosteriorRecorder()
        with dialled(pl_module, DIAL, steps):
            pl_module.recorded(batch, **recorder.consumers())
            flops = pl_module.flops_per_token(pl_module.config.block_size)
        if len(recorder.steps) != steps:
            return None
        return {"steps": steps, "flops_per_token": flops, **recorder.scored()}

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        return posterior_report(findings)

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        tables = {"latents": latents(findings), "coordinates": coordinates(findings)}
        figures: dict[str, Draw] = {"latents": latents_figure}
        steps = inner_steps(findings)
        if len(steps) > 1:
            tables["inner_steps"] = steps
            figures["inner_steps"] = inner_steps_figure
        return AnalysisReport(tables=tables, figures=figures)


# ---- collecting


class PosteriorRecorder(Recorder):
    """Records the posteriors of one pass through a batch.

    Padding rows, which have nothing to infer from, are left out.
    """

    def __init__(self) -> None:
        super().__init__("inner_step", "posterior")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The inner steps, in order."""
        return self.recorded("inner_step")

    @property
    def _posterior(self) -> dict[str, Any]:
        return self.latest("posterior")

    @property
    def inferred(self) -> bool:
        """Whether the model has recorded a posterior."""
        return bool(self._posterior)

    @property
    def latents_per_layer(self) -> int:
        """Number of latent vectors per layer, or in total if the layers are not recorded."""
        return int(self._posterior.get("latents_per_layer") or self._posterior["kl"].shape[1])

    @property
    def has_density(self) -> bool:
        """Whether q has a density, unlike the sample of a chain."""
        return self._posterior["log_variance"] is not None

    def rows(self, name: str) -> np.ndarray:
        """Returns a value of the posterior, float64 (rows, ...)."""
        return as_float64(self._posterior[name])[self._informed()]

    def inner(self, name: str) -> np.ndarray:
        """Returns a value of the inner steps, float64 (steps, rows, parts), nan if None.

        Parts are latent vectors, or a single one for a value per row.
        """
        values, informed = [step[name] for step in self.steps], self._informed()
        if not values or values[0] is None:
            return np.full((len(values), int(informed.sum()), 1), np.nan)
        return np.stack([as_float64(value).reshape(len(value), -1) for value in values])[
            :, informed
        ]

    def _informed(self) -> np.ndarray:
        return self._posterior["informed"].cpu().numpy()

    def scored(self) -> dict[str, float]:
        """Returns sums over the sequences in nats, and the number of ``tokens``.

        They are ``nll`` and, given another sequence's z, ``nll_other`` (nan if there is no other);
        ``kl`` and ``kl_floor`` (nan without a density).
        """
        other, floor = self._posterior.get("nll_other"), self._posterior.get("kl_floor")
        dense, rows = self.has_density, int(self._informed().sum())
        return {
            "nll": float(self.rows("nll").sum()),
            "nll_other": math.nan if other is None else float(self.rows("nll_other").sum()),
            "kl": float(self.rows("kl").sum()) if dense else math.nan,
            "kl_floor": floor * rows if dense and floor is not None else math.nan,
            "tokens": float(self.rows("targets").sum()),
        }


def collect_posterior(findings: Findings, recorder: PosteriorRecorder) -> None:
    """Adds sums over the sequences of a pass.

    ``samples`` has one row for the state before each inner ``step``, and one for the ``scored``
    ``sample``; ``vectors`` one row per latent vector with its ``kl``; ``coordinates`` one row
    per coordinate with mu (``mean``), mu^2 (``square``) and sigma^2 (``variance``, nan if q
    has no density).
    """
    mean = recorder.rows("mean")  # (rows, Z, D)
    rows, vectors, width = mean.shape
    if not rows:
        return
    scored, num_steps = recorder.scored(), len(recorder.steps)
    inner = {
        "nll": recorder.inner("nll").sum(axis=(1, 2)),
        "kl": recorder.inner("kl").sum(axis=(1, 2)),
        "mean_gradient": _whole_norms(recorder.inner("mean_gradient")),
        "log_variance_gradient": _whole_norms(recorder.inner("log_variance_gradient")),
    }
    counts = {"tokens": scored["tokens"], "sequences": rows}
    steps = pd.DataFrame({"step": np.arange(num_steps), "sample": "inner", **inner, **counts})
    findings.add("samples", steps)
    findings.add("samples", [{"step": num_steps, "sample": "scored", **scored, "sequences": rows}])
    vector = np.arange(vectors)
    layer = vector // recorder.latents_per_layer + 1
    kl = recorder.rows("kl").sum(axis=0)
    findings.add("vectors", {"layer": layer, "vector": vector, "kl": kl})
    variance = np.exp(recorder.rows("log_variance")) if recorder.has_density else mean * np.nan
    sums = {
        name: values.sum(axis=0).ravel()
        for name, values in (("mean", mean), ("square", mean**2), ("variance", variance))
    }
    keys = {"layer": layer.repeat(width), "coordinate": np.arange(vectors * width)}
    findings.add("coordinates", keys | sums)


def _whole_norms(norms: np.ndarray) -> np.ndarray:
    """Sums the norms of the full gradients of sequences, from (steps, rows, Z) to (steps,)."""
    return np.sqrt(np.square(norms).sum(axis=2)).sum(axis=1)


# ---- tables


def _summed(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Sums the rows that agree in some columns; nan propagates."""
    return table.groupby(list(by), as_index=False).sum(skipna=False)


def inner_steps(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per inner step, and a last one for the scored sample.

    ``elbo`` (eq. 5), ``nll`` and ``kl`` are in nats per token, corpus-level quotients as in
    reported losses. Row t is the state before step t (from 0), at the sample of that step; the
    last row, ``scored``, is the state after all steps, at a sample with noise that inference has
    not used. ``mean_gradient`` and ``log_variance_gradient`` are means over sequences of the
    2-norms of the gradient of -ELBO in nats with respect to mu and log sigma^2 of all latent
    vectors of a sequence. For a chain the former is the gradient of -log p(z, x) at z; without a
    density ``elbo``, ``kl`` and the other gradient are nan. The scored sample alone has
    ``nll_other``, given z of another sequence of the batch, and ``kl_floor``, the KL divergence of
    inference from a text that is independent of z (``latent_thought.posterior.divergence_floor``).
    """
    table = _summed(findings["samples"], "step", "sample")
    for name in ("nll", "kl", *SCORED):
        table[name] /= table["tokens"]
    for name in GRADIENTS:
        table[name] = table.get(name, math.nan) / table["sequences"]
    table["elbo"] = -(table["nll"] + table["kl"])
    return table[["step", "sample", "elbo", "nll", "kl", *GRADIENTS, *SCORED]]


def has_density(findings: Findings) -> bool:
    """Returns whether posteriors have a density."""
    samples = findings["samples"]
    return bool(samples.loc[samples["sample"] == "scored", "kl"].notna().all())


def layers(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per layer; empty if posteriors have no density.

    ``kl`` in nats per token sums to the KL divergence of the whole posterior. ``active_vectors``
    counts latent vectors whose KL divergence, averaged over sequences, is above ``ACTIVE_KL``, and
    ``active_coordinates`` coordinates u with Var_x(E_q(u|x)[u]) above ``ACTIVE_VARIANCE`` (Burda et
    al. 2016), nan for fewer than two sequences. A collapsed posterior has neither. Layers count
    from 1; latent vectors that all layers read form one row.
    """
    if not has_density(findings):
        return pd.DataFrame()
    scored = _summed(findings["samples"], "sample").set_index("sample").loc["scored"]
    sequences = float(scored["sequences"])
    vectors = _summed(findings["vectors"], "layer", "vector")
    vectors["active"] = vectors["kl"] / sequences > ACTIVE_KL
    coordinates = _summed(findings["coordinates"], "layer", "coordinate")
    if sequences > 1:
        deviations = coordinates["square"] - coordinates["mean"] ** 2 / sequences
        spread = deviations / (sequences - 1)
        active = (spread > ACTIVE_VARIANCE).astype(float).where(spread.notna())
    else:
        active = pd.Series(math.nan, index=coordinates.index)
    by_vector = vectors.groupby("layer")
    by_coordinate = active.groupby(coordinates["layer"])
    table = pd.DataFrame(
        {
            "kl": by_vector["kl"].sum(skipna=False) / scored["tokens"],
            "active_vectors": by_vector["active"].sum(),
            "vectors": by_vector.size(),
            "active_coordinates": by_coordinate.sum(skipna=False),
            "coordinates": by_coordinate.size(),
        }
    )
    return table.reset_index()


def latents(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per latent vector, means over sequences.

    The columns are ``layer`` from 1, ``vector`` from 0, its ``kl`` in nats per sequence,
    ``mean_norm``, the 2-norm of its posterior mean, and ``variance``, sigma^2 averaged over its
    coordinates; ``kl`` and ``variance`` are nan if posteriors have no density.
    """
    table = _summed(findings["vectors"], "layer", "vector")
    table["kl"] /= _sequences(findings)
    by_vector = coordinates(findings).groupby("vector")
    norms = by_vector["mean"].agg(lambda mean: math.sqrt(np.square(mean).sum()))
    table["mean_norm"] = table["vector"].map(norms)
    table["variance"] = table["vector"].map(by_vector["variance"].mean())
    return table


def coordinates(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per coordinate of the latent vectors.

    The columns are ``layer`` from 1, ``vector`` and ``coordinate`` within it from 0, ``mean`` (mu)
    and ``variance`` (sigma^2, nan if posteriors have no density), means over sequences.
    """
    table = _summed(findings["coordinates"], "layer", "coordinate")
    width = len(table) // findings["vectors"]["vector"].nunique()
    vector, coordinate = np.divmod(table["coordinate"].to_numpy(), width)
    values = table[["mean", "variance"]] / _sequences(findings)
    keys = {"layer": table["layer"], "vector": vector, "coordinate": coordinate}
    return pd.DataFrame({**keys, **values})


def _sequences(findings: Findings) -> float:
    samples = findings["samples"]
    return float(samples.loc[samples["sample"] == "scored", "sequences"].sum())


def sweep(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per number of inner steps, ascending; empty without a sweep.

    ``loss`` is ``val/loss`` of the same sequences: NLL + KL, a bound, or NLL without a density,
    which is not a bound. ``loss``, ``nll`` and ``kl`` are in nats per token at the scored sample,
    ``nll_other`` and ``kl_floor`` as in :func:`inner_steps`. ``flops_per_token`` is the cost of
    scoring, including inference.
    """
    rows = findings["sweep"]
    if not len(rows):
        return rows
    by_steps = rows.groupby("steps")
    names = ["nll", "kl", *SCORED]
    sums = by_steps[[*names, "tokens"]].sum(skipna=False)
    table = sums[names].div(sums["tokens"], axis=0)
    table.insert(0, "flops_per_token", by_steps["flops_per_token"].last())
    table.insert(1, "loss", table["nll"] + table["kl"].fillna(0.0))
    return table.reset_index()


# ---- the report


def posterior_report(findings: Findings) -> AnalysisReport:
    """Returns the report of an analysis.

    Scalars are under ``posterior/``: ``elbo``, ``nll``, ``kl``, ``nll_other`` and ``kl_floor``,
    nats per token at the scored sample; ``last_step/mean_gradient`` and
    ``last_step/log_variance_gradient``, see :func:`inner_steps`; ``layer_<l>/kl``, and
    ``active_coordinates`` and ``active_vectors`` of a layer or of all, see :func:`layers`;
    ``variance/mean`` and ``variance/<quantile>`` over the coordinates with a finite, positive
    variance; ``sweep/steps_<n>``, nats per token with n inner steps, see :func:`sweep`.
    """
    steps, by_layer, points = inner_steps(findings), layers(findings), sweep(findings)
    tables = {
        "inner_steps": steps if len(steps) > 1 else steps[:0],
        "layers": by_layer,
        "sweep": points,
    }
    scalars = _scalars(steps, by_layer, coordinates(findings)["variance"], points)
    scalars = {f"posterior/{name}": value for name, value in scalars.items()}
    return AnalysisReport(scalars=scalars, tables=tables, figures=FIGURES)


def _scalars(
    steps: pd.DataFrame, by_layer: pd.DataFrame, variance: pd.Series, points: pd.DataFrame
) -> dict[str, float]:
    values = {name: steps[name].iloc[-1] for name in ("elbo", "nll", "kl", *SCORED)}
    if len(steps) > 1:
        values |= {f"last_step/{name}": steps[name].iloc[-2] for name in GRADIENTS}
    active = ("active_coordinates", "active_vectors")
    values |= scalars_of(by_layer, "layer_{layer}/{name}", ("kl", *active))
    for name in active if len(by_layer) else ():
        values[name] = by_layer[name].sum(skipna=False)
    variance = variance[np.isfinite(variance) & (variance > 0)]
    if len(variance):
        values["variance/mean"] = variance.mean()
        for name, part in QUANTILES.items():
            values[f"variance/{name}"] = variance.quantile(part)
    return values | scalars_of(points, "sweep/steps_{steps}", ("loss",))


# ---- figures of the tables


def inner_steps_figure(tables: Tables) -> Any:
    """Draws -ELBO and its parts against the inner step, and the norms of gradients."""
    steps = tables["inner_steps"]
    figure, (nats, norms) = panels(11, 3.8, 2)
    table = steps.assign(loss=-steps["elbo"])
    columns = {"loss": ("NLL + KL = -ELBO", GREEN)} | PARTS
    columns = {name: pair for name, pair in columns.items() if table[name].notna().any()}
    draw_lines(nats, table[:-1], "step", columns, ".-")
    for name, (_, color) in columns.items():
        nats.plot(table["step"].iloc[-1], table[name].iloc[-1], "*", color=color, markersize=11)
    nats.plot([], [], "*", color=GREY, markersize=11, label="scored sample")
    positive = {name: pair for name, pair in GRADIENTS.items() if (table[name] > 0).any()}
    draw_lines(norms, table[:-1], "step", positive, ".-")
    if positive:
        norms.set_yscale("log")
    finish(nats, "inner step", "nats per token")
    finish(norms, "inner step", "norm of a sequence's gradient")
    return figure


def layers_figure(tables: Tables) -> Any:
    """Draws the KL divergence of each layer, and the share of its latents that is active."""
    by_layer = tables["layers"]
    figure, (kl, active) = panels(10, 3.6, 2)
    draw_bars(kl, by_layer, "layer", {"kl": (None, BLUE)})
    columns = {"vectors": ("latent vectors", BLUE), "coordinates": ("coordinates", ORANGE)}
    shares = {name: by_layer[f"active_{name}"] / by_layer[name] for name in columns}
    draw_bars(active, by_layer.assign(**shares), "layer", columns)
    active.set_ylim(0, 1.25)  # room for the legend
    finish(kl, "layer", "KL (nats per token)", whole=True)
    finish(active, "layer", "active share", whole=True, ncols=2, loc="upper left")
    return figure


def latents_figure(tables: Tables) -> Any:
    """Draws KL divergence, norm of the mean and variance of each latent vector, by layer."""
    table = tables["latents"]
    columns = {
        "kl": "KL (nats per sequence)",
        "mean_norm": "norm of the posterior mean",
        "variance": "posterior variance (prior: 1)",
    }
    names = [name for name in columns if table[name].notna().any()]
    figure, axes = panels(4.4 * len(names), 3.6, len(names))
    layers = list(table.groupby("layer"))
    for ax, name in zip(axes, names, strict=True):
        for color, (layer, part) in zip(shades(len(layers)), layers, strict=True):
            label = f"layer {layer}" if ax is axes[0] else None
            ax.bar(part["vector"], part[name], 0.8, color=color, label=label)
        ax.margins(y=0.3)  # room for the legend
        finish(ax, "latent vector", columns[name], whole=True, loc="upper left", ncols=3)
    return figure


def sweep_figure(tables: Tables) -> Any:
    """Draws the loss, with its parts, against inner steps and against FLOPs per token."""
    points, in_use = tables["sweep"], max(len(tables["inner_steps"]) - 1, 0)
    bound = points["kl"].notna().all()  # without a density there is no KL divergence
    figure, axes = panels(11, 3.8, 2)
    label = "NLL + KL, a bound" if bound else "NLL at the last sample, not a bound"
    columns = {"loss": (label, GREEN)} | (PARTS if bound else {})
    axes[0].axvline(in_use, color=GREY, linestyle=":", label="as configured")
    axes[1].set_xscale("log")
    names = {"steps": "inner steps (T_fast) at validation", "flops_per_token": "FLOPs per token"}
    for ax, (x, meaning) in zip(axes, names.items(), strict=True):
        draw_lines(ax, points, x, columns)
        finish(ax, meaning, "nats per token")
    return figure


FIGURES: dict[str, Draw] = {
    "inner_steps": inner_steps_figure,
    "layers": layers_figure,
    "sweep": sweep_figure,
}
