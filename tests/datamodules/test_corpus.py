"""What is said of a prepared corpus: the sizes of its splits, and that too much is held out."""

import pytest

from datamodules import LocalText
from datamodules.corpus import format_counts, too_much_held_out
from datamodules.store import SPLITS, Counts

SHARES = {"val_fraction": 0.05, "test_fraction": 0.05}


@pytest.fixture
def told(monkeypatch):
    """What is told at rank zero."""
    lines = []
    monkeypatch.setattr("datamodules.corpus.rank_zero_info", lines.append)
    return lines


@pytest.fixture
def warned(monkeypatch):
    """What is warned about at rank zero."""
    lines = []
    monkeypatch.setattr("datamodules.corpus.rank_zero_warn", lines.append)
    return lines


@pytest.fixture
def books(tmp_path):
    """Four books of 1,208 bytes, of two chapters each."""
    (tmp_path / "books").mkdir()
    for number in range(4):
        chapters = f"Book {number}".ljust(602, "."), f"The end of {number}".ljust(603, ".")
        (tmp_path / "books" / f"{number}.txt").write_text("\n\n\n".join(chapters))
    return {"data_files": f"{tmp_path}/books/*.txt", "cache_dir": str(tmp_path / "cache")}


def counts(train, val=0, test=0, documents=1):
    tokens = dict(zip(SPLITS, (train, val, test), strict=True))
    return {s: Counts(documents=documents if n else 0, tokens=n) for s, n in tokens.items()}


# Sizes


def test_sizes_are_told_once_a_store(books, told, warned, monkeypatch):
    line = "LocalText: train 2 documents, 2,418 tokens; val 1, 1,209; test 1, 1,209"
    data = LocalText(**books)
    for stage in ("fit", "validate", "test"):
        data.prepare_data()
        data.setup(stage)
    LocalText(**books).prepare_data()
    assert told == [f"Preparing {data.store_dir}", line]
    assert len(warned) == 1
    monkeypatch.setattr("datamodules.corpus._LOGGED", set())  # as in another process
    LocalText(**books).prepare_data()
    assert told[2:] == [line]
    assert len(warned) == 2


def test_splits_without_text_are_left_out():
    assert format_counts(counts(1000, 20)) == "train 1 document, 1,000 tokens; val 1, 20"
    assert format_counts(counts(0, 20, documents=2000)) == "val 2,000 documents, 20 tokens"
    assert format_counts(counts(0)) == "no documents"


# Too much held out, with a cure


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, "50%"),
        ({"separator": r"\n{3,}"}, "25%"),
        ({"test_fraction": 0.0}, "25%"),
        ({"val_fraction": 0.3, "test_fraction": 0.0}, None),
        ({"val_fraction": 0.0, "test_fraction": 0.0}, None),
    ],
)
def test_the_warning_follows_the_options(books, told, warned, options, share):
    LocalText(**books, **options).prepare_data()
    assert len(warned) == (share is not None)
    if share is not None:
        assert f"{share} of the tokens are held out" in warned[0]
        assert ("data.separator" in warned[0]) == ("separator" not in options)
        assert "data.val_files" in warned[0]


def test_a_split_with_files_of_its_own_is_not_counted(books, told, warned, tmp_path):
    (tmp_path / "val.txt").write_text("v" * 9000)
    own = {"val_files": f"{tmp_path}/val.txt"}
    LocalText(**books, **own, test_fraction=0.0).prepare_data()
    assert warned == []
    LocalText(**books, **own).prepare_data()
    assert "25% of the tokens are held out for test, and test_fraction asked for 5%" in warned[0]


def test_more_than_twice_and_five_points_above_are_too_much():
    def said(*sizes, **shares):
        return too_much_held_out(counts(*sizes), shares or SHARES, "more documents")

    assert said(800, 100, 100) is None  # twice
    assert said(799, 100, 101) is not None
    assert said(940, 60, val_fraction=0.01) is None  # 5 points above
    assert said(939, 61, val_fraction=0.01) is not None
    assert said(0, 0, 0) is None
    assert too_much_held_out(counts(1, 100, 100), {}, "more documents") is None
