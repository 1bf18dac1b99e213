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

from datamodules import AnswerDataModule, LocalText, OpenWebText, PythonDocs, local_corpora, readers
from datamodules.corpus import Repeats
from datamodules.files import expand
from datamodules.local_corpora import module_document, passages, topics
from datamodules.readers import read_documents, read_files, split_text
from datamodules.store import SPLITS

TEXTS = ["first", "zweites, \u00e4hnlich", "third\nwith two lines"]
A_ROW = b'{"text": "a"}\n'
JSONL = "".join(json.dumps({"text": t, "n": 1}) + "\n" for t in TEXTS).encode()


def read(path: Path, **options) -> list[str]:
    return list(read_files([path], lambda p: read_documents(p, **options)))


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


def piped(data: bytes, window_log: int = 20) -> bytes:
    """A zstd frame without the size of its content, as `zstd --long` writes what is piped to it."""
    options = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=window_log, enable_ldm=True
    )
    frame = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return frame.compress(data) + frame.flush()


SKIPPABLE = b"\x50\x2a\x4d\x18\x05\0\0\0hello"  # a frame of the user's, of 5 bytes


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.zst", piped(JSONL, window_log=31)),
        ("a.jsonl.zst", piped(b"") + piped(JSONL[:50]) + SKIPPABLE + piped(JSONL[50:], 31)),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0) + bytes(512)),  # from a tape
        (
            "a.jsonl.gz",
            gzip.compress(JSONL[:9], mtime=0) + gzip.compress(JSONL[9:], mtime=0) + bytes(1),
        ),
        ("A.JSONL.GZ", gzip.compress(JSONL, mtime=0)),
        ("A.NDJSON", JSONL),
    ],
)
def test_whole_files_as_other_programs_write_them(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == TEXTS


@pytest.mark.parametrize(
    ("suffix", "first", "second"),
    [
        (".gz", gzip.compress(JSONL, mtime=0), gzip.compress(JSONL, mtime=0)),
        (".zst", piped(JSONL), piped(JSONL, window_log=31)),
    ],
)
def test_every_cut_is_noticed(tmp_path, suffix, first, second):
    """All but the one between the two, which leaves a whole file."""
    path, whole = tmp_path / f"a.jsonl{suffix}", first + second
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size == len(first):
            assert read(path) == TEXTS
            continue
        with pytest.raises(ValueError, match="truncated"):
            read(path)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"text": st.text(min_size=1).filter(lambda t: t.strip())})),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 9),
)
def test_a_json_array_is_read_item_by_item(tmp_path_factory, rows, indent, ascii, size):
    path = tmp_path_factory.mktemp("array") / "a.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    path.write_bytes(b"\xef\xbb\xbf" + f" \n{text}\n".encode("utf-8", "replace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", size)  # values are cut anywhere
        found = [row for _, row in readers.read_rows(path, lone_surrogates=True)]
    assert found == json.loads(path.read_text(encoding="utf-8-sig"))


def test_parquet_and_text_field(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": TEXTS, "n": [1, 2, 3]}), path)
    assert read(path, text_field="body") == TEXTS
    with pytest.raises(ValueError, match=r"no column 'text'; the columns are 'body', 'n'"):
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
    monkeypatch.setattr(readers, "CHUNK", 16)
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
        ("a.txt", b"abc \xff", r"not UTF-8 \(byte 4: ff\)"),
        ("a.txt", b"\xc3\xa4 \xc3", r"not UTF-8 \(byte 3: c3\)"),
        ("a.txt", b"x" * 2**20 + b"\xc3(", r"not UTF-8 \(byte 1048576: c3\)"),
        ("a.txt", b"x" * (2**20 - 1) + b"\xe4\xbd", r"not UTF-8 \(byte 1048575: e4 bd\)"),
        ("a.txt.gz", gzip.compress(b"\xef\xbb\xbfabc\xff", mtime=0), "byte 6: ff"),
        ("a.jsonl", A_ROW + b'{"text": "\xff"}\n', r"line 2 .*byte 24: ff"),
        ("a.txt", "Latin \xe4".encode("utf-16"), "is UTF-16, not UTF-8"),
        ("a.txt", "Latin \xe4".encode("utf-16-be"), "is UTF-16, not UTF-8"),
        ("a.jsonl", JSONL.decode().encode("utf-16-le"), "is UTF-16, not UTF-8"),
        ("a.jsonl.zst", zst_of_two_frames("abcdefghijkl".encode("utf-32")), "is UTF-32, not"),
        ("a.jsonl", gzip.compress(JSONL, mtime=0), "is compressed with gzip. Rename"),
        ("a.txt", zst_of_two_frames(JSONL), "is compressed with zstd. Rename"),
        ("a.txt.gz", b"", "truncated"),
        ("a.jsonl.zst", b"", "truncated"),
        ("a.jsonl", A_ROW + b'\n{"text": \n', "line 3 is not JSON"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "line 1: .*'text'; .*'body', 'id'"),
        ("a.jsonl", b'{"text": null}\n', "is empty"),
        ("a.jsonl", A_ROW + b'{"text": 5}\n', "line 2: the field 'text' is int"),
        ("a.jsonl", b"[1]\n", "item 1: expected an object with the field 'text', found int"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "item 1 is followed by '{'"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "item 2 is followed by nothing"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "item 2 is not JSON"),
        ("a.json", b'[{"text": "a"}, oops, {"text": "b"}]', "item 2 is not JSON"),
        ("a.json", b'[{"text": "a"}]\n{"text": "b"}', "'{' follows the JSON array"),
        ("a.json", b'[{"text": "b\\ud800"}]', "item 1: .*half a surr"),
        ("a.json", b"[" * 100_000, "item 1 is not JSON .*nested too deeply"),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-9], "damaged or truncated"),
        ("a.jsonl.gz", b"no gzip", "damaged or truncated"),
        ("a.txt.zst", zst_of_two_frames(JSONL)[:-3], "damaged or truncated"),
        ("a.txt.zst", b"no zstd at all", "damaged or truncated"),
        ("a.jsonl", A_ROW + b"[" * 100_000, "line 2 is not JSON .*nested too deeply"),
        ("a.jsonl", b"1" * 9999, "line 1 is not JSON .*Exceeds the limit"),
        ("a.jsonl", A_ROW + b'{"text": "b\\ud800"}\n', "line 2: .*surrogate"),
        ("a.jsonl", b'{"text": "a", "id": [{"\\uDFFF": 1}]}', "line 1: .*surrogate"),
        ("a.parquet", b"no parquet", "not a parquet file"),
        ("a.parquet", b"PAR1" + b"\xff" * 64 + b"\x40\0\0\0PAR1", "not a parquet file"),
        ("a.parquet", parquet(b"\xff"), "rows 1 to 1: .*not UTF-8"),
        ("a.parquet", parquet(b"some text", damage=True), "not a parquet file or is truncated"),
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
    with pytest.raises(ValueError, match="no such file"):
        expand(f"{tmp_path}/none.txt")
    with pytest.raises(ValueError, match=r"is a folder.*glob"):
        expand(str(tmp_path))


