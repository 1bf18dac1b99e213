"""The parts of the record, each a function from a folder to plain values.

They run on the packages of the checkout that ``RECORD_TREE`` names, in its own process.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import yaml
import zstandard

TREE = Path(os.environ["RECORD_TREE"])
INPUTS = yaml.safe_load((Path(__file__).with_name("inputs.yaml")).read_text())
WORDS = ("the", "thought", "latent", "state", "token", "memory", "ponders", "forks", "reads", "and")
SIZES = ("dim=16", "num_layers=3", "num_heads=2")
QUICK = (
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.check_val_every_n_epoch=null",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.num_sanity_val_steps=0",
    "--samples.every_n_validations=0",
    "--seed_everything=0",
    "--loggers=csv",
)
TEXT = ("--data=datamodules.LocalText", "--data.data_files=text.jsonl", "--data.block_size=32")
SENTENCES = (
    "--data=datamodules.Sentences",
    "--data.corpus=datamodules.LocalText",
    "--data.corpus.data_files=text.jsonl",
    "--data.batch_tokens=256",
)
PARITY = (
    "--data=datamodules.StateTracking",
    "--data.train_examples=40",
    "--data.val_examples=8",
    "--data.test_examples=8",
    "--data.operations=[4,5]",
    "--data.test_operations=[4,5]",
    "--data.block_size=400",
)
SENTENCE_WINDOWS = (
    "--data=datamodules.SentenceWindows",
    "--data.corpus=datamodules.LocalText",
    "--data.corpus.data_files=text.jsonl",
    "--data.block_size=48",
)
METHODS = {
    "TransformerLM": TEXT,
    "ThoughtbubblesLM": (*TEXT, "--model.config.fork_layers=[1,2]", "--model.config.kappa=2L"),
    "CopyLM": TEXT,
    "LatentThoughtLM": (*TEXT, "--model.config.inner_steps=2"),
    "PonderLM": TEXT,
    "PonderLM1": TEXT,
    "PonderLM2": TEXT,
    "LoopedLM": TEXT,
    "PauseLM": TEXT,
    "MoRLM": TEXT,
    "ThoughtGestaltLM": (*SENTENCES, "--model.config.sentence_layer=2"),
    "GistLM": SENTENCE_WINDOWS,
    "ThinkingStatesLM": PARITY,
    "CoTLM": PARITY,
    "NoCoTLM": PARITY,
    "ICoTLM": PARITY,
    "CoconutLM": PARITY,
}
ANALYSES = {
    "ThoughtbubblesLM": "ForkAnalysis",
    "ThoughtGestaltLM": "GateAnalysis",
    "LatentThoughtLM": "PosteriorAnalysis",
    "PonderLM": "StepAllocation",
    "ThinkingStatesLM": "ThoughtTrace",
}
PROMPTED = ("TransformerLM", "ThoughtbubblesLM", "PonderLM", "LatentThoughtLM", "ThoughtGestaltLM")
DIALS = {"LatentThoughtLM": "inner_steps=1,2"}
TRANSIENT = ("second", "time", "wall", "memory", "date", "path", "checkpoint", "version", "digest")
"""What keys of results contain whose values are not the same twice."""


def digest(content: bytes | str) -> str:
    """The beginning of a SHA-256."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(content).hexdigest()[:12]


def call(program: str, *argv: object) -> tuple[int, str, str]:
    """Runs train.py or evaluate.py within this process; returns exit code, stdout and stderr."""
    if program == "train":
        from training import main
    else:
        from evaluation.cli import main
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main([str(word) for word in argv])
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # a fault is an outcome, too
            errors.write(f"Traceback {type(error).__name__}: {error}")
            code = 1
    return int(code or 0), output.getvalue(), errors.getvalue()


def write_text(folder: Path) -> None:
    """Forty documents in ``text.jsonl``."""
    draw = random.Random(0)
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(40):
            sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for _ in range(9)]
            text = " ".join(f"{sentence.capitalize()}." for sentence in sentences)
            file.write(json.dumps({"text": text}) + "\n")


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _flat(each, f"{key}.{index}")
    elif isinstance(value, bool | int | float) or value is None:
        yield key, value


