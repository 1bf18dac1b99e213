"""``evaluate.py zero_shot``: likelihood of sets of texts of other kinds than the training's.

Table 1 of the Latent-Thought paper: each set is scored in blocks that do not overlap, with the
checkpoint's own tokenizer, by the numbers of ``evaluate.py perplexity``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from datamodules import LanguageDataModule, ZeroShotText
from datamodules.recipe import public_path
from datamodules.zero_shot import ZERO_SHOT_SETS, zero_shot_set
from evaluation.arguments import (
    add_file_arguments,
    add_model_arguments,
    carried,
    load_checkpoint,
    load_model,
)
from evaluation.cost import Cost, mean_cost
from evaluation.load import Precision, build_data, check_fit, prepare
from evaluation.output import check_targets, format_columns, format_table, write_report
from evaluation.perplexity import PerplexityReport, measure_perplexity
from evaluation.scoring import PERPLEXITY_KEYS
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, CheckpointError, Recipe


@dataclass(frozen=True)
class ZeroShotReport:
    """The numbers of one model on some sets, and everything needed to repeat them."""

    reports: Mapping[str, PerplexityReport]
    """What was measured on each set, by its name; at least one."""

    @property
    def _any(self) -> PerplexityReport:
        return next(iter(self.reports.values()))

    @property
    def cost(self) -> Cost:
        """That of all sets together: FLOPs and steps are means over their tokens."""
        costs = [report.cost for report in self.reports.values()]
        counts = [report.totals.tokens for report in self.reports.values()]
        return mean_cost(costs, counts)

    @property
    def perplexity_key(self) -> str:
        """What the perplexities are, by the kind of the model's likelihood."""
        return PERPLEXITY_KEYS[self._any.likelihood]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file.

        On top, for ``evaluate.py compare --view results``, what all sets have in common and a
        perplexity of each; under ``sets`` the whole result of each, as of ``perplexity``.
        """
        report, key = self._any, self.perplexity_key
        return {
            **{f"{name}_{key}": r.totals.perplexity for name, r in self.reports.items()},
            "likelihood": report.likelihood,
            "causal": report.causal,
            **self.cost.as_dict(),
            "model": report.model,
            "parameters": report.parameters,
            "train_tokens": report.train_tokens,
            "checkpoint": report.checkpoint,
            "sets": {name: r.as_dict() for name, r in self.reports.items()},
        }

    def as_table(self) -> str:
        """Returns a row for each set, and what holds for all of them."""
        header = ["set", "split", self.perplexity_key.replace("_", " "), "bits per byte", "tokens"]
        rows = [[name, *_row(name, report)] for name, report in self.reports.items()]
        report = self._any
        common = {
            "likelihood": report.likelihood,
            "causal": "yes" if report.causal else "no",
            **self.cost.as_cells(),
            "checkpoint": report.checkpoint,
        }
        return f"{format_columns([header, *rows])}\n\n{format_table(common)}"


def _row(name: str, report: PerplexityReport) -> list[str]:
    """Returns split, perplexity, bits per byte and tokens of a set; less than all is marked."""
    totals, how = report.totals, report.settings
    limited = how["batches"] < how["of_batches"]
    part = f" ({how['batches']} of {how['of_batches']} batches)" if limited else ""
    bits = "unknown" if totals.bits_per_byte is None else f"{totals.bits_per_byte:.4f}"
    return [_split(name, report), f"{totals.perplexity:.2f}", bits, f"{totals.tokens:,}{part}"]


def _split(name: str, report: PerplexityReport) -> str:
    """Returns the hub's split, or that the text is of files that may be anything."""
    arguments = report.data["recipe"]["init_args"]
    inner = arguments.get("corpus")
    if isinstance(inner, Mapping):  # cut into sentences
        arguments = inner["init_args"]
    return zero_shot_set(name).split if arguments.get("data_files") is None else "own file"


# ---- the command


def measure_zero_shot(
    checkpoint: Checkpoint,
    model: LanguageModel,
    sets: Mapping[str, LanguageDataModule],
    *,
    precision: Precision = "32",
    limit_batches: int | None = None,
) -> ZeroShotReport:
    """Returns the model's likelihood of each set.

    Args:
        checkpoint: where the model comes from.
        model: on its device, in eval mode.
        sets: by name, prepared and set up.
        precision: of the matrix products.
        limit_batches: score that many of the first batches of each; None: all.
    """
    return ZeroShotReport(
        {
            name: measure_perplexity(
                checkpoint, model, data, precision=precision, limit_batches=limit_batches
            )
            for name, data in sets.items()
        }
    )


