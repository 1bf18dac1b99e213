"""``evaluate.py sweep``: perplexity of checkpoints against the steps and FLOPs they take.

Dials are fields of configs that decide how much a trained model computes; which fields those are, a
config declares (``SequenceConfig.dials``).
"""

import itertools
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from datamodules import LanguageDataModule
from evaluation.arguments import (
    add_data_arguments,
    add_run_arguments,
    add_which_argument,
    data_recipe,
)
from evaluation.figures import (
    COLOURS,
    LEGEND_COLUMNS,
    MARKS,
    check_picture,
    label_sizes,
    table_path,
    write_csv,
    write_picture,
)
from evaluation.load import (
    build_data,
    build_model,
    build_outline,
    check_fit,
    check_tokenizer,
    pick_device,
    prepare,
)
from evaluation.output import format_columns
from evaluation.perplexity import PerplexityReport, measure_perplexity
from evaluation.runs import (
    MODEL,
    MOST_KEYS,
    Labels,
    differing,
    find_checkpoints,
    label_runs,
    short_names,
)
from evaluation.scoring import PERPLEXITY_KEYS
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe
from lightning_models.outputs import Likelihood
from lightning_models.recipe import import_packages

# ---- dials


OPTIONS = {
    "kappa": "kappas",
    "inner_steps": "inner_steps",
    "thinking_steps": "thinking_steps",
    "alpha": "alphas",
    "tau": "taus",
}
"""Dials that have an option of their own, and its name; all others are turned by ``--dial``."""


@dataclass(frozen=True)
class DialValues:
    """Values of a dial as they were typed."""

    option: str
    """The option and its text, for messages."""
    texts: tuple[str, ...]
    """At least one."""


def add_dial_arguments(parser: ArgumentParser) -> None:
    """Declares the options that turn dials."""
    for field, option in OPTIONS.items():
        parser.add_argument(
            f"--{option}",
            type=str,
            default="",
            help=f"Values of {field} at which every model that has this dial is scored, separated "
            f"by commas, e.g. --{option}=1,2 (the sign = lets the first be negative).",
        )
    parser.add_argument(
        "--dial",
        type=str,
        nargs="+",
        default=[],
        help="The same for any dial that a config declares: NAME=VALUE,VALUE ..., such as "
        "kappa=64,128,256 or memory_size=1,5,40.",
    )


def typed_dials(settings: Namespace) -> dict[str, DialValues]:
    """Returns what the command line says of dials, by the name of the field.

    Raises:
        ValueError: if ``--dial`` is not NAME=VALUES, there are no values, or a dial is given twice.
    """
    words = [(key, option, settings[option]) for key, option in OPTIONS.items() if settings[option]]
    for word in settings.dial:
        name, sign, values = word.partition("=")
        if not (name and sign):
            raise ValueError(f"dial ({word}) must be NAME=VALUE,VALUE, e.g. kappa=64,128,256")
        words.append((name, "dial", values))
    found: dict[str, DialValues] = {}
    for name, option, values in words:
        texts = tuple(part.strip() for part in values.strip("[]").split(",") if part.strip())
        if not texts:
            raise ValueError(
                f"{option} ({values}) has no values of {name}; separate them by commas"
            )
        if name in found:
            raise ValueError(f"{option}: {name} is given twice; put its values into one list")
        found[name] = DialValues(f"{option} ({values})", tuple(dict.fromkeys(texts)))
    return found


def own_dials(model: LanguageModel, dials: Mapping[str, DialValues]) -> dict[str, list[Any]]:
    """Returns the values of those dials that a model has, of the types of its fields.

    Raises:
        ValueError: if a value is of another type.
    """
    declared, hints = model.config.dials, get_type_hints(type(model.config))
    return {
        name: [_read(text, hints[name], name, typed.option) for text in typed.texts]
        for name, typed in dials.items()
        if name in declared
    }


def _read(text: str, hint: Any, name: str, option: str) -> Any:
    """Returns the value of a field from how it was typed."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    try:
        return parser.parse_args([f"--{name}={text}"])[name]
    except ArgumentError as error:
        kind = getattr(hint, "__name__", str(hint))
        raise ValueError(
            f"{option} must be values of {name} ({kind}) separated by commas; {text} is none"
        ) from error


def check_declared(models: Sequence[LanguageModel], dials: Mapping[str, DialValues]) -> None:
    """Checks that every dial is one of some model.

    Raises:
        ValueError: if one is not; it names those there are.
    """
    there = dict.fromkeys(name for model in models for name in model.config.dials)
    for name in dials:
        if name not in there:
            raise ValueError(
                f"none of the models has the dial {name}; they have {', '.join(there) or 'none'}"
            )


# ---- variants and points


STEPS = "thinking_steps"
"""Field of a model's config: K, the additional steps that a token may take at most."""


