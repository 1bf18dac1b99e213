"""The hub: commits, places to go on at, and why a data set cannot be read."""

import errno
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from datamodules import CorpusUnavailableError, OpenWebText, PeS2o, Pile, WikiText103, prepare
from datamodules import hub as reading
from datamodules.prepare import prepare_store
from datamodules.store import SPLITS
from tests.datamodules.test_corpora import PAGES, jsonl, prepared, texts_of, write_parquet

OWT = "Skylion007/openwebtext"
PILE = "EleutherAI/the_pile_deduplicated"
LONG = [f"Page {i}: " + "word " * (i % 7 + 1) for i in range(600)]


def newer(texts) -> list[str]:
    return [text.upper() for text in texts]


@pytest.fixture
def small_sections(monkeypatch):
    """Sections of some twenty documents, and a place noted at every document."""
    monkeypatch.setattr(prepare, "CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr("datamodules.hub._EVERY", 1)
    monkeypatch.setattr(reading, "_ROWS", 8)
    monkeypatch.setitem(prepare_store.__kwdefaults__, "shard_tokens", 500)


@pytest.fixture
def break_after(monkeypatch):
    """Returns a function after which reading texts of the hub fails at that row."""
    whole = reading._streamed, reading._numbered

    def failing(function, number):
        def read(*arguments):
            rows = 0
            for state, texts in function(*arguments):
                if rows + len(texts) > number:
                    raise ConnectionError("the line is dead")
                rows += len(texts)
                yield state, texts

        return read

    def set_to(number):
        for name, function in zip(("_streamed", "_numbered"), whole, strict=True):
            broken = function if number is None else failing(function, number)
            monkeypatch.setattr(reading, name, broken)

    return set_to


def interrupted(kind, tmp_path, **options) -> dict:
    """Prepares until the line is dead; returns the header of the journal that is left."""
    with pytest.raises(CorpusUnavailableError, match="the line is dead"):
        prepared(kind, tmp_path, **options)
    (partial,) = (tmp_path / "cache").glob("*.partial")
    lines = (partial / "journal.jsonl").read_text().splitlines()
    assert len(lines) > 3
    return json.loads(lines[0])


# The commit


@pytest.mark.parametrize("cap", [None, 12000])
@pytest.mark.usefixtures("small_sections")
def test_a_preparation_goes_on_with_the_commit_it_began_with(tmp_path, hub, break_after, cap):
    write_parquet(hub.repository(PILE) / "data/train-0.parquet", LONG)
    break_after(200)
    header = interrupted(Pile, tmp_path, train_tokens=cap)
    assert header["origin"]["train"]["commit"] == f"{1:040x}"
    write_parquet(hub.repository(PILE, commit=2) / "data/train-0.parquet", newer(LONG))
    break_after(None)
    data = prepared(Pile, tmp_path, train_tokens=cap)
    taken = texts_of(data, "train")
    assert taken == [text for text in LONG if text in set(taken)]
    assert len(taken) > 220
    assert data._store.meta["origin"]["train"]["commit"] == f"{1:040x}"
    fresh = prepared(Pile, tmp_path / "fresh", train_tokens=cap)
    assert fresh._store.meta["origin"]["train"]["commit"] == f"{2:040x}"
    assert texts_of(fresh, "train")[0] == LONG[0].upper()
    assert fresh.fingerprint == data.fingerprint


def test_a_revision_can_be_asked_for(tmp_path, hub):
    write_parquet(hub.repository(OWT) / "data/train-0.parquet", PAGES)
    write_parquet(hub.repository(OWT, commit=2) / "data/train-0.parquet", newer(PAGES))
    first, tip = f"{1:040x}", f"{2:040x}"
    old = prepared(OpenWebText, tmp_path, val_documents=5, revision=first)
    new = prepared(OpenWebText, tmp_path, val_documents=5)
    assert texts_of(old, "train") == PAGES[:-5]
    assert texts_of(new, "train") == newer(PAGES[:-5])
    assert new._store.meta["origin"]["train"]["commit"] == tip
    assert old.fingerprint != new.fingerprint
    again = OpenWebText(**old.recipe()["init_args"])
    assert again.fingerprint == old.fingerprint
    assert hub.asked == [first, tip]
    with pytest.raises(ValueError, match=r"revision='x' .* data_files are read instead"):
        OpenWebText(data_files="a.jsonl", revision="x")


def test_without_a_revision_fingerprints_stay_what_they_were():
    assert OpenWebText().fingerprint == OpenWebText(revision=None).fingerprint
    assert "revision" not in json.dumps(OpenWebText().source())


def test_another_revision_in_the_cache_does_not_stand_in(tmp_path, hub, monkeypatch):
    write_parquet(hub.repository(OWT) / "data/train-0.parquet", PAGES)
    load = datasets.load_dataset_builder

    def from_the_cache(*arguments, **options):  # as `datasets` does where the hub stumbles
        builder = load(*arguments, **options)
        builder.hash = f"{7:040x}"
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", from_the_cache)
    with pytest.raises(CorpusUnavailableError, match=f"got the revision {7:040x}, not {1:040x}"):
        prepared(OpenWebText, tmp_path, val_documents=5)


@pytest.mark.usefixtures("small_sections")
def test_without_network_only_the_commit_of_the_finished_shards_will_do(tmp_path, hub, break_after):
    write_parquet(hub.repository(PILE) / "data/train-0.parquet", LONG)
    break_after(200)
    interrupted(Pile, tmp_path)
    break_after(None)
    hub.network = False
    write_parquet(hub.repository(PILE, commit=2) / "data/train-0.parquet", newer(LONG))
    with pytest.raises(CorpusUnavailableError, match="no network"):
        prepared(Pile, tmp_path)
    hub.repository(PILE, commit=1)
    assert (
        texts_of(prepared(Pile, tmp_path), "train")[:300]
        == [text for i, text in enumerate(LONG) if i not in (1, 2)][:300]
    )


# Going on without reading what is stored


@pytest.mark.parametrize("jsonl_files", [False, True])
@pytest.mark.usefixtures("small_sections")
def test_a_resumed_stream_does_not_open_the_files_behind_it(
    tmp_path, hub, break_after, monkeypatch, jsonl_files
):
    kind, texts = (PeS2o if jsonl_files else Pile), [*LONG[:300], " ", *LONG[300:]]
    repository = hub.repository("allenai/peS2o" if jsonl_files else PILE)
    for i in range(6):
        part = texts[i * 100 : i * 100 + 100]
        if jsonl_files:
            (repository / "data/v2").mkdir(parents=True, exist_ok=True)
            (repository / f"data/v2/train-{i}.json.gz").write_bytes(gzip.compress(jsonl(part)))
            (repository / "data/v2/valid-0.json.gz").write_bytes(gzip.compress(jsonl(["v"] * 3)))
        else:
            write_parquet(repository / f"data/train-{i}.parquet", part)
    break_after(450)
    interrupted(kind, tmp_path, train_tokens=10**6)
    break_after(None)
    opened = spied_files(monkeypatch)
    data = prepared(kind, tmp_path, train_tokens=10**6)
    names = {f"train-{i}" for i in range(6) if any(f"train-{i}." in name for name in opened)}
    assert names - {"train-3"} == {"train-4", "train-5"}  # the library opens one before, at times
    assert not any("valid" in name for name in opened)
    whole = prepared(kind, tmp_path / "whole", train_tokens=10**6)
    for split in SPLITS:
        assert texts_of(data, split) == texts_of(whole, split)
    assert sum(len(texts_of(data, split)) for split in SPLITS) >= 599
    assert '"place"' not in (data.store_dir / "journal.jsonl").read_text()
    assert list(data.documents("train")) == texts_of(data, "train")  # nothing is left out now


def spied_files(monkeypatch) -> list[str]:
    """A list that will hold the names of the data files that are read."""
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    opened: list[str] = []
    for kind in (Parquet, Text):

        def tables(self, *arguments, _real=kind._generate_tables, **options):
            opened.extend(map(str, [*arguments, *options.values()]))
            return _real(self, *arguments, **options)

        monkeypatch.setattr(kind, "_generate_tables", tables)
    return opened


@pytest.mark.parametrize("first", [0, 5, 130])
@pytest.mark.parametrize("end", [None, 400])
def test_a_place_leads_to_the_next_row(tmp_path, hub, monkeypatch, first, end):
    monkeypatch.setattr(reading, "_ROWS", 8)
    texts = [text if i % 13 else " " for i, text in enumerate(LONG)]
    for i in range(6):
        write_parquet(
            hub.repository(PILE) / f"data/train-{i}.parquet", texts[i * 100 : i * 100 + 100]
        )
    expected = [text for text in texts[first:end] if text != " "]

    def opened():
        place = reading.HubSplit(name=PILE, split="train")
        return reading.HubTexts(place, streaming=True, corpus="Pile", cure="Cure")

    for stop in (0, 1, 50, 200, len(expected) - 1):
        source = opened()
        reader = source.documents(first, end)
        assert [next(reader) for _ in range(stop)] == expected[:stop]
        places = json.loads(json.dumps(source.places()))
        for _ in range(2):  # stopped again right away
            again = opened()
            again.go_to(places)
            places = json.loads(json.dumps(again.places()))
        got = list(again.documents(first, end))
        empty = got.count("")
        assert stop - 8 <= empty <= stop
        assert got[empty:] == expected[empty:]


@pytest.mark.usefixtures("small_sections")
def test_the_documents_for_validation_are_not_read_again(tmp_path, hub, break_after):
    write_parquet(hub.repository(OWT) / "data/train-0.parquet", LONG)
    options = {"val_documents": 100, "train_tokens": 10**6}
    break_after(250)
    interrupted(OpenWebText, tmp_path, **options)
    break_after(None)
    data = prepared(OpenWebText, tmp_path, **options)
    assert texts_of(data, "val") == LONG[:100]
    assert texts_of(data, "train") == LONG[100:]


@pytest.mark.usefixtures("small_sections")
def test_a_tokenizer_that_is_trained_before_does_not_move_the_place(tmp_path, hub, break_after):
    write_parquet(hub.repository(PILE) / "data/train-0.parquet", LONG)
    options = {"tokenizer": "bpe:300", "train_tokens": 6000}
    whole = prepared(Pile, tmp_path / "whole", **options)
    break_after(350)  # enough to train, and a little more

    with pytest.raises(CorpusUnavailableError):
        prepared(Pile, tmp_path, **{**options, "train_tokens": 10**6})
    break_after(None)
    data = prepared(Pile, tmp_path, **options)
    rows = texts_of(data, "train")
    assert rows == texts_of(whole, "train")


def test_a_script_is_named_as_such(tmp_path, hub):
    repository = hub.repository(OWT)
    (repository / "openwebtext.py").write_text("raise SystemExit")
    with pytest.raises(CorpusUnavailableError) as error:
        prepared(OpenWebText, tmp_path, val_documents=6)
    assert "scripts are no longer supported" in str(error.value)
    assert "set data.revision to a commit that has data files" in str(error.value)
    assert "network" not in str(error.value)


# What differs from the papers


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Pile, {}, "deduplicated"),
        (Pile, {"train_tokens": 400}, "meta.pile_set_name"),
        (OpenWebText, {"train_tokens": 400}, "the first 6 documents validate"),
        (OpenWebText, {}, None),
    ],
)
def test_deviations_are_in_the_log_of_every_run_and_in_meta(
    tmp_path, hub, caplog, kind, options, said
):
    options = {**({"val_documents": 6} if kind is OpenWebText else {}), **options}
    for name in (OWT, PILE):
        write_parquet(hub.repository(name) / "data/train-0.parquet", PAGES)
    for run in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            data = prepared(kind, tmp_path, **options)
            data.setup("test")
        lines = [line for line in caplog.messages if line.startswith(f"{kind.__name__}: ")]
        told = [line for line in lines if not line.startswith(f"{kind.__name__}: train ")]
        assert len(lines) - len(told) == (run == 0)  # the sizes
        assert len(told) == (said is not None), run
        assert said is None or said in told[0]
    assert (said is None) == (data._store.meta["notes"] == [])
    if said is not None:
        assert told == [f"{kind.__name__}: {' '.join(data._store.meta['notes'])}"]


