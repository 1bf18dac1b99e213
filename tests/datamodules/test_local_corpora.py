"""Your own files and Python's documentation: formats, broken content, splits."""

import gzip
import io
import json
import re
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import LocalText, OpenWebText, PythonDocs, local_corpora, readers
from datamodules.local_corpora import module_document, passages, topics
from datamodules.readers import expand, read_documents, split_text
from datamodules.store import SPLITS

TEXTS = ["first", "zweites, \u00e4hnlich", "third\nwith two lines"]
JSONL = "".join(json.dumps({"text": t, "n": 1}) + "\n" for t in TEXTS).encode()


def read(path: Path, **options) -> list[str]:
    return list(read_documents(path, **options))


def zst_of_two_frames(data: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return compress(data[:20]) + compress(data[20:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.ndjson.zst", zst_of_two_frames)],
)
def test_jsonl_plain_and_compressed(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(JSONL + b"\n" + JSONL))  # a blank line between
    assert read(path) == TEXTS * 2


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.md.zst", zst_of_two_frames)],
)
def test_text_plain_and_compressed(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack("\ufeffein \u00e4\r\nzwei\r\n\r\ndrei\r".encode()))
    assert read(path) == ["ein \u00e4\nzwei\n\ndrei\n"]
    assert read(path, separator=r"\n\n") == ["ein \u00e4\nzwei", "drei\n"]


def test_parquet_and_text_field(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": TEXTS, "n": [1, 2, 3]}), path)
    assert read(path, text_field="body") == TEXTS
    with pytest.raises(ValueError, match=r"no column 'text', the columns are 'body', 'n'"):
        read(path)


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab\n=", max_size=200), st.integers(1, 7), st.sampled_from([r"\n\n+", "=+", "^=|a$"])
)
def test_cutting_a_stream_equals_cutting_the_text(text, size, pattern):
    separator = re.compile(pattern, re.MULTILINE)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_LOOK_AHEAD", 210)  # longer than any text here: no match is cut
        pieces = list(split_text(lambda n: parts.pop(0) if parts else "", separator))
    assert pieces == re.split(separator, text)


def test_cutting_holds_one_document_at_a_time():
    sizes = []

    def endless(size: int) -> str:
        sizes.append(size)
        return ("x" * 999 + "\n") * (size // 1000 + 1)

    pieces = split_text(endless, re.compile("\n"))
    assert [len(next(pieces)) for _ in range(5000)] == [999] * 5000
    assert max(sizes) == min(sizes) == 2**20


def test_long_matches_and_look_around_across_chunks(monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK", 16)
    text = "a" * 5000 + "\n" * 50 + "b" * 5000
    parts = [text[i : i + 16] for i in range(0, len(text), 16)]
    pieces = list(
        split_text(lambda n: parts.pop(0) if parts else "", re.compile(r"(?<=a)\n+(?=b)"))
    )
    assert pieces == ["a" * 5000, "b" * 5000]


def parquet(text: bytes, *, damage: bool = False) -> bytes:
    """A file of one text, which need not be UTF-8; or one whose first page is overwritten."""
    sink = io.BytesIO()
    column = pa.Array.from_buffers(pa.string(), 1, pa.array([text], pa.binary()).buffers())
    pq.write_table(pa.table({"text": column}), sink)
    content = sink.getvalue()
    return content[:4] + b"\xff" * 24 + content[28:] if damage else content


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b'{"text": "  "}\n', "is empty"),
        ("a.txt", b"abc \xff", "not UTF-8"),
        ("a.txt", b"\xc3\xa4 \xc3", "not UTF-8"),
        ("a.txt", b"x" * 2**20 + b"\xc3(", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is not JSON"),
        (
            "a.jsonl",
            b'{"body": "a", "id": 1}\n',
            "line 1: there is no field 'text', .*'body', 'id'",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "line 2: the field 'text' holds NoneType"),
        ("a.jsonl", b"[1]\n", "line 1: expected an object with the field 'text', found list"),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-9], "damaged or cut off"),
        ("a.jsonl.gz", b"no gzip", "damaged or cut off"),
        ("a.txt.zst", zst_of_two_frames(JSONL)[:-3], "damaged or cut off"),
        ("a.txt.zst", b"no zstd at all", "damaged or cut off"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2 is not JSON .*nested too deeply"),
        ("a.jsonl", b"1" * 9999, "line 1 is not JSON .*Exceeds the limit"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b\\ud800"}\n',
            "line 2: .*half a surr",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "id": [{"\\uDFFF": 1}]}',
            "line 1: .*half a surr",
        ),
        ("a.parquet", b"no parquet", "not a parquet file"),
        ("a.parquet", b"PAR1" + b"\xff" * 64 + b"\x40\0\0\0PAR1", "not a parquet file"),
        ("a.parquet", parquet(b"\xff"), "rows 1 to 1: .*not UTF-8"),
        ("a.parquet", parquet(b"some text", damage=True), "not a parquet file, or cut off"),
        ("a.csv", b"a,b", "suffix decides the format"),
        ("a.parquet.gz", b"", "suffix decides the format"),
    ],
)
@pytest.mark.parametrize("separator", [None, "\n\n"])
def test_bad_files_say_what_and_where(tmp_path, name, content, message, separator):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(path, separator=separator)
    assert str(path) in str(error.value)


