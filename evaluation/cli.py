"""Commands, their parser, and errors in the input as one line with exit code 2."""

import importlib
import os
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from lightning_models.recipe import ExactOptions, import_public_classes, prints_descriptions

DEBUG_FLAG = "--debug"
ONE_PROCESS = (
    "torchrun has started several processes, but evaluate.py is one; start it with python. Several "
    "score a corpus with torchrun ... train.py validate | test --ckpt_path CKPT"
)

COMMANDS = {
    "perplexity": ("perplexity", "Score a corpus: perplexity and bits per byte."),
    "zero_shot": ("zero_shot", "Score seven sets of texts of other kinds."),
    "tasks": ("tasks.command", "Score tasks of lm-evaluation-harness: LAMBADA, HellaSwag, BLiMP."),
    "reason": ("reason.command", "Ask questions with known right answers, and time them."),
    "quality": ("quality", "Compare its texts with human ones: MAUVE, perplexity."),
    "reversal": ("reversal", "Ask for a relation that the prompt states in reverse."),
    "scaling": ("scaling", "Fit power laws through results of perplexity."),
    "sweep": ("sweep", "Compare perplexity with the steps and FLOPs it takes."),
    "compare": ("compare", "Compare any runs: tables, plots, curves, FLOPs."),
    "generate": ("generate", "Continue prompts."),
    "import": ("importing", "Write a checkpoint from transformers weights."),
    "export": ("exporting", "Write a model for transformers, a folder, or one file."),
}
"""Name -> module of this package with ``add_arguments`` and ``run``; what the command does."""

ARGUMENTS = dict.fromkeys(COMMANDS, "--ckpt runs/first") | {
    "scaling": "'runs/*.json' --x tokens",
    "sweep": "--ckpts runs/first runs/second --output runs/sweep.svg",
    "compare": "runs/first runs/second",
    "generate": "--ckpt runs/first --prompt 'The function'",
    "import": "--hf FOLDER_OR_HUB_NAME --output runs/imported.ckpt",
    "export": "--ckpt runs/first --output runs/exported",
}
"""Arguments of an example of each command, for messages."""


class ExactParser(ExactOptions, ArgumentParser):
    """The parser of ``evaluate.py`` and of its commands."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 2 for bad input, reported in one line.

    Args:
        args: the command line; None: that of the process.
    """
    argv = sys.argv[1:] if args is None else list(args)
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if os.environ.get("RANK") == "0":
            print(f"error: {ONE_PROCESS}", file=sys.stderr)
        return 2
    return run_with_clear_errors(lambda: _run(argv), argv)


def run_with_clear_errors(program: Callable[[], None], argv: Sequence[str]) -> int:
    """Returns the exit code of ``program``: 2 for bad input, reported in one line on stderr.

    With ``--debug`` or the environment variable DEBUG=1 such errors keep their traceback, as
    defects always do. Ctrl-C ends with 130.

    Args:
        program: what to run.
        argv: the command line.
    """
    try:
        program()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from training.errors import explain  # takes seconds, so not before there is an error

        message = explain(error)
        if message is None or DEBUG_FLAG in argv or os.environ.get("DEBUG", "0") not in ("", "0"):
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2
    return 0


def _run(argv: Sequence[str]) -> None:
    if not ((argv and argv[0] in COMMANDS) or {"-h", "--help"} & set(argv)):
        from training.errors import check_verb  # takes seconds, so not before there is an error

        check_verb(
            argv, {name: f"python evaluate.py {name} {ARGUMENTS[name]}" for name in COMMANDS}
        )
    parser = build_parser(argv)
    try:
        settings = _parse(parser, argv)
    except ArgumentError as error:
        from training.errors import condense, with_options  # takes seconds, as above

        raise ArgumentError(None, with_options(condense(str(error)), parser)) from error
    from lightning.pytorch.utilities import rank_zero_only  # the command has imported both

    from evaluation.arguments import check_numbers
    from lightning_models.runtime import choose_kernels

    # whatever RANK or SLURM_PROCID say
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    module, _ = COMMANDS[settings.command]
    options = settings[settings.command]
    check_numbers(options)
    if "cudnn_attention" in options:  # commands that run models
        choose_kernels(cudnn_attention=options.cudnn_attention)
    importlib.import_module(f"evaluation.{module}").run(options)


def _parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parses; short names of classes are known, and listed, only after modules were imported."""
    if command_in(argv) and any(word == "-h" or "help" in word for word in argv):
        import_public_classes("datamodules")
    try:
        return parser.parse_args(argv)
    except ArgumentError:
        import_public_classes("datamodules")
        return parser.parse_args(argv)


def command_in(argv: Sequence[str]) -> str | None:
    """Returns the command that a command line names."""
    return next((word for word in argv if not word.startswith("-")), None)


def build_parser(argv: Sequence[str]) -> ArgumentParser:
    """Returns the parser; only the command that ``argv`` names is imported and has its options."""
    set_parsing_settings(docstring_parse_attribute_docstrings=prints_descriptions(argv))
    chosen = command_in(argv)
    parser = ExactParser(
        prog="evaluate.py",
        description="Evaluates a checkpoint; needs nothing but the checkpoint.",
        exit_on_error=False,
    )
    commands = parser.add_subcommands(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = ExactParser(description=summary, exit_on_error=False)
        if name == chosen:
            importlib.import_module(f"evaluation.{module}").add_arguments(command, argv)
            command.add_argument(
                DEBUG_FLAG, action="store_true", help="Show the traceback of errors in the input."
            )
        commands.add_subcommand(name, command, help=summary)
    return parser
