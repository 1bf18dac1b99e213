"""Zero-shot sets: detokenised documents of your files and of the hub; nothing trains."""

import json
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import CorpusUnavailableError, ZeroShotText, detokenizers
from datamodules import detokenizers as undo
from datamodules.store import SPLITS
from datamodules.zero_shot import ZERO_SHOT_SETS
from tests.datamodules.test_corpora import prepared, texts_of

QUOTED = "\N{LEFT DOUBLE QUOTATION MARK}no,\N{RIGHT DOUBLE QUOTATION MARK} he said"
# Rows as each set has them, and the documents they become.
ROWS = {
    "ptb": (["the firm 's N shares", "it is n't"], ["the firm's 1 shares", "it isn't"]),
    "wikitext": (
        [" = A Title = \n", "", " A well @-@ known , one . \n"],
        ["= A Title =\n", "A well-known, one.\n"],
    ),
    "lm1b": (["He said , yes .", "Why ?"], ["He said, yes.", "Why?"]),
    "lambada": ([QUOTED, "she left"], ['\n"no," he said', "\nshe left"]),
    "ag_news": (["Oil ( Reuters ) - up", "Down, so"], ["Oil ( Reuters ) - up", "Down, so"]),
    "pubmed": (["in 2011 , it rose . \n it fell ."], ["in 2011, it rose .\nit fell."]),
    "arxiv": (["we show ( @xmath0 ) .\nso , it is ."], ["we show (@xmath0) .\nso, it is."]),
}
# Where the hub has them today.
LAYOUT = {
    "ptb": ("refs/convert/parquet", "penn_treebank/validation/0000.parquet"),
    "wikitext": ("main", "wikitext-103-raw-v1/validation-00000-of-00001.parquet"),
    "lm1b": ("refs/convert/parquet", "plain_text/test/0000.parquet"),
    "lambada": ("main", "data/lambada_test.jsonl"),
    "ag_news": ("main", "data/test-00000-of-00001.parquet"),
    "pubmed": ("main", "section/validation-00000-of-00001.parquet"),
    "arxiv": ("main", "section/validation-00000-of-00001.parquet"),
}
NAMES = list(ROWS)


