"""``evaluate.py sweep``: perplexity of checkpoints against their steps and FLOPs.

Dials are fields of a config that change how much a trained model computes; the config declares them
(``SequenceConfig.dials``). A frame has a row for each point: a checkpoint at settings of its dials,
with its likelihood and costs.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_type_hints

import pandas as pd
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from evaluation.arguments import (
    add_data_arguments,
    add_run_arguments,
    add_which_argument,
    data_recipe,
)
from evaluation.cost import NAMES
from evaluation.figures import (
    MARKS,
    STEPS,
    SWEEP_AXES,
    SWEEP_COSTS,
    check_picture,
    sweep_figure,
    write_figure,
)
from evaluation.load import build_data, build_outline, known_changes, prepare_for_all
from evaluation.perplexity import score_checkpoint
from evaluation.run_metrics import NATS
from evaluation.runs import config_labels, find_checkpoints, make_labels, path_names
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import FOUR_DIGITS, TableColumn, as_aligned, show_columns, title_of
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.recipe import import_packages, split_names

# ---- dials


def typed_dials(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns one or more values of each dial as text.

    Raises:
        ValueError: If an argument is not NAME=VALUES, or a dial is given twice.
    """
    dials: dict[str, list[str]] = {}
    for argument in arguments:
        name, sign, values = argument.partition("=")
        texts = split_names(values)
        if not (name and sign and texts):
            raise ValueError(f"dial ({argument}) must be NAME=VALUE,VALUE, e.g. kappa=64,128,256")
        if name in dials:
            raise ValueError(f"dial: {name} is given twice; put its values into one list")
        dials[name] = texts
    return dials


