"""Prompts begin validation rows; each continuation has a random stream of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules import Kinship, LocalText
from datamodules.tokenizers import BytesTokenizer
from evaluation.load import build_model, build_tokenizer
from evaluation.quality.texts import (
    check_room,
    documents,
    human_texts,
    sampling_config,
    write_texts,
)
from lightning_models import OptimizerConfig, ThoughtGestaltLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.thought_gestalt import ThoughtGestaltConfig

PROMPTS = [[256], [256, 116, 104], [97, 98], [256], [256], [97, 98], [256]]


def prepared(data):
    data.prepare_data()
    data.setup("validate")
    return data


@pytest.fixture
def author(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    model, tokenizer = build_model(checkpoint), build_tokenizer(checkpoint)

    def write(name="multinomial", prompts=PROMPTS, seed=0, **options):
        config = sampling_config(name, seed=seed)
        written = write_texts(
            model, tokenizer, prompts, sampling=config, **{"new_tokens": 6, **options}
        )
        assert written.prompts == prompts
        assert written.seconds > 0
        assert written.texts_per_second == len(prompts) / written.seconds
        return written

    return write


# ---- prompts


@pytest.mark.parametrize("split", ["val", "train"])
def test_human_texts_begin_windows_spread_over_the_split(corpus, split):
    data = prepared(LocalText(**corpus))
    source = data.evaluation_source(split)
    windows = torch.cat([source.batch(n)["tokens"] for n in range(len(source))])
    full = len(data.stream(split)) // 32
    for count in (1, 7, full):
        texts = human_texts(data, split, count=count, length=20)
        expected = [windows[number * full // count, :20].tolist() for number in range(count)]
        assert texts == expected
    assert texts[0][0] == data.tokenizer.eos_id
    with pytest.raises(ValueError, match=rf"prompts \({full + 1}\): there are only {full} full"):
        human_texts(data, split, count=full + 1, length=20)


def test_human_texts_of_sentence_data_begin_documents(make_sentences):
    data = prepared(make_sentences())
    stream, bos = data.stream("train"), data.tokenizer.bos_id
    ends = stream.document_ends.tolist()
    tokens = stream.gather(np.arange(len(stream))).tolist()
    whole = [tokens[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    starts = [[i for i in ids if i != bos][:40] for ids in whole if len(ids) >= 60]
    assert human_texts(data, "train", count=len(starts), length=40) == starts
    assert human_texts(data, "train", count=2, length=40) == [starts[0], starts[len(starts) // 2]]
    with pytest.raises(ValueError, match="long enough documents in the train split"):
        human_texts(data, "train", count=len(starts) + 1, length=40)


def test_what_has_no_running_text_is_refused(corpus):
    data = prepared(LocalText(**corpus))
    with pytest.raises(ValueError, match=r"\(40\) are more than a window of the data has \(32\)"):
        human_texts(data, "val", count=1, length=40)
    other = SimpleNamespace(stream=data.stream, tokenizer=data.tokenizer)
    for unsuited in (other, Kinship(cache_dir=corpus["cache_dir"])):
        with pytest.raises(ValueError, match="have no running text to continue"):
            human_texts(unsuited, "val", count=1, length=4)


def test_texts_are_cut_where_documents_end():
    tokenizer = BytesTokenizer()
    assert documents([97, 98, 256, 99], tokenizer) == ["ab", "c"]
    assert documents([256, 97, 256, 256], tokenizer) == ["", "a", "", ""]
    assert documents([], tokenizer) == [""]


# ---- what is written


@pytest.mark.parametrize("name", ["greedy", "multinomial", "nucleus"])
def test_batches_change_nothing(author, name):
    expected = author(name).new
    for batch_size in (1, 2, 3, 100):
        assert author(name, batch_size=batch_size).new == expected


def test_equal_prompts_have_streams_of_their_own(author):
    written = author(prompts=[[256]] * 9, batch_size=4)
    assert written.distinct == len({tuple(new) for new in written.new}) == 9
    assert author(prompts=[[256]] * 9, batch_size=4).new == written.new
    assert author(prompts=[[256]] * 9, seed=1).new != written.new
    # the stream is that of the number, whatever stands in front
    assert author(prompts=[[97, 98], *[[256]] * 8]).new[1:] == written.new[1:]
    assert author("greedy", prompts=[[256]] * 9).distinct == 1


def test_every_row_hands_its_stream_to_the_model(author, monkeypatch):
    """Models that draw latent vectors draw them from it, in greedy decoding too."""
    from lightning_models import TransformerLM

    seen = []
    init_cache = TransformerLM.init_cache

    def note(self, prompts, lengths, max_new_tokens, streams=()):
        seen.extend(streams)
        return init_cache(self, prompts, lengths, max_new_tokens, streams)

    monkeypatch.setattr(TransformerLM, "init_cache", note)
    author("greedy", batch_size=3, seed=5)
    assert seen == [(5, row) for row in range(len(PROMPTS))]


def test_the_end_of_a_document_ends_no_text():
    class Ending:
        device = torch.device("cpu")

        def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
            return SimpleNamespace(select=lambda rows: None)

        def decode_step(self, cache, tokens):
            logits = torch.zeros(len(tokens), 300)
            logits[:, 256] = 5.0  # EOS
            logits[:, 280] = 9.0  # padding of the vocabulary
            return logits, torch.ones(len(tokens), dtype=torch.bool)

    greedy = sampling_config("greedy")
    written = write_texts(Ending(), BytesTokenizer(), [[256]] * 3, new_tokens=4, sampling=greedy)
    assert written.new == [[256] * 4] * 3


def test_models_of_sentences_write_on_behind_documents(make_sentences):
    data = prepared(make_sentences())
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 2, "sentence_layer": 2}
    torch.manual_seed(0)
    model = ThoughtGestaltLM(
        ThoughtGestaltConfig(vocab_size=data.vocab_size, block_size=data.block_size, **sizes),
        OptimizerConfig(),
    )
    model.configure_model()
    texts = human_texts(data, "train", count=3, length=40)
    prompts = [text[:20] for text in texts] + [data.tokenizer.prompt_ids("")]
    assert prompts[-1] == [data.tokenizer.bos_id]
    check_room(model.eval(), 20, 10**6, "sample_tokens")  # memory forgets: there is no limit
    options = {"new_tokens": 50, "sampling": sampling_config("multinomial")}
    written = write_texts(model, data.tokenizer, prompts, batch_size=4, **options)
    assert [len(new) for new in written.new] == [50] * 4
    assert data.tokenizer.eod_id in {token for new in written.new for token in new}
    alone = write_texts(model, data.tokenizer, prompts, batch_size=1, **options)
    assert alone.new == written.new


def test_what_does_not_fit_the_context_is_named(checkpoint_path):
    model = build_model(read_checkpoint(checkpoint_path))
    check_room(model, 1, 32, "sample_tokens")  # the last token is not read again
    with pytest.raises(ValueError, match=r"sample_tokens \(33\) .* 32 tokens; pass --sample_tok"):
        check_room(model, 1, 33, "sample_tokens")
    with pytest.raises(ValueError, match="pass --new_tokens 3 or less"):
        check_room(model, 30, 4, "new_tokens")
    with pytest.raises(ValueError, match="shorten the prompt"):
        check_room(model, 33, 4, "new_tokens")
