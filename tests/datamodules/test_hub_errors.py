"""Why the hub cannot be read, and what the message says helps."""

import errno
import gzip

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from datamodules import CorpusUnavailableError, OpenWebText, WikiText103
from tests.datamodules.test_hub_corpora import PAGES, prepared, write_parquet

OWT = "Skylion007/openwebtext"


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