def test_text_beyond_the_first_plane_is_no_lone_surrogate(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud800"}\n')
    assert read(path) == ["\U0001f600", "\\ud800"]


def test_a_published_corpus_may_hold_lone_surrogates(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert list(OpenWebText(data_files=str(path)).read_file(path)) == ["a\ud800b"]


def test_globs(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [p.name for p in expand(f"{tmp_path}/*.txt")] == ["a.txt", "b.txt"]
    assert [p.name for p in expand([f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt"])] == [
        "b.txt",
        "a.txt",
        "c.txt",
    ]
    with pytest.raises(ValueError, match="no file matches"):
        expand(f"{tmp_path}/*.jsonl")
    with pytest.raises(ValueError, match="there is no such file"):
        expand(f"{tmp_path}/none.txt")
    with pytest.raises(ValueError, match=r"is a folder.*glob"):
        expand(str(tmp_path))


def test_fractional_splits_hold_every_document_once(corpus, lines):
    data = corpus(val_fraction=0.2, test_fraction=0.1)
    splits = {s: list(data.documents(s)) for s in ("train", "val", "test")}
    joined = sorted(chain(*splits.values()))
    assert joined == sorted(json.loads(line)["text"] for line in lines.read_text().splitlines())
    assert [len(splits[s]) for s in ("train", "val", "test")] == [42, 12, 6]


def test_explicit_splits_leave_the_training_files_whole(corpus, tmp_path):
    for name in ("val", "test"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    data = corpus(val_files=f"{tmp_path}/val.txt", test_files=[f"{tmp_path}/test.txt"])
    assert data.counts("train").documents == 60
    assert list(data.documents("val")) == ["text of val"]
    assert list(data.documents("test")) == ["text of test"]
    half = corpus(val_files=f"{tmp_path}/val.txt", test_fraction=0.1)
    assert [half.counts(s).documents for s in ("train", "val", "test")] == [54, 1, 6]


def test_a_file_in_two_splits_is_refused(corpus, lines):
    with pytest.raises(ValueError, match="is in data_files and in val_files"):
        corpus(val_files=str(lines))


def test_files_to_score_alone_train_nothing(corpus, tmp_path):
    (tmp_path / "test.txt").write_text("text of the test")
    data = corpus(data_files=None, test_files=f"{tmp_path}/test.txt", val_fraction=0.1)
    assert [data.counts(s).documents for s in ("train", "val", "test")] == [0, 0, 1]
    with pytest.raises(ValueError, match=r"data_files \(null\): set data.data_files"):
        data.setup("fit")
    with pytest.raises(ValueError, match=r"data_files \(null\) names no text"):
        LocalText()


def test_a_single_book_is_cut_into_passages_for_its_splits(corpus, tmp_path, caplog):
    chapters = [f"{'word ' * 90}{n}.\n{'line ' * 50}\n" for n in range(100)]
    book = tmp_path / "book.txt"
    book.write_text("\n".join(chapters))
    with caplog.at_level("INFO"):
        data = corpus(data_files=f"{tmp_path}/b*.txt")
    assert "book.txt, the only file, is cut into passages" in caplog.text
    assert [data.counts(s).documents for s in SPLITS] == [29, 2, 2]
    parts = [text for s in SPLITS for text in data.documents(s)]
    assert len(set(parts)) == 33
    assert all(part.startswith("word word") and part in book.read_text() for part in parts)
    assert sum(map(len, parts)) == len(book.read_text())
    whole = corpus(data_files=str(book), val_fraction=0.0, test_fraction=0.0)
    assert [whole.counts(s).documents for s in SPLITS] == [1, 0, 0]
    (tmp_path / "other.txt").write_text("x" * 9000)
    both = corpus(data_files=[str(book), f"{tmp_path}/other.txt"], test_fraction=0.0)
    assert [both.counts(s).documents for s in SPLITS] == [1, 1, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3000), st.sampled_from(["", "a b ", "line\n", "paragraph\n \n"]))
def test_passages_are_the_text_in_even_pieces(count, filler):
    text = "x" * 700 + filler * count
    parts = passages(text)
    assert "".join(parts) == text
    assert len(parts) <= 50
    assert min(map(len, parts)) >= min(500, len(text))
    assert max(map(len, parts)) <= max(1250, 2.5 * (len(text) / 50 + 1))


def test_one_document_cannot_be_split(corpus, tmp_path):
    (tmp_path / "one.txt").write_text("one document\n\nof two parts\n\nor three")
    with pytest.raises(ValueError, match=r"no documents \(1 in all.*data.separator"):
        corpus(data_files=f"{tmp_path}/one.txt")
    data = corpus(data_files=f"{tmp_path}/one.txt", separator="\n\n", block_size=2, batch_size=1)
    assert [data.counts(s).documents for s in ("train", "val", "test")] == [1, 1, 1]
    whole = corpus(data_files=f"{tmp_path}/one.txt", val_fraction=0.0, test_fraction=0.0)
    assert whole.val_dataloader() == []
    with pytest.raises(ValueError, match=r"test split is empty.*test_fraction=0.0"):
        whole.test_dataloader()


def test_fingerprint_follows_content_and_options_not_folders(corpus, lines, tmp_path):
    first = corpus().fingerprint
    moved = tmp_path / "elsewhere" / lines.name
    moved.parent.mkdir()
    moved.write_bytes(lines.read_bytes())
    assert corpus(data_files=str(moved)).fingerprint == first
    assert corpus(block_size=8, seed=3, train_windows="random").fingerprint == first
    options = [
        {"val_fraction": 0.1},
        {"test_fraction": 0.1},
        {"tokenizer": "bpe:300"},
        {"separator": "x"},
        {"val_files": str(moved.with_name("v.jsonl"))},
    ]
    moved.with_name("v.jsonl").write_bytes(JSONL)
    names = {corpus(**o).fingerprint for o in options} | {first}
    moved.write_bytes(moved.read_bytes().replace(b"Document 7", b"Document 8"))  # same size
    names.add(corpus(data_files=str(moved)).fingerprint)
    assert len(names) == 7


def test_large_files_are_identified_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(local_corpora, "_WHOLE", 100)
    monkeypatch.setattr(local_corpora, "_SAMPLE", 4)
    path = tmp_path / "large.txt"
    path.write_bytes(bytes(1000))
    first = local_corpora.identify(path)
    for edited in (0, 999):
        path.write_bytes(bytes(edited) + b"x" + bytes(999 - edited))
        assert local_corpora.identify(path) != first
    path.write_bytes(bytes(1001))
    assert local_corpora.identify(path)["bytes"] == 1001


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PythonDocs:
    docs = PythonDocs(cache_dir=str(tmp_path_factory.mktemp("cache")))
    docs.prepare_data()
    docs.setup()
    return docs


def test_size_and_splits(data):
    counts = [data.counts(split) for split in SPLITS]
    assert 1_200_000 < sum(c.utf8_bytes for c in counts) < 4_000_000
    assert sum(c.documents for c in counts) > 300
    assert counts[0].documents > 10 * counts[1].documents > 0
    assert all(c.tokens == c.utf8_bytes + c.documents for c in counts)


def test_topics_come_from_pydoc():
    from pydoc_data.topics import topics as texts

    found = topics()
    assert len(texts) - 3 <= len(found) == len(set(found)) <= len(texts)
    assert all(text.strip() + "\n" in found for text in texts.values())


def test_module_document_takes_long_docstrings_of_all_definitions(tmp_path):
    path = tmp_path / "module.py"
    long = ("A docstring long enough to be taken, " * 2).strip()
    path.write_text(
        f'"""Short."""\nclass A:\n    """{long}"""\n    if True:\n        async def f(self):\n'
        f'            """  First.\n\n            {long}\n            """\n            return 1\n'
    )
    text = module_document(path, "package.module", 50)
    assert text.startswith(f"package.module.A\n\n{long}\n")
    assert f"package.module.A.f\n\nFirst.\n\n{long}\n" in text
    assert "Short" not in text
    assert module_document(path, "m", 6).startswith("m\n\nShort.\n\nm.A\n")


def test_unreadable_modules_are_left_out(tmp_path):
    path = tmp_path / "old.py"
    path.write_bytes(b"print 'python 2'")
    assert module_document(path, "old", 0) == ""
    path.write_bytes(b'"""\xff"""')
    assert module_document(path, "old", 0) == ""


def test_fingerprint_changes_with_the_interpreter_and_options(data, monkeypatch):
    names = {data.fingerprint, PythonDocs(min_docstring=100).fingerprint}
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    names.add(PythonDocs().fingerprint)
    assert len(names) == 3
    assert data.fingerprint.startswith("python_docs-bytes-")
