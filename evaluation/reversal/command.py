"""``evaluate.py reversal``: whether a relation in the prompt is found in reverse, too."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.arguments import add_which_argument
from evaluation.checkpoint.corpus import build_data, build_tokenizer
from evaluation.checkpoint.device import Device, Precision, pick_device
from evaluation.checkpoint.provenance import count_train_tokens, non_embedding_parameters
from evaluation.checkpoint.rebuild import build_model, changed_fields
from evaluation.console import format_columns, format_table
from evaluation.cost import Cost, GeneratedSteps, Stopwatch, price
from evaluation.output import check_targets, write_atomically, write_json
from evaluation.reversal.figure import reversal_figure
from evaluation.reversal.models import Asked, HubModel, OwnModel
from evaluation.reversal.names import NAMES
from evaluation.reversal.probe import (
    CONDITIONS,
    Answers,
    ask,
    draw_pairs,
    one_prompt,
    single_tokens,
)
from evaluation.samples import check_vocabulary
from lightning_models.checkpoint import Checkpoint, read_checkpoint
from lightning_models.layers import recording
from lightning_models.recipe import import_packages

DPI = 150


@dataclass(frozen=True)
class ReversalReport:
    """The answers of one model, and everything needed to repeat them."""

    answers: Answers
    names: int
    """Names that pairs were drawn from."""
    left_out: int
    """Names that are not a single token."""
    source: dict[str, Any]
    """``model`` and ``checkpoint`` or ``hf``: who was asked; of a checkpoint its sizes, too."""
    settings: dict[str, Any]
    cost: Cost | None = None
    """Of the answers; None for models of other libraries, which we do not count."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            **self.answers.means(),
            "pairs": len(self.answers),
            "names": {"used": self.names, "left_out": self.left_out},
            "standard_errors": self.answers.standard_errors(),
            **({} if self.cost is None else self.cost.as_dict()),
            **self.source,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        means, errors = self.answers.means(), self.answers.standard_errors()
        rows = [["", *CONDITIONS]]
        for measure, label in {
            "target": "NLL of the target (nats)",
            "distractor": "NLL of the distractor (nats)",
            "margin": "margin (nats)",
            "error_rate": "error rate",
        }.items():
            keys = [f"{condition}_{measure}" for condition in CONDITIONS]
            rows.append([label, *(f"{means[key]:.4f} +- {errors[key]:.4f}" for key in keys)])
        facts = {
            "pairs": f"{len(self.answers):,}",
            "names": f"{self.names} ({self.left_out} are no single token and left out)",
            "tokenizer": str(self.settings["tokenizer"]),
            **({} if self.cost is None else self.cost.as_cells()),
            **{key: value for key, value in self.source.items() if value is not None},
        }
        return f"{format_columns(rows)}\n\n{format_table(facts)}"


def measure_reversal(
    model: Asked,
    *,
    source: dict[str, Any],
    settings: dict[str, Any],
    names: Sequence[str] = NAMES,
    pairs: int = 1000,
    seed: int = 0,
    priced: Callable[[int, float | None, float], Cost] | None = None,
) -> ReversalReport:
    """Returns the answers of a model to both queries about pairs of names.

    Args:
        model: what is asked.
        source: who that is, for the report.
        settings: how, for the report; with the tokenizer's name.
        names: to draw pairs from; those that are no single token are left out.
        pairs: how many; all that there are, if fewer.
        seed: of the draw.
        priced: returns the cost of a context of so many tokens, from additional steps and seconds
            (``evaluation.cost.price``); None: it is not known.

    Raises:
        ValueError: if fewer than two names are left.
    """
    ids = single_tokens(names, model.prompt)
    if len(ids) < 2:
        raise ValueError(
            f"names: {len(ids)} of {len(names)} are single tokens of the tokenizer "
            f"({settings['tokenizer']}), and the probe needs 2; take a model whose tokenizer has "
            "whole words (gpt2), or give --names that it has"
        )
    drawn = draw_pairs(list(ids), pairs, seed)
    steps, watch = GeneratedSteps(), Stopwatch()
    with recording(generated_steps=steps.count):
        answers = ask(model, drawn, ids)
    cost: Cost | None = None
    if priced is not None:  # names are single tokens, so all prompts of a question are as long
        cost = priced(len(one_prompt(model, drawn[0], "normal")), steps.mean, watch.seconds)
    settings = {"pairs": pairs, "seed": seed, **settings}
    return ReversalReport(answers, len(ids), len(names) - len(ids), source, settings, cost)


