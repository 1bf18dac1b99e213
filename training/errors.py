"""Which errors are the user's to fix, and the one line they are reported in."""

import argparse
import dataclasses
import difflib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from datamodules.journals import no_room

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
    ("EADDRINUSE", "another program has that port: set MASTER_PORT to a free one"),
)
"""What messages of Python, numpy and torch say of too large and misspelt values; and the cures."""


TRACKERS = ("wandb", "mlflow")
"""Packages of loggers, whose own errors are of accounts, servers and stores."""


LOST_PROCESS = 4
"""Exit code of a process that another one of the run has left alone."""
LOST_LINE = (
    "another process of the run has ended, so this one ends, too (was it killed, or out of memory? "
    "--ckpt_path last resumes training)"
)


class UserError(Exception):
    """A problem with the input, reported without a traceback; the message names the cure."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        """Takes the message.

        Args:
            message: What is wrong, and the cure.
            agreed: Whether all processes of the run raise it at the same place.
        """
        super().__init__(message)
        self.agreed = agreed


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
    if (full := no_room(error)) is not None:
        name = getattr(error, "filename", None) or "the log, or another file of the run"
        return f"{name} cannot be written ({full}); make room, or choose another place"
    if of_launcher(error):
        missing = f"the environment variable {error} is missing; start with srun or torchrun"
        text = missing if isinstance(error, KeyError) else _one_line(str(error))
        return f"{text.rstrip('.')}. For a run of one process, set --trainer.devices 1"
    if isinstance(error, OSError) and error.filename is not None:
        reason = error.strerror or type(error).__name__
        return f"{error.filename}: {reason}. Check the path, or choose another one"
    if isinstance(error, RuntimeError) and "Error(s) in loading state_dict" in str(error):
        return _weights_do_not_fit(str(error))
    if isinstance(error, ValueError) and _raised_by(error, "jsonargparse"):
        return condense(str(error))
    text = _one_line(str(error))
    return next((f"{text}; {cure}" for words, cure in CURES if words in text), None)


def is_agreed(error: BaseException) -> bool:
    """Whether all processes of the run raise the error at the same place, so that one reports."""
    return any(getattr(cause, "agreed", False) for cause in _causes(error))


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


def was_restoring(error: BaseException) -> bool:
    """Whether Lightning raised an error while it restored the state of a checkpoint."""
    return any(
        Path(frame.filename).name == "checkpoint_connector.py" and "restore" in frame.name
        for frame in traceback.extract_tb(error.__traceback__)
    )


def condense(report: str) -> str:
    """Returns a report of jsonargparse as one line: the option, what is wrong, what is right.

    ``Parser key "model": Problem with given class_path 'A': Parser key "config.dim": Expected a
    <class 'int'>. Got value: x`` becomes ``--model.init_args.config.dim (x) must be a whole
    number``. The record of the parser's search is left out.
    """
    lines = [line.strip() for line in report.splitlines()]
    kept = [line for line in lines if line and not line.startswith(NOISE)]
    text = " ".join(line.removeprefix("- ") for line in kept)
    given = re.search(r"^\s*Given value: (?!NestedArg\()(.*)$", report, re.MULTILINE)
    return _name_option(text, given[1] if given else None)


_KEY = re.compile(r"Parser key \"(?P<key>[^\"]+)\":? ?(?P<rest>.*)")
_OF_CLASS = re.compile(
    r"Problem with given class_path '(?P<name>[^']+)': (?P<rest>.*?)"
    r"(?:(?<!\":)(?= Problem with given class_path '[^']+': (?:Option '|module '|No module))|$)"
)
"""The first class of a union: the others are tried after it, and fail for being others. A class
that follows a key is the value of that argument."""
_NO_OPTION = re.compile(
    r"unrecognized arguments: --(?P<option>[^\s=]+).*|Option '(?P<own>\S+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<member>[^']+)'"
)
_NO_MEMBER = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_EXPECTED = re.compile(
    r"Expected a (?:<class '(?P<kind>[\w.]+)'>|typing\.Literal\[(?P<choices>.*?)\](?=$|[. ])"
    r"|(?P<path>dot import path) string: .*?(?=$| Expected a ))"
    r"(?:\. Got value: (?P<value>.*?)(?=$| Problem with | Expected a ))?"
)
KINDS = {
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "str": "text",
    "collections.abc.Iterable": "a list",
}
"""What values of types are called in messages."""


def _name_option(text: str, given: str | None) -> str:
    """Returns the message for an option; a text that names no parser key stays as it is.

    Args:
        text: a report in one line.
        given: the value that was refused; None: the text has it, or it is one of a group.
    """
    keys: list[str] = []
    kind = ""
    while (found := _KEY.match(text)) is not None:
        keys, text = [*keys, found["key"]], found["rest"]
        if (of_class := _OF_CLASS.search(text)) is not None:
            kind, text = of_class["name"], of_class["rest"]
            if text.startswith("Parser key") or _NO_OPTION.match(text):
                keys, given = [*keys, "init_args"], None
    if not keys:
        return text
    option = "--" + ".".join(keys)
    if (unknown := _NO_OPTION.match(text)) is not None:
        group = ".".join(filter(None, (unknown["group"], unknown["member"])))
        return f"{option}.{unknown['option'] or unknown['own'] or group} is no option of {kind}"
    if (missing := _NO_MEMBER.match(text)) is not None:
        names = getattr(sys.modules.get(missing["module"]), "__all__", ())
        near = [f"{missing['module']}.{name}" for name in nearest_names(missing["name"], names)]
        return f"{option} ({kind}): there is no such class{is_meant(near)}"
    return f"{option}{_reason(text, given, kind)}"


def _reason(text: str, given: str | None, kind: str) -> str:
    """Returns value and reason, to follow the name of an option."""
    wanted: dict[str, None] = {}
    choices: list[str] = []
    for found in _EXPECTED.finditer(text):
        given = found["value"] or given
        if found["choices"]:
            choices += re.findall(r"[^\s,']+", found["choices"])
        elif found["path"]:
            wanted["the path of a class, such as callbacks.ForkAnalysis"] = None
        else:
            wanted[KINDS.get(found["kind"], f"a {found['kind'].rpartition('.')[2]}")] = None
    if choices:
        wanted["one of " + ", ".join(dict.fromkeys(choices))] = None
    shown = f" ({given})" if given else ""
    if not wanted:
        return f"{shown}: {text}" if not kind or kind == given else f" ({kind}): {text}"
    near = difflib.get_close_matches(str(given), choices, n=1)
    return f"{shown} must be {' or '.join(wanted)}{is_meant(near)}"


def is_meant(near: Sequence[str]) -> str:
    """Returns the question after a message, empty where nothing is near."""
    return f"; is {' or '.join(near[:3])} meant?" if near else ""


# ---- verbs


OTHER_VERBS = {
    "eval": "validate perplexity",
    "evaluate": "validate perplexity",
    "finetune": "fit",
    "harness": "tasks",
    "lm_eval": "tasks",
    "ppl": "perplexity",
    "resume": "fit",
    "run": "fit",
    "sample": "generate",
    "score": "perplexity",
    "train": "fit",
}
"""Verbs as other programs call them -> what they are called here."""


def check_verb(argv: Sequence[str], examples: Mapping[str, str]) -> None:
    """Checks the first word of a command line.

    Args:
        argv: the words after the program's name.
        examples: a command line for each verb, that begins with ``python PROGRAM VERB``.

    Raises:
        UserError: if it is no verb; the message has the verbs, or those near, and an example.
    """
    word = argv[0] if argv and not argv[0].startswith("-") else ""
    if word in examples:
        return
    first = next(iter(examples))
    program, names = examples[first].split()[1], ", ".join(examples)
    if not word and (later := next((each for each in argv if each in examples), None)):
        raise UserError(f"the verb comes first: python {program} {later} {argv[0]} ...")
    if not word:
        raise UserError(f"{program} needs a verb: {names}; for example: {examples[first]}")
    if word.endswith((".yaml", ".yml")):
        raise UserError(f"{word} is no verb of {program}; write: python {program} fit -c {word}")
    near = [verb for verb in OTHER_VERBS.get(word.lower(), "").split() if verb in examples]
    near = near or difflib.get_close_matches(word.lower(), examples, n=2)
    if near:
        hint = f"{is_meant(near)} For example: {examples[near[0]]}"
        raise UserError(f"{word} is no verb of {program}{hint}")
    hint = f"; the verbs are {names}; for example: {examples[first]}"
    raise UserError(f"{word} is no verb of {program}{hint}")


# ---- options


_UNKNOWN = re.compile(
    r"--(?P<known>\S+) is no option of"
    r"|unrecognized arguments: --(?P<option>[^\s=]+)|Option '(?P<own>\S+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<member>[^']+)'"
    r"|Subcommand '\w+' does not accept option '(?P<top>[^']+)'",
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
    argv: Sequence[str] = (),
) -> str:
    """Returns a parser's message, with the names that an unknown option may be short for.

    Args:
        message: in one line.
        parser: whose options are known.
        classes: of ``model`` and ``data``, whose arguments are known, too; None: there are none.
        argv: the command line, for a word that follows the value of another option.
    """
    classes = classes or {}
    known = list(_of_class(message, classes)) or [*_options(parser), *class_options(classes)]
    options = {o.replace(".init_args", ""): o for o in known if not o.endswith("+")}
    if (positional := _POSITIONAL.search(message)) is not None:
        if (listed := _unquoted_files(argv, positional["word"])) is not None:
            return listed
        flag = next((o for o in ("--config", "--ckpt") if o in options), None)
        return f"{message}; write {flag} {positional['word']}" if flag else message
    if (missing := _MISSING.search(message)) is not None:
        option = f"--{missing['name']}"
        kind = "option" if option in options else "argument"
        return f"the {kind} {option if kind == 'option' else missing['name']} is missing"
    if message.startswith("--trainer.logger "):
        return f"{message}; --loggers takes tensorboard, csv, wandb and mlflow by name"
    found = _UNKNOWN.match(message)
    if found is None:
        return message
    member = ".".join(filter(None, (found["group"], found["member"])))
    name = found["known"] or found["option"] or found["own"] or member or found["top"]
    asked = f"--{name}".replace(".init_args", "")
    if asked in options:  # of another verb, or of a parent class that the class does not pass on
        last = options[asked].rpartition(".")[2]
        inner = [o for o in _inner_options(classes) if o.rpartition(".")[2] == last]
        return message + (is_meant(inner) or "; leave it out")
    longer = [o for o in options if o.startswith(asked)]
    if longer:
        return f"{message}; write {' or '.join(options[o] for o in longer[:3])} in full"
    near = _nearest(asked, list(options))
    return message + is_meant([options[o] for o in near])


def _unquoted_files(argv: Sequence[str], word: str) -> str | None:
    """Returns the message for a word that is a second file of an option, null where it is not."""
    before = list(argv[: argv.index(word)]) if word in argv else []
    last = next((i for i in reversed(range(len(before))) if before[i].startswith("-")), None)
    if last is None:
        return None
    option, _, value = before[last].partition("=")
    files = [*filter(None, [value]), *before[last + 1 :], word]
    if len(files) < 2 or re.search(r"files(\.\w+)?$", option) is None:
        return None
    return (
        f"{option} takes one word, and {word} is a second one; write {option} "
        f"'[{', '.join(files)}]', or a pattern in quotes, such as '*{Path(word).suffix}'"
    )


def _of_class(message: str, classes: Mapping[str, type]) -> Iterator[str]:
    """Yields the options of the class that an option was typed for, if not one of ``classes``."""
    found = re.match(r"--(\S+)\.init_args\.\S+ is no option of ([\w.]+)\.(\w+)", message)
    if found is not None and found[1] not in classes:
        kind = getattr(sys.modules.get(found[2]), found[3], None)
        if isinstance(kind, type) and kind not in classes.values():
            yield from class_options({found[1]: kind})


def _inner_options(classes: Mapping[str, type]) -> Iterator[str]:
    """Yields the options of arguments that are classes of ours, such as a data module's corpus."""
    for key, kind in classes.items():
        for each in kind.__mro__:
            hints = get_type_hints(vars(each)["__init__"]) if "__init__" in vars(each) else {}
            for name, hint in hints.items():
                if isinstance(hint, type) and hint.__module__.partition(".")[0] in PACKAGES:
                    yield from class_options({f"{key}.init_args.{name}": hint})


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


def of_launcher(error: BaseException) -> bool:
    """Whether Lightning cannot use the environment variables of SLURM, torchrun or another one."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]  # os.environ has a frame of its own
    return any({"lightning", "environments"} <= {*Path(frame.filename).parts} for frame in frames)


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
