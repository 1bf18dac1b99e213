"""What all analyses share: whose turn it is, at which step, where to, and how they are added."""

import math

import pandas as pd
import pytest

from callbacks import (
    AnswerAccuracy,
    ForkAnalysis,
    GateAnalysis,
    PosteriorAnalysis,
    StepAllocation,
    ThoughtTrace,
)
from callbacks.analysis.base import Analysis, Findings
from callbacks.analysis.report import AnalysisReport, as_csv
from tests.callbacks.written import names
from training.cli import LatentCLI


class Counts(Analysis):
    """Counts the batches, and those of sweeps."""

    tag = "counts"

    def __init__(self, every=1, output=None, sweep_every=0):
        super().__init__(every, 2, output, sweep_every)

    def _collect(self, trainer, pl_module, batch, findings):
        assert not pl_module.training
        findings.add("batches", [{"kind": "swept" if self._sweeps else "seen"}])

    def _report(self, trainer, pl_module, findings):
        return AnalysisReport(texts={"found.txt": " ".join(findings["batches"]["kind"])})


class CountsOfTests(Counts):
    of_tests = True


def written(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_turns_of_validations_and_sweeps(make_model, make_data, make_trainer, tmp_path):
    """Every second validation, swept at every fourth; the sanity check is none of them."""
    options = {"max_steps": 4, "val_check_interval": 1, "limit_val_batches": 3}
    trainer = make_trainer(Counts(2, sweep_every=4), num_sanity_val_steps=1, **options)
    trainer.fit(make_model(), make_data())
    assert written(tmp_path / "counts") == {
        "val-step=2-found.txt": "seen seen",
        "val-step=4-found.txt": "swept swept",
    }


def test_validations_are_counted_on(make_model, make_data, make_trainer, tmp_path):
    analysis = Counts(3)
    analysis.load_state_dict({"validations": 2})
    trainer = make_trainer(analysis, max_steps=1, val_check_interval=1)
    trainer.fit(make_model(), make_data())
    assert set(written(tmp_path / "counts")) == {"val-step=1-found.txt"}
    assert analysis.state_dict() == {"validations": 3}


def test_checkpoints_are_analysed_at_their_step(make_model, make_data, make_trainer, tmp_path):
    """Alone, a validation is swept; a test is looked at by who says so."""
    path, data = tmp_path / "three.ckpt", make_data(test_fraction=0.2)
    trainer = make_trainer(max_steps=3, limit_val_batches=0)
    trainer.fit(make_model(), data)
    trainer.save_checkpoint(path)
    analyses = [
        Counts(output=str(tmp_path / "later")),
        CountsOfTests(output=str(tmp_path / "tests")),
    ]
    trainer = make_trainer(*analyses, limit_test_batches=1)
    trainer.validate(make_model(), data, ckpt_path=path, verbose=False)
    trainer.test(make_model(), data, ckpt_path=path, verbose=False)
    of_validation = {"val-step=3-found.txt": "swept"}
    assert written(tmp_path / "later") == of_validation
    assert written(tmp_path / "tests") == {**of_validation, "test-step=3-found.txt": "swept"}


def test_folders_that_refuse_files(make_model, make_data, make_trainer, tmp_path):
    """One that is named is refused at once; another must not end the training."""
    (tmp_path / "counts").write_text("a file is in the way")
    trainer = make_trainer(Counts(), max_steps=1, val_check_interval=1)
    with pytest.warns(UserWarning, match="counts cannot be written to"):
        trainer.fit(make_model(), make_data())
    assert trainer.global_step == 1
    trainer = make_trainer(Counts(output=str(tmp_path / "counts" / "it")))
    with pytest.raises(ValueError, match=r"counts.output \(.*\): .* is a file"):
        trainer.validate(make_model(), make_data(), verbose=False)
    assert not names(tmp_path)


IN_YAML = """
trainer:
  callbacks:
    - {class_path: callbacks.ForkAnalysis, init_args: {num_batches: 2, reference_ckpt: null}}
    - {class_path: callbacks.GateAnalysis, init_args: {num_batches: 3, every_n_steps: 10}}
    - {class_path: callbacks.PosteriorAnalysis, init_args: {steps: [0, 8], output: null}}
    - {class_path: callbacks.StepAllocation, init_args: {alphas: [-2, 2], tokens: [' a']}}
    - {class_path: callbacks.ThoughtTrace, init_args: {num_batches: 3, shown_rows: 0}}
    - {class_path: callbacks.AnswerAccuracy, init_args: {num_batches: null}}
"""


def test_all_are_added_in_yaml(tmp_path):
    config = tmp_path / "analyses.yaml"
    config.write_text(IN_YAML)
    root = f"--trainer.default_root_dir={tmp_path}"
    trainer = LatentCLI(["-c", str(config), root, "--trainer.accelerator=cpu"], run=False).trainer
    found = {type(each): each for each in trainer.callbacks}
    assert (found[ForkAnalysis].num_batches, found[ForkAnalysis].attention) == (2, True)
    assert (found[GateAnalysis].num_batches, found[GateAnalysis].every_n_steps) == (3, 10)
    assert tuple(found[PosteriorAnalysis].steps) == (0, 8)
    assert tuple(found[StepAllocation].alphas) == (-2, 2)
    assert found[StepAllocation].tokens == (" a",)
    assert (found[ThoughtTrace].num_batches, found[ThoughtTrace].shown_rows) == (3, 0)
    assert found[AnswerAccuracy].num_batches is None


def test_a_table_without_lines_keeps_its_columns():
    findings, other = Findings(), Findings()
    findings.add("found", [])
    other.add("found", {"v": [], "w": []})
    findings.append(other)
    assert not findings
    assert list(findings["found"]) == ["v", "w"]
    findings.add("found", {"v": [1], "w": [2]})
    assert findings["found"].to_dict("list") == {"v": [1], "w": [2]}
    assert list(findings["nothing"]) == []


def test_numbers_of_any_column_have_six_digits():
    values = [1 / 3, None, math.inf, 2]
    for kind in (object, float):
        assert as_csv(pd.DataFrame({"v": values}, dtype=kind)) == 'v\n0.333333\n""\n""\n2\n'
