"""What each token stands for."""

import pytest

from callbacks.analysis.token_text import EOS, PART, pieces
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

    eos_id, text_bos_id = 0, 9

    def decode(self, ids):
        return self.decode_continuation(ids).removeprefix(" ")

    def decode_continuation(self, ids):
        return "".join({1: " one", 2: " two", 3: ""}[i] for i in ids)


def test_spaces_that_decoders_drop_in_front_are_kept_within():
    assert pieces(SpaceDropper(), [1, 2, 1, 3]) == ["one", " two", " one", PART]
    assert pieces(SpaceDropper(), [1, 2], begins=False) == [" one", " two"]
    assert pieces(SpaceDropper(), [2, 0, 9, 1], begins=False) == [" two", EOS, EOS, "one"]
