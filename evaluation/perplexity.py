"""``evaluate.py perplexity``: what a checkpoint's model makes of a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from datamodules import BatchLoader, TextDataModule
from evaluation.arguments import add_model_arguments, checkpoint_in
from evaluation.classes import import_packages, resolve_class
from evaluation.console import format_table
from evaluation.corpus import build_data, check_fit, prepare
from evaluation.device import Precision, pick_device
from evaluation.output import check_target, write_json
from evaluation.rebuild import build_model, changed_fields
from evaluation.scoring import PERPLEXITY_KEYS, Totals, score_batches
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe, read_checkpoint

Split = Literal["train", "val", "test"]


@dataclass(frozen=True)
class PerplexityReport:
    """The numbers of one model on one corpus, and everything needed to repeat them."""

    totals: Totals
    likelihood: str
    """Kind of the likelihood: exact, lower_bound, estimate or noncausal."""
    causal: bool
    flops_per_token: float
    """FLOPs per token of a forward pass over one window."""
    checkpoint: str
    data: dict[str, Any]
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            "nats_per_token": self.totals.nats_per_token,
            PERPLEXITY_KEYS[self.likelihood]: self.totals.perplexity,
            "bits_per_byte": self.totals.bits_per_byte,
            "tokens": self.totals.tokens,
            "bytes": self.totals.bytes,
            "likelihood": self.likelihood,
            "causal": self.causal,
            "flops_per_token": self.flops_per_token,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        values = {**self.as_dict(), **self.data, "flops_per_token": f"{self.flops_per_token:.4g}"}
        if values.get("trained_on") in (None, values["fingerprint"]):
            values.pop("trained_on", None)
        hidden = ("data", "settings", "recipe")
        rows = {k.replace("_", " "): _readable(v) for k, v in values.items() if k not in hidden}
        return format_table(rows)


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def measure_perplexity(
    checkpoint: Checkpoint,
    model: LanguageModel,
    data: TextDataModule,
    *,
    split: Split = "val",
    precision: Precision = "32",
    limit_batches: int | None = None,
) -> PerplexityReport:
    """Returns the model's likelihood of a split of prepared data, each token scored once.

    Args:
        checkpoint: where the model comes from.
        model: on its device, in eval mode.
        data: prepared and set up; windows of ``data.block_size`` tokens do not overlap.
        split: which documents.
        precision: of the matrix products.
        limit_batches: score only so many batches; None: all.

    Raises:
        ValueError: if the split is empty.
    """
    on_gpu = model.device.type == "cuda"
    source = data.evaluation_source(split)
    loader = BatchLoader(source, start=lambda: 0, num_workers=data.num_workers, pin_memory=on_gpu)
    count = len(source) if limit_batches is None else min(limit_batches, len(source))
    batches = islice(loader, count)
    totals = score_batches(model, batches, precision=precision, num_batches=count)
    return PerplexityReport(
        totals=totals,
        likelihood=model.likelihood,
        causal=model.causal,
        flops_per_token=model.flops_per_token(data.block_size, training=False),
        checkpoint=str(checkpoint.path),
        data={
            "recipe": data.recipe(),
            "split": split,
            "fingerprint": data.fingerprint,
            "trained_on": checkpoint.data_state.get("fingerprint"),
        },
        settings={
            "batches": count,
            "of_batches": len(source),
            "batch_size": data.eval_batch_size,
            "precision": precision,
            "device": str(model.device),
            "set": changed_fields(checkpoint, model),
        },
    )


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the checkpoint."""
    add_model_arguments(parser)
    parser.add_subclass_arguments(
        TextDataModule,
        "data",
        required=False,
        help="Corpus to score. What is not given is taken from the checkpoint's own data.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Documents to score.")
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Windows per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score so many batches only."
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    checkpoint = checkpoint_in(argv)
    if checkpoint is not None and checkpoint.data_recipe is not None:
        resolve_class(checkpoint.data_recipe["class_path"], TextDataModule)
        parser.set_defaults({"data": checkpoint.data_recipe})


def _data_recipe(settings: Namespace) -> Recipe | None:
    """Returns the recipe that the command line and the checkpoint make together."""
    if settings.data is None:
        return None
    recipe: Recipe = settings.data.as_dict()
    if settings.batch_size is not None:
        recipe["init_args"]["eval_batch_size"] = settings.batch_size
    return recipe


def run(settings: Namespace) -> None:
    """Scores the corpus, prints a table and writes the JSON file if one is asked for."""
    for key in ("batch_size", "limit_batches"):
        if settings[key] is not None and settings[key] < 1:
            raise ValueError(f"{key} ({settings[key]}) must be at least 1, or null")
    target = None if settings.output is None else check_target(settings.output)
    import_packages(settings.packages)
    checkpoint = read_checkpoint(settings.ckpt)
    data = build_data(checkpoint, _data_recipe(settings))
    device = pick_device(settings.device)
    model = build_model(checkpoint, settings["set"]).to(device)
    check_fit(model, data)
    prepare(data, checkpoint)
    report = measure_perplexity(
        checkpoint,
        model,
        data,
        split=settings.split,
        precision=settings.precision,
        limit_batches=settings.limit_batches,
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