def write_rows(path: Path, rows, field: str) -> Path:
    """Writes rows as parquet, jsonl or lines, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({field: rows, "other": ["x"] * len(rows)}), path)
    elif path.suffix == ".txt":
        path.write_text("".join(row.rstrip("\n") + "\n" for row in rows))
    else:
        path.write_text("".join(json.dumps({"id": 1, field: row}) + "\n" for row in rows))
    return path


def test_each_set_of_the_table_is_tried_here():
    assert list(ZERO_SHOT_SETS) == list(LAYOUT) == NAMES


# Your files


@pytest.mark.parametrize("suffix", ["txt", "json", "parquet"])
@pytest.mark.parametrize("name", NAMES)
def test_your_files_become_documents(tmp_path, name, suffix):
    rows, documents = ROWS[name]
    path = write_rows(tmp_path / f"set.{suffix}", rows, ZERO_SHOT_SETS[name].text_field)
    data = prepared(ZeroShotText, tmp_path, set_name=name, data_files=str(path))
    assert texts_of(data, "val") == documents
    assert [data.counts(split).documents for split in SPLITS] == [0, len(documents), 0]


def test_a_field_may_have_another_name(tmp_path):
    for field, options in (("text", {}), ("body", {"text_field": "body"})):
        path = write_rows(tmp_path / f"{field}.jsonl", ["it is n't"], field)
        data = prepared(ZeroShotText, tmp_path, set_name="ptb", data_files=[str(path)], **options)
        assert texts_of(data, "val") == ["it isn't"]
    with pytest.raises(ValueError, match="'sentence'; .*'id', 'body'"):
        prepared(ZeroShotText, tmp_path, set_name="ptb", data_files=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set_name": "ptb", "data_files": "none.txt"}, r"none.txt: no such file"),
        ({"set_name": "ptb", "data_files": []}, r"ZeroShotText \(ptb\): data_files is empty"),
        ({"set_name": "ptb", "data_files": __file__}, r"the suffix decides the format"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepared(ZeroShotText, tmp_path, **options)


def test_the_fingerprint_follows_set_detokenizer_and_rows(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "set.txt", ["a", "b"], "text")
    options = [{"set_name": name} for name in NAMES]
    options += [{"set_name": name, "data_files": str(path)} for name in NAMES]
    options += [{"set_name": "ptb", "revision": "x"}]
    prints = {ZeroShotText(**o).fingerprint for o in options}
    assert len(prints) == len(options)
    assert ZeroShotText(set_name="ptb", block_size=8).fingerprint in prints
    assert ZeroShotText(set_name="ptb", val_fraction=0.3).fingerprint in prints
    monkeypatch.setattr(detokenizers, "VERSION", 2)
    assert not prints & {ZeroShotText(**o).fingerprint for o in options}


# A test set


def test_nothing_is_trained_on_it(tmp_path):
    path = write_rows(tmp_path / "set.txt", ["a", "b"], "text")
    data = prepared(ZeroShotText, tmp_path, set_name="lm1b", data_files=str(path))
    with pytest.raises(ValueError, match=r"ZeroShotText \(lm1b\)"):
        data.train_dataloader()
    with pytest.raises(ValueError, match=r"test split is empty. .* test split .* as val"):
        data.test_dataloader()
    assert len(data.val_dataloader()) == 1
    with pytest.raises(ValueError, match="neither a model nor a tokenizer"):
        prepared(ZeroShotText, tmp_path, set_name="lm1b", data_files=str(path), tokenizer="bpe:300")


# The hub


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Returns a function that puts rows of a set into the hub's cache; there is no network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))

    def put(name, rows, commit=1) -> str:
        published, (revision, file) = ZERO_SHOT_SETS[name].repository, LAYOUT[name]
        repository = folder / f"datasets--{published.replace('/', '--')}"
        digest = f"{commit:040x}"
        field = ZERO_SHOT_SETS[name].text_field
        write_rows(repository / "snapshots" / digest / file, rows, field)
        reference = repository / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(digest)
        return digest

    return put


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_has_the_same_documents(tmp_path, hub_cache, name):
    rows, documents = ROWS[name]
    commit = hub_cache(name, rows)
    data = prepared(ZeroShotText, tmp_path, set_name=name)
    assert texts_of(data, "val") == documents
    repository = ZERO_SHOT_SETS[name].repository
    assert data.origin == {"repository": repository, "commit": commit}


def test_only_the_files_of_the_split_are_fetched(tmp_path, hub):
    folder = hub.repository(ZERO_SHOT_SETS["arxiv"].repository, commit=3)
    for name in (LAYOUT["arxiv"][1], "section/train-00000-of-00001.parquet"):
        write_rows(folder / name, ["a"], "article")
    data = prepared(ZeroShotText, tmp_path, set_name="arxiv")
    assert data.origin["commit"] == f"{3:040x}"
    assert hub.fetched == [LAYOUT["arxiv"][1]]


def test_a_preparation_goes_on_with_the_commit_it_began_with(hub_cache):
    first = hub_cache("lm1b", ["Old ?"])
    hub_cache("lm1b", ["New ?"], commit=2)
    data = ZeroShotText(set_name="lm1b")
    assert list(data.documents("val")) == ["New?"]
    data.pin({"repository": "billion-word-benchmark/lm1b", "commit": first})
    assert list(data.documents("val")) == ["Old?"]


def test_without_network_and_copy_the_option_that_helps_is_named(tmp_path, hub_cache):
    with pytest.raises(CorpusUnavailableError, match=r"\(pubmed\): .*--files\.pubmed"):
        prepared(ZeroShotText, tmp_path, set_name="pubmed")


def test_a_repository_without_the_files_is_said_so(tmp_path, hub):
    (hub.repository(ZERO_SHOT_SETS["ag_news"].repository) / "README.md").touch()
    with pytest.raises(CorpusUnavailableError, match="ag_news"):
        prepared(ZeroShotText, tmp_path, set_name="ag_news")


PTB = [
    ("the company 's shares rose", "the company's shares rose"),
    ("the workers ' pay", "the workers' pay"),
    ("it is n't black monday", "it isn't black monday"),
    ("a loss of $ N million or N cents", "a loss of $1 million or 1 cents"),
    ("between N N and N N of it", "between 1 1 and 1 1 of it"),
    ("rose # N to N", "rose #1 to N"),
    ("sold 1\\/2 of mr. <unk> 's stake", "sold 1/2 of mr. ?'s stake"),
    ("dow jones inc.", "dow jones inc."),
    ("a 'small number", "a 'small number"),
]
WIKITEXT = [
    ("= Robert Boulter =", "= Robert Boulter ="),
    ("= = Early life = =", "== Early life =="),
    ("= = = Stage = = =", "=== Stage ==="),
    (
        "a well @-@ known band of 1 @,@ 500 and 3 @.@ 5 kg .",
        "a well-known band of 1,500 and 3.5 kg.",
    ),
    ("He asked : who , when ; and why ? Then !", "He asked: who, when; and why? Then!"),
    ("the play ( 2006 ) by [ sic ] { a }", "the play (2006) by [sic] {a}"),
    ('" Herons , " she said .', '"Herons," she said.'),
    ("the term ' plate ' , ( \" iron \" )", "the term 'plate', (\"iron\")"),
    ("Boulter 's role ; they don 't", "Boulter's role; they don't"),
    ("the dogs ' tails and the cats ' paws", "the dogs' tails and the cats' paws"),
    (
        "at 45 \N{DEGREE SIGN} N and on . . . and N in it",
        "at 45\N{DEGREE SIGN}N and on... and N in it",
    ),
]
LM1B = [
    ("Having a good time , he said .", "Having a good time, he said."),
    ("He doesn 't know Bush 's plan .", "He doesn't know Bush's plan."),
    ("See http : / / www.a.com / b and https : / / c", "See http://www.a.com/b and https://c"),
    ("Why ? Stop ! Now ?", "Why? Stop! Now?"),
    ("It is : a ; b , and / or c", "It is: a; b, and/or c"),
    ('" I am , " she said ( today ) [ sic ] .', '"I am," she said (today) [sic] .'),
    ("It cost $ 5 or \N{POUND SIGN} 3 .", "It cost $5 or \N{POUND SIGN}3."),
    ("the ' fixer ' left", "the 'fixer' left"),
    ("In the U.S. it rose 3.5 percent", "In the U.S. it rose 3.5 percent"),
]
PAPERS = [
    (
        "in 2011 , 314 ( 296 - 331 ) million were ill .",
        "in 2011, 314 (296 - 331) million were ill.",
    ),
    ("it rose .\nit fell .", "it rose .\nit fell."),
    ("it rose . \n it fell .", "it rose .\nit fell."),
    ("see fig . @xcite ; we can 't", "see fig. @xcite; we can't"),
    ("a and / or b , at $ 5 [ 3 ]", "a and/or b, at $5 [3]"),
]


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        *[(undo.ptb, *pair) for pair in PTB],
        *[(undo.wikitext, *pair) for pair in WIKITEXT],
        *[(undo.lm1b, *pair) for pair in LM1B],
        *[(undo.scientific_papers, *pair) for pair in PAPERS],
    ],
)
def test_spaces_of_the_tokenisation_are_undone(function, text, expected):
    assert function(text) == expected


def test_lambada_gets_straight_quotation_marks_and_a_line_end_in_front():
    text = " \N{LEFT DOUBLE QUOTATION MARK}go,\N{RIGHT DOUBLE QUOTATION MARK} he said\nto it \n"
    assert undo.lambada(text) == '\n"go," he said\nto it'


def test_text_as_people_write_it_stays():
    text = 'He said, "It\'s 3.5 (about $4)." Then? See http://a.com/b; it\'s "well-known" [1].'
    for function in (undo.ptb, undo.wikitext, undo.lm1b, undo.scientific_papers, undo.unchanged):
        assert function(text) == text


@pytest.mark.parametrize("name", ZERO_SHOT_SETS)
def test_a_text_twice_detokenised_is_the_same(name):
    row = "the firms ' 1 , 2 ( 3 ) said it was n't \" so \" . The man 's . \n And 4 @-@ 5 ?"
    once = ZERO_SHOT_SETS[name].detokenizer(row)
    assert ZERO_SHOT_SETS[name].detokenizer(once) == once
    assert once.strip()
