"""Texts as tokens: what is given, what is scored, and where long ones are cut."""

import pytest

from datamodules import SentenceTokenizer, load_tokenizer
from datamodules.sentences.splitters import parse_splitter
from evaluation.tasks.readers import (
    MarkedReader,
    Piece,
    SentenceReader,
    WindowReader,
    reader_of,
    windows,
)

BYTES = load_tokenizer("bytes")
EOS = BYTES.eos_id


def marked(splitter="rules", most=64):
    return SentenceTokenizer(BYTES, parse_splitter(splitter), max_sentence_tokens=most)


def scored_text(piece):
    return BYTES.decode([i for i, s in zip(piece.tokens, piece.scored, strict=True) if s])


def test_white_space_at_the_end_of_the_context_is_scored_with_the_continuation():
    piece = WindowReader(BYTES, None).piece("one  ", "two")
    assert piece.tokens == tuple(b"one  two")
    assert scored_text(piece) == "  two"


@pytest.mark.parametrize("context", ["", " "])
def test_an_empty_context_is_the_end_of_text(context):
    piece = WindowReader(BYTES, None).piece(context, "two")
    assert piece.tokens[0] == EOS
    assert scored_text(piece) == f"{context}two"
    assert piece.given == 1


class Merging:
    """Encodes 'ab' as one token, where it stands together."""

    start_id, text_bos_id = 0, None

    def encode(self, text):
        return [{"ab": 3, "a": 1, "b": 2}[part] for part in ([text] if text == "ab" else text)]


def test_a_continuation_inside_the_last_token_of_the_context_is_scored_with_it():
    assert WindowReader(Merging(), None).piece("a", "b") == Piece((0, 3), (False, True))


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 24])
def test_long_texts_are_cut_as_by_the_harness(length):
    from lm_eval.utils import get_rolling_token_windows

    tokens = [(7 * i) % 50 for i in range(length)]
    piece = Piece((EOS, *tokens), (False, *[True] * length))
    theirs = get_rolling_token_windows(tokens, EOS, max_seq_len=6, context_len=1)
    ours = windows(piece, 6)
    for own, (inputs, predicted) in zip(ours, theirs, strict=True):
        assert list(own.tokens[:-1]) == inputs
        assert list(own.tokens[-len(predicted) :]) == predicted
        assert sum(own.scored) == len(predicted)
        assert all(own.scored[-len(predicted) :])


def test_a_long_context_is_cut_on_the_left():
    (piece,) = WindowReader(BYTES, 8).pieces("0123456789", "abc")
    assert piece.tokens == tuple(b"456789abc")
    assert piece.given == 6


def test_a_batch_has_targets_where_tokens_are_scored():
    reader = WindowReader(BYTES, None)
    pieces = [reader.piece("ab", "c"), reader.piece("", "xyz")]
    batch = reader.batch(pieces)
    assert batch["targets"].tolist() == [[-100, ord("c"), -100], [*b"xyz"]]
    assert batch["tokens"].tolist() == [[*b"ab", EOS], [EOS, *b"xy"]]
    assert batch["mask"].tolist() == [[True, True, False], [True] * 3]
    assert batch["context"].tolist() == [2, 1]
    found = reader.scored_of(batch["targets"], pieces)
    assert [row.tolist() for row in found] == [[ord("c")], [*b"xyz"]]


def test_what_is_drawn_depends_on_what_is_given_alone():
    reader = WindowReader(BYTES, None)
    first, second = reader.piece("ab", "c"), reader.piece("ab", "de")
    assert first.number == second.number != reader.piece("ac", "c").number
    assert 0 <= first.number < 2**62


def test_prefixes_score_one_token_each():
    piece = Piece((1, 2, 3, 4), (False, False, True, True), (3, 4))
    assert list(piece.prefixes()) == [
        Piece((1, 2, 3), (False, False, True), (3,)),
        Piece((1, 2, 3, 4), (False, False, False, True), (3, 4)),
    ]


def test_a_continuation_may_go_on_with_a_sentence_or_begin_one():
    reader = SentenceReader(marked(), None)
    on = reader.piece("One reads. Two", " writes.")
    assert [on.tokens[a:b] for a, b in zip((0, *on.ends), on.ends, strict=False)] == [
        tuple(b"One reads."),
        tuple(b" Two writes."),
    ]
    assert scored_text(on) == " writes."
    begun = reader.piece("One reads.", " Two writes. Three.")
    assert len(begun.ends) == 3
    assert scored_text(begun) == " Two writes. Three."


def test_sentence_batches_score_words_alone():
    reader = SentenceReader(marked(), None)
    pieces = [reader.piece("One reads. Two", " x. Y."), reader.piece("", "Z")]
    batch = reader.batch(pieces)
    words = [batch["targets"][row][batch["targets"][row] >= 0].tolist() for row in (0, 1)]
    assert words == [[*b" x. Y."], [*b"Z"]]
    found = reader.scored_of(batch["targets"], pieces)
    assert [row.tolist() for row in found] == words
    assert reader.read_tokens(pieces[1]) == 3  # BOS, Z, EOS


def test_marked_windows_read_marks_and_score_words():
    tokenizer = marked()
    piece = MarkedReader(tokenizer, None).piece("One.", " Two. T")
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert piece.tokens == (bos, *b"One.", eos, bos, *b" Two.", eos, bos, *b" T")
    assert scored_text(piece) == " Two. T"
    cut = windows(piece, 6)
    assert sum(sum(part.scored) for part in cut) == len(" Two. T")
    assert all(part.scored[-1] and len(part.tokens) <= 7 for part in cut)


def test_prompts_are_what_the_model_was_trained_to_continue():
    assert WindowReader(BYTES, None).prompt("") == [EOS]
    assert WindowReader(BYTES, None).prompt("ab") == [*b"ab"]
    tokenizer = marked()
    assert SentenceReader(tokenizer, None).prompt("One.") == tokenizer.prompt_ids("One.")


class Model:
    context_limit = 32

    def __init__(self, reads):
        self.reads = reads


def test_models_get_the_reader_of_their_rows():
    assert type(reader_of(Model("windows"), BYTES)) is WindowReader
    assert type(reader_of(Model("windows"), marked())) is MarkedReader
    assert type(reader_of(Model("sentences"), marked())) is SentenceReader
    for rows, named in {"sentences": "bytes", "reasoning": "evaluate.py reason"}.items():
        with pytest.raises(ValueError, match=named):
            reader_of(Model(rows), BYTES)


def test_whole_texts_have_draws_of_their_own():
    reader = WindowReader(BYTES, None)
    one, other = (reader.piece("", text) for text in ("one", "other"))
    assert one.number == other.number, "answers to one (empty) question share theirs"
    assert one.whole_number != other.whole_number
    assert one.whole_number == reader.piece("", "one").whole_number