def numbers(value: Any) -> dict[str, Any]:
    """The numbers of a result by their path, without what differs from run to run."""
    found = dict(_flat(value))
    return {k: v for k, v in found.items() if not any(part in k for part in TRANSIENT)}


# ---- configurations


def configs(folder: Path) -> dict[str, Any]:
    """`--print_config` of every file that trains: a digest for each of its top-level keys."""
    found = {}
    for path in sorted((TREE / "configs").glob("*/*.yaml")):
        if path.parent.name in ("studies", "tasks", "data", "trainer"):
            continue
        code, output, _ = call("train", "fit", "-c", path, "--print_config")
        parsed = yaml.safe_load(output) if code == 0 else {}
        keys = {key: digest(json.dumps(value, default=str)) for key, value in parsed.items()}
        found[f"{path.parent.name}/{path.name}"] = {"exit": code, **keys}
    return found


# ---- studies


class _Started:
    """A process that a study starts: its command line is kept, and it has done its work at once."""

    commands: list[str] = []  # noqa: RUF012
    pid, returncode = 1, 0

    def __init__(self, command: list[Any], **_: Any) -> None:
        words = [str(word) for word in command]
        value = dict(itertools.pairwise(words))
        shown = [_moved(word) for word in words]
        if "compare" in words:  # read from the runs, which there are none of here
            raise KeyboardInterrupt
        if "-c" in words:
            config = json.dumps(yaml.safe_load(Path(value["-c"]).read_text()))
            shown.append(digest(_moved(config)))
        if "fit" in words:
            root, config = Path(value["--trainer.default_root_dir"]), Path(value["-c"])
            kind = yaml.safe_load(config.read_text())["model"]["class_path"].rpartition(".")[2]
            checkpoints = root / kind / "version_0" / "checkpoints"
            checkpoints.mkdir(parents=True, exist_ok=True)
            (checkpoints / "last.ckpt").touch()
        elif "--output" in words:
            Path(value["--output"]).write_text("{}")
        self.commands.append(" ".join(shown))

    def wait(self, timeout: float | None = None) -> int:
        return 0

    poll = wait

    def communicate(self, *_: Any, **__: Any) -> tuple[bytes, bytes]:
        return b"", b""

    def __enter__(self) -> "_Started":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _moved(text: str) -> str:
    """The text, wherever the checkout, this part and the interpreter are."""
    names = {sys.executable: "python", str(TREE): "TREE", str(Path.cwd()): "RUNS"}
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def studies(folder: Path) -> dict[str, Any]:
    """Command lines, with their configurations, of the runs of every study."""
    from studies.__main__ import main

    found = {}
    for path in sorted((TREE / "configs" / "studies").glob("*.yaml")):
        output = "report.md" if "columns" in yaml.safe_load(path.read_text()) else "report"
        for options in ((), ("--steps", "5"), ("--epochs", "2", "--seeds", "3,1")):
            _Started.commands.clear()
            where = folder / "studied"
            shutil.rmtree(where, ignore_errors=True)
            with (
                mock.patch.object(subprocess, "Popen", _Started),
                contextlib.suppress(BaseException),
            ):
                main([path.stem, *options, "--folder", str(where), "--output", output])
            lines = sorted(_Started.commands)
            print("\n".join(lines))
            found[" ".join((path.stem, *options))] = {
                "steps": len(lines),
                "lines": digest("\n".join(lines)),
            }
    return found


# ---- runs, commands, analyses


def runs(folder: Path) -> dict[str, Any]:
    """A short run of each method; commands and analyses on its checkpoint."""
    write_text(folder)
    _write_tasks(folder)
    return {name: _run(name, folder) for name in METHODS}


