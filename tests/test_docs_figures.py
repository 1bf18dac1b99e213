"""The tables of the documentation, and the figures that docs/figures.py draws from them."""

import csv
import runpy
from pathlib import Path

import pytest

from callbacks.analysis.report import as_png

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "docs/figures.py"))["FIGURES"]


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_is_drawn_and_on_its_page(page):
    figure = FIGURES[page]()
    assert all(ax.lines or ax.patches for ax in figure.axes)
    assert as_png(figure).startswith(b"\x89PNG")
    folder = "docs/results" if (ROOT / f"docs/results/{page}.md").is_file() else "docs"
    assert f"figures/{page}.png)" in (ROOT / folder / f"{page}.md").read_text()


def test_no_other_figure_is_kept():
    kept = {path.stem for path in (ROOT / "docs/results/figures").iterdir()}
    assert kept == {*FIGURES, "reproducing"}


def test_rows_of_a_table_have_equal_lengths():
    for path in (ROOT / "docs").rglob("*.csv"):
        with path.open(newline="") as file:
            assert len({len(row) for row in csv.reader(file)}) == 1, path