@dataclass(frozen=True)
class SweepVariant:
    """A checkpoint at settings of its dials."""

    checkpoint: Checkpoint
    name: str
    """What tells its checkpoint from the others."""
    changes: Mapping[str, Any]
    """Fields of its config that are not as in training."""
    dials: Mapping[str, Any]
    """The dials among them."""
    outline: LanguageModel
    """The model without weights."""

    @property
    def thinking_steps(self) -> int:
        """K; 0 for models without additional steps."""
        return int(getattr(self.outline.config, STEPS, 0))


@dataclass(frozen=True)
class SkippedPoint:
    """A checkpoint at settings of its dials that it cannot take."""

    name: str
    """What tells its checkpoint from the others."""
    dials: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        """Returns the line that is printed."""
        return f"skipped: {self.name} at {shown_dials(self.dials)}: {self.reason}"


@dataclass(frozen=True)
class SweepPoint:
    """What a variant has reached, and what a token costs it."""

    variant: SweepVariant
    label: str
    """Points of one label are a line of the figure."""
    report: PerplexityReport

    def value(self, key: str) -> float:
        """Returns the number of an axis of the figure, see ``sweep_figure.AXES``."""
        if key == STEPS:
            return float(self.variant.thinking_steps)
        return self.report.cost.as_dict()[key]


def shown_dials(dials: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """Returns dials and their values for people, such as ``kappa 2L, tau 0.1``.

    Args:
        dials: values by field.
        names: what fields are called; None: as they are.
    """
    shown = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in dials.items()}
    return ", ".join(f"{(names or {}).get(key, key)} {value}" for key, value in shown.items())


def find_variants(
    checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any], dials: Mapping[str, DialValues]
) -> tuple[list[SweepVariant], list[SkippedPoint]]:
    """Returns each checkpoint at each combination of the dials that its model has.

    Next to them the combinations that a checkpoint cannot take, with the reason.

    Args:
        checkpoints: in their order.
        changes: fields of configs to change where a config has them.
        dials: values by the name of the field.

    Raises:
        ValueError: if no config has a field, a dial is none of any, or no checkpoint takes a value.
    """
    _check_known(checkpoints, changes)
    names = short_names([checkpoint.path.resolve() for checkpoint in checkpoints])
    plain = [build_outline(checkpoint, _fixed(checkpoint, changes)) for checkpoint in checkpoints]
    check_declared(plain, dials)
    variants: list[SweepVariant] = []
    skipped: list[SkippedPoint] = []
    for checkpoint, name, outline in zip(checkpoints, names, plain, strict=True):
        fixed, own = _fixed(checkpoint, changes), own_dials(outline, dials)
        for values in itertools.product(*own.values()):
            turned = dict(zip(own, values, strict=True))
            try:
                variants.append(_variant(checkpoint, name, fixed, turned))
            except ValueError as error:
                skipped.append(SkippedPoint(name, turned, str(error)))
    _check_taken(variants, skipped)
    return variants, skipped


def _variant(
    checkpoint: Checkpoint, name: str, fixed: Mapping[str, Any], turned: Mapping[str, Any]
) -> SweepVariant:
    """Returns a variant.

    Raises:
        ValueError: if its config refuses a value, or the checkpoint's weights have other shapes.
    """
    changes = {**fixed, **turned}
    outline = build_outline(checkpoint, changes)
    saved, own = checkpoint.content["state_dict"], outline.state_dict()
    sizes = {key: tuple(value.shape) for key, value in own.items()}
    learned = {key: tuple(value.shape) for key, value in saved.items()}
    other = [key for key in {**learned, **sizes} if learned.get(key) != sizes.get(key)]
    if other and turned:
        raise ValueError(
            f"{checkpoint.path}: the weights were learned for another size ({other[0]}: "
            f"{learned.get(other[0], 'none')}, {shown_dials(turned)} needs "
            f"{sizes.get(other[0], 'none')}); train a checkpoint with it"
        )
    return SweepVariant(checkpoint, name, changes, turned, outline)


