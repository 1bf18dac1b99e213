"""The hub: commits, the files that are fetched, and why a data set cannot be read."""

import errno
import json

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from datamodules import CorpusUnavailableError, OpenWebText, Pile, WikiText103, corpus, encoding
from datamodules import hub as reading
from tests.datamodules.test_corpora import PAGES, prepared, texts_of, write_parquet

OWT = "Skylion007/openwebtext"
PILE = "EleutherAI/the_pile_deduplicated"
LONG = [f"Page {i}: " + "word " * (i % 7 + 1) for i in range(600)]


def newer(texts) -> list[str]:
    return [text.upper() for text in texts]


def write_files(repository, texts, number=6) -> None:
    size = len(texts) // number
    for i in range(number):
        name = f"data/train-{i:05d}-of-{number:05d}.parquet"
        write_parquet(repository / name, texts[i * size : i * size + size])


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of some twenty documents."""
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr(encoding, "PART_BYTES", 500)


@pytest.fixture
def dead_line(monkeypatch):
    """Returns a function that lets files of a number and above not be fetched (None: all be)."""
    download = huggingface_hub.hf_hub_download

    def cut(number):
        def fetch(name, file, **options):
            if number is not None and int(file.partition("train-")[2][:5]) >= number:
                raise ConnectionError("the line is dead")
            return download(name, file, **options)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)

    return cut


def interrupted(kind, tmp_path, **options) -> None:
    with (
        pytest.warns(UserWarning, match="tokens that were written are kept"),
        pytest.raises(CorpusUnavailableError, match="the line is dead"),
    ):
        prepared(kind, tmp_path, **options)


# The commit


@pytest.mark.parametrize("cap", [None, 12000])
@pytest.mark.usefixtures("small_parts")
def test_a_preparation_goes_on_with_the_commit_it_began_with(tmp_path, hub, dead_line, cap):
    write_files(hub.repository(PILE), LONG)
    dead_line(2)
    interrupted(Pile, tmp_path, train_tokens=cap)
    write_files(hub.repository(PILE, commit=2), newer(LONG))
    dead_line(None)
    data = prepared(Pile, tmp_path, train_tokens=cap)
    taken = texts_of(data, "train")
    assert taken == [text for text in LONG if text in set(taken)]
    assert len(taken) > 220
    assert data.origin["train"] == {"name": PILE, "commit": f"{1:040x}"}
    fresh = prepared(Pile, tmp_path / "fresh", train_tokens=cap)
    assert fresh.origin["train"]["commit"] == f"{2:040x}"
    assert texts_of(fresh, "train")[0] == LONG[0].upper()
    assert fresh.fingerprint == data.fingerprint


def test_a_revision_can_be_asked_for(tmp_path, hub):
    write_files(hub.repository(OWT), PAGES)
    write_files(hub.repository(OWT, commit=2), newer(PAGES))
    first, tip = f"{1:040x}", f"{2:040x}"
    old = prepared(OpenWebText, tmp_path, val_documents=5, revision=first)
    new = prepared(OpenWebText, tmp_path, val_documents=5)
    assert texts_of(old, "train") == PAGES[:-5]
    assert texts_of(new, "train") == newer(PAGES[:-5])
    assert new.origin["train"]["commit"] == tip
    assert old.fingerprint != new.fingerprint
    again = OpenWebText(**old.recipe()["init_args"])
    assert again.fingerprint == old.fingerprint
    with pytest.raises(ValueError, match="revision='x' .*data_files"):
        OpenWebText(data_files="a.jsonl", revision="x")


def test_fingerprints_stay_what_they_were():
    assert OpenWebText().fingerprint == "open_web_text-bytes-f894a81ea45236f2"
    assert Pile(tokenizer="bytes").fingerprint == "pile-bytes-81f2c3a42a31ed54"
    assert WikiText103().fingerprint == "wiki_text103-bytes-1f6ac0e4459fe2dc"
    assert "revision" not in json.dumps(OpenWebText().source())


@pytest.mark.usefixtures("small_parts")
def test_without_network_only_the_commit_of_the_finished_parts_will_do(tmp_path, hub, dead_line):
    write_files(hub.repository(PILE), LONG)
    dead_line(2)
    interrupted(Pile, tmp_path)
    dead_line(None)
    hub.network = False
    folder = hub.repository(PILE, commit=2)
    write_files(folder, newer(LONG))
    first = folder.with_name(f"{1:040x}").rename(tmp_path / "away")
    with pytest.raises(CorpusUnavailableError, match="no network"):
        prepared(Pile, tmp_path)
    first.rename(folder.with_name(f"{1:040x}"))
    data = prepared(Pile, tmp_path)
    assert texts_of(data, "train") == [text for i, text in enumerate(LONG) if i not in (1, 2)]


def test_a_cache_without_some_of_the_files_does_not_stand_in(tmp_path, hub):
    write_files(hub.repository(PILE), LONG)
    hub.network = False
    whole = prepared(Pile, tmp_path)
    assert sum(whole.counts(split).documents for split in ("train", "val", "test")) == 600
    (hub.repository(PILE) / "data/train-00005-of-00006.parquet").unlink()
    with pytest.raises(CorpusUnavailableError, match="no network"):
        prepared(Pile, tmp_path / "fresh")


def test_a_cache_that_cannot_be_counted_stands_in_with_a_warning(tmp_path, hub):
    write_files(hub.repository(PILE), LONG)
    for number, file in enumerate(sorted(hub.repository(PILE).rglob("*.parquet"))):
        file.rename(file.with_name(f"train-{number}.parquet"))
    hub.network = False
    with pytest.warns(UserWarning, match="the 6 cached files that match .* are assumed to be all"):
        prepared(Pile, tmp_path)


# The files


@pytest.mark.usefixtures("small_parts")
def test_a_cap_fetches_only_the_files_that_it_needs(tmp_path, hub):
    write_files(hub.repository(PILE), LONG)
    data = prepared(Pile, tmp_path, train_tokens=5000, num_proc=1)
    assert data.counts("train").tokens <= 5000
    assert sorted(set(hub.fetched)) == [f"data/train-0000{i}-of-00006.parquet" for i in range(2)]


def test_a_tokenizer_is_trained_on_the_same_text(tmp_path, hub):
    write_files(hub.repository(PILE), LONG)
    data = prepared(Pile, tmp_path, tokenizer="bpe:300", train_tokens=6000)
    taken = texts_of(data, "train")
    assert taken == [text for text in LONG if text in set(taken)]
    assert 5900 < data.counts("train").tokens <= 6000


# What differs from the papers


@pytest.mark.parametrize(
    ("kind", "options", "differs"),
    [
        (Pile, {}, True),
        (Pile, {"train_tokens": 400}, True),
        (OpenWebText, {"train_tokens": 400, "val_documents": 6}, True),
        (OpenWebText, {"val_documents": 6}, False),
    ],
)
def test_deviations_are_in_the_log_of_every_run_and_in_meta(
    tmp_path, hub, caplog, kind, options, differs
):
    for name in (OWT, PILE):
        write_files(hub.repository(name), PAGES)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            data = prepared(kind, tmp_path, **options)
            data.setup("test")
        notes = data._store.meta["notes"]
        assert bool(notes) == differs
        logged = caplog.messages.count(f"{kind.__name__}: {' '.join(notes)}")
        assert logged == differs, "once"


@pytest.mark.parametrize("cap", [None, 400])
def test_every_run_says_which_revision_repeats_it(tmp_path, hub, caplog, cap):
    write_files(hub.repository(OWT, commit=7), PAGES)
    commit = f"{7:040x}"
    line = f"OpenWebText: read {OWT} at {commit}; --data.revision {commit} repeats it."
    for fresh in (True, False):
        caplog.clear()
        corpus._LOGGED.clear()  # a run of another process
        with caplog.at_level("INFO"):
            prepared(OpenWebText, tmp_path, val_documents=6, train_tokens=cap)
        assert caplog.messages.count(line) == 1, fresh
    caplog.clear()
    with caplog.at_level("INFO"):
        prepared(OpenWebText, tmp_path, val_documents=6, train_tokens=cap, revision=commit)
        prepared(
            OpenWebText, tmp_path, val_documents=6, data_files=str(tmp_path / "hub/**/*.parquet")
        )
    assert "repeats it" not in caplog.text


# Why it cannot be read


def refused(kind):
    from types import SimpleNamespace

    return kind("401", response=SimpleNamespace(status_code=401, headers={}, request=None))


ERRORS = [
    refused(GatedRepoError),
    refused(RepositoryNotFoundError),
    OSError(errno.ENOSPC, "No space left"),
    TimeoutError("slow"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("asked", ["dataset_info", "hf_hub_download"])
def test_the_corpus_the_cause_and_the_cure_are_named(tmp_path, hub, monkeypatch, error, asked):
    if asked == "hf_hub_download":
        write_files(hub.repository(OWT), PAGES)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(reading if asked == "dataset_info" else huggingface_hub, asked, fail)
    with pytest.raises(CorpusUnavailableError) as raised:
        prepared(OpenWebText, tmp_path, val_documents=6)
    message = str(raised.value)
    for part in (f"OpenWebText: {OWT} (train) ", type(error).__name__, "data.data_files="):
        assert part in message
    assert "\n" not in message


def test_a_missing_revision_is_told(tmp_path, hub):
    write_files(hub.repository(OWT), PAGES)
    with pytest.raises(CorpusUnavailableError, match=r"'v9' .*data.revision"):
        prepared(OpenWebText, tmp_path, revision="v9")


def test_a_missing_configuration_is_told(tmp_path, hub):
    write_files(hub.repository("Salesforce/wikitext"), PAGES)
    with pytest.raises(CorpusUnavailableError, match="wikitext-103-raw-v1"):
        prepared(WikiText103, tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path, hub):
    path = hub.repository(OWT) / "data/train-00000-of-00001.parquet"
    write_parquet(path, PAGES)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    for cap in (None, 100):
        with pytest.raises(ValueError, match="train-00000-of-00001.parquet"):
            prepared(OpenWebText, tmp_path, val_documents=6, train_tokens=cap)