def own_dials(model: LanguageModel, dials: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """Returns the values of the dials that a model has, in the types of its fields.

    Raises:
        ValueError: If a value has the wrong type.
    """
    declared, hints = model.config.dials, get_type_hints(type(model.config))
    return {
        name: [_read(text, hints[name], name) for text in texts]
        for name, texts in dials.items()
        if name in declared
    }


def _read(text: str, hint: Any, name: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    try:
        return parser.parse_args([f"--{name}={text}"])[name]
    except ArgumentError as error:
        type_name = getattr(hint, "__name__", str(hint))
        raise ValueError(
            f"dial ({name}={text}) must be values of {name} ({type_name}) separated by commas"
        ) from error


# ---- variants: checkpoints at settings of their dials


@dataclass(frozen=True)
class SweepVariant:
    """A checkpoint at settings of its dials."""

    checkpoint: Checkpoint
    name: str
    """Path that distinguishes its checkpoint from the others."""
    changes: Mapping[str, Any]
    """Fields of its config with other values than in training."""
    dials: Mapping[str, Any]
    """The dials among these fields."""
    outline: LanguageModel
    """The model without weights."""


def shown_dials(dials: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """Formats dials and their values, such as ``kappa 2L, tau 0.1``.

    ``names`` has names to display instead of those fields' names.
    """
    texts = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in dials.items()}
    return ", ".join(f"{(names or {}).get(key, key)} {value}" for key, value in texts.items())


def find_variants(
    checkpoints: Sequence[Checkpoint],
    changes: Mapping[str, Any],
    dials: Mapping[str, Sequence[str]],
) -> tuple[list[SweepVariant], list[str]]:
    """Returns each checkpoint at each combination of the dials that its model has.

    Args:
        checkpoints: The checkpoints to vary.
        changes: Fields of configs to set in every model that has them.
        dials: Values as text, by the name of the field.

    Returns:
        The variants, and a sentence for each combination that a config rejects.

    Raises:
        ValueError: If no config has a field, or no model has a dial.
    """
    fields = known_changes(checkpoints, changes)
    outlines = [build_outline(*pair) for pair in zip(checkpoints, fields, strict=True)]
    declared = dict.fromkeys(name for outline in outlines for name in outline.config.dials)
    for name in dials:
        if name not in declared:
            names = ", ".join(declared) or "none"
            raise ValueError(f"none of the models has the dial {name}; they have {names}")
    variants, skipped = [], []
    every = zip(checkpoints, path_names(checkpoints), fields, outlines, strict=True)
    for checkpoint, name, fixed, outline in every:
        of_model = own_dials(outline, dials)
        for values in itertools.product(*of_model.values()):
            turned = dict(zip(of_model, values, strict=True))
            changed = {**fixed, **turned}
            try:
                varied = build_outline(checkpoint, changed)
            except ValueError as error:
                skipped.append(_skipped(name, turned, error))
            else:
                variants.append(SweepVariant(checkpoint, name, changed, turned, varied))
    return variants, skipped


def _skipped(name: str, dials: Mapping[str, Any], error: ValueError) -> str:
    return f"{name} at {shown_dials(dials)}: {error}"


def label_variants(variants: Sequence[SweepVariant], keys: str | None) -> list[str]:
    """Returns the label of each variant's checkpoint, see ``runs.make_labels``.

    Checkpoints may share a label made from ``keys`` of the models' config; a line of the figure
    then connects them.
    """
    if keys is not None:
        return config_labels([variant.outline.recipe() for variant in variants], split_names(keys))
    firsts = {variant.checkpoint.path: variant for variant in variants}
    labels = make_labels(
        [variant.name for variant in firsts.values()],
        [variant.checkpoint.run_name for variant in firsts.values()],
        [variant.outline.recipe() for variant in firsts.values()],
    )
    by_path = dict(zip(firsts, labels, strict=True))
    return [by_path[variant.checkpoint.path] for variant in variants]


# ---- points


def point_line(variant: SweepVariant, label: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a point with its likelihood and costs.

    ``note`` is its annotation in the figure: its dials, or its K.

    Args:
        variant: The checkpoint and its dials.
        label: Label from ``label_variants``.
        result: Result of ``score_checkpoint``.
    """
    steps = int(getattr(variant.outline.config, STEPS, 0))
    note = f"K={steps}" if steps else ""
    if variant.dials:
        note = shown_dials(variant.dials, variant.outline.config.dials)
    return {
        "checkpoint": variant.checkpoint.path,
        "name": variant.name,
        "label": f"{label} {MARKS[variant.outline.likelihood]}".rstrip(),
        STEPS: steps,
        "dials": dict(variant.dials),
        "note": note,
        **{key: result[key] for key in ("likelihood", "causal", NATS, *NAMES) if key in result},
        "perplexity": result[PERPLEXITY_KEYS[result["likelihood"]]],
    }


def points_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns the points with the ``line`` of each, and whether it is on a ``frontier_COST``.

    A point is on the Pareto frontier of a cost if no other point with the same kind of likelihood
    is at least as good in cost and perplexity and better in one of them.
    """
    points = pd.DataFrame(list(rows), dtype=object)
    points["line"] = _lines(points)
    for cost in SWEEP_COSTS:
        kinds = points.groupby("likelihood")[[cost, "perplexity"]]
        best = [idx for _, members in kinds for idx in frontier(members)]
        points[f"frontier_{cost}"] = points.index.isin(best)
    return points


def frontier(points: pd.DataFrame) -> list[int]:
    """Returns the indices of the points (cost, loss) on the Pareto frontier, cheapest first.

    Equal points are on it together; points whose cost or loss is NaN are not.
    """
    cost, loss = points.columns
    ordered = points.astype(float).dropna().sort_values([cost, loss], kind="stable")
    falls = ~(ordered[loss] >= ordered[loss].cummin().shift())  # also the first
    same = (ordered == ordered.where(falls).ffill()).all(axis=1)
    return list(ordered.index[same])


def _lines(points: pd.DataFrame) -> list[str]:
    """Returns the line of each point in the figure, one for each label and kind of likelihood.

    With dials, a line is one checkpoint along the last dial, at one setting of the others and one
    K; checkpoints that share a label are then distinguished by their names.
    """
    keys = []
    facts = points[["label", "name", "likelihood", STEPS, "dials"]]
    for label, name, likelihood, steps, dials in facts.itertuples(index=False):
        fixed = dict(list(dials.items())[:-1])
        if dials and steps and STEPS not in dials:
            fixed = {"K =": steps, **fixed}
        text = ", ".join(part for part in (label, shown_dials(fixed)) if part)
        keys.append((text, name if dials else "", likelihood))
    texts = [text for text, _, _ in dict.fromkeys(keys)]
    return [
        text if texts.count(text) == 1 else f"{text} ({name or likelihood})"
        for text, name, likelihood in keys
    ]


def loss_key(likelihood: str) -> str:
    """Returns the column of the loss for a kind of likelihood."""
    return NATS if likelihood == "exact" else f"{NATS}_{likelihood}"


def points_table(points: pd.DataFrame) -> pd.DataFrame:
    """Returns the content of the CSV file, one row per point.

    Losses and perplexities have a column for each kind of likelihood, and each dial has a column;
    cells without a value are empty. ``seconds`` is the wall time of scoring.
    """
    dials = pd.DataFrame(list(points["dials"]), dtype=object).drop(columns=STEPS, errors="ignore")
    kinds = list(points["likelihood"].unique())
    names = {NATS: loss_key, "perplexity": PERPLEXITY_KEYS.__getitem__}
    losses = {
        name(likelihood): points[key].where(points["likelihood"] == likelihood)
        for key, name in names.items()
        for likelihood in kinds
    }
    parts = [
        points[["checkpoint", "label", STEPS]],
        dials,
        points[["likelihood", "causal"]],
        pd.DataFrame(losses),
        points[[*SWEEP_COSTS, *(f"frontier_{cost}" for cost in SWEEP_COSTS), "seconds"]],
    ]
    return pd.concat(parts, axis=1)


def shown_points(points: pd.DataFrame) -> str:
    """Formats likelihoods and costs; a star marks the Pareto frontier of a cost."""
    table = points_table(points)
    for cost in SWEEP_COSTS:
        stars = points[f"frontier_{cost}"].map({True: " *", False: ""})
        table[cost] = points[cost].map(FOUR_DIGITS) + stars
    typed = points["dials"].map(lambda dials: STEPS in dials)
    table[STEPS] = points[STEPS].where(typed | (points[STEPS] > 0)).astype(object)
    hidden = ("checkpoint", "label", "likelihood", "causal", "seconds")
    keys = [key for key in table if key not in hidden and not key.startswith("frontier_")]
    columns = {key: TableColumn(NAMES.get(key) or title_of(key)) for key in keys}
    columns["seconds"] = TableColumn("seconds", "{:.3g}".format)
    frame = show_columns(table.set_index("label").rename_axis(None), columns)
    of_kind = " of its kind of likelihood" if points["likelihood"].nunique() > 1 else ""
    notes = [f"*: no other point{of_kind} has both less cost and less perplexity"]
    if table[STEPS].notna().any():
        notes.append("thinking steps: additional steps per token at most, K of the papers")
    return "\n".join([as_aligned(frame), *notes])


# ---- command


Measure = Literal["perplexity", "loss"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options; data default to the first checkpoint's."""
    parser.add_argument(
        "--ckpts",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes; a folder stands for the "
        "checkpoint (--which) of every run in it. All must have the same tokenizer.",
    )
    add_which_argument(parser)
    add_run_arguments(parser)
    add_data_arguments(parser)
    parser.add_argument(
        "--dial",
        type=str,
        nargs="+",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="Values of dials at which to score every model that has the dial, such as "
        "kappa=64,128,256 or inner_steps=0,4,16; any dial that a config declares.",
    )
    parser.add_argument(
        "--against",
        type=str,
        default=",".join(SWEEP_COSTS),
        help=f"Panels of the figure, separated by commas: {', '.join(SWEEP_AXES)}.",
    )
    parser.add_argument(
        "--measure",
        type=Measure,
        default="perplexity",
        help="Value on the y axis against costs: perplexity, or the loss in nats per token.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the lines, separated by commas, or model for "
        "the class; checkpoints with one label share a line. Null means the run's --name, or its "
        "path.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="Figure to write, .svg, .png or .pdf; its points are written next to it as .csv.",
    )


def run(settings: Namespace) -> None:
    """Scores every checkpoint, prints a table, and writes the figure and its points."""
    picture, against = check_picture(settings.output), _axes(settings.against)
    dials = typed_dials(settings.dial)
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.ckpts, "ckpts", settings.which)
    variants, skipped = find_variants(checkpoints, settings["set"], dials)
    if not variants:
        raise ValueError(skipped[-1])
    labels = label_variants(variants, settings.label)
    recipe = data_recipe(settings, checkpoints[0])
    data = build_data(variants[0].checkpoint, recipe)
    prepare_for_all(data, [(variant.checkpoint, variant.outline) for variant in variants], "ckpts")
    options = {key: settings[key] for key in ("split", "precision", "limit_batches", "device")}
    rows = []
    for variant, label in zip(variants, labels, strict=True):
        try:
            result, _ = score_checkpoint(variant.checkpoint, data, variant.changes, **options)
            rows.append(point_line(variant, label, result))
        except ValueError as error:  # also if weights have another shape
            if not variant.dials:
                raise
            skipped.append(_skipped(variant.name, variant.dials, error))
    if not rows:
        raise ValueError(skipped[-1])
    points = points_frame(rows)
    print(shown_points(points))
    for reason in skipped:
        print(f"skipped: {reason}")
    height = "perplexity" if settings.measure == "perplexity" else NATS
    draw = partial(sweep_figure, points, against, height)
    write_figure(draw, points_table(points), picture)


def _axes(typed: str) -> list[str]:
    chosen = split_names(typed)
    if not chosen or not set(chosen) <= set(SWEEP_AXES):
        raise ValueError(f"against ({typed}) must name some of {', '.join(SWEEP_AXES)}, by commas")
    return chosen
