"""Where sentences end: rules, a SaT model (tiny, randomly initialised, on disk), spans."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.sentences import SplitterUnavailableError, parse_splitter, splitters
from datamodules.sentences.splitters import tidy

TEXT = 'Mr. Smith left. "Why?" she asked.\n\nA title\n \n  He ran (fast). It was \u4f60\u597d. \n'


def parts(text: str, ends) -> list[str]:
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


# Rules


def test_rules_find_sentences_and_blank_lines():
    (ends,) = parse_splitter("rules").ends([TEXT])
    assert parts(TEXT, ends) == [
        "Mr. Smith left.",
        ' "Why?" she asked.',
        "\n\nA title",
        "\n \n  He ran (fast).",
        " It was \u4f60\u597d. \n",
    ]


def test_a_no_break_space_before_a_period():
    """The library panics at a capital, a no-break space and a period."""
    text = "It is plan B\u00a0. He left. She did not."
    (ends,) = parse_splitter("rules").ends([text])
    assert parts(text, ends)[-2:] == [" He left.", " She did not."]


texts = st.text(alphabet='abC. !?"\n\r\t,\u00e4\u4f60\U0001f600', max_size=80)


@settings(max_examples=200, deadline=None)
@given(text=texts, paragraph=st.integers(1, 30))
def test_sentences_join_to_the_text_and_none_is_white_space(text, paragraph):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitters, "_LONGEST_PARAGRAPH", paragraph)
        (ends,) = parse_splitter("rules").ends([text])
    found = parts(text, ends)
    assert "".join(found) == text
    assert all(part.strip() for part in found) or len(found) == 1
    assert not any(part[-1].isspace() for part in found[:-1])


def test_a_long_paragraph_is_split_as_a_short_one(monkeypatch):
    text = " ".join(f"This is sentence number {i} of a very long line." for i in range(60))
    (whole,) = parse_splitter("rules").ends([text])
    monkeypatch.setattr(splitters, "_LONGEST_PARAGRAPH", 200)
    (pieces,) = parse_splitter("rules").ends([text])
    assert len(whole) == 60
    assert pieces.tolist() == whole.tolist()


@given(text=texts, data=st.data())
def test_tidy_moves_white_space_to_the_next_sentence(text, data):
    given_ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    ends = tidy(text, given_ends).tolist()
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text)
    assert {text[:e].rstrip() for e in given_ends} - {""} <= {text[:e].rstrip() for e in ends}


# Names


@pytest.mark.parametrize("name", ["sentences", "spans", "spans:0", "spans:x", "sat:", "rules:en"])
def test_unknown_names_are_told_with_the_known_ones(name):
    with pytest.raises(ValueError, match="'rules', 'sat'"):
        parse_splitter(name)


def test_spans_need_no_text():
    spans = parse_splitter("spans:4")
    assert spans.token_ends(10).tolist() == [4, 8, 10]
    assert spans.token_ends(8).tolist() == [4, 8]
    assert spans.token_ends(0).tolist() == [0]


# SaT


@pytest.fixture(scope="module")
def sat_folder(tmp_path_factory) -> Path:
    """A SaT model of one layer whose answers depend on the token, and its tokenizer of bytes."""
    import tokenizers
    import torch
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from wtpsplit.configs import SubwordXLMConfig
    from wtpsplit.models import SubwordXLMForTokenClassification

    folder = tmp_path_factory.mktemp("sat") / "tiny"
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    config = SubwordXLMConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=514,
        num_labels=1,
    )
    torch.manual_seed(0)
    model = SubwordXLMForTokenClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    torch.nn.init.constant_(model.classifier.bias, -4.0)
    model.save_pretrained(folder)
    return folder


def test_sat_gives_the_sentences_of_wtpsplit(sat_folder):
    from wtpsplit import SaT

    splitter = parse_splitter(f"sat:{sat_folder}")
    documents = [TEXT, "one line", "\n\n", TEXT * 30]
    found = splitter.ends(documents)
    theirs = SaT(str(sat_folder), tokenizer_name_or_path=str(sat_folder)).split(documents)
    assert 5 < len(found[0]) < len(TEXT) / 2
    for text, ends, expected in zip(documents, found, theirs, strict=True):
        ours = [part.strip() for part in parts(text, ends)]
        assert ours == ([s.strip() for s in expected if s.strip()] or [""])
        assert "".join(parts(text, ends)) == text


def test_a_local_sat_is_known_by_its_content(sat_folder, tmp_path):
    import shutil

    copy = tmp_path / "elsewhere" / "tiny"
    shutil.copytree(sat_folder, copy)
    splitter, other = parse_splitter(f"sat:{sat_folder}"), parse_splitter(f"sat:{copy}")
    assert splitter.identity() == other.identity()
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert splitter.identity() != other.identity()


def test_sat_is_pickled_without_its_model(sat_folder):
    splitter = parse_splitter(f"sat:{sat_folder}")
    splitter.load()
    again = pickle.loads(pickled := pickle.dumps(splitter))
    assert len(pickled) < 500
    assert again.ends([TEXT])[0].tolist() == splitter.ends([TEXT])[0].tolist()
    assert not splitter.gains_from_processes


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("sat-3l", 0.025), ("sat-12l-sm", 0.25), ("sat-3l-no-limited-lookahead", 0.01)],
)
def test_thresholds_are_those_of_wtpsplit(name, threshold):
    assert parse_splitter(f"sat:{name}").threshold == threshold
    assert parse_splitter(f"sat:/models/of/smith/{name}").threshold == threshold


@pytest.mark.parametrize("name", ["sat:./nothing/here", "sat:/nothing", "sat:~/nothing"])
def test_a_missing_folder_is_told_with_the_cure(name):
    with pytest.raises(SplitterUnavailableError, match="'rules'"):
        parse_splitter(name).load()
    with pytest.raises(SplitterUnavailableError, match="the folder does not exist"):
        parse_splitter(name).identity()


@pytest.mark.parametrize(
    ("name", "options"), [("sat", {}), ("sat:owner/model", {"hub_prefix": None})]
)
def test_weights_that_cannot_be_fetched_are_told_with_the_cure(name, options, monkeypatch):
    asked = []

    def no_network(model, given):
        asked.append((model, given))
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr(splitters, "_load", no_network)
    with pytest.raises(SplitterUnavailableError) as told:
        parse_splitter(name).ends(["text"])
    assert asked == [(name.partition(":")[2] or "sat-3l-sm", options)]
    assert "We couldn't connect to the hub). Set splitter to 'sat:FOLDER'" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_folder_without_a_tokenizer_is_told(sat_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((sat_folder / name).read_bytes())
    with pytest.raises(SplitterUnavailableError, match="local folder with model and tokenizer"):
        parse_splitter(f"sat:{tmp_path}").load()
