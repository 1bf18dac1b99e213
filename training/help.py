"""Verbs of ``train.py``, and their parser."""

import importlib
import inspect
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_models.recipe_options import ExactOptions

VERBS = {
    "fit": "Trains a model",
    "validate": "Scores the validation split with a checkpoint",
    "test": "Scores the test split with a checkpoint",
    "predict": "Continues prompts (--data.predict_file) with a checkpoint",
    "list": "Shows the configs: parameters, FLOPs per token, tokens",
    "plan": "Predicts a run's tokens, FLOPs, hours and memory, without training",
}
EXAMPLE = "python train.py fit -c configs/transformer/tiny.yaml"
DESCRIPTION = (
    " ".join(f"{verb}: {text}." for verb, text in VERBS.items())
    + " `python train.py VERB --help` describes the options of a verb."
)
VERB_DESCRIPTION = (
    "{title}. Configs are given with -c; several are merged, and typed options take precedence. "
    "`--model.help CLASS` and `--data.help CLASS` describe the options of one class, and "
    "`--print_config=comments` prints a config with every key explained."
)


class TrainingParser(ExactOptions, LightningArgumentParser):  # type: ignore[misc]
    """A parser that accepts options by their full names only."""


def public_classes(package: str) -> list[str]:
    """Returns the names of the models or data modules that a package exports."""
    module = importlib.import_module(package)
    base = getattr(module, {"lightning_models": "LanguageModel"}.get(package, "LanguageDataModule"))
    exported: list[Any] = [getattr(module, name) for name in module.__all__]
    return sorted(
        cls.__name__
        for cls in exported
        if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)
    )