def test_a_file_of_several_names_counts_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "folder").symlink_to(tmp_path)
    assert expand([f"{tmp_path}/*.txt", "b.txt", "folder/*.txt", "./a.txt"]) == [tmp_path / "a.txt"]


@pytest.mark.parametrize("folder", ["da ta [v2]", "what?", "[a-c]"])
def test_folders_named_like_patterns(tmp_path, folder):
    for name in (folder, "b", "da ta v"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "[1].txt").write_text("text")
    own = tmp_path / folder / "deep" / "[1].txt"
    for pattern in ("deep/[1].txt", "deep/*.txt", "*/*.txt", "**/*.txt", "deep/[[]1].txt"):
        assert expand(f"{tmp_path / folder}/{pattern}") == [own]


def test_a_pattern_stays_one_where_no_folder_has_its_name(tmp_path):
    for name in ("a", "b", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c.txt").write_text("text")
    assert [path.parent.name for path in expand(f"{tmp_path}/[a-c]/*.txt")] == ["a", "b"]


def test_equal_texts_in_two_splits_are_warned_of(corpus, tmp_path, recwarn):
    def write(name: str, texts) -> str:
        (tmp_path / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        return f"{tmp_path}/{name}"

    files = {
        "data_files": write("train.jsonl", [f"text {i}" for i in range(100)]),
        "val_files": write("val.jsonl", [f" text {i}\n" for i in range(97, 120)] * 2),
        "test_files": write("test.jsonl", [f"text {i}" for i in range(119, 140)]),
    }
    corpus(**files)
    (message,) = [str(w.message) for w in recwarn if "in train" in str(w.message)]
    assert "LocalText: 3 texts are in train and in val; 1 text is in val and in test:" in message
    assert message.endswith("Remove the repeats from all splits but one.")


class Asked(AnswerDataModule):
    """Questions whose answers, "yes" and "no", are in all splits."""

    def questions(self, split):
        for i in {"train": range(50), "val": range(48, 60), "test": range(60, 70)}[split]:
            yield f"Is {i} even?", " yes" if i % 2 == 0 else " no"


def test_equal_questions_in_two_splits_are_warned_of_but_not_their_answers(tmp_path, recwarn):
    Asked(cache_dir=str(tmp_path), block_size=32, batch_size=2).prepare_data()
    (message,) = [str(w.message) for w in recwarn if "in train" in str(w.message)]
    assert message.startswith("Asked: 2 questions are in train and in val: scores on questions ")


def test_repeated_texts_are_counted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr("datamodules.corpus._MAX_HASHES", 512)
    repeats = Repeats()
    for _ in repeats.watch(("train", f"text {i}") for i in range(20_000)):
        assert len(repeats._splits) <= 512
    assert repeats.describe("text") is None
    for _ in repeats.watch(("val", f"text {i}") for i in range(10_000, 30_000)):
        assert len(repeats._splits) <= 512
    count = re.fullmatch(r"about ([\d,]+) texts are in train and in val", repeats.describe("text"))[
        1
    ]
    assert abs(int(count.replace(",", "")) - 10_000) < 5_000  # 6 times the standard deviation


def test_rows_without_text_are_counted_and_files_without_text_are_skipped(
    tmp_path, caplog, recwarn
):
    column = ["First text.", None, " \n", "Fourth text."]
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in column))
    (tmp_path / "c.txt").touch()
    (tmp_path / "d.txt").write_text(" \n")
    paths = expand(f"{tmp_path}/*")
    with caplog.at_level("INFO"):
        texts = list(read_files(paths, read_documents))
    assert texts == ["First text.", "Fourth text."] * 2
    assert "4 files: 4 of 8 texts are empty or null and are left out." in caplog.text
    (message,) = [str(w.message) for w in recwarn]
    assert message.startswith("2 of 4 files have no text and are skipped: ")
    assert message.endswith("c.txt, " + str(tmp_path / "d.txt"))
    with pytest.raises(ValueError, match=r"All 2 files are empty.*c.txt"):
        list(read_files(paths[2:], read_documents))