def _run(name: str, folder: Path) -> dict[str, Any]:
    sizes = [f"--model.config.{size}" for size in SIZES]
    batch = () if METHODS[name][0] == SENTENCES[0] else ("--data.batch_size=4",)
    model = (f"--model=lightning_models.{name}", *sizes)
    root = f"--trainer.default_root_dir=runs/{name}"
    code, _, errors = call("train", "fit", *model, *METHODS[name], *batch, *QUICK, root)
    paths = sorted(Path("runs", name).rglob("last.ckpt"))
    if code or not paths:
        print(name, errors[-500:])
        return {"exit": code}
    content = torch.load(paths[0], weights_only=True)
    metrics = pd.read_csv(paths[0].parents[1] / "metrics.csv")
    weights = content["state_dict"]
    return {
        "weights": digest(b"".join(_bytes(weights[key]) for key in sorted(weights))),
        "metrics": _table(metrics),
        "verbs": _verbs(name, paths[0]),
        "analysis": _analysis(name, paths[0]),
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _table(frame: pd.DataFrame) -> dict[str, Any]:
    """A column's digest, of its values in nine digits."""
    return {
        str(key): digest(" ".join(_shown(value) for value in frame[key]))
        for key in sorted(frame)
        if not any(part in str(key) for part in (*TRANSIENT, "tokens_per", "mfu"))
    }


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float | np.floating) else str(value)


def _verbs(name: str, path: Path) -> dict[str, Any]:
    """Results of the commands that take this method."""
    scored = ("--limit_batches", 2, "--split", "train")
    commands: dict[str, tuple] = {"perplexity": ("perplexity", "--ckpt", path, *scored)}
    if METHODS[name][0] == TEXT[0]:
        left = ("--mode", "autoregressive", "--positions", 9)
        commands["left to right"] = ("perplexity", "--ckpt", path, *scored, *left)
        commands["tasks"] = ("tasks", "--ckpt", path, "--tasks", "pairs", "--include_path", "tasks")
    if METHODS[name] is PARITY:
        commands["reason"] = ("reason", "--ckpt", path)
    if name in DIALS:
        dial = ("--dial", DIALS[name], "--limit_batches", 2, "--output", "sweep.svg")
        commands["sweep"] = ("sweep", "--ckpts", path, *dial)
    results = {key: _result(words) for key, words in commands.items()}
    if name in PROMPTED:
        words = ("generate", "--ckpt", path, "--prompt", "the thought", "--max_new_tokens", 8)
        for temperature in (0, 1):
            code, output, _ = call("evaluate", *words, "--temperature", temperature, "--seed", 1)
            results[f"generate at {temperature}"] = f"{code}, {digest(output)}"
        sizes = ("--samples", 3, "--sample_tokens", 6, "--judge", "null")
        words = ("quality", "--ckpt", path, "--mode", "unconditional", *sizes)
        results["quality"] = _result(words)
    return results


def _result(words: tuple) -> dict[str, Any]:
    """Numbers of the file that a command writes."""
    target = Path("sweep.csv" if words[0] == "sweep" else "result.json")
    target.unlink(missing_ok=True)
    output = () if words[0] == "sweep" else ("--output", target)
    code, _, errors = call("evaluate", *words, *output)
    if code or not target.exists():
        print(words, errors[-500:])
        return {"exit": code}
    if target.suffix == ".csv":
        return _table(pd.read_csv(target))
    return numbers(json.loads(target.read_text()))


def _analysis(name: str, path: Path) -> dict[str, Any]:
    """Columns of the tables that a validation writes."""
    if name not in ANALYSES:
        return {}
    callback = f"--trainer.callbacks+=callbacks.{ANALYSES[name]}"
    root = f"--trainer.default_root_dir=analysed/{name}"
    few = ("--trainer.callbacks.num_batches=1", "--trainer.limit_val_batches=2")
    code, _, errors = call("train", "validate", f"--ckpt_path={path}", callback, *few, root)
    if code:
        print(name, errors[-500:])
        return {"exit": code}
    return {
        file.name: _table(pd.read_csv(file))
        for file in sorted(Path("analysed", name).rglob("*.csv"))
        if file.name != "metrics.csv"
    }


