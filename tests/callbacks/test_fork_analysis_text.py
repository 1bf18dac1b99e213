"""The page of an analysis of forks."""

import math
from html.parser import HTMLParser

import numpy as np
import pytest

from callbacks.fork_analysis.page import page
from callbacks.fork_analysis.statistics import MEASURES, TokenRow


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
