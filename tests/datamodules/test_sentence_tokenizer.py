"""Marked documents: the words of the whole text, cut into sentences, and back."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datamodules.sentences import SentenceTokenizer, parse_splitter
from datamodules.tokenizers import (
    BytesTokenizer,
    JsonTokenizer,
    tokenizer_from_state,
    train_bpe,
)

TEXT = 'Mr. Smith left. "Why?" she asked.\n\nA title\n\n He ran, and ran on. It was \u4f60\u597d. '


@pytest.fixture(scope="module")
def bpe():
    return train_bpe("bpe:300", [TEXT * 3, "the he and it was. \n\n ran left asked"])


@pytest.fixture(scope="module")
def metaspace():
    """Pieces as SentencePiece has them: a space is put in front, and no bytes are told."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(set('\u2581abcdefghijklmnopqrstuvwxyzMSWAHI.,?"\n\u4f60\u597d'))
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", *alphabet])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return JsonTokenizer("pieces.json", inner.to_str())


def sentence_tokenizer(inner=None, splitter="rules", most=64) -> SentenceTokenizer:
    return SentenceTokenizer(
        inner or BytesTokenizer(), parse_splitter(splitter), max_sentence_tokens=most
    )


def sentences_of(tokenizer, ids) -> list[list[int]]:
    """The words of each sentence of a marked document, which must be well-formed."""
    assert ids[-1] == tokenizer.eod_id
    found, words = [], None
    for i in [*ids[:-1], tokenizer.eos_id]:
        if i == tokenizer.bos_id:
            assert words is None
            words = []
        elif i == tokenizer.eos_id:
            found.append(words)
            words = None
        else:
            assert words is not None
            assert i < tokenizer.bos_id
            words.append(i)
    return found


@pytest.mark.parametrize("name", ["bytes", "bpe", "metaspace"])
def test_marked_sentences(name, request):
    inner = BytesTokenizer() if name == "bytes" else request.getfixturevalue(name)
    tokenizer = sentence_tokenizer(inner)
    found = sentences_of(tokenizer, tokenizer.encode(TEXT))
    assert [inner.decode(words).strip() for words in found] == [
        "Mr. Smith left.",
        '"Why?" she asked.',
        "A title",
        "He ran, and ran on.",
        "It was \u4f60\u597d.",
    ]


def test_ids_and_names(bpe):
    tokenizer = sentence_tokenizer(bpe)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eod_id) == (300, 301, 302)
    assert tokenizer.vocab_size == 303
    assert tokenizer.stop_ids == (302,)
    assert set(tokenizer.special_ids) == {bpe.eos_id, 300, 301, 302}
    assert tokenizer.token_bytes.tolist() == [*bpe.token_bytes.tolist(), 0, 0, 0]


texts = st.text(alphabet='ab C.!,"\n-\u4f60\U0001f600\u00e4', min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(text=texts, most=st.integers(1, 20), splitter=st.sampled_from(["rules", "spans:1"]))
@example(text=" .\u4f60", most=20, splitter="rules")
@pytest.mark.parametrize("name", ["bytes", "bpe", "metaspace"])
def test_the_words_are_those_of_the_whole_text(name, bpe, metaspace, text, most, splitter):
    inner = {"bytes": BytesTokenizer(), "bpe": bpe, "metaspace": metaspace}[name]
    tokenizer = sentence_tokenizer(inner, splitter, most)
    ids = tokenizer.encode(text)
    found = sentences_of(tokenizer, ids)
    assert [i for words in found for i in words] == inner.encode(text)
    assert all(0 < len(words) <= most for words in found)
    assert tokenizer.decode(ids) == inner.decode(inner.encode(text))
    assert name == "metaspace" or tokenizer.decode(ids) == text
    ((measured, sizes),) = tokenizer.encode_measured([text])
    assert measured.tolist() == ids
    assert sizes.sum() == len(text.encode())
    assert all(size == 0 for i, size in zip(ids, sizes, strict=True) if i >= tokenizer.bos_id)


def test_a_token_across_a_border_belongs_to_the_earlier_sentence():
    inner = train_bpe("bpe:258", ['a!"b' * 9])
    assert inner.decode([257]) == '!"'
    tokenizer = sentence_tokenizer(inner)
    ids = tokenizer.sentence_prompt_ids(["a!", '"b'])
    found = sentences_of(tokenizer, [*ids, tokenizer.eod_id])
    assert [inner.decode(words) for words in found] == ['a!"', "b"]


# Caps


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one, two three four", ["one,", " two three", " four"]),
        ("abcdefghijklmnopqrst", ["abcdefghij", "klmnopqrst"]),
        ("it is (so) he said so", ["it is (so)", " he said s", "o"]),
        ("a-b-c-d-e-f-g-h", ["a-b-c-d-e-", "f-g-h"]),
        ("ab: cd; ef gh", ["ab: cd;", " ef gh"]),
    ],
)
def test_long_sentences_are_cut_behind_punctuation_else_hard(text, expected):
    tokenizer = sentence_tokenizer(most=10)
    found = sentences_of(tokenizer, tokenizer.encode(text))
    assert [tokenizer.decode(words) for words in found] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aaa -- bbbbbbb", "aaa --"),
        ("aaa-- bbbbbbb", "aaa--"),
        ("aaa - bbbbbbb", "aaa -"),
        ("aaa-a bbbbbbb", "aaa-a bb"),
        ('aaa "bb bbbbb', 'aaa "bb b'),
        ('aaa" bbbbbbbb', 'aaa"'),
    ],
)
def test_dashes_and_closing_quotes_but_no_hyphens_and_opening_quotes(text, expected):
    inner = train_bpe("bpe:262", [' -- -- a-- a-- - - " "', " -- -" * 9, ' "' * 9, "a--"])
    tokenizer = sentence_tokenizer(inner, most=8)
    first = sentences_of(tokenizer, tokenizer.encode(text))[0]
    assert inner.decode(first) == expected


