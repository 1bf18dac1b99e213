"""Which errors are the user's to fix, and the one line they are reported in."""

import argparse
import dataclasses
import difflib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("lightning_models", "datamodules", "callbacks", "training", "evaluation")

# Lines of jsonargparse's reports that say how it searched, not what was wrong.
NOISE = (
    "Does not validate against any of the Union subtypes",
    "- Does not validate against any of the Union subtypes",
    "Subtypes:",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "- Expected a path but",
    "Given value type:",
    "Given value:",
)


CURES = (
    ("Could not determine home directory", "~ names a user that there is not; write the folder"),
    ("Unable to allocate", "lower the batch size or the sizes of the model"),
    ("can't allocate memory", "lower the batch size or the sizes of the model"),
)
"""What messages of Python, numpy and torch say of too large and misspelt values; and the cures."""


TRACKERS = ("wandb", "mlflow")
"""Packages of loggers, whose own errors are of accounts, servers and stores."""


class UserError(Exception):
    """A problem with the input, reported without a traceback; the message names the cure."""


def explain(error: BaseException) -> str | None:
    """Returns what to tell the user, or None if the error is a defect that needs its traceback.

    Input errors are: our own exceptions, ValueError and OSError raised in our own code, a file or
    folder that the system refuses, what the command line, its references and Lightning's
    configuration checks raise, weights that do not fit the model, and sizes that do not fit into
    memory.
    """
    for cause in _causes(error):
        if _is_ours(cause):
            return _without_worker(str(cause))
    if type(error).__module__.partition(".")[0] in TRACKERS:
        return _one_line(str(error))  # no key, no server
    if isinstance(error, argparse.ArgumentError):
        return condense(str(error))
    if isinstance(error, MisconfigurationException | OmegaConfBaseException):
        return _one_line(str(error))
    if isinstance(error, ValueError) and _raised_by(error, "lightning", "trainer", "loops"):
        return _one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        reason = error.strerror or type(error).__name__
        return f"{error.filename}: {reason}. Check the path, or choose another one"
    if isinstance(error, RuntimeError) and "Error(s) in loading state_dict" in str(error):
        return _weights_do_not_fit(str(error))
    if isinstance(error, ValueError) and _raised_by(error, "jsonargparse"):
        return condense(str(error))
    text = _one_line(str(error))
    return next((f"{text}; {cure}" for words, cure in CURES if words in text), None)


LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|failed to recv, got 0 bytes"
)
"""What gloo, NCCL and torch's store say where the process at the other end has ended."""


def lost_process(error: BaseException) -> bool:
    """Whether a collective operation failed because another process of the run has ended."""
    return any(
        isinstance(cause, RuntimeError)
        and LOST.search(str(cause)) is not None
        and _raised_by(cause, "torch")
        for cause in _causes(error)
    )


def condense(report: str) -> str:
    """Returns a report of jsonargparse as one line, without the record of its search."""
    lines = [line.strip() for line in report.splitlines()]
    kept = [line for line in lines if line and not line.startswith(NOISE)]
    return " ".join(line.removeprefix("- ") for line in kept)


_UNKNOWN = re.compile(
    r"(?:Parser key \"(?P<key>\w+)\".*)?"
    r"(?:unrecognized arguments: --(?P<option>[^\s=]+)|Option '(?P<own>\S+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<member>[^']+)'"
    r"|Subcommand '\w+' does not accept option '(?P<top>[^']+)')",
    re.DOTALL,
)
_POSITIONAL = re.compile(r"unrecognized arguments: (?P<word>[^-\s]\S*)")
_MISSING = re.compile(r"arguments are required: \w+\.(?P<name>\w+)")

FOREIGN = {
    "batch": "batch_size",
    "checkpoint": "ckpt_path ckpt",
    "context_length": "block_size",
    "d_model": "config.dim",
    "epochs": "max_epochs",
    "files": "data_files",
    "gpus": "devices",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "hidden_size": "config.dim",
    "layers": "config.num_layers",
    "learning_rate": "optimizer.lr",
    "logdir": "default_root_dir",
    "max_length": "block_size",
    "mlflow": "loggers",
    "model_name": "model",
    "n_embd": "config.dim",
    "n_head": "config.num_heads",
    "n_heads": "config.num_heads",
    "n_layer": "config.num_layers",
    "n_layers": "config.num_layers",
    "num_epochs": "max_epochs",
    "num_train_epochs": "max_epochs",
    "output_dir": "default_root_dir output",
    "resume": "ckpt_path",
    "resume_from_checkpoint": "ckpt_path",
    "run_name": "name",
    "seq_len": "block_size",
    "steps": "max_steps",
    "wandb": "loggers",
}
"""Last part of an option as other programs call it -> ends of what it is called here."""


