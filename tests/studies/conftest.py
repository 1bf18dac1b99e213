"""A study of two runs, and commands that are not executed."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import yaml

from studies import results_page, runner
from studies.study import load_study

load_declared = functools.cache(load_study)
"""A study of the project as declared, to be read only: loading one takes tenths of a second."""
SHAPE = {"num_layers": 1, "dim": 16, "num_heads": 2, "positions": "rope"}


def model(kind: str) -> dict:
    return {"class_path": f"lightning_models.{kind}", "init_args": {"config": SHAPE}}


CONTENT = {
    "title": "Two runs",
    "introduction": "Is one better?",
    "data": {"tokenizer": "bytes", "block_size": 16, "batch_size": 2},
    "steps": 2,
    "seeds": [0, 1],
    "evaluations": {"blockwise": {}},
    "runs": {
        "plain": {"model": model("TransformerLM")},
        "copy": {
            "title": "copied",
            "model": model("CopyLM"),
            "evaluations": {
                "blockwise": {},
                "sampled": {"mode": "autoregressive", "positions": 8},
            },
            "analyses": {
                "looks": {
                    "class_path": "callbacks.ForkAnalysis",
                    "reference": "plain",
                    "files": ["*.png", "*.csv"],
                    "quoting": ["quote.png"],
                }
            },
        },
    },
    "columns": {
        "bpb": "blockwise.bits_per_byte",
        "gap": "sampled.difference.nats_per_token",
        "logged M": "`logged.val/x` / 1e6",
    },
    "protocol": "Nothing was searched.",
}


@pytest.fixture
def study_file(tmp_path):
    """Writes the file of the study with changed keys (None: without the key); returns its path."""

    def write(**changes):
        content = {key: each for key, each in (CONTENT | changes).items() if each is not None}
        path = tmp_path / "pair.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def study(study_file):
    """Two runs of two steps on two seeds; the second run has more to measure."""
    return load_study(str(study_file(paired={"bpb": "plain"})))


class Commands:
    """In place of the execution of commands: records them, and raises for some of them."""

    def __init__(self):
        self.seen = []
        self.failing = {}
        """What to raise, by a word of the command."""

    def __call__(self, command, log: Path, label=""):
        command = [str(word) for word in command]
        self.seen.append(command)
        log.write_text("not executed")
        value = dict(itertools.pairwise(command))
        if "fit" in command:
            folder = Path(value["--trainer.default_root_dir"], "X", "version_0", "checkpoints")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "last.ckpt").touch()
        for word, error in self.failing.items():
            if any(word in part for part in command):
                raise error
        if "--output" in command:
            seed = int(_run_of(command)[-1])
            # the copied run is better by 0.5 on seed 0 and by 0.25 on seed 1
            bits = 2.0 + seed - (0.0 if "plain" in _run_of(command) else 0.5 / (1 + seed))
            result = {"bits_per_byte": bits, "causal": "plain" in _run_of(command)}
            result["difference"] = {"nats_per_token": -1e-9}
            Path(value["--output"]).write_text(json.dumps(result))
        if "validate" in command:
            for name in ("picture.png", "quote.png"):
                Path(value["-c"]).with_name(name).write_text("picture")

    def compare(self, argv):
        """In place of ``evaluate.py compare``."""
        self.seen.append(["python", "evaluate.py", *map(str, argv)])
        output = argv[argv.index("--output") + 1]
        Path(output).mkdir(exist_ok=True)
        for name in ("report.md", "report.html", "runs.csv", "checks.csv", "loss.svg"):
            Path(output, name).write_text("A comparison.")
        return 0

    @property
    def kinds(self):
        """Verb of each command, with its run."""
        runs = [command for command in self.seen if command[2] != "compare"]
        return [f"{command[2]} {_run_of(command)}" for command in runs]


def _run_of(command) -> str:
    return next(part for word in command for part in Path(word).parts if "-seed" in part)


@pytest.fixture
def commands(monkeypatch):
    commands = Commands()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several jobs change it
    monkeypatch.setattr(runner, "execute", commands)
    monkeypatch.setattr(results_page, "evaluate", commands.compare)
    cost = {"run.parameters": 10, "run.flops": 3e12, "run.inference_flops_per_token": 2e3}
    cost["run.commit"] = "9e3b1c2"
    monkeypatch.setattr(results_page, "read_cost", lambda folder, split: cost)
    monkeypatch.setattr(results_page, "read_scalars", lambda folder: {"val/x": {0: 4e6, 1: 3e6}})
    return commands
