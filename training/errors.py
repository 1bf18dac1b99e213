"""Tells user errors from bugs, and formats them in one line."""

import argparse
import difflib
import os
import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lightning_models.atomic_files import full_disk

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("lightning_models", "datamodules", "callbacks", "training", "evaluation")

NOISE = (
    "Does not validate against any of the Union subtypes",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value",
)
"""Lines of jsonargparse's reports that describe its search, not the error."""


CURES = (
    ("Could not determine home directory", "~ refers to an unknown user; give the full path"),
    ("Unable to allocate", "reduce the batch size or the model size"),
    ("can't allocate memory", "reduce the batch size or the model size"),
    ("EADDRINUSE", "another program is using that port; set MASTER_PORT to a free one"),
)
"""Fragments of messages from Python, numpy and torch about bad values, with the cures."""


NO_PACKAGE = re.compile(r"Requirement '(wandb|mlflow)\b[^']*' not met")
"""Message from Lightning's loggers when their package is not installed."""
TRACKERS = ("wandb", "mlflow")
"""Packages of loggers, whose errors are about accounts, servers and stores."""


LOST_PROCESS = 4
"""Exit code of a process after another process of the run has ended."""
LOST_LINE = (
    "another process of the run has ended, so this one ends as well (was it killed, or out of "
    "memory? --ckpt_path last resumes training)"
)


class UserError(Exception):
    """A problem with the input, reported without a traceback; the message names the cure.

    Attributes:
        agreed: Whether all processes of the run raise it at the same point.
    """

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


def explain(error: BaseException) -> str | None:
    """Returns a message for the user, or None if the error is a bug that needs its traceback.

    User errors are this project's exceptions, ValueErrors and OSErrors raised in its code,
    inaccessible files and folders, command-line errors, unresolved references in a config, failed
    configuration checks in Lightning, weights that do not fit the model, and sizes that do not fit
    into memory.
    """
    for cause in _causes(error):
        if _is_ours(cause):
            return _without_worker(str(cause))
    if (package := NO_PACKAGE.search(str(error))) is not None:
        name = package[1]
        return f"trainer.logger needs {name}; install it with pip install -e '.[{name}]'"
    if type(error).__module__.partition(".")[0] in TRACKERS:
        return _one_line(str(error))  # such as a missing API key or an unreachable server
    if isinstance(error, argparse.ArgumentError):
        return condense(str(error))
    if isinstance(error, MisconfigurationException | OmegaConfBaseException):
        return _one_line(str(error))
    if isinstance(error, ValueError) and _raised_by(error, "lightning", "trainer", "loops"):
        return _one_line(str(error))
    if (full := full_disk(error)) is not None:
        name = getattr(error, "filename", None) or "the log, or another file of the run"
        return (
            f"{name} cannot be written ({os.strerror(full)}); free some space, or write elsewhere"
        )
    if is_launcher_error(error):
        missing = f"the environment variable {error} is missing; start with srun or torchrun"
        text = missing if isinstance(error, KeyError) else _one_line(str(error))
        return f"{text.rstrip('.')}. For a single-process run, set --trainer.devices 1"
    if isinstance(error, OSError) and error.filename is not None:
        reason = error.strerror or type(error).__name__
        return f"{error.filename}: {reason}. Check the path, or choose another one"
    if isinstance(error, RuntimeError) and "Error(s) in loading state_dict" in str(error):
        return _weights_do_not_fit(str(error))
    if isinstance(error, ValueError) and _raised_by(error, "jsonargparse"):
        return condense(str(error))
    text = _one_line(str(error))
    return next((f"{text}; {cure}" for phrase, cure in CURES if phrase in text), None)


def is_agreed(error: BaseException) -> bool:
    """Returns whether all processes raise the error at the same point, so that only one reports."""
    return any(getattr(cause, "agreed", False) for cause in _causes(error))


LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|failed to recv, got 0 bytes"
)
"""Messages from gloo, NCCL and torch's store after the process at the other end has ended."""


def lost_process(error: BaseException) -> bool:
    """Returns whether a collective operation failed because another process has ended."""
    return any(
        isinstance(cause, RuntimeError)
        and LOST.search(str(cause)) is not None
        and _raised_by(cause, "torch")
        for cause in _causes(error)
    )


def was_restoring(error: BaseException) -> bool:
    """Returns whether Lightning raised an error while restoring a checkpoint."""
    return any(
        Path(frame.filename).name == "checkpoint_connector.py" and "restore" in frame.name
        for frame in traceback.extract_tb(error.__traceback__)
    )


def condense(report: str) -> str:
    """Condenses a jsonargparse report to the option and the first reason, in one line.

    For a union, the report lists the reasons for each of its types.
    """
    keys: list[str] = []
    reasons: list[str] = []
    owner = ""
    for line in (line.strip().removeprefix("- ") for line in report.splitlines()):
        head = _HEAD.match(line)
        if head and reasons:
            break  # another type of the union
        if head and head["key"]:
            keys.append(head["key"])
        elif head:
            owner = head["owner"]
        reason = line[head.end() :] if head else line
        if reason and not reason.startswith(NOISE):
            reasons.append(reason)
    text = "; ".join(dict.fromkeys(reasons))
    if (unknown := _UNKNOWN.match(text)) is not None:
        option = ".".join([*keys, *filter(None, unknown.groups())])
        return f"--{option} is not an option" + (f" of {owner}" if owner else "")
    value = _VALUE.search(report)
    if value is not None and "Got value" not in text:
        text = f"{text}. Got value: {value[1]}"
    return f"--{'.'.join(keys)}: {text}" if keys else text