def _check_taken(variants: Sequence[SweepVariant], skipped: Sequence[SkippedPoint]) -> None:
    """Refuses values that nothing takes; those that some take are points left out."""
    for point in skipped:
        for key, value in point.dials.items():
            if not any(variant.dials.get(key) == value for variant in variants):
                raise ValueError(point.reason)


def _check_known(checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any]) -> None:
    for key in changes:
        if not any(key in _config(checkpoint) for checkpoint in checkpoints):
            raise ValueError(f"none of the models has the setting {key}; leave it out")


def _fixed(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes of fields that the checkpoint's config has."""
    return {key: value for key, value in changes.items() if key in _config(checkpoint)}


def _config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config: Mapping[str, Any] = checkpoint.model_recipe["init_args"].get("config", {})
    return config


def label_variants(
    variants: Sequence[SweepVariant], keys: str | None, dials: Sequence[str]
) -> Labels:
    """Returns a label for each variant, whatever its number of steps and its dials.

    Args:
        variants: what is measured.
        keys: of the configs, separated by commas; None: the class, and what models of one class
            and K differ in.
        dials: fields that make no label: those that are turned.

    Raises:
        ValueError: if no model has such a key.
    """
    recipes = [variant.outline.recipe() for variant in variants]
    if keys is not None:
        return label_runs(recipes, [variant.name for variant in variants], keys)
    more = _differences(recipes, dials)
    if len(more) >= MOST_KEYS:
        note = f"models of one class differ in {', '.join(more)}; --label KEY,... chooses"
        return Labels((), tuple((variant.name,) for variant in variants), note)
    return label_runs(recipes, [variant.name for variant in variants], ",".join([MODEL, *more]))


def _differences(recipes: Sequence[Recipe], dials: Sequence[str]) -> list[str]:
    """Returns the keys in which configs of one class and K differ, dials left out."""
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for recipe in recipes:
        config = recipe["init_args"]["config"]
        groups.setdefault((recipe["class_path"], config.get(STEPS)), []).append(config)
    found = dict.fromkeys(key for group in groups.values() for key in differing(group))
    return [key for key in found if key not in dials]


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the numbers of the points (cost, loss) that no other one beats, cheapest first.

    A point beats another if it is nowhere worse and somewhere better.
    """
    order = sorted(range(len(points)), key=points.__getitem__)
    best: list[int] = []
    for number in order:
        if (
            not best
            or points[number][1] < points[best[-1]][1]
            or points[number] == points[best[-1]]
        ):
            best.append(number)
    return best


# ---- figure


Measure = Literal["perplexity", "loss"]

AXES = {
    "executed_steps": "additional steps per token",
    "flops_per_token_6nd": "FLOPs per token, 6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs per generated token",
    "flops_per_token": "FLOPs per scored token",
    STEPS: "thinking steps K (additional steps per token at most)",
}
"""What loss is drawn against, and what that is called."""
COSTS = tuple(key for key in AXES if key != STEPS)
"""Axes with a Pareto frontier; over K the loss is that in nats, as in Fig. 6."""
MARKERS = {"exact": "o", "lower_bound": "v", "estimate": "s", "noncausal": "X"}
"""Of points, by the kind of their likelihood."""
GREY = "#333a44"
WIDE = 10.0
"""From this ratio of the largest to the smallest FLOPs on, their axis is logarithmic."""


def sweep_figure(
    points: Sequence[SweepPoint], against: Sequence[str], measure: Measure = "perplexity"
) -> Any:
    """Returns a panel an axis: a line a label, a point a checkpoint and setting.

    Points of different kinds of likelihood share neither line, nor marker, nor frontier.

    Args:
        points: what was measured.
        against: keys of ``AXES``, from left to right.
        measure: what costs are drawn under.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(against), 4.4), layout="constrained")
    panels = figure.subplots(1, len(against), squeeze=False)[0]
    named: dict[str, Any] = {}
    marks: Mapping[str, str] = {str(kind): mark for kind, mark in MARKS.items()}
    for panel, key in zip(panels, against, strict=True):
        for number, (label, members) in enumerate(lines_of(points).items()):
            named[label] = _draw(panel, members, key, measure, COLOURS[number % len(COLOURS)])
        for kind, members in by_kind(points).items() if key in COSTS else ():
            name = f"Pareto frontier {marks[kind]}".rstrip()
            named[name] = _draw_frontier(panel, members, key, measure, MARKERS[kind])
        _dress(panel, key, measure, [point.value(key) for point in points])
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(plain), LEGEND_COLUMNS),
    }
    place |= {"ncols": min(len(plain), LEGEND_COLUMNS), "frameon": False, "fontsize": 9}
    figure.legend(list(named.values()), plain, **place)
    return figure


