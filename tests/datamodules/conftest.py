"""Small corpora on disk, made again for each test, and a hub made of folders."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from datamodules import LocalText, Sentences
from datamodules import hub as reading
from datamodules.prepare import prepare_store
from datamodules.sentences import SentenceIndex
from datamodules.store import Split, Store, TokenStream
from datamodules.tokenizers import BytesTokenizer

MakeStream = Callable[..., TokenStream]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """60 numbered documents of different lengths as jsonl."""
    path = tmp_path / "lines.jsonl"
    texts = [f"Document {i}: " + "word " * (i % 7 + 1) for i in range(60)]
    path.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)))
    return path


@pytest.fixture
def corpus(tmp_path: Path, lines: Path) -> Callable[..., LocalText]:
    """Returns a function that makes a prepared corpus of `lines`."""

    def make(**options) -> LocalText:
        defaults = {"data_files": str(lines), "block_size": 16, "batch_size": 4}
        data = LocalText(**{**defaults, "cache_dir": str(tmp_path / "cache"), **options})
        data.prepare_data()
        data.setup()
        return data

    return make


STORY = (
    "Mr. Smith went out. He saw a fox, a hen and a very long queue of people that waited for bread!"
    '\n\nWhy did they wait? "Nobody knows," she said.  It rained; \u00fcber all, \u4f60\u597d. '
)


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """40 numbered documents of 4 to 36 sentences as jsonl."""
    path = tmp_path / "stories.jsonl"
    texts = [f"Story {i} begins. " + STORY * (i % 9 + 1) for i in range(40)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


@pytest.fixture
def sentences(tmp_path: Path, stories: Path) -> Callable[..., Sentences]:
    """Returns a function that makes prepared `Sentences` of `stories`."""

    def make(tokenizer: str = "bytes", *, kind: type = Sentences, **options) -> Sentences:
        cache = str(tmp_path / "cache")
        inner = LocalText(data_files=str(stories), tokenizer=tokenizer, cache_dir=cache)
        data = kind(corpus=inner, **options)
        data.prepare_data()
        data.setup()
        return data

    return make


@pytest.fixture(scope="session")
def make_index() -> Callable[..., SentenceIndex]:
    """Returns a function from the words of each sentence of each document to their index."""

    def make(documents: list[list[int]]) -> SentenceIndex:
        marked = []
        for words in documents:
            for n in words:
                marked += [1, *[0] * n, 2]
            marked[-1:] = [3, 2]  # EOD in front of the last EOS
        lengths = [sum(words) + 2 * len(words) + 1 for words in documents]
        stream = MemoryStream(np.array(marked, dtype=np.int64), np.cumsum(lengths))
        return SentenceIndex(stream, eos_id=2)

    return make


class MemoryStream:
    """Tokens and document ends of a `TokenStream`, without files."""

    def __init__(self, tokens, document_ends):
        self.tokens, self.document_ends = tokens, document_ends

    def __len__(self):
        return len(self.tokens)

    def gather(self, positions):
        return self.tokens[positions]


@pytest.fixture(scope="session")
def make_stream(tmp_path_factory: pytest.TempPathFactory) -> MakeStream:
    """Returns a function from document lengths (EOS not counted) to a stream of distinct tokens.

    Token ids count up over the stream, so that a row of tokens says where it was cut.
    """

    def make(lengths: list[int], shard_tokens: int = 2**28) -> TokenStream:
        tokenizer = _Counting()
        folder = tmp_path_factory.mktemp("stream") / "store"
        documents: list[tuple[Split, str]] = [("train", "x" * n) for n in lengths]
        prepare_store(
            folder,
            description={},
            documents=lambda: documents,
            make_tokenizer=lambda: tokenizer,
            shard_tokens=shard_tokens,
        )
        return Store(folder).stream("train")

    return make


class _Counting(BytesTokenizer):
    """Gives every character of the corpus an id of its own; EOS is 0."""

    vocab_size = 2**20
    eos_id = 0

    def __init__(self) -> None:
        self._next = 1

    def encode_arrays(self, texts):
        arrays = []
        for text in texts:
            arrays.append(np.arange(self._next, self._next + len(text)))
            self._next += len(text)
        return arrays


class FakeHub:
    """Repositories as folders ``<name>@<commit>``, read through the real `datasets`.

    Attributes:
        network: Whether it can be reached.
        asked: What was loaded: a commit, or "offline".
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder, self._cache = folder, cache
        self._branches: dict[tuple[str, str], str] = {}
        self._served: dict[str, object] = {}
        self._load = datasets.load_dataset_builder
        self.network = True
        self.asked: list[str] = []

    def repository(self, name: str, commit: int = 1, branch: str = "main") -> Path:
        """Returns the folder of a commit, which is now the newest of a branch."""
        self._branches[name, branch] = f"{commit:040x}"
        folder = self._folder / f"{name}@{commit:040x}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def serve(self, name: str, data) -> None:
        """Lets a repository have this data set as any of its splits."""
        (self.repository(name) / "data.parquet").touch()
        self._served[name] = data

    def dataset_info(self, name, revision=None):
        from huggingface_hub.errors import RevisionNotFoundError

        if not self.network:
            raise ConnectionError("no network")
        commit = self._branches.get((name, revision or "main"), revision or f"{1:040x}")
        folder = self._folder / f"{name}@{commit}"
        if not folder.is_dir():
            response = SimpleNamespace(status_code=404, headers={}, request=None)
            raise RevisionNotFoundError("there is none", response=response)
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        return SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=f) for f in files])

    def load_dataset_builder(self, name, config=None, *, revision=None, data_files=None):
        self.asked.append(
            "offline"
            if not self.network and datasets.config.HF_HUB_OFFLINE
            else revision or "files"
        )
        commit = revision or self._branches.get((name, "main"))
        if name in self._served:
            data = self._served[name]
            return SimpleNamespace(
                hash=commit,
                download_and_prepare=lambda: None,
                as_dataset=lambda split: data,
                as_streaming_dataset=lambda split: data,
            )
        if data_files is not None:
            return self._load(name, data_files=data_files, cache_dir=str(self._cache))
        folder = self._folder / f"{name}@{commit}"
        if (folder / f"{folder.name.partition('@')[0]}.py").exists():
            raise RuntimeError("Dataset scripts are no longer supported, but found it.py")
        builder = self._load(str(folder), config, cache_dir=str(self._cache))
        builder.hash = commit
        return builder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> FakeHub:
    """Lets corpora find repositories in a folder."""
    fake = FakeHub(tmp_path / "hub", tmp_path / "hf")
    monkeypatch.setattr(datasets, "load_dataset_builder", fake.load_dataset_builder)
    monkeypatch.setattr(reading, "dataset_info", fake.dataset_info)
    monkeypatch.setattr(reading, "_REPOSITORIES", f"{tmp_path / 'hub'}/")
    return fake
