"""WikiText-103: what an article is, its formats, seeded subsets."""

import gzip
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import WikiText103
from datamodules.corpora import articles
from datamodules.order import shuffled
from datamodules.store import SPLITS

ARTICLE = " = Title {i} = \n \n Text of {i} . \n \n = = Section = = \n \n More of {i} . \n"


def text(first: int, end: int) -> str:
    return " \n" + " \n".join(ARTICLE.format(i=i) + " \n" for i in range(first, end))


def expected(first: int, end: int) -> list[str]:
    return [ARTICLE.format(i=i) for i in range(first, end)]


def cut(written: str) -> list[str]:
    return list(articles(written.splitlines(keepends=True), "here"))


def prepared(tmp_path: Path, **options) -> WikiText103:
    data = WikiText103(cache_dir=str(tmp_path / "cache"), block_size=8, **options)
    data.prepare_data()
    data.setup()
    return data


def test_articles_begin_at_titles_and_keep_their_lines():
    assert cut(text(0, 3)) == expected(0, 3)
    assert cut("") == cut(" \n \n") == []


@pytest.mark.parametrize(
    "line",
    [
        " = = Section = = ",
        " = = = Part = = = ",
        " = = ",
        "= x",
        " y = z = ",
        " = half = = ",
        " = = half = ",
    ],
)
def test_other_lines_with_equals_signs_are_no_titles(line):
    written = text(0, 1) + f" \n{line}\n \n more \n"
    assert len(cut(written)) == 1
    assert line in cut(written)[0]


def test_a_formula_between_lines_of_text_is_no_title():
    for inside in (" \n = a = b = \n text \n", " text \n = a = b = \n \n"):
        written = text(0, 1) + inside + text(1, 2)
        assert len(cut(written)) == 2
        assert " = a = b = \n" in cut(written)[0]


def test_text_before_the_first_title_and_a_title_at_the_end():
    assert cut(" tail of another \n \n" + text(0, 1))[0] == " tail of another \n"
    assert cut(text(0, 1) + " \n = Last = \n") == [*expected(0, 1), " = Last = \n"]
    assert cut(" = Only = \n") == [" = Only = \n"]


def test_text_without_blank_lines_is_refused():
    dense = "".join(line + "\n" for line in text(0, 3).splitlines() if line.strip())
    with pytest.raises(ValueError, match="here: no line is an article's title"):
        cut(dense)


def write(tmp_path: Path, name: str, content: str) -> str:
    path = tmp_path / name
    if name.endswith(".parquet"):
        lines = ["" if line == " \n" else line for line in content.splitlines(keepends=True)]
        pq.write_table(pa.table({"text": lines}), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return str(path)


@pytest.mark.parametrize("suffix", ["raw", "tokens", "txt", "raw.gz"])
def test_files_of_the_archive(tmp_path, suffix):
    parts = {"data_files": (0, 9), "val_files": (9, 11), "test_files": (11, 12)}
    files = {k: write(tmp_path, f"wiki.{k}.{suffix}", text(*span)) for k, span in parts.items()}
    data = prepared(tmp_path, **files)
    for split, span in zip(SPLITS, parts.values(), strict=True):
        assert list(data.documents(split)) == expected(*span)
        assert data.counts(split).documents == span[1] - span[0]


def test_rows_of_the_hub_are_lines(tmp_path):
    data = prepared(tmp_path, data_files=write(tmp_path, "train.parquet", text(0, 20)))
    assert [data.counts(s).documents for s in SPLITS] == [16, 2, 2]
    first = next(iter(data.documents("train")))
    assert first.replace("\n\n", "\n \n") == expected(0, 1)[0]


def test_jsonl_is_not_its_format(tmp_path):
    with pytest.raises(ValueError, match="not as jsonl"):
        prepared(tmp_path, data_files=write(tmp_path, "a.jsonl", "{}"))
    with pytest.raises(ValueError, match="format is told by the suffix"):
        prepared(tmp_path, data_files=write(tmp_path, "a.csv", "x"))


def test_a_seeded_subset_has_whole_articles_until_the_cap(tmp_path):
    options = {
        "data_files": write(tmp_path, "t.raw", text(0, 40)),
        "val_files": write(tmp_path, "v.raw", text(40, 42)),
        "test_fraction": 0.0,
    }
    size = len(expected(10, 11)[0]) + 1
    orders = {}
    for seed in (0, 1, None):
        for articles_wanted in (10, 20):
            cap = articles_wanted * size
            data = prepared(tmp_path, **options, shuffle_seed=seed, train_tokens=cap)
            assert articles_wanted <= data.counts("train").documents <= articles_wanted + 1
            assert data.counts("train").tokens <= cap
            assert data.counts("val").documents == 2
            orders[seed, articles_wanted] = list(data.documents("train"))
    assert orders[None, 10] == expected(0, 40)
    assert orders[0, 10] == orders[0, 20] != orders[1, 10]  # smaller subsets are in larger ones
    assert sorted(orders[0, 10]) == sorted(expected(0, 40))


def test_unusable_arguments():
    with pytest.raises(ValueError, match="level='char' must be 'raw' or 'word'"):
        WikiText103(level="char")
    with pytest.raises(ValueError, match="shuffle_seed=-1"):
        WikiText103(shuffle_seed=-1)


def test_the_hub_names_follow_the_level():
    names = {level: WikiText103(level=level).source()["hub"]["train"] for level in ("raw", "word")}
    assert names["raw"]["config"] == "wikitext-103-raw-v1"
    assert names["word"]["config"] == "wikitext-103-v1"
    assert WikiText103(level="word").fingerprint != WikiText103().fingerprint


def test_shuffling_keeps_all_documents_and_depends_on_the_seed(tmp_path):
    rng = random.Random(0)
    texts = ["x" * rng.randint(0, 9) + str(i) + "\u00e4\ud800" for i in range(200)]
    orders = [list(shuffled(texts, seed=s, folder=tmp_path / "new")) for s in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(texts)
    assert list(shuffled([], seed=0, folder=tmp_path)) == []
