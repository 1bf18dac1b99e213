import json

import pytest
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from datamodules.tokenizers import (
    BytesTokenizer,
    JsonTokenizer,
    TokenizerSpec,
    TokenizerUnavailableError,
    check_vocab_size,
    load_tokenizer,
    parse_tokenizer,
    tokenizer_from_state,
    train_bpe,
)

TEXTS = [
    "the cat sat on the mat",
    "na\u00efve caf\u00e9 \u20ac \U0001f642\n\tindented",
    "the end of the day",
]
EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe("bpe:280", TEXTS * 3)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert len(ids) == tokenizer.token_bytes[ids].sum() == len(text.encode())


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_round_trip_and_bytes(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert int(bpe.token_bytes[ids].sum()) == len(text.encode())


def test_bpe_has_exactly_the_entries_asked_for(bpe):
    assert bpe.vocab_size == 280 == len(bpe.token_bytes)
    assert bpe.token_bytes[bpe.eos_id] == 0
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0])  # merges were learnt


def test_bpe_training_is_reproducible(bpe):
    assert train_bpe("bpe:280", TEXTS * 3).json_text == bpe.json_text


def test_bpe_too_large_for_its_corpus():
    with pytest.raises(ValueError, match=r"'bpe:9000'.*'bpe:\d+'"):
        train_bpe("bpe:9000", TEXTS)


@pytest.mark.parametrize("text", [EOS, f"a {EOS} b{EOS}", EOS * 3])
def test_special_text_is_ordinary_text(bpe, text):
    for tokenizer in (bpe, BytesTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert tokenizer.eos_id not in tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids) == text


def test_eos_that_the_file_does_not_mark_as_special_is_not_injected_either(bpe):
    data = json.loads(bpe.json_text)
    data["added_tokens"][0]["special"] = False
    tokenizer = JsonTokenizer("plain", json.dumps(data))
    assert tokenizer.eos_id not in tokenizer.encode(f"a {EOS}")


def test_batch_equals_one_by_one(bpe):
    for tokenizer in (bpe, BytesTokenizer()):
        assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(t) for t in TEXTS]
        assert [a.tolist() for a in tokenizer.encode_arrays(TEXTS)] == tokenizer.encode_batch(TEXTS)


def test_state_rebuilds_the_tokenizer(bpe):
    for tokenizer in (bpe, BytesTokenizer()):
        again = tokenizer_from_state(json.loads(json.dumps(tokenizer.state())))
        assert again.name == tokenizer.name
        assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
    with pytest.raises(ValueError, match="kind='other'"):
        tokenizer_from_state({"kind": "other"})


def test_file_by_path(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.json_text, encoding="utf-8")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode(TEXTS[1]) == bpe.encode(TEXTS[1])
    identity = parse_tokenizer(str(path)).identity
    path.write_text(bpe.json_text + " ", encoding="utf-8")
    assert parse_tokenizer(str(path)).identity != identity


def test_added_tokens_that_are_not_special_count_their_bytes(bpe):
    inner = hf.Tokenizer.from_str(bpe.json_text)
    inner.add_tokens(["\u20ac\u20ac"])
    inner.add_special_tokens(["<pad>"])
    tokenizer = JsonTokenizer("more", inner.to_str())
    assert tokenizer.vocab_size == 282
    assert tokenizer.token_bytes[280:].tolist() == [6, 0]


def test_sentencepiece_pieces_count_their_text():
    vocab = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "<0x41>": 3, "cat": 4}
    inner = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    inner.add_special_tokens(["<unk>", "</s>"])
    tokenizer = JsonTokenizer("pieces", inner.to_str())
    assert tokenizer.eos_id == 1
    assert tokenizer.token_bytes.tolist() == [0, 0, 4, 1, 3]


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("bytes", "bytes", 257),
        ("gpt2", "tiktoken", 50257),
        ("o200k_base", "tiktoken", 200019),
        ("EleutherAI/gpt-neox-20b", "hub", 50277),
        ("somebody/something", "hub", None),
        ("bpe:1024", "bpe", 1024),
    ],
)
def test_names_are_known_without_loading(name, kind, size):
    assert parse_tokenizer(name) == TokenizerSpec(kind, name, size)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "Choose 'bytes', a tiktoken encoding .gpt2"),
        ("no/such/tokenizer.json", "no such file"),
        ("bpe:256", "at least 257"),
        ("bpe:many", "number of entries"),
    ],
)
def test_unusable_names(name, message):
    with pytest.raises(ValueError, match=message):
        parse_tokenizer(name)


def test_a_trained_tokenizer_cannot_be_loaded_by_name():
    with pytest.raises(ValueError, match="trained on a corpus"):
        load_tokenizer("bpe:300")


def test_size_that_differs_from_the_known_one_is_refused(bpe):
    with pytest.raises(ValueError, match="280 .*50257"):
        check_vocab_size(bpe, TokenizerSpec("hub", "openai-community/gpt2", 50257))


def test_broken_file_and_file_without_eos(bpe):
    with pytest.raises(ValueError, match="not a readable tokenizer.json"):
        JsonTokenizer("broken", "{}")
    data = json.loads(bpe.json_text.replace(EOS, "<stop>"))
    with pytest.raises(ValueError, match="<stop>"):
        JsonTokenizer("endless", json.dumps(data))


def test_failed_downloads_say_what_to_do(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no network\nsecond line")

    monkeypatch.setattr("tiktoken.get_encoding", fail)
    with pytest.raises(TokenizerUnavailableError, match=r"no network\).*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(TokenizerUnavailableError, match=r"no network\).*tokenizer.json"):
        load_tokenizer("Qwen/Qwen2.5-0.5B")


def test_tiktoken_encoding(monkeypatch):
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    small = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={EOS: 260}
    )
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: small)
    monkeypatch.setitem(parse_tokenizer.__globals__["TIKTOKEN_SIZES"], "gpt2", 261)
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (261, 260)
    assert tokenizer.encode("the th") == [257, 32, 256]
    assert tokenizer.eos_id not in tokenizer.encode(f"the {EOS}")
    assert tokenizer.decode([257, 260, 97]) == "thea"
    assert tokenizer.token_bytes[255:].tolist() == [1, 2, 3, 0, 0, 0]  # 258, 259 are unused
    assert tokenizer.decode([257, 258, 259, 97]) == "thea"
    assert tokenizer.encode_batch(["the", "\u00e9"]) == [[257], [195, 169]]
