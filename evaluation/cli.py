"""Commands, their parser, and errors in the input as one line with exit code 2."""

import importlib
import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from lightning_models.recipe import as_started
from lightning_models.recipe_options import (
    ExactOptions,
    import_public_classes,
    prints_descriptions,
)

DATA_HELP = "--data.help"
DEBUG_FLAG = "--debug"
ONE_PROCESS = (
    "torchrun has started several processes, but evaluate.py runs in one; start it with python. To "
    "score a corpus with several, use torchrun ... train.py validate | test --ckpt_path CKPT"
)

COMMANDS = {
    "perplexity": ("perplexity", "Score a corpus: perplexity and bits per byte."),
    "zero_shot": ("zero_shot", "Score seven sets of out-of-domain texts."),
    "tasks": ("tasks.command", "Score tasks of lm-evaluation-harness: LAMBADA, HellaSwag, BLiMP."),
    "reason": ("reason.command", "Ask questions with known answers, and time the models."),
    "quality": ("quality", "Compare its texts with human ones: MAUVE, perplexity."),
    "reversal": ("reversal", "Ask for a relation that the prompt states in reverse."),
    "scaling": ("scaling", "Fit power laws to results of perplexity."),
    "sweep": ("sweep", "Compare perplexity with the steps and FLOPs it takes."),
    "compare": ("compare", "Compare any runs: tables, plots, curves, FLOPs."),
    "generate": ("generate", "Continue prompts."),
    "think": ("think", "Show what models do at each token of a text."),
    "import": ("importing", "Write a checkpoint from transformers weights."),
    "export": ("exporting", "Write a model for transformers, a folder, or one file."),
}
"""Module with ``add_arguments`` and ``run``, and summary of each command, by its name."""


class ExactParser(ExactOptions, ArgumentParser):  # type: ignore[misc]
    """The parser of ``evaluate.py`` and of its commands."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Bad input is reported in one line on stderr with exit code 2; with ``--debug`` or the
    environment variable DEBUG=1 such errors keep their traceback, as defects always do. Ctrl-C
    exits with 130.

    Args:
        args: The command line. Defaults to ``sys.argv[1:]``.
    """
    argv = sys.argv[1:] if args is None else list(args)
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if os.environ.get("RANK") == "0":
            print(as_started(f"error: {ONE_PROCESS}"), file=sys.stderr)
        return 2
    try:
        _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from training.errors import explain, with_options  # takes seconds

        message = explain(error)
        if message is None or DEBUG_FLAG in argv or os.environ.get("DEBUG", "0") not in ("", "0"):
            raise
        if isinstance(error, ArgumentError):
            message = with_options(message, build_parser(argv))
        print(as_started(f"error: {' '.join(message.split())}"), file=sys.stderr)
        return 2
    return 0


def _run(argv: Sequence[str]) -> None:
    wants_help = {"-h", "--help"} & set(argv) or any(
        w.startswith("--print_completion") for w in argv
    )
    if not ((argv and argv[0] in COMMANDS) or wants_help):
        from training.errors import check_verb  # takes seconds

        check_verb(argv, COMMANDS, "python evaluate.py perplexity --ckpt runs/first")
    command, settings = parse(argv)
    from lightning.pytorch.utilities import rank_zero_only  # the command has imported both

    from lightning_models.runtime import choose_kernels, note_busy_cores

    # independent of RANK and SLURM_PROCID
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    if "cudnn_attention" in settings:  # commands that run models
        note_busy_cores()
        choose_kernels(cudnn_attention=settings.cudnn_attention)
    importlib.import_module(f"evaluation.{COMMANDS[command][0]}").run(settings)


def parse(argv: Sequence[str]) -> tuple[str, Namespace]:
    """Returns the command of a command line, and its settings.

    Options of ``--data`` can be parsed only with the checkpoint's data, so ``settings.data`` is the
    list of their arguments, for ``evaluation.arguments.data_recipe``.

    Raises:
        ArgumentError: If an option is unknown, or its value is invalid.
    """
    parser = build_parser(argv)
    if command_in(argv) and {"-h", "--help", DATA_HELP} & {word.partition("=")[0] for word in argv}:
        import_public_classes("datamodules")  # help lists the classes there are
    others, of_data = split_data_options(argv)
    parsed = parser.parse_args(others)
    settings = parsed[parsed.command]
    if "data" in settings:
        settings.data = of_data
    elif of_data:
        parser.parse_args(argv)  # refuses them: they are not options of this command
    return parsed.command, settings


def split_data_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command line without ``--data`` and the options under it, and their words."""
    others: list[str] = []
    of_data: list[str] = []
    takes_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if f"{name}.".startswith("--data.") and name != DATA_HELP:
            of_data.append(word)
            takes_value = not equals
        elif takes_value and not word.startswith("--"):
            of_data.append(word)
            takes_value = False
        else:
            others.append(word)
            takes_value = False
    return others, of_data


def command_in(argv: Sequence[str]) -> str | None:
    """Returns the command that a command line names."""
    return next((word for word in argv if not word.startswith("-")), None)


def build_parser(argv: Sequence[str]) -> ArgumentParser:
    """Returns the parser; only the command that ``argv`` names is imported and has its options."""
    set_parsing_settings(docstring_parse_attribute_docstrings=prints_descriptions(argv))
    chosen = command_in(argv)
    parser = ExactParser(
        prog=as_started("evaluate.py"),
        description="Evaluates a checkpoint; needs nothing but the checkpoint.",
        exit_on_error=False,
    )
    commands = parser.add_subcommands(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = ExactParser(description=summary, exit_on_error=False)
        if name == chosen:
            importlib.import_module(f"evaluation.{module}").add_arguments(command)
            command.add_argument(
                DEBUG_FLAG, action="store_true", help="Show the traceback of errors in the input."
            )
        commands.add_subcommand(name, command, help=summary)
    return parser
