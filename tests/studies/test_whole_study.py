"""A study of two steps through the real train.py and evaluate.py."""

from dataclasses import replace

import pytest

from studies import Text
from studies.report import write_report
from studies.results import collect
from studies.runner import run_study


@pytest.mark.slow
def test_two_runs_of_two_steps(study, text_file, data_cache, tmp_path):
    small = replace(
        study,
        text=Text(files=(str(text_file),)),
        data={**study.data, "cache_dir": str(data_cache)},
        trainer={"accelerator": "cpu"},
        seeds=(0,),
    )
    run_study(small, tmp_path / "runs")
    plain, copied = collect(small, tmp_path / "runs")
    assert [tokens for tokens, _ in plain.curve] == [32, 64]
    assert 6 < plain.evaluations["blockwise"]["bits_per_byte"] < 10
    assert plain.evaluations["blockwise"]["bits_per_byte"] == pytest.approx(plain.curve[-1][1])
    assert copied.evaluations["sampled"]["tokens"] == 8
    assert copied.training_flops == 3 * copied.evaluations["blockwise"]["flops_per_token"]
    assert plain.parameters == copied.parameters > 0
    assert plain.versions["torch"]
    write_report(small, [plain, copied], tmp_path / "report.md")
    assert "own text" in (tmp_path / "report.md").read_text()