TASK = """task: pairs
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{goal}}"
doc_to_choice: "{{[one, two]}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def _write_tasks(folder: Path) -> None:
    (folder / "tasks").mkdir()
    draw = random.Random(1)
    pick = lambda n: " ".join(draw.choices(WORDS, k=n))  # noqa: E731
    rows = [{"goal": pick(5), "one": pick(3), "two": pick(4), "label": i % 2} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK.replace("FILE", str(folder / "rows.jsonl"))
    (folder / "tasks" / "pairs.yaml").write_text(task)


# ---- token files


def stores(folder: Path) -> dict[str, Any]:
    """Digests of the token files of small corpora in their publishers' formats."""
    import datamodules

    pages = [f"Page {i} says:\n" + "a word of it. " * (i % 7 + 1) for i in range(60)]
    named = [
        {"text": page, "meta": {"pile_set_name": ("ArXiv", "Github")[i % 2]}}
        for i, page in enumerate(pages)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in named).encode()
    Path("pages.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    Path("pages.json.gz").write_bytes(gzip.compress(lines))
    pd.DataFrame({"text": pages}).to_parquet("pages.parquet")
    article = "\n = Title {i} = \n\n Text of {i} . \n"
    Path("wiki.raw").write_text("".join(article.format(i=i) for i in range(60)))
    write_text(folder)
    cases = {
        "OpenWebText": {"data_files": "pages.parquet", "val_documents": 9},
        "PeS2o": {"data_files": "pages.json.gz", "val_fraction": 0.1},
        "Pile": {"data_files": "pages.jsonl.zst", "pile_sets": ["ArXiv"], "val_fraction": 0.1},
        "WikiText103": {"data_files": "wiki.raw", "shuffle_seed": 3},
        "LocalText": {"data_files": "text.jsonl"},
        "PythonDocs": {},
    }
    found = {}
    for kind, options in cases.items():
        for tokenizer in ("bytes", "bpe:300"):
            cache = folder / "caches" / f"{kind} {tokenizer}"
            data = getattr(datamodules, kind)(
                **options, tokenizer=tokenizer, block_size=16, cache_dir=str(cache)
            )
            data.prepare_data()
            files = sorted(path for path in cache.rglob("*") if path.suffix in (".tokens", ".ends"))
            found[cache.name] = {path.name: digest(path.read_bytes()) for path in files}
    return found


# ---- input that must be refused


FIT = (
    "fit",
    *TEXT,
    "--data.batch_size=4",
    "--data.cache_dir=cache",
    *("--model.config.dim=16", "--model.config.num_layers=1", "--model.config.num_heads=2"),
    *("--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"),
    *("--trainer.num_sanity_val_steps=0", "--samples.every_n_validations=0"),
)
CKPT = "runs/TransformerLM/version_0/checkpoints/last.ckpt"


def bad(folder: Path) -> dict[str, Any]:
    """Exit code of each bad input, and whether its one line names what is bad."""
    write_text(folder)
    _write_bad_files(folder)
    assert call("train", *FIT, "--trainer.default_root_dir=runs")[0] == 0
    whole = Path(CKPT).read_bytes()
    Path("cut.ckpt").write_bytes(whole[: len(whole) // 2])
    found = {}
    for kind, lines in INPUTS.items():
        for line in lines:
            words = line.replace("CKPT", CKPT).split() or [""]
            argv = (*FIT, line) if kind == "fit" else words
            outcome = _outcome(call("evaluate" if kind == "evaluate" else "train", *argv), line)
            found[f"{kind} {line}"] = outcome
    return found


def _outcome(result: tuple[int, str, str], line: str) -> str:
    """Exit code, number of error lines, whether one names the option or the value."""
    code, _, errors = result
    shown = [text for text in errors.splitlines() if text.startswith("error: ")]
    last = line.split()[-1]
    option, _, value = last.rpartition("=") if "=" in last else ("", "", last)
    names = [option.lstrip("-").rpartition(".")[2], Path(value).name, *line.split()[-2:-1]]
    named = any(name.lstrip("-") in text for name in names if name.strip("-") for text in shown)
    if "Traceback" in errors:
        return f"{code}, traceback"
    return f"{code}, {len(shown)} line, {'named' if named else 'not named'}"


def _write_bad_files(folder: Path) -> None:
    (folder / "empty.ckpt").touch()
    (folder / "folder").mkdir()
    broken = '{"text": "a"}\n{"text": "b"}\n{"text": "c\n{"text": "d"}\n'
    texts = {
        "broken.jsonl": broken,
        "deep.jsonl": '{"text": "a"}\n' + "[" * 100_000 + "\n",
        "deep.json": "[" * 100_000,
        "no.yaml": "a: [\n",
        "reference.yaml": "trainer: {max_steps: '${nowhere}'}\n",
        "long.txt": "word " * 99 + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("binary.json", "binary.yaml"):
        (folder / name).write_bytes(bytes(range(256)))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"some words " * 999)[:-9])
    torch.save({"state_dict": {}, "epoch": 3}, folder / "foreign.ckpt")


class Evil:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch trace",)


def hostile(folder: Path) -> dict[str, Any]:
    """Exit code of each checkpoint that would run code, and whether any code ran."""
    write_text(folder)
    assert call("train", *FIT, "--trainer.default_root_dir=runs")[0] == 0
    (folder / "lies_around.py").write_text(
        "open('trace', 'w')\nfrom datamodules import LocalText\nclass Thing(LocalText): pass\n"
    )
    sys.path.insert(0, str(folder))
    found = {}
    for name, content in _hostile_contents(torch.load(CKPT, weights_only=True)):
        Path("evil").mkdir(exist_ok=True)
        if isinstance(content, bytes):
            Path("evil/last.ckpt").write_bytes(content)
        else:
            torch.save(content, "evil/last.ckpt")
        for program, *argv in (
            ("train", "fit", "--ckpt_path=evil/last.ckpt", "--trainer.max_steps=3"),
            ("train", "test", "--ckpt_path=evil/last.ckpt", "--trainer.accelerator=cpu"),
            ("evaluate", "perplexity", "--ckpt", "evil/last.ckpt"),
        ):
            code = call(program, *argv)[0]
            ran = Path("trace").exists() or "lies_around" in sys.modules
            found[f"{name}, {argv[0]}"] = f"{code}, {'ran code' if ran else 'ran nothing'}"
    return found


def _hostile_contents(good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "honest", good
    yield "bare pickle", pickle.dumps(Evil(), protocol=2)
    yield "pickle", pickle.dumps({"state_dict": Evil()})
    yield "torch file", Evil()
    yield "hyper-parameters", {**good, "hyper_parameters": {"config": {"dim": Evil()}}}
    yield "callback", {**good, "callbacks": {"ResumeState": {"state": [Evil()]}}}
    thing = {"class_path": "lies_around.Thing", "init_args": {}}
    Path("thing.yaml").write_text(yaml.safe_dump(thing))
    spellings = {
        "dict": thing,
        "yaml": yaml.safe_dump(thing),
        "json": json.dumps(thing),
        "name": "lies_around.Thing",
        "listed": [thing],
        "file": "thing.yaml",
    }
    sentences = {"class_path": "datamodules.Sentences", "init_args": {"corpus": None}}
    places = {
        "model": ("model",),
        "optimizer": ("model", "init_args", "optimizer"),
        "config": ("model", "init_args", "config"),
        "field": ("model", "init_args", "config", "dim"),
        "unknown field": ("model", "init_args", "config", "more"),
        "data": ("data",),
        "corpus": ("data", "init_args", "corpus"),
    }
    for place, keys in places.items():
        for spelling, value in spellings.items():
            changed = pickle.loads(pickle.dumps(good))
            if place == "corpus":
                changed["recipe"]["data"] = {**sentences, "init_args": {"corpus": None}}
            target = changed["recipe"]
            for key in keys[:-1]:
                target = target[key]
            target[keys[-1]] = value
            yield f"{place} as {spelling}", changed