def by_kind(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Returns the points by the kind of their likelihood."""
    kinds: dict[str, list[SweepPoint]] = {}
    for point in points:
        kinds.setdefault(point.report.likelihood, []).append(point)
    return kinds


def lines_of(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Returns the points of each line: those of a label and a kind of likelihood.

    Where dials were turned, a line is one checkpoint along the last of them, at one setting of the
    others and one K; checkpoints that share a label then have their names after it.
    """
    lines: dict[tuple[str, ...], list[SweepPoint]] = {}
    for point in points:
        variant, name = point.variant, ""
        fixed = dict(list(variant.dials.items())[:-1])
        if variant.dials:
            name = variant.name
            if variant.thinking_steps and STEPS not in variant.dials:
                fixed = {"K =": variant.thinking_steps, **fixed}
        text = ", ".join(part for part in (point.label, shown_dials(fixed)) if part)
        lines.setdefault((text, name, point.report.likelihood), []).append(point)
    texts = [text for text, _, _ in lines]
    return {
        text if texts.count(text) == 1 else f"{text} ({name or kind})": members
        for (text, name, kind), members in lines.items()
    }


def height(point: SweepPoint, key: str, measure: Measure = "perplexity") -> float:
    """Returns what is drawn over an axis: ``measure``, but over K nats per token."""
    totals = point.report.totals
    as_perplexity = key in COSTS and measure == "perplexity"
    return totals.perplexity if as_perplexity else totals.nats_per_token


def _draw(
    panel: Any, members: Sequence[SweepPoint], key: str, measure: Measure, colour: str
) -> Any:
    places = sorted(
        (point.value(key), height(point, key, measure), _note(point)) for point in members
    )
    x, y, notes = zip(*places, strict=True)
    style = {"marker": MARKERS[members[0].report.likelihood], "markersize": 4, "linewidth": 1.2}
    (line,) = panel.plot(x, y, color=colour, **style)
    turned = any(point.variant.dials for point in members)
    for left, low, note in zip(x, y, notes, strict=True):
        if key != STEPS or turned:
            offset: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points"}
            panel.annotate(note, (left, low), fontsize=7, color=colour, **offset)
    return line


def _note(point: SweepPoint) -> str:
    """Returns what stands next to a point: its dials, or its K."""
    variant = point.variant
    if variant.dials:
        return shown_dials(variant.dials, variant.outline.config.dials)
    return f"K={variant.thinking_steps}" if variant.thinking_steps else ""


def _draw_frontier(
    panel: Any, points: Sequence[SweepPoint], key: str, measure: Measure, marker: str
) -> Any:
    """Draws steps through the points that no other one beats, and a ring around each."""
    places = [(point.value(key), height(point, key, measure)) for point in points]
    x, y = zip(*(places[number] for number in frontier(places)), strict=True)
    style: dict[str, Any] = {"color": GREY, "linestyle": ":", "zorder": 0}
    rings: dict[str, Any] = {"marker": marker, "markersize": 9, "markerfacecolor": "none"}
    (line,) = panel.plot(x, y, drawstyle="steps-post", **style, **rings)
    return line


def _dress(panel: Any, key: str, measure: Measure, values: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    as_perplexity = key in COSTS and measure == "perplexity"
    panel.set_xlabel(AXES[key])
    panel.set_ylabel("perplexity" if as_perplexity else "loss (nats per token)")
    panel.margins(0.1)
    if "flops" in key and max(values) >= WIDE * min(values):
        panel.set_xscale("log")
        label_sizes(panel.xaxis)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=key == STEPS))
        if "flops" in key:
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)


# ---- table


SHORT = {
    "executed_steps": "steps",
    "flops_per_token_6nd": "6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs/generated token",
    "flops_per_token": "FLOPs/scored token",
}
"""What the printed table calls the costs."""


