"""The text of an analysis: what each token stands for, and the page."""

import math
from html.parser import HTMLParser

import numpy as np
import pytest

from callbacks.fork_analysis.page import page
from callbacks.fork_analysis.pieces import EOS, PART, pieces
from callbacks.fork_analysis.statistics import MEASURES, TokenRow
from datamodules.tokenizers import BytesTokenizer, train_bpe

TEXT = "Na\u00efve caf\u00e9s:\n\t\u65e5\u672c\u8a9e \U0001f4ad <b> & 'x' \u2026"


def test_bytes_show_characters_at_their_last_byte():
    ids = BytesTokenizer().encode("a\u20ac\u00e9!")
    assert pieces(BytesTokenizer(), ids) == ["a", PART, PART, "\u20ac", PART, "\u00e9", "!"]


@pytest.mark.parametrize("size", [257, 262, 275])
def test_joined_pieces_are_the_text(size):
    """At 257 entries every byte is a token; above, tokens end within characters."""
    tokenizer = train_bpe(f"bpe:{size}", [TEXT * 4] * 4)
    ids = tokenizer.encode(TEXT)
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found).replace(PART, "") == TEXT


def test_documents_end_visibly_and_within_characters_too():
    tokenizer = BytesTokenizer()
    half = tokenizer.encode("\u20ac")[:2]
    assert pieces(tokenizer, [97, tokenizer.eos_id, *half, tokenizer.eos_id, 98]) == [
        "a",
        EOS,
        PART,
        PART,
        EOS,
        "b",
    ]


def test_bytes_that_are_no_text_do_not_swallow_what_follows():
    found = pieces(BytesTokenizer(), [0x80] * 6 + [97, 98])
    assert found[-1] == "b"
    assert "a" in found[-2]


class SpaceDropper:
    """Drops the space in front of a text, as decoders of word pieces do."""

    eos_id = 0

    def decode(self, ids):
        return "".join({1: " one", 2: " two", 3: ""}[i] for i in ids).removeprefix(" ")


def test_spaces_that_decoders_drop_in_front_are_kept_within():
    assert pieces(SpaceDropper(), [1, 2, 1, 3]) == ["one", " two", " one", PART]


# ---- page


class Reader(HTMLParser):
    """Collects tags with attributes, and the text of each element that is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append((tag, dict(attributes), []))

    def handle_data(self, data):
        if self.open:
            self.open[-1][2].append(data)

    def handle_endtag(self, tag):
        name, attributes, parts = self.open.pop()
        assert name == tag
        self.texts.append((tag, attributes, "".join(parts)))


@pytest.fixture
def written():
    texts = ["<b>", "&\"'", "\n", "\x00\x7f", " end"]
    numbers = np.array([0.5, 0.25, 1.0, 1.0, 0.125])
    row = TokenRow(
        ids=np.arange(5),
        streams=np.array([[1, 2, 1, 1, 2], [1, 4, 1, 2, 3]]),
        original_score=numbers,
        fork_score=np.array([math.nan, 0.375, math.nan, 0.5, 0.5]),
        entropy=np.array([1.25, 2.5, 0.0, 3.0, 4.0]),
        reference_entropy=np.full(5, 7.5),
    )
    layer = dict.fromkeys(MEASURES, 0.5) | {"budget_use": math.nan}
    return page("step <1>", [layer, layer | {"survival": math.nan}], [row], [texts])


def test_the_page_parses_and_shows_each_token(written):
    reader = Reader(written)
    assert reader.open == []
    tokens = [found for found in reader.texts if "title" in found[1]]
    assert [text for _, _, text in tokens] == ["<b>", "&\"'", "\u21b5\n", "\u2400\u2421", " end"]
    assert [attributes["class"] for _, attributes, _ in tokens] == ["s1", "s4", "s1", "s2", "s3"]
    tip = tokens[1][1]["title"].split("\n")
    assert tip == [
        "token 1, id 1",
        "streams 2 \u2192 4",
        "P 0.25 (original), 0.375 (forks)",
        "entropy 2.5 nats",
        "reference entropy 7.5 nats",
    ]
    assert "(forks)" not in tokens[0][1]["title"]


def test_all_counts_have_a_shade_of_their_own(written):
    shades = {line for line in written.splitlines() if line.startswith((".s1 ", ".s2 ", ".s4 "))}
    assert len({shade.partition("{")[2] for shade in shades}) == 3


def test_the_page_needs_nothing_else(written):
    reader = Reader(written)
    assert {tag for tag, _ in reader.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span"),
        *("table", "tr", "th", "td"),
    }
    assert not {name for _, attributes in reader.tags for name in attributes} & {"src", "href"}
    for word in ("http", "url(", "@import", "//"):
        assert word not in written


def test_measures_that_nobody_has_are_left_out(written):
    assert MEASURES["budget_use"] not in written
    assert MEASURES["survival"] in written
    assert "nan" not in written