def test_spans_longer_than_a_sentence_are_refused():
    with pytest.raises(ValueError, match="75 .*max_sentence_tokens=64"):
        sentence_tokenizer(splitter="spans:75")
    assert sentence_tokenizer(splitter="spans:75", most=75).max_sentence_tokens == 75
    with pytest.raises(ValueError, match="max_sentence_tokens=0"):
        sentence_tokenizer(most=0)


def test_spans_count_tokens(bpe):
    tokenizer = sentence_tokenizer(bpe, "spans:5")
    sizes = [len(words) for words in sentences_of(tokenizer, tokenizer.encode(TEXT))]
    assert set(sizes[:-1]) == {5}
    assert 0 < sizes[-1] <= 5


# Prompts


@pytest.mark.parametrize("splitter", ["rules", "spans:7"])
def test_prompts_leave_their_last_sentence_open(bpe, splitter):
    tokenizer = sentence_tokenizer(bpe, splitter)
    for text in ("He ran. It", "He ran.", "He", "He ran. "):
        ids = tokenizer.prompt_ids(text)
        assert ids == tokenizer.encode(text)[:-1]  # all but EOD
        assert ids[-1] not in (tokenizer.eos_id, tokenizer.eod_id)
        assert tokenizer.decode(ids) == text
    assert tokenizer.prompt_ids("") == [tokenizer.bos_id]
    assert tokenizer.prompt_sentences("") == [[]]
    assert tokenizer.prompt_sentences("He ran. It") == sentences_of(
        tokenizer, tokenizer.encode("He ran. It")
    )


def test_known_sentences_are_kept_whatever_the_splitter_sees():
    tokenizer = sentence_tokenizer()
    ids = tokenizer.sentence_prompt_ids(["He ran ", "and. She", " sat"])
    found = sentences_of(tokenizer, [*ids, tokenizer.eod_id])
    assert [tokenizer.decode(words) for words in found] == ["He ran", " and. She", " sat"]


# State


def test_state_is_plain_and_rebuilds_the_tokenizer(bpe):
    tokenizer = SentenceTokenizer(bpe, parse_splitter("rules", "de"), max_sentence_tokens=9)
    state = json.loads(json.dumps(tokenizer.state()))
    assert state["kind"] == "sentences"
    assert state["inner"] == bpe.state()
    again = tokenizer_from_state(state)
    assert again.state() == tokenizer.state()
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.splitter.language == "de"


def test_a_missing_sat_model_does_not_keep_text_from_being_decoded():
    state = {"kind": "sentences", "inner": {"kind": "bytes"}, "language": "en"}
    state |= {"splitter": "sat:/nothing/here", "max_sentence_tokens": 64}
    tokenizer = tokenizer_from_state(state)
    assert tokenizer.decode([257, 72, 105, 259, 258]) == "Hi"
    assert tokenizer.state() == state
    with pytest.raises(ValueError, match="the folder does not exist"):
        tokenizer.encode("Hi")


def test_workers_get_no_tables(bpe):
    tokenizer = sentence_tokenizer(bpe)
    tokenizer.encode(TEXT * 9)
    assert len(pickle.dumps(tokenizer)) < len(pickle.dumps(bpe)) + 500
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_workers_pay_where_there_is_something_to_split():
    gains = {name: sentence_tokenizer(splitter=name) for name in ("rules", "spans:9", "sat")}
    found = {name: tokenizer.gains_from_processes for name, tokenizer in gains.items()}
    assert found == {"rules": True, "spans:9": False, "sat": False}


def test_arrays_hold_all_ids_of_a_byte_vocabulary():
    (ids,) = sentence_tokenizer().encode_arrays(["Hi. You"])
    assert ids.dtype == np.int64
    assert ids.tolist() == [257, 72, 105, 46, 258, 257, 32, 89, 111, 117, 259]