def as_rows(points: Sequence[SweepPoint]) -> list[list[Any]]:
    """Returns a row a point after a header, with all digits.

    Losses and perplexities stand under the names of their kind, dials under their own; cells of
    what a point has not are empty. ``frontier_...`` says whether no other point of the same kind of
    likelihood has both less cost and less perplexity; ``seconds`` is the wall time of scoring.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    header = ["checkpoint", "label", STEPS, *dials, "likelihood", "causal"]
    header += [loss_key(kind) for kind in kinds] + [PERPLEXITY_KEYS[kind] for kind in kinds]
    header += [*COSTS, *(f"frontier_{key}" for key in COSTS), "seconds"]
    rows: list[list[Any]] = [header]
    for number, point in enumerate(points):
        variant, report = point.variant, point.report
        row: list[Any] = [variant.checkpoint.path, point.label, variant.thinking_steps]
        row += [variant.dials.get(key) for key in dials]
        row += [report.likelihood, report.causal]
        for value in (report.totals.nats_per_token, report.totals.perplexity):
            row += [value if kind == report.likelihood else None for kind in kinds]
        row += [point.value(key) for key in COSTS]
        rows.append([*row, *(number in best[key] for key in COSTS), report.cost.seconds])
    return rows


def as_table(
    points: Sequence[SweepPoint], note: str | None, skipped: Sequence[SkippedPoint] = ()
) -> str:
    """Returns likelihoods and costs for people; a star is on the Pareto frontier of its cost.

    Args:
        points: what was measured.
        note: what to tell of the labels.
        skipped: settings that checkpoints cannot take.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    names = [loss_key(kind).replace("_", " ") for kind in kinds]
    names += [PERPLEXITY_KEYS[kind].replace("_", " ") for kind in kinds]
    rows = [["", "thinking steps", *dials, *names, *(SHORT[key] for key in COSTS), "seconds"]]
    for number, point in enumerate(points):
        totals, own = point.report.totals, point.report.likelihood
        row = [point.label, str(point.variant.thinking_steps or "-")]
        row += [_cell(point.variant.dials.get(key)) for key in dials]
        for value in (totals.nats_per_token, totals.perplexity):
            row += [_cell(value if kind == own else None) for kind in kinds]
        stars = {key: " *" if number in best[key] else "" for key in COSTS}
        row += [f"{point.value(key):.4g}{stars[key]}" for key in COSTS]
        rows.append([*row, f"{point.report.cost.seconds:.3g}"])
    of_kind = " of its kind of likelihood" if len(kinds) > 1 else ""
    notes = [f"*: no other one{of_kind} has both less cost and less perplexity"]
    if any(point.variant.thinking_steps for point in points):
        notes.append("thinking steps: additional steps per token at most, K of the papers")
    notes += [f"note: {note}"] if note else []
    return "\n".join([format_columns(rows), *notes, *map(str, skipped)])


def loss_key(kind: str) -> str:
    """Returns what a loss is called whose likelihood is of that kind."""
    return "nats_per_token" if kind == "exact" else f"nats_per_token_{kind}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _dials(points: Sequence[SweepPoint]) -> list[str]:
    """Returns the dials that are turned; K has a column of its own."""
    turned = dict.fromkeys(key for point in points for key in point.variant.dials)
    return [key for key in turned if key != STEPS]


def _kinds(points: Sequence[SweepPoint]) -> list[str]:
    kinds = dict.fromkeys(point.report.likelihood for point in points)
    return list(kinds)


def _frontiers(points: Sequence[SweepPoint]) -> dict[str, set[int]]:
    """Returns the numbers of the points on the frontier of each cost, within their kind."""
    place = {id(point): number for number, point in enumerate(points)}
    found: dict[str, set[int]] = {key: set() for key in COSTS}
    for key, best in found.items():
        for members in by_kind(points).values():
            costs = [(point.value(key), height(point, key)) for point in members]
            best |= {place[id(members[number])] for number in frontier(costs)}
    return found


# ---- command