def refused(kind):
    from types import SimpleNamespace

    return kind("401", response=SimpleNamespace(status_code=401, headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "said", "helps"),
    [
        (refused(GatedRepoError), "gated, private, or gone", "log in"),
        (refused(RepositoryNotFoundError), "gated, private, or gone", "log in"),
        (ValueError("BuilderConfig 'a' not found."), "laid out otherwise", "older commit"),
        (FileNotFoundError("Unable to find 'hf://x'"), "laid out otherwise", "older commit"),
        (pa.ArrowInvalid("Parquet magic bytes not found"), "a damaged file", "delete its files"),
        (gzip.BadGzipFile("CRC check failed"), "a damaged file", "delete its files"),
        (OSError(errno.ENOSPC, "No space left"), "does not fit", "set HF_HOME to a folder"),
        (KeyError("text"), "could not be read", "try again"),
        (TimeoutError("slow"), "cannot be read from", "try again with a network"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_each_cause_has_its_message(tmp_path, hub, monkeypatch, error, said, helps, wrapped):
    write_parquet(hub.repository(OWT) / "data/train-0.parquet", PAGES)

    def load(*_, **__):
        if not wrapped:
            raise error
        try:
            raise error
        except Exception as cause:
            raise datasets.exceptions.DatasetGenerationError("An error occurred") from cause

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(CorpusUnavailableError) as raised:
        prepared(OpenWebText, tmp_path, val_documents=6)
    message = str(raised.value)
    assert message.startswith(f"OpenWebText: {OWT} (train) ")
    assert said in message
    assert helps in message
    assert type(error).__name__ in message
    assert "data.data_files=" in message
    assert ("with a network" in message) == isinstance(error, TimeoutError)
    assert "\n" not in message


def test_a_missing_revision_is_told(tmp_path, hub):
    write_parquet(hub.repository(OWT) / "data/train-0.parquet", PAGES)
    with pytest.raises(CorpusUnavailableError, match=r"no revision 'v9' .* set data.revision to"):
        prepared(OpenWebText, tmp_path, revision="v9")


def test_a_damaged_parquet_file_is_told(tmp_path, hub):
    folder = hub.repository(OWT) / "data"
    write_parquet(folder / "train-0.parquet", PAGES)
    content = (folder / "train-0.parquet").read_bytes()
    (folder / "train-0.parquet").write_bytes(content[: len(content) // 2])
    for cap in (None, 100):
        with pytest.raises(CorpusUnavailableError, match="damaged file"):
            prepared(OpenWebText, tmp_path, val_documents=6, train_tokens=cap)


def test_a_missing_configuration_is_told(tmp_path, hub):
    pq.write_table(pa.table({"text": PAGES}), hub.repository("Salesforce/wikitext") / "a.parquet")
    with pytest.raises(CorpusUnavailableError, match=r"laid out otherwise.*wikitext-103-raw-v1"):
        prepared(WikiText103, tmp_path)
