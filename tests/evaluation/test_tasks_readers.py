"""Texts as tokens: what is given, what is scored, and where long ones are cut."""

import pytest

from datamodules import SentenceTokenizer, load_tokenizer
from datamodules.sentences.splitters import parse_splitter
from evaluation.tasks.readers import (
    MarkedReader,
    Segment,
    SentenceReader,
    WindowReader,
    reader_of,
    scored_of,
    windows,
)

BYTES = load_tokenizer("bytes")
EOS = BYTES.eos_id


def marked(splitter="rules", most=64):
    return SentenceTokenizer(BYTES, parse_splitter(splitter), max_sentence_tokens=most)


def scored_text(piece):
    return BYTES.decode([i for i, s in zip(piece.tokens, piece.scored, strict=True) if s])


PLAIN, MARKED = WindowReader(BYTES, None), marked()
BOS, END = MARKED.bos_id, MARKED.eos_id


@pytest.mark.parametrize(
    ("reader", "pair", "tokens", "scored"),
    [
        # white space at the context's end goes to the continuation
        (PLAIN, ("one  ", "two"), b"one  two", "  two"),
        # an empty context is the end of text
        (PLAIN, ("", "two"), (EOS, *b"two"), "two"),
        (PLAIN, (" ", "two"), (EOS, *b" two"), " two"),
        # a continuation goes on with the context's last sentence, or begins another
        (SentenceReader(MARKED, None), ("One reads. Two", " writes."), None, " writes."),
        (SentenceReader(MARKED, None), ("One.", " Two. Three."), None, " Two. Three."),
        (
            MarkedReader(MARKED, None),
            ("One.", " Two. T"),
            (BOS, *b"One.", END, BOS, *b" Two.", END, BOS, *b" T"),
            " Two. T",
        ),
    ],
)
def test_what_is_read_and_scored(reader, pair, tokens, scored):
    piece = reader.segment(*pair)
    assert scored_text(piece) == scored
    assert piece.tokens == tuple("".join(pair).encode() if tokens is None else tokens)


class Merging:
    """Encodes 'ab' as one token, where it stands together."""

    start_id, text_bos_id = 0, None

    def encode(self, text):
        return [{"ab": 3, "a": 1, "b": 2}[part] for part in ([text] if text == "ab" else text)]


def test_a_continuation_inside_the_last_token_of_the_context_is_scored_with_it():
    assert WindowReader(Merging(), None).segment("a", "b") == Segment((0, 3), (False, True))


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 24])
def test_long_texts_are_cut_as_by_the_harness(length):
    from lm_eval.utils import get_rolling_token_windows

    tokens = [(7 * i) % 50 for i in range(length)]
    piece = Segment((EOS, *tokens), (False, *[True] * length))
    theirs = get_rolling_token_windows(tokens, EOS, max_seq_len=6, context_len=1)
    ours = windows(piece, 6)
    for own, (inputs, predicted) in zip(ours, theirs, strict=True):
        assert list(own.tokens[:-1]) == inputs
        assert list(own.tokens[-len(predicted) :]) == predicted
        assert sum(own.scored) == len(predicted)
        assert all(own.scored[-len(predicted) :])


def test_a_long_context_is_cut_on_the_left():
    (piece,) = WindowReader(BYTES, 8).segments("0123456789", "abc")
    assert piece.tokens == tuple(b"456789abc")
    assert piece.given == 6


def test_a_batch_has_targets_where_tokens_are_scored():
    reader = WindowReader(BYTES, None)
    pieces = [reader.segment("ab", "c"), reader.segment("", "xyz")]
    batch = reader.batch(pieces)
    assert batch["targets"].tolist() == [[-100, ord("c"), -100], [*b"xyz"]]
    assert batch["tokens"].tolist() == [[*b"ab", EOS], [EOS, *b"xy"]]
    assert batch["mask"].tolist() == [[True, True, False], [True] * 3]
    assert batch["context"].tolist() == [2, 1]
    found = scored_of(batch["targets"], batch["targets"])
    assert [row.tolist() for row in found] == [[ord("c")], [*b"xyz"]]


def test_what_is_drawn_depends_on_what_is_given_alone():
    reader = WindowReader(BYTES, None)
    pieces = [reader.segment(*pair) for pair in (("ab", "c"), ("ab", "de"), ("ac", "c"))]
    first, second, other = reader.batch(pieces)["sequence_id"].tolist()
    assert first == second != other
    assert 0 <= first < 2**62


def test_prefixes_score_one_token_each():
    piece = Segment((1, 2, 3, 4), (False, False, True, True), (3, 4))
    assert list(piece.prefixes()) == [
        Segment((1, 2, 3), (False, False, True), (3,)),
        Segment((1, 2, 3, 4), (False, False, False, True), (3, 4)),
    ]


def test_sentences_end_in_the_whole_text():
    reader = SentenceReader(marked(), None)
    for pair, ends in (
        (("One reads. Two", " writes."), (len("One reads."), len("One reads. Two writes."))),
        (("One reads.", " Two."), (len("One reads."), len("One reads. Two."))),
    ):
        assert reader.segment(*pair).ends == ends


def test_sentence_batches_score_words_alone():
    reader = SentenceReader(marked(), None)
    pieces = [reader.segment("One reads. Two", " x. Y."), reader.segment("", "Z")]
    batch = reader.batch(pieces)
    words = [batch["targets"][row][batch["targets"][row] >= 0].tolist() for row in (0, 1)]
    assert words == [[*b" x. Y."], [*b"Z"]]
    found = scored_of(batch["targets"], batch["targets"])
    assert [row.tolist() for row in found] == words
    assert reader.read_tokens(pieces[1]) == 3  # BOS, Z, EOS


def test_windows_of_marked_sentences_end_with_a_word():
    piece = MarkedReader(marked(), None).segment("One.", " Two. T")
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
    pieces = [reader.segment("", text) for text in ("one", "other", "one")]
    one, other, again = reader.batch(pieces)["sequence_id"].tolist()
    assert one == other == again, "answers to one (empty) question share theirs"
    one, other, again = reader.batch(pieces, whole=True)["sequence_id"].tolist()
    assert one == again != other