def with_options(
    message: str,
    parser: argparse.ArgumentParser,
    classes: Mapping[str, type] | None = None,
) -> str:
    """Returns a parser's message, with the names that an unknown option may be short for.

    Args:
        message: in one line.
        parser: whose options are known.
        classes: of ``model`` and ``data``, whose arguments are known, too; None: there are none.
    """
    options = {
        o.replace(".init_args", ""): o
        for o in (*_options(parser), *class_options(classes or {}))
        if not o.endswith("+")
    }
    if (positional := _POSITIONAL.search(message)) is not None:
        flag = next((o for o in ("--config", "--ckpt") if o in options), None)
        return f"{message}; write {flag} {positional['word']}" if flag else message
    if (missing := _MISSING.search(message)) is not None:
        option = f"--{missing['name']}"
        return f"the option {option} is missing" if option in options else message
    if message.startswith('Parser key "trainer.logger"'):
        return f"{message}; --loggers takes tensorboard, csv, wandb and mlflow by name"
    found = _UNKNOWN.match(message)
    if found is None:
        return message
    member = ".".join(filter(None, (found["group"], found["member"])))
    name = found["option"] or found["own"] or member or found["top"]
    asked = "--" + ".".join(filter(None, (found["key"], name))).replace(".init_args", "")
    longer = [o for o in options if o.startswith(asked)]
    if longer:
        return f"{message}; write {' or '.join(options[o] for o in longer[:3])} in full"
    near = _nearest(asked, list(options))
    return f"{message}; is {' or '.join(options[o] for o in near[:3])} meant?" if near else message


def _nearest(asked: str, options: list[str]) -> list[str]:
    """Returns the options that are called so elsewhere, end so, or look alike; the best kind."""
    last = asked.lstrip("-").rpartition(".")[2]
    ends = FOREIGN.get(last, "").split()
    near = [o for end in ends for o in options if o.endswith((f".{end}", f"--{end}"))]
    near = near or [o for o in options if o.lstrip("-").rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(asked, options, n=1, cutoff=0.8)
    by_last = {o.lstrip("-").rpartition(".")[2]: o for o in reversed(options)}
    return near or [by_last[n] for n in difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)]


def nearest_names(name: str, names: Sequence[str]) -> list[str]:
    """Returns the names that contain another one, or look like it, letter case aside."""
    lower = {n.lower(): n for n in names}
    inside = [n for key, n in lower.items() if name.lower() in key]
    return inside or [lower[n] for n in difflib.get_close_matches(name.lower(), lower, n=2)]


def class_options(classes: Mapping[str, type]) -> Iterator[str]:
    """Yields the options of classes and of those below them, fields of dataclasses included."""
    for key, kind in classes.items():
        for each in kind.__mro__:
            hints = get_type_hints(vars(each)["__init__"]) if "__init__" in vars(each) else {}
            for name, hint in hints.items():
                fields = dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ()
                yield from (f"--{key}.init_args.{name}.{field.name}" for field in fields)
                if not fields and name != "return":
                    yield f"--{key}.init_args.{name}"


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the options of a parser and of its verbs."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _options(verb)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and what it was raised from, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _is_ours(error: BaseException) -> bool:
    """Whether the class is ours, or it is a ValueError or OSError that our code raised."""
    if type(error).__module__.partition(".")[0] in PACKAGES:
        return True
    if not isinstance(error, ValueError | OSError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path = Path(frames[-1].filename)
    if frames[-1].name == "__init__" and path.name.startswith("<"):  # generated by dataclasses
        return True
    # a ValueError that C code raises under a line of ours (unpacking, int()) is a defect of ours
    known = isinstance(error, OSError) or (frames[-1].line or "").startswith("raise")
    return known and path.is_relative_to(PROJECT) and path.relative_to(PROJECT).parts[0] in PACKAGES


def _without_worker(message: str) -> str:
    """Returns a message without what torch puts around that of a loading process."""
    if not re.match(r"Caught \w+ in DataLoader worker process", message):
        return message
    return message.rstrip().splitlines()[-1].partition(": ")[2]


def _raised_by(error: BaseException, package: str, *folders: str) -> bool:
    """Whether code of the package, and of one of these folders if any are named, has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    parts = Path(frames[-1].filename).parts if frames else ()
    return package in parts and (not folders or any(folder in parts for folder in folders))


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _weights_do_not_fit(message: str) -> str:
    """Returns the head of torch's list of mismatches."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    first = _one_line(" ".join(lines[1:3]))
    return f"the checkpoint's weights do not fit this model: {first}{more}"