_HEAD = re.compile(
    r"(?:Parser key \"(?P<key>[^\"]+)\"(?: element \d+)?"
    r"|Problem with given class_path '(?P<owner>[^']+)')[: ]*"
)
_UNKNOWN = re.compile(
    r"unrecognized arguments: --([^\s=]+)"
    r"|(?:Group '([\w.]+)' does not accept |Subcommand '\w+' does not accept )?[oO]ption '([^']+)'"
)
_MISSING = re.compile(r"the following arguments are required: (.+)")
_VALUE = re.compile(r"^\s*Given value: (?!NestedArg\()(.*)$", re.MULTILINE)


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean X?" for the most similar name, or an empty string.

    Args:
        name: Name as typed.
        names: Valid names.
    """
    lower = {valid.lower(): valid for valid in names}
    matches = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[matches[0]]}?" if matches else ""


def with_options(
    message: str, parser: argparse.ArgumentParser, classes: Mapping[str, type] | None = None
) -> str:
    """Completes a message about options with their names on the command line.

    A missing option is named as it is typed; for an unknown one, the most similar option is
    suggested.

    Args:
        message: Message from :func:`condense`.
        parser: Parser with the valid options.
        classes: Classes of ``model`` and ``data``, whose arguments are valid options too.
    """
    if (missing := _MISSING.match(message)) is not None:
        typed = {*_options(parser)}
        keys = [key.rpartition(".")[2] for key in missing[1].split(", ")]  # without the verb
        return f"missing: {', '.join(f'--{key}' if f'--{key}' in typed else key for key in keys)}"
    unknown = re.match(r"--(\S+) is not an option", message)
    if unknown is None:
        return message
    name = unknown[1].replace("init_args.", "")
    options = [*_options(parser), *_class_options(classes or {})]
    names = {
        o.lstrip("-").replace("init_args.", "") for o in options if not o.endswith(("+", "help"))
    }
    names = {option for option in names if not name.startswith(f"{option}.")}
    if name in names:  # an option of another verb
        return message
    by_last = {option.rpartition(".")[2]: option for option in sorted(names, reverse=True)}
    last = name.rpartition(".")[2]
    matches = (
        [by_last[last]]
        if last in by_last
        else difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    )
    similar = difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)
    matches = matches or [by_last[option] for option in similar]
    return f"{message}. Did you mean --{matches[0]}?" if matches else message


def check_verb(argv: Sequence[str], verbs: Collection[str], example: str) -> None:
    """Checks the verb of a command line.

    Args:
        argv: Arguments after the program's name.
        verbs: Valid verbs.
        example: A command line that begins with ``python PROGRAM VERB``.

    Raises:
        UserError: If the first argument is not a verb.
    """
    word = argv[0] if argv and not argv[0].startswith("-") else ""
    if word in verbs:
        return
    program = example.split()[1]
    wrong = f"{word} is not a verb of {program}.{suggest(word, verbs)}" if word else ""
    wrong = wrong or f"{program} needs a verb as its first argument."
    raise UserError(f"{wrong} The verbs are {', '.join(verbs)}; for example: {example}")


def _class_options(classes: Mapping[str, type]) -> Iterator[str]:
    """Yields the options of classes, each prefixed with its key."""
    for key, cls in classes.items():
        parser = ArgumentParser()
        parser.add_class_arguments(cls, key)
        yield from parser._option_string_actions


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the options of a parser and its verbs."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _options(verb)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _is_ours(error: BaseException) -> bool:
    """Returns whether this project raised the error explicitly, or defines its class."""
    if type(error).__module__.partition(".")[0] in PACKAGES:
        return True
    if not isinstance(error, ValueError | OSError):
        return False
    if isinstance(error, OSError) and (error.filename is not None or full_disk(error)):
        return False  # a system error, which names a file
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path = Path(frames[-1].filename)
    if frames[-1].name == "__init__" and path.name.startswith("<"):  # generated by dataclasses
        return True
    # a ValueError that C code raises in one of our lines (unpacking, int()) is a bug
    is_user_error = isinstance(error, OSError) or (frames[-1].line or "").startswith("raise")
    in_project = path.is_relative_to(PROJECT) and path.relative_to(PROJECT).parts[0] in PACKAGES
    return is_user_error and in_project


def _without_worker(message: str) -> str:
    """Strips the text that torch adds to a message from a DataLoader worker."""
    if not re.match(r"Caught \w+ in DataLoader worker process", message):
        return message
    return message.rstrip().splitlines()[-1].partition(": ")[2]


def is_launcher_error(error: BaseException) -> bool:
    """Returns whether the error is about the environment variables that a launcher sets."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]  # os.environ adds a frame
    return any({"lightning", "environments"} <= {*Path(frame.filename).parts} for frame in frames)


def _raised_by(error: BaseException, package: str, *folders: str) -> bool:
    """Returns whether the error was raised in a package, or in one of its given ``folders``."""
    frames = traceback.extract_tb(error.__traceback__)
    parts = Path(frames[-1].filename).parts if frames else ()
    return package in parts and (not folders or any(folder in parts for folder in folders))


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _weights_do_not_fit(message: str) -> str:
    """Returns the beginning of torch's list of mismatches."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    first = _one_line(" ".join(lines[1:3]))
    return f"the checkpoint's weights do not fit this model: {first}{more}"
