"""Options that commands share."""

from argparse import ArgumentParser as PlainParser
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

from evaluation.classes import import_packages
from evaluation.device import Device, Precision
from lightning_models.checkpoint import Checkpoint, read_checkpoint


def add_model_arguments(parser: ArgumentParser) -> None:
    """Declares which checkpoint to load, and how."""
    parser.add_argument("--ckpt", type=str, required=True, help="Checkpoint file (.ckpt).")
    parser.add_argument(
        "--device", type=Device, default="auto", help="Where to run; auto takes a GPU if any."
    )
    parser.add_argument(
        "--precision", type=Precision, default="32", help="bf16 rounds the matrix products."
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the model's config to change, e.g. --set.attention_backend math.",
    )
    parser.add_argument(
        "--packages",
        type=list[str],
        default=[],
        help="Packages to import first, where the model or the data are classes of your own.",
    )


def checkpoint_in(argv: Sequence[str]) -> Checkpoint | None:
    """Returns the checkpoint that a command line names, or None; needed before it can be parsed."""
    scan = PlainParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--ckpt")
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if found.ckpt is None or {"-h", "--help"} & set(argv):
        return None
    import_packages([name for name in found.packages.strip("[]").split(",") if name])
    return read_checkpoint(found.ckpt)
