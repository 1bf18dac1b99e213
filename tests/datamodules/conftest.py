"""Small corpora on disk, made anew for each test."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datamodules import LocalText
from datamodules.preparation import prepare_store
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