def read_names(file: str | None) -> list[str]:
    """Returns the different names of a text file, one a line; None: the built-in ones.

    Raises:
        ValueError: if the file cannot be read.
    """
    if file is None:
        return list(NAMES)
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"names ({file}): cannot be read ({error}); give a text file, one name a line"
        ) from error
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--ckpt",
        type=str | None,
        default=None,
        help="Checkpoint file (.ckpt), or the folder of a run.",
    )
    add_which_argument(parser)
    parser.add_argument(
        "--hf",
        type=str | None,
        default=None,
        help="Instead: hub name or folder of a causal language model of transformers.",
    )
    parser.add_argument("--pairs", type=int, default=1000, help="Pairs of names to ask about.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the draw of pairs.")
    parser.add_argument(
        "--names",
        type=str | None,
        default=None,
        help="Text file, one name a line (null: built in).",
    )
    parser.add_argument(
        "--device", type=Device, default="auto", help="Where to run; auto takes a GPU if any."
    )
    parser.add_argument(
        "--precision",
        type=Precision,
        default="32",
        help="bf16 rounds the matrix products, with --hf all weights.",
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the checkpoint's config to change.",
    )
    parser.add_argument(
        "--packages", type=list[str], default=[], help="Packages to import first, with own classes."
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument("--plot", type=str | None, default=None, help="PNG file to write.")


def run(settings: Namespace) -> None:
    """Asks the model, prints a table and writes the files that are asked for."""
    _check(settings)
    target, picture = check_targets(output=settings.output, plot=settings.plot)
    names = read_names(settings.names)
    import_packages(settings.packages)
    model, source, how = _load_own(settings) if settings.hf is None else _load_hub(settings)
    how |= {"precision": settings.precision, "names": settings.names}
    report = measure_reversal(
        model,
        source=source,
        settings=how,
        names=names,
        pairs=settings.pairs,
        seed=settings.seed,
        priced=functools.partial(price, model.model) if isinstance(model, OwnModel) else None,
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
    if picture is not None:
        figure = reversal_figure(report.answers, str(settings.hf or settings.ckpt))
        write_atomically(picture, lambda path: figure.savefig(path, format="png", dpi=DPI))


def _check(settings: Namespace) -> None:
    """Raises a ValueError for options that are out of range or do not go together."""
    if (settings.ckpt is None) == (settings.hf is None):
        raise ValueError("give one model: --ckpt CHECKPOINT or --hf NAME_OR_FOLDER")
    if settings.pairs < 1:
        raise ValueError(f"pairs ({settings.pairs}) must be at least 1")
    if settings.hf is not None and settings.which == "best":
        raise ValueError("which=best chooses a checkpoint of a run; leave it out with --hf")
    if settings.hf is not None and settings["set"]:
        raise ValueError("set changes the config of a checkpoint; leave it out with --hf")


def _load_own(settings: Namespace) -> tuple[Asked, dict[str, Any], dict[str, Any]]:
    """Returns a checkpoint's model, and what the report says of it and of its settings."""
    checkpoint = read_checkpoint(settings.ckpt, settings.which)
    device = pick_device(settings.device)
    tokenizer = build_tokenizer(checkpoint)
    model = build_model(checkpoint, settings["set"]).to(device)
    check_vocabulary(model, tokenizer)
    source = {
        "model": type(model).__name__,
        "parameters": non_embedding_parameters(model),
        "train_tokens": _train_tokens(checkpoint),
        "checkpoint": str(checkpoint.path),
        "hf": None,
    }
    how = {
        "tokenizer": tokenizer.name,
        "device": str(device),
        "set": changed_fields(checkpoint, model),
        "which": checkpoint.which,
        "trained_on": checkpoint.data_state.get("fingerprint"),
    }
    return OwnModel(model, tokenizer, settings.precision), source, how


def _train_tokens(checkpoint: Checkpoint) -> int | None:
    """Returns the lexical tokens of the training text; None where that is not prepared here."""
    try:
        return count_train_tokens(checkpoint, build_data(checkpoint))
    except ValueError:  # the probe needs no text
        return None


def _load_hub(settings: Namespace) -> tuple[Asked, dict[str, Any], dict[str, Any]]:
    """Returns a model of ``transformers``, and what the report says of it and of its settings."""
    device = pick_device(settings.device)
    model = HubModel(settings.hf, device, settings.precision)
    source = {"model": type(model.model).__name__, "checkpoint": None, "hf": settings.hf}
    return model, source, {"tokenizer": settings.hf, "device": str(device)}
