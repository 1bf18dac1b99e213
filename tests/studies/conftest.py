"""A study of two runs, commands that only pretend, and results that were never measured."""

import itertools
import json
from pathlib import Path

import pytest

from studies.results import Result
from studies.study import Analysis, CheckpointOf, Column, Evaluation, Run, Study

BLOCKWISE = Evaluation(name="blockwise")
SAMPLED = Evaluation(name="sampled", options={"mode": "autoregressive", "positions": 8})


def model(kind: str) -> dict:
    sizes = {"num_layers": 1, "dim": 16, "num_heads": 2, "positions": "rope"}
    return {"class_path": f"lightning_models.{kind}", "init_args": {"config": sizes}}


@pytest.fixture
def study():
    """Two runs of two steps on two seeds; the second run has more to measure."""
    looks = Analysis(
        name="looks",
        callback="callbacks.ForkAnalysis",
        options={"reference_ckpt": CheckpointOf("plain")},
        files=("*.png", "*.csv"),
        quoting=("quote.png",),
    )
    return Study(
        method="pretended",
        title="A pretended study",
        introduction="Is one better?",
        runs=(
            Run(
                name="plain", title="plain", model=model("TransformerLM"), evaluations=(BLOCKWISE,)
            ),
            Run(
                name="copy",
                title="copied",
                model=model("CopyLM"),
                cost=3,
                evaluations=(BLOCKWISE, SAMPLED),
                analyses=(looks,),
            ),
        ),
        baseline="plain",
        columns=(
            Column(title="bpb", evaluation="blockwise", digits=2),
            Column(title="sampled bpb", evaluation="sampled", digits=2),
            Column(title="gap", evaluation="sampled", key="difference.nats_per_token", digits=3),
        ),
        data={"tokenizer": "bytes", "block_size": 16, "batch_size": 2},
        trainer={},
        steps=2,
    )


class Commands:
    """Pretends to run commands; remembers them, and stops at the ones it is told to."""

    def __init__(self):
        self.seen = []
        self.failing = {}
        """What to raise, by a word of the command."""

    def __call__(self, command, log: Path):
        command = [str(word) for word in command]
        self.seen.append(command)
        log.write_text("pretended")
        value = dict(itertools.pairwise(command))
        if "fit" in command:
            folder = Path(value["--trainer.default_root_dir"], "X", "version_0", "checkpoints")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "last.ckpt").touch()
        for word, error in self.failing.items():
            if any(word in part for part in command):
                raise error
        if "--output" in command:
            Path(value["--output"]).write_text(json.dumps({"bits_per_byte": 2.0}))
        if "validate" in command:
            Path(value["-c"]).with_name("picture.png").write_text("picture")

    @property
    def kinds(self):
        """Verb or command of each, with its run."""
        return [f"{command[2]} {_run_of(command)}" for command in self.seen]


def _run_of(command) -> str:
    return next(part for word in command for part in Path(word).parts if "-seed" in part)


@pytest.fixture
def commands():
    return Commands()


@pytest.fixture
def results(study):
    """Builds the results of all runs from their bits per byte."""

    def build(**changes):
        found = []
        for run in study.seeded():
            bpb = {"plain": 2.5, "copy": 2.25}[run.name] + 0.1 * run.seed
            whole = {"bits_per_byte": bpb, "causal": run.name == "plain", "flops_per_token": 2e6}
            whole |= {"likelihood": "exact" if run.name == "plain" else "noncausal", "tokens": 99}
            sampled = {"bits_per_byte": 2.0, "nats_per_token": 4.0, "standard_error": 0.5}
            sampled |= {"likelihood": "exact", "causal": True, "of_positions": 50}
            sampled |= {"difference": {"nats_per_token": -0.25, "standard_error": 0.1}}
            values = {
                "run": run,
                "parameters": 1234,
                "seconds": 60.0 if run.name == "plain" else 90.0,
                "sittings": 1 + run.seed,
                "speed": 2000.0,
                "training_flops": 6e6,
                "tokens": 64,
                "curve": [(32, 4.0), (64, bpb)],
                "evaluations": {"blockwise": whole}
                | ({} if run.name == "plain" else {"sampled": sampled}),
                "versions": {"torch": "2.13.0", "commit": f"abc{run.seed}"},
            }
            found.append(Result(**{**values, **changes}))
        return found

    return build
