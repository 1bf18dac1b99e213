"""``python -m datamodules.reasoning.align``: places the steps of problems, by rule or by a teacher.

For example::

    python -m datamodules.reasoning.align rule --files train.jsonl
    python -m datamodules.reasoning.align teacher --files train.txt --output aligned.jsonl
        --url https://api.openai.com/v1 --model NAME

Both write files that `ReasoningGSM8K(aligned_file=...)` reads (see `gsm8k`).
``rule`` also counts its decisions.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from tqdm import tqdm

from datamodules.files import expand
from datamodules.reasoning.examples import Example
from datamodules.reasoning.gsm8k import (
    CURE,
    SolvedProblem,
    check_format,
    read_solved,
    solved_problem,
)
from datamodules.reasoning.placement import PlacementRule, counts_of
from datamodules.reasoning.teacher import ChatEndpoint, EndpointConfig, place_steps
from datamodules.word_problems import REPOSITORY, GSM8KName, fetch_problems
from lightning_models.atomic_files import write_whole

_PROGRAM = "python -m datamodules.reasoning.align"


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 2 for bad input, reported in one line.

    Args:
        args: The command line. Defaults to the arguments of the process.
    """
    try:
        settings = build_parser().parse_args(sys.argv[1:] if args is None else list(args))
        _COMMANDS[settings.command](settings[settings.command])
    except KeyboardInterrupt:
        print("interrupted; run the same command to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError, argparse.ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> ArgumentParser:
    """Returns the parser of the two commands."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=_PROGRAM, description="Places the steps of problems.", allow_abbrev=False
    )
    commands = parser.add_subcommands(dest="command", required=True)
    rule = _command("Place steps by rule, and count its decisions.", output_needed=False)
    rule.add_class_arguments(PlacementRule)
    commands.add_subcommand("rule", rule, help="by rule")
    teacher = _command("Let a language model place the steps.", output_needed=True)
    teacher.add_class_arguments(EndpointConfig)
    teacher.add_argument(
        "--concurrency", type=int, default=4, help="Number of concurrent requests."
    )
    commands.add_subcommand("teacher", teacher, help="by a language model")
    parser.exit_on_error = rule.exit_on_error = teacher.exit_on_error = False
    return parser


def _command(description: str, *, output_needed: bool) -> ArgumentParser:
    parser = ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--files",
        type=str | list[str] | None,
        default=None,
        help="Problems: jsonl in GSM8K's format or txt in GSM8K-Aug's, paths or globs (null reads "
        "the training problems of the dataset on the hub).",
    )
    parser.add_argument(
        "--dataset", type=GSM8KName, default=REPOSITORY, help="Dataset on the hub, without files."
    )
    parser.add_argument(
        "--output",
        type=str if output_needed else str | None,
        required=output_needed,
        help="jsonl file to write; `teacher` continues an existing one.",
    )
    parser.add_argument("--limit", type=int | None, default=None, help="Only the first N problems.")
    return parser


def _by_rule(settings: Namespace) -> None:
    output = None if settings.output is None else _writable(settings.output)
    rule = PlacementRule(at=settings.at, last_at_end=settings.last_at_end)
    counts: Counter[str] = Counter()
    lines = []
    for problem in tqdm(_problems(settings), unit=" problems", disable=None):
        counts["problems"] += 1
        if not problem.equations:
            counts["problems without steps"] += 1
            continue
        placed = rule(problem.question, problem.equations)
        counts.update(counts_of(placed))
        example = Example(problem.question, problem.equations, placed.markers, problem.answer)
        row = {"query": example.marked(), "thinking": list(problem.equations)}
        lines.append(json.dumps({**row, "answer": problem.answer}, ensure_ascii=False))
    if output is not None:
        write_whole(output, "".join(f"{line}\n" for line in lines))
    _print_counts(counts)


def _by_teacher(settings: Namespace) -> None:
    if settings.concurrency < 1:
        raise ValueError(f"concurrency={settings.concurrency} must be at least 1")
    output = _writable(settings.output)
    fields = EndpointConfig.__dataclass_fields__
    endpoint = ChatEndpoint(EndpointConfig(**{name: settings[name] for name in fields}))
    bar = tqdm(unit=" replies", disable=None)

    def report(counts: Counter[str]) -> None:
        """Shows the number of examples placed so far."""
        bar.set_postfix(kept=counts["kept"], dropped=counts["dropped"], refresh=False)
        bar.update()

    try:
        _print_counts(
            place_steps(
                _problems(settings),
                endpoint.complete,
                output,
                concurrency=settings.concurrency,
                report=report,
            )
        )
    finally:
        endpoint.close()
        bar.close()


_COMMANDS: dict[str, Callable[[Namespace], None]] = {"rule": _by_rule, "teacher": _by_teacher}


def _writable(target: str) -> Path:
    """Returns the path of the output after checking that its folder is writable.

    Raises:
        ValueError: If it is a folder, or its folder is missing or not writable.
    """
    output = Path(target)
    if output.is_dir():
        raise ValueError(f"output ({output}) is a folder; name a file in it")
    if not output.parent.is_dir():
        raise ValueError(
            f"output ({output}): the folder {output.parent} does not exist; create it first"
        )
    trial = output.with_name(f".{output.name}.trial")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(
            f"output ({output}): the folder {output.parent} is not writable ({error.strerror}); "
            "name another one"
        ) from error
    return output


def _problems(settings: Namespace) -> Iterator[SolvedProblem]:
    if settings.limit is not None and settings.limit < 1:
        raise ValueError(f"limit={settings.limit} must be at least 1, or null for all")
    if settings.files is None:
        problems: Iterator[SolvedProblem] = map(
            solved_problem, fetch_problems("train", cure=CURE, dataset=settings.dataset).rows
        )
    else:
        paths = expand(settings.files)
        for path in paths:
            check_format(path)
        problems = read_solved(paths, "files")
    return islice(problems, settings.limit)


def _print_counts(counts: Counter[str]) -> None:
    width = max(map(len, counts), default=0)
    for name, count in counts.items():
        print(f"{name:<{width}}  {count}")


if __name__ == "__main__":
    sys.exit(main())