def test_files_without_a_known_ending_need_a_format(corpus, tmp_path):
    (tmp_path / "Changes.old.gz").write_bytes(gzip.compress(b"one\n\ntwo\n\nthree"))
    (tmp_path / "bash.1").write_text("four\n\nfive\n\nsix")
    files = {"data_files": [f"{tmp_path}/Changes.old.gz", f"{tmp_path}/bash.1"], "block_size": 2}
    options = {"separator": "\n\n", "batch_size": 1, "val_fraction": 0.2, "test_fraction": 0.2}
    with pytest.raises(ValueError, match=r"suffix decides the format.*data.format"):
        corpus(**files, **options)
    data = corpus(format="text", **files, **options)
    texts = [text for split in SPLITS for text in data.documents(split)]
    assert sorted(texts) == sorted(["one", "two", "three", "four", "five", "six"])
    (tmp_path / "rows.log").write_bytes(JSONL)
    rows = corpus(format="jsonl", data_files=f"{tmp_path}/rows.log", batch_size=1, block_size=2)
    assert sum(rows.counts(s).documents for s in SPLITS) == 3
    with pytest.raises(ValueError, match="format"):
        LocalText(data_files="a", format="csv")


STORIES = "\n<|endoftext|>\n".join(f"Story {i} is told." for i in range(20))


@pytest.mark.parametrize(
    ("text", "separator", "words"),
    [
        (STORIES, r"\n<\|endoftext\|>\n", []),
        # Each of the 19 separators leaves its two bars as documents.
        (STORIES, "<|endoftext|>", ["leaves 38 of 58 documents", r"write '<\|endoftext\|>'"]),
        (STORIES, "[end]{9}", ["matches nothing", r"write '\[end\]\{9\}'"]),
        (STORIES, "\t", ["matches nothing: each file is one document. Check"]),
        (STORIES + "\n\n\n", r"\n{3}", []),
    ],
)
def test_a_separator_that_goes_wrong_is_warned_of(tmp_path, recwarn, text, separator, words):
    (tmp_path / "a.txt").write_text(text)
    list(LocalText(data_files=f"{tmp_path}/a.txt", separator=separator).documents("train"))
    warnings = [str(warning.message) for warning in recwarn]
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


@pytest.mark.parametrize("separator", [r"\r\n\r\n", "\r\n\r\n", r"(?:\r\n){2}", r"\r?\n\r?\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_of_separators_match_all_line_ends(tmp_path, separator, end):
    path = tmp_path / "a.txt"
    path.write_bytes(end.join(["one", "", "two", "", "three"]).encode())
    assert read(path, separator=separator) == ["one", "two", "three"]
    data = LocalText(data_files=str(path), separator=separator)
    # A store that was prepared with a separator that could not match is not taken.
    assert "\\r\\n" not in data.source()["separator"]


def test_an_escaped_backslash_before_r_and_n_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(r"one\r\ntwo")
    assert read(path, separator=r"\\r\\n") == ["one", "two"]


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
    with pytest.raises(ValueError, match="data_files.*val_files"):
        corpus(val_files=str(lines))


def test_files_to_score_alone_train_nothing(corpus, tmp_path):
    (tmp_path / "test.txt").write_text("text of the test")
    data = corpus(data_files=None, test_files=f"{tmp_path}/test.txt", val_fraction=0.1)
    assert [data.counts(s).documents for s in ("train", "val", "test")] == [0, 0, 1]
    with pytest.raises(ValueError, match=r"data_files \(null\)"):
        data.setup("fit")
    with pytest.raises(ValueError, match=r"data_files \(null\)"):
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
    with pytest.raises(ValueError, match=r"no documents \(total 1.*data.separator"):
        corpus(data_files=f"{tmp_path}/one.txt")
    data = corpus(data_files=f"{tmp_path}/one.txt", separator="\n\n", block_size=2, batch_size=1)
    assert [data.counts(s).documents for s in ("train", "val", "test")] == [1, 1, 1]
    whole = corpus(data_files=f"{tmp_path}/one.txt", val_fraction=0.0, test_fraction=0.0)
    assert whole.val_dataloader() == []
    with pytest.raises(ValueError, match=r"test split .*test_fraction=0\.0"):
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
