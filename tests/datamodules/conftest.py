"""Small corpora on disk, made again for each test, and a hub made of folders."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import RevisionNotFoundError

from datamodules import LocalText, Sentences, encoding
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

    def make(lengths: list[int], part_bytes: int = 2**28) -> TokenStream:
        tokenizer = _Counting()
        folder = tmp_path_factory.mktemp("stream") / "store"
        documents: list[tuple[Split, str]] = [("train", "x" * n) for n in lengths]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoding, "PART_BYTES", part_bytes)
            prepare_store(
                folder,
                description={},
                documents=lambda first: documents[first:],
                make_tokenizer=lambda: tokenizer,
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
    """Repositories in the cache of the real `huggingface_hub`, and the hub's answers about them.

    Attributes:
        network: Whether the hub answers.
        fetched: Names of the files that were asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.network = True
        self.fetched: list[str] = []
        self._download = huggingface_hub.hf_hub_download

    def repository(self, name: str, commit: int = 1, branch: str = "main") -> Path:
        """Returns the folder of a commit, which is now the newest of a branch."""
        repository = self._folder / f"datasets--{name.replace('/', '--')}"
        reference = repository / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(f"{commit:040x}")
        folder = repository / "snapshots" / f"{commit:040x}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def dataset_info(self, name, revision=None):
        if not self.network:
            raise ConnectionError("no network")
        repository = self._folder / f"datasets--{name.replace('/', '--')}"
        reference = repository / "refs" / (revision or "main")
        folder = (
            repository
            / "snapshots"
            / (reference.read_text() if reference.is_file() else str(revision))
        )
        if not folder.is_dir():
            response = SimpleNamespace(status_code=404, headers={}, request=None)
            raise RevisionNotFoundError("there is none", response=response)
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        siblings = [SimpleNamespace(rfilename=file) for file in files]
        return SimpleNamespace(sha=folder.name, siblings=siblings)

    def hf_hub_download(self, name, file, **options):
        self.fetched.append(file)
        return self._download(name, file, **options)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> FakeHub:
    """Lets corpora find repositories in a folder."""
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(reading, "dataset_info", fake.dataset_info)
    return fake
