"""Datasets of the `datasets` library as a corpus: every form, the store, and bad input."""

import json
import re
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from datamodules import CorpusUnavailableError, HubText, LocalText, Sentences
from datamodules.store import SPLITS
from tests.datamodules.test_corpora import PAGES, prepared, texts_of

ROWS = [{"id": i, "text": page} for i, page in enumerate(PAGES)]
ROWS[7]["text"] = None
TEXTS = [row["text"] for row in ROWS if row["text"]]


def made() -> Dataset:
    return Dataset.from_list(ROWS)


def streamed(rows=ROWS) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def write(form: str, folder: Path) -> str:
    """Writes the rows in a form that `HubText` names; returns the folder."""
    match form:
        case "saved":
            made().save_to_disk(folder)
        case "saved splits":
            DatasetDict({"train": made()}).save_to_disk(folder)
        case _:
            folder.mkdir()
            getattr(made(), f"to_{form}")(folder / f"train.{form}")
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` keeps what it converts in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")


@pytest.fixture
def expected(tmp_path):
    """The texts of each split that `LocalText` makes of the same rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = prepared(LocalText, tmp_path, data_files=str(path))
    return {split: texts_of(data, split) for split in SPLITS}


@pytest.mark.parametrize("cap", [None, 10**6])
@pytest.mark.parametrize("form", ["saved", "saved splits", "parquet", "json", "csv"])
def test_every_form_has_the_documents_of_its_rows(tmp_path, expected, form, cap):
    folder = write(form, tmp_path / "pages")
    data = prepared(HubText, tmp_path, dataset=folder, train_tokens=cap)
    assert {split: texts_of(data, split) for split in SPLITS} == expected
    again = HubText(**data.recipe()["init_args"])
    assert again.store_dir == data.store_dir


@pytest.mark.parametrize("make", [made, streamed, lambda: DatasetDict(train=made()), lambda: ROWS])
def test_a_dataset_made_in_python_is_found_again_by_its_fingerprint(tmp_path, expected, make):
    data = prepared(HubText, tmp_path, dataset=make(), fingerprint="pages, first edition")
    assert {split: texts_of(data, split) for split in SPLITS} == expected
    recipe = json.loads(json.dumps(data.recipe()))["init_args"]
    again = prepared(HubText, tmp_path, **recipe)
    assert {split: texts_of(again, split) for split in SPLITS} == expected


def test_the_fingerprint_of_datasets_names_the_store(tmp_path):
    data = prepared(HubText, tmp_path, dataset=made())
    assert data.hparams["fingerprint"] == made()._fingerprint
    other = made().map(lambda row: {"text": (row["text"] or "").upper()})
    assert HubText(dataset=other, cache_dir=str(tmp_path)).fingerprint != data.fingerprint


def test_a_transform_of_the_users_is_kept(tmp_path):
    shouting = made().with_transform(lambda rows: {"text": [str(i) * 9 for i in rows["id"]]})
    data = prepared(HubText, tmp_path, dataset=shouting, val_fraction=0.0, test_fraction=0.0)
    assert texts_of(data, "train") == [str(i) * 9 for i in range(len(ROWS))]


def test_splits_of_the_dataset_come_before_shares(tmp_path):
    parts = DatasetDict(
        {name: Dataset.from_dict({"text": [f"{name} {i}" for i in range(9)]}) for name in "abc"}
    )
    data = prepared(
        HubText, tmp_path, dataset=parts, train_split="c", val_split="a", test_fraction=0.2
    )
    assert texts_of(data, "val") == [f"a {i}" for i in range(9)]
    assert sorted(texts_of(data, "train") + texts_of(data, "test")) == [f"c {i}" for i in range(9)]
    assert texts_of(data, "test")


def test_a_cap_reads_no_more_rows_than_it_takes(tmp_path):
    read = []

    def rows():
        for row in ROWS * 50:
            read.append(row)
            yield row

    dataset = IterableDataset.from_generator(rows)
    data = prepared(
        HubText, tmp_path, dataset=dataset, fingerprint="x", train_tokens=400, num_proc=1
    )
    assert 300 < data.counts("train").tokens <= 400
    assert len(read) < len(ROWS) * 50


def test_a_single_row_is_cut_into_passages(tmp_path):
    book = "\n\n".join(f"Paragraph {i} says a thing or two about it." for i in range(400))
    data = prepared(HubText, tmp_path, dataset=Dataset.from_dict({"text": [book]}))
    parts = [part for split in SPLITS for part in texts_of(data, split)]
    assert all(texts_of(data, split) for split in SPLITS)
    assert sorted(parts) == sorted(p for p in parts if p in book)
    assert sum(map(len, parts)) == len(book)
    whole = prepared(
        HubText,
        tmp_path,
        dataset=Dataset.from_dict({"text": [book]}),
        val_fraction=0.0,
        test_fraction=0.0,
    )
    assert texts_of(whole, "train") == [book]


def test_rows_without_text_are_counted(tmp_path, caplog):
    with caplog.at_level("INFO"):
        prepared(HubText, tmp_path, dataset=made())
    assert "1 of 60 texts are empty or null" in caplog.text


def test_sentences_over_it(tmp_path):
    corpus = {"dataset": made(), "cache_dir": str(tmp_path / "cache"), "tokenizer": "bytes"}
    data = Sentences(corpus=HubText(**corpus), splitter="spans:9", max_sentence_tokens=9)
    data.prepare_data()
    data.setup()
    assert sum(data.counts(split).documents for split in SPLITS) == len(TEXTS)
    again = Sentences(**data.recipe()["init_args"])
    again.setup()
    assert again.counts("train") == data.counts("train")


@pytest.mark.parametrize("cap", [None, 10**6])
def test_the_commit_of_the_hub_is_settled_once(tmp_path, hub, monkeypatch, cap):
    name = "somebody/pages"
    for commit, change in ((1, str), (2, str.upper)):
        folder = hub.repository(name, commit=commit)
        rows = [{"text": change(page)} for page in PAGES]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load, asked = datasets.load_dataset, []

    def load_dataset(path, config, *, revision, **options):
        asked.append((path, revision, options["streaming"]))
        return load(str(folder.with_name(revision)), config, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    old = prepared(HubText, tmp_path, dataset=name, revision=f"{1:040x}", train_tokens=cap)
    new = prepared(HubText, tmp_path, dataset=name, train_tokens=cap)
    assert texts_of(old, "train")[0] == PAGES[0]
    assert texts_of(new, "train")[0] == PAGES[0].upper()
    assert new.origin == {"name": name, "commit": f"{2:040x}"}
    assert set(asked) == {(name, f"{n:040x}", cap is not None) for n in (1, 2)}
    assert HubText(**old.recipe()["init_args"]).fingerprint == old.fingerprint != new.fingerprint


BAD = {
    "nothing": ({}, "data.dataset"),
    "no folder and no name": ({"dataset": "./nowhere"}, "dataset='./nowhere'"),
    "unknown column": ({"dataset": made, "text_field": "body"}, "row 1: no field 'body'"),
    "a number": ({"dataset": made, "text_field": "id"}, "row 1: the field 'id' is int"),
    "a late number": (
        {"dataset": lambda: [*ROWS, {"text": 3}], "fingerprint": "x"},
        "row 61: the field 'text' is int",
    ),
    "half a surrogate pair": (
        {"dataset": lambda: [{"text": "a\ud800"}], "fingerprint": "x"},
        "row 1: the text contains '\\ud800'",
    ),
    "unknown split": ({"dataset": made, "val_split": "dev"}, "val_split='dev'"),
    "no fingerprint": ({"dataset": streamed}, "fingerprint="),
    "an iterator": ({"dataset": lambda: iter(ROWS), "fingerprint": "x"}, "dataset"),
    "a number for a dataset": ({"dataset": 3}, "dataset is of type int"),
    "no name": ({"dataset": ""}, "dataset=''"),
    "one split for two": ({"dataset": made, "val_split": "train"}, "train_split, val_split"),
    "a slice of a Dataset": (
        {"dataset": made, "train_split": "train[:9]"},
        "train_split='train[:9]'",
    ),
    "a store that is gone": ({"fingerprint": "x"}, "--data"),
    "two identities": ({"dataset": "a/b", "fingerprint": "x"}, "data.fingerprint"),
    "a revision of no repository": ({"dataset": made, "revision": "x"}, "data.revision"),
    "a config of no repository": ({"dataset": made, "config": "x"}, "data.config"),
    "no text": ({"dataset": lambda: Dataset.from_dict({"text": [None, " "]})}, "split train"),
    "no cap": ({"dataset": made, "train_tokens": 0}, "train_tokens=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_its_place(tmp_path, case):
    options, named = BAD[case]
    built = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        prepared(HubText, tmp_path, **built)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"train_split": "trein"}, {"config": "german"}, {"damaged": True}]
)
@pytest.mark.parametrize("cap", [None, 10**6])
def test_what_datasets_cannot_read_is_one_line(tmp_path, options, cap):
    folder = Path(write("json", tmp_path / "pages"))
    if options == {"damaged": True}:
        (folder / "train.json").write_text('{"text": "a"}\n{"text": ')
        options = {}
    with pytest.raises(CorpusUnavailableError) as error:
        prepared(HubText, tmp_path, dataset=str(folder), train_tokens=cap, **options)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_hub_out_of_reach_is_one_line(tmp_path, hub):
    hub.network = False
    with pytest.raises(CorpusUnavailableError, match=r"data\.dataset"):
        prepared(HubText, tmp_path, dataset="somebody/pages")
