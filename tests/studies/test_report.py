"""Tables and figures from results; what people wrote survives."""

from dataclasses import replace

import pytest

from studies import StudyError, Text
from studies.report import BEGIN, END, check_report, render, write_report
from studies.study import Column
from studies.tables import seeds_table, summary_table


def cells(table, row):
    """The cells of a line, by the heads of the table."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return dict(zip(lines[0], lines[2 + row], strict=True))


def test_the_summary_has_means_and_ranges(study, results):
    table = summary_table(study, results())
    plain, copied = cells(table, 0), cells(table, 1)
    assert plain["bpb"] == "2.55 (2.50 to 2.60)"
    assert plain["sampled bpb"] == plain["gap"] == "-"
    assert copied["bpb"] == "2.30 (2.25 to 2.35), not causal"
    assert copied["sampled bpb"] == "2.00 (2.00 to 2.00)"
    assert copied["gap"] == "-0.250 (-0.250 to -0.250)"
    assert copied["FLOPs/token, training"] == "6.00 M"
    assert copied["FLOPs/token, inference"] == "2.00 M"
    assert copied["parameters"] == "1,234"
    assert (copied["wall time"], copied["wall time / baseline"]) == ("1:30", "1.50")
    assert plain["wall time / baseline"] == "1.00"


def test_other_kinds_of_likelihood_are_named(study, results):
    bound = {"blockwise": {"bits_per_byte": 2.0, "causal": True, "likelihood": "lower_bound"}}
    table = summary_table(study, results(evaluations=bound))
    assert cells(table, 0)["bpb"] == "2.00 (2.00 to 2.00), lower bound"


def test_every_seed_has_a_line_with_standard_errors(study, results):
    table = seeds_table(study, results())
    assert [cells(table, row)["run"] for row in range(4)] == ["plain", "plain", "copied", "copied"]
    second = cells(table, 3)
    assert second["seed"] == "1"
    assert second["sampled bpb"] == "2.00 ± 0.25"  # 0.5 nats of 4 a token
    assert second["bpb"] == "2.35"
    assert second["times resumed"] == "1"
    assert second["tokens/s"] == "2,000"


def test_one_seed_has_no_range_and_a_missing_baseline_no_ratio(study, results):
    alone = [result for result in results() if result.run.folder == "copy-seed0"]
    line = cells(summary_table(study, alone), 0)
    assert line["bpb"] == "2.25, not causal"
    assert line["wall time / baseline"] == "-"


def test_numbers_are_shown_in_their_unit(study, results):
    column = Column(title="M", evaluation="blockwise", key="flops_per_token", digits=1, unit=1e6)
    wide = replace(study, columns=(column,))
    assert cells(summary_table(wide, results()), 0)["M"] == "2.0 (2.0 to 2.0)"
    assert cells(seeds_table(wide, results()), 1)["M"] == "2.0"


def test_zero_has_no_sign(study, results):
    tiny = {"sampled": {"difference": {"nats_per_token": -1e-9}}}
    assert cells(seeds_table(study, results(evaluations=tiny)), 2)["gap"] == "0.000"


def test_missing_measurements_are_dashes(study, results):
    bare = results(evaluations={}, speed=None, training_flops=None, curve=[])
    line = cells(summary_table(study, bare), 0)
    assert line["FLOPs/token, inference"] == line["FLOPs/token, training"] == line["bpb"] == "-"
    assert cells(seeds_table(study, bare), 0)["tokens/s"] == "-"


def test_the_section_says_what_was_done(study, results):
    text = render(
        study, results(), ["pretended/copy-looks/a.png", "pretended/copy-looks/b.csv"], ""
    )
    assert text.startswith(BEGIN)
    assert text.endswith(END)
    assert "python -m studies pretended --steps 2 --seeds 0,1" in text
    assert "torch 2.13.0; commit abc0 and abc1" in text
    assert "64 tokens (2 steps of 32) a run" in text
    assert "measured on 99 tokens" in text
    assert "![a.png](pretended/copy-looks/a.png)" in text
    assert "[b.csv](pretended/copy-looks/b.csv)" in text
    assert "not run" not in text


def test_commits_are_short_and_one_seed_is_told(study, results):
    versions = {"commit": "0123456789abcdef0123456789abcdef01234567-dirty"}
    (one,) = [r for r in results(versions=versions) if r.run.folder == "plain-seed0"]
    text = render(study, [one], [], "")
    assert "commit 0123456789ab-dirty." in text
    assert "One seed (0)" in text


def test_missing_runs_are_named(study, results):
    assert "- not run: copy-seed1\n" in render(study, results()[:-1], [], "")


def test_paths_of_the_users_text_are_not_in_the_report(study, results):
    own = replace(study, text=Text(files=("/secret/place/*.txt",), name="novels"))
    text = render(own, results(), [], "")
    assert "secret" not in text
    assert "--text '<novels>'" in text
    assert "text: novels" in text


def test_what_people_wrote_survives(study, results, tmp_path):
    path = tmp_path / "pretended.md"
    write_report(study, results(), path)
    first = path.read_text()
    assert "## Conclusions" in first
    path.write_text(first.replace("(written by hand", "It works. (written by hand") + "The end.\n")
    changed = results(parameters=4321)
    write_report(study, changed, path)
    second = path.read_text()
    assert "It works." in second
    assert second.endswith("The end.\n")
    assert "4,321" in second
    assert "1,234" not in second
    assert second.count(BEGIN) == second.count(END) == 1


def test_figures_and_files_lie_beside_the_report(study, results, tmp_path):
    picture = tmp_path / "runs" / "a.png"
    picture.parent.mkdir()
    picture.write_text("picture")
    path = tmp_path / "docs" / "pretended.md"
    stale = path.parent / "pretended" / "copy-looks" / "stale.png"
    foreign = path.parent / "pretended" / "foreign.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    foreign.touch()
    found = results()
    found[1] = replace(found[1], files={"looks": [picture]})
    write_report(study, found, path)
    assert (path.parent / "pretended" / "copy-looks" / "a.png").read_text() == "picture"
    assert not stale.exists()
    assert foreign.exists()
    assert "pretended/copy-looks/a.png" in path.read_text()
    curves = (path.parent / "pretended" / "curves.svg").read_text()
    assert "<svg" in curves
    assert "pretended/curves.svg" in path.read_text()


def test_the_same_results_make_the_same_files(study, results, tmp_path):
    drawn = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_report(study, results(), tmp_path / name / "report.md")
        drawn.append((tmp_path / name / "report" / "curves.svg").read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_file_without_the_marks_is_left_alone(text, tmp_path):
    path = tmp_path / "own.md"
    path.write_text(text)
    with pytest.raises(StudyError, match=r"own\.md\) has no section between the marks"):
        check_report(path)


def test_a_report_needs_a_folder(tmp_path):
    with pytest.raises(StudyError, match="does not exist; create it"):
        check_report(tmp_path / "missing" / "a.md")
    with pytest.raises(StudyError, match="is a folder; name a file"):
        check_report(tmp_path)