def checkpoints_in(argv: Sequence[str]) -> list[Checkpoint]:
    """Returns the checkpoints that a command line names; needed before it can be parsed."""
    scan = PlainParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--ckpts", nargs="+", default=[])
    scan.add_argument("--which", default="last")
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if not found.ckpts or {"-h", "--help"} & set(argv):
        return []
    import_packages(found.packages)
    return find_checkpoints(found.ckpts, "ckpts", found.which)


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the first checkpoint."""
    parser.add_argument(
        "--ckpts",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder a checkpoint "
        "of every run in it (--which). All have one tokenizer.",
    )
    add_which_argument(parser)
    add_run_arguments(parser)
    add_data_arguments(parser, argv, lambda words: next(iter(checkpoints_in(words)), None))
    add_dial_arguments(parser)
    parser.add_argument(
        "--against",
        type=str,
        default=",".join(COSTS),
        help=f"Panels of the figure, separated by commas: {', '.join(AXES)}.",
    )
    parser.add_argument(
        "--measure",
        type=Measure,
        default="perplexity",
        help="What is drawn over costs: perplexity, or the loss in nats per token.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the lines, separated by commas, or model for "
        "the class. Found where models of one class and K differ in at most one.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="Figure to write, .svg or .png; its points are written next to it as .csv.",
    )


def run(settings: Namespace) -> None:
    """Scores every checkpoint, prints a table, and writes the figure and its points."""
    picture, against = check_picture(settings.output), _axes(settings.against)
    dials = typed_dials(settings)
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.ckpts, "ckpts", settings.which)
    variants, skipped = find_variants(checkpoints, settings["set"], dials)
    labels = label_variants(variants, settings.label, list(dials))
    data = _shared_data(variants, settings)
    points: list[SweepPoint] = []
    for variant, label in zip(variants, labels.texts(), strict=True):
        found = _measure(variant, label, data, settings)
        points += [found] if isinstance(found, SweepPoint) else []
        skipped += [found] if isinstance(found, SkippedPoint) else []
    if not points:
        raise ValueError(skipped[-1].reason)
    print(as_table(points, labels.note, skipped))
    header, *rows = as_rows(points)
    write_csv(table_path(picture), header, rows)
    write_picture(sweep_figure(points, against, settings.measure), picture)


def _axes(typed: str) -> list[str]:
    """Returns the panels that are asked for.

    Raises:
        ValueError: if one is not known.
    """
    chosen = [part.strip() for part in typed.strip("[]").split(",")]
    for key in chosen:
        if key not in AXES:
            raise ValueError(f"against ({key}) is none of {', '.join(AXES)}")
    return chosen


def _shared_data(variants: Sequence[SweepVariant], settings: Namespace) -> LanguageDataModule:
    """Returns prepared data that every model can read.

    Raises:
        ValueError: if one of them has another tokenizer, or other rows; it names the checkpoint.
    """
    first = variants[0].checkpoint
    _check_rows(variants)
    data = build_data(first, data_recipe(settings))
    _check_all(variants, lambda variant: check_fit(variant.outline, data))
    prepare(data, first)
    _check_all(variants, lambda variant: check_tokenizer(data, variant.checkpoint))
    return data


def _check_rows(variants: Sequence[SweepVariant]) -> None:
    """Raises a ValueError if models do not read data of one kind: windows, sentences, reasoning."""
    first = variants[0]
    for variant in variants:
        if variant.outline.reads != first.outline.reads:
            raise ValueError(
                f"ckpts: {type(first.outline).__name__} ({first.name}) reads "
                f"{first.outline.reads} and {type(variant.outline).__name__} ({variant.name}) "
                f"reads {variant.outline.reads}; a sweep scores all on the same data, so make one "
                "of each kind"
            )


def _check_all(variants: Sequence[SweepVariant], check: Callable[[SweepVariant], None]) -> None:
    for variant in variants:
        try:
            check(variant)
        except ValueError as error:
            raise ValueError(
                f"ckpts ({variant.checkpoint.path}): {error}; all checkpoints are scored on the "
                "same data, those of the first one or of --data"
            ) from error


def _measure(
    variant: SweepVariant, label: str, data: LanguageDataModule, settings: Namespace
) -> SweepPoint | SkippedPoint:
    """Returns a point, or why a checkpoint whose dials were turned cannot be scored there.

    Raises:
        ValueError: if one that was left as it is cannot be scored.
    """
    model = build_model(variant.checkpoint, variant.changes).to(pick_device(settings.device))
    try:
        report = measure_perplexity(
            variant.checkpoint,
            model,
            data,
            split=settings.split,
            precision=settings.precision,
            limit_batches=settings.limit_batches,
        )
    except ValueError as error:
        if not variant.dials:
            raise
        return SkippedPoint(variant.name, variant.dials, str(error))
    return SweepPoint(variant, _marked(label, model), report)


def _marked(label: str, model: LanguageModel) -> str:
    """Returns the label with the kind of the likelihood after it where that is not exact."""
    marks: Mapping[Likelihood, str] = MARKS
    return f"{label} {marks[model.likelihood]}".rstrip()