def set_recipe(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a set as the checkpoint's model reads it.

    Its tokenizer, windows and batches are those of the training; where that cut another corpus into
    sentences, so is the set.

    Args:
        checkpoint: whose data are the example.
        changes: arguments of `ZeroShotText`; ``block_size`` and ``eval_batch_size`` are those of
            the batches.

    Raises:
        CheckpointError: if the checkpoint was trained without a datamodule.
    """
    trained = checkpoint.data_recipe
    if trained is None:
        raise CheckpointError(
            f"{checkpoint.path} was trained without a datamodule, so it names no tokenizer; score "
            "one set at a time with evaluate.py perplexity --data datamodules.ZeroShotText "
            "--data.set_name ptb --data.tokenizer ..."
        )
    arguments = trained["init_args"]
    inner = arguments.get("corpus")
    if isinstance(inner, Mapping) and "class_path" in inner:
        batches = {key: changes[key] for key in ("block_size", "eval_batch_size") if key in changes}
        corpus = _recipe({**carried(inner.get("init_args", {})), **changes})
        return {**trained, "init_args": {**arguments, **batches, "corpus": corpus}}
    return _recipe({**carried(arguments), **changes})


def _recipe(arguments: dict[str, Any]) -> Recipe:
    return {"class_path": public_path(ZeroShotText), "init_args": arguments}


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--sets", type=str, default=",".join(ZERO_SHOT_SETS), help="Sets to score, by commas."
    )
    for name, kind in ZERO_SHOT_SETS.items():
        parser.add_argument(
            f"--files.{name}",
            type=str | list[str] | None,
            default=None,
            help=f"Your copy of {name}, files or patterns: {kind.local_format} (null: the hub's).",
        )
    parser.add_argument(
        "--text_field",
        type=str | None,
        default=None,
        help="Field or column of your files with the text (null: the set's own, or text).",
    )
    parser.add_argument(
        "--cache_dir",
        type=str | None,
        default=None,
        help="Folder of the tokenised sets (null: that of the training's data).",
    )
    parser.add_argument(
        "--block_size", type=int | None, default=None, help="Tokens a block (null: as trained)."
    )
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Blocks per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score that many batches of a set."
    )
    add_file_arguments(parser, output="JSON file to write.")


def chosen_sets(settings: Namespace) -> list[str]:
    """Returns the names of the sets to score, in the order given, each once.

    Raises:
        ValueError: if one is not known, there are none, or files are given for another one.
    """
    typed = [name.strip() for name in settings.sets.strip("[]").split(",")]
    names = list(dict.fromkeys(name for name in typed if name))
    unknown = [name for name in names if name not in ZERO_SHOT_SETS]
    if unknown or not names:
        raise ValueError(
            f"sets ({settings.sets}) must name some of {', '.join(ZERO_SHOT_SETS)}, by commas"
        )
    for name, files in settings.files.as_dict().items():
        if files is not None and name not in names:
            raise ValueError(f"files.{name} is given, but {name} is not scored; add it to --sets")
    if settings.text_field is not None and not any(settings.files[name] for name in names):
        raise ValueError(
            f"text_field ({settings.text_field}) is that of your own files; name them with --files"
        )
    return names


def _changes(settings: Namespace, name: str) -> dict[str, Any]:
    """Returns the arguments of a set that the command line gives."""
    files = settings.files[name]
    given = {
        "block_size": settings.block_size,
        "eval_batch_size": settings.batch_size,
        "cache_dir": settings.cache_dir,
        "text_field": None if files is None else settings.text_field,
    }
    return {
        "set_name": name,
        "data_files": files,
        **{key: value for key, value in given.items() if value is not None},
    }


def _check_block(model: LanguageModel, block_size: int | None) -> None:
    """Raises a ValueError if the block size that was typed is longer than the model can read."""
    learned = model.config.position_limit
    if block_size is not None and learned is not None and block_size > learned:
        raise ValueError(
            f"block_size ({block_size}) is longer than the {learned} positions that the model has "
            f"learned; set --block_size {learned} or less"
        )


def run(settings: Namespace) -> None:
    """Scores the sets, prints a table and writes the JSON file if one is asked for."""
    names = chosen_sets(settings)
    (target,) = check_targets(output=settings.output)
    checkpoint = load_checkpoint(settings)
    recipes = {name: set_recipe(checkpoint, _changes(settings, name)) for name in names}
    sets = {name: build_data(checkpoint, recipe) for name, recipe in recipes.items()}
    model = load_model(settings, checkpoint)
    _check_block(model, settings.block_size)
    for data in sets.values():  # all of them before hours of scoring
        check_fit(model, data)
        prepare(data, checkpoint)
    report = measure_zero_shot(
        checkpoint,
        model,
        sets,
        precision=settings.precision,
        limit_batches=settings.limit_batches,
    )
    write_report(report, target)
