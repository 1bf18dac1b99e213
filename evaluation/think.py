"""``evaluate.py think``: per-token traces of models reading a text, on one page."""

from dataclasses import replace

import pandas as pd
from jsonargparse import ArgumentParser, Namespace

from evaluation.api import LoadedModel
from evaluation.arguments import add_file_arguments, add_labelled_checkpoints
from evaluation.devices import pick_device
from evaluation.load import build_model, build_tokenizer, known_changes
from evaluation.runs import find_named, make_labels, path_names
from evaluation.tables import as_aligned
from evaluation.thoughts_page import LETTERS, check_page, save_page
from lightning_models.recipe import import_packages


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_labelled_checkpoints(parser, "Methods and tokenizers may be mixed.")
    parser.add_argument(
        "--text",
        type=str,
        required=True,
        help="Text to read; a model that answers questions reads it as a question.",
    )
    add_file_arguments(parser, output="Self-contained HTML page to write.")


def run(settings: Namespace) -> None:
    """Prints one line per model, and writes the page if requested."""
    target = None if settings.output is None else check_page(settings.output, "output")
    device = pick_device(settings.device)
    import_packages(settings.packages)
    named = find_named(settings.ckpt, "ckpt", settings.which)
    if len(named) > len(LETTERS):
        raise ValueError(f"ckpt: a page shows at most {len(LETTERS)} models, not {len(named)}")
    checkpoints = [checkpoint for _, checkpoint in named]
    recipes = [checkpoint.model_recipe for checkpoint in checkpoints]
    labels = make_labels(path_names(checkpoints), [name for name, _ in named], recipes)
    changes = known_changes(checkpoints, settings["set"])
    traces = []
    for label, checkpoint, changed in zip(labels, checkpoints, changes, strict=True):
        model, tokenizer = build_model(checkpoint, changed).to(device), build_tokenizer(checkpoint)
        loaded = LoadedModel(checkpoint, model, tokenizer, settings.precision)
        try:
            traces.append(replace(loaded.trace(settings.text), name=label))
        except ValueError as error:
            raise ValueError(f"ckpt ({checkpoint.path}): {error}") from error
    table = pd.DataFrame([trace.facts for trace in traces], index=labels).fillna("-")
    print(as_aligned(table))
    if target is not None:
        save_page(traces, target, "output")
        print(f"written to {target}")
