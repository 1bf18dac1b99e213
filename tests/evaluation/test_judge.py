"""A judge's likelihoods, against one text at a time in float64."""

import math

import pytest
import torch

from evaluation.load import Pretrained
from evaluation.quality.measures import Judge

CPU = torch.device("cpu")
TEXTS = [
    ["the thought reads"],
    ["memory", "state and memory", "the end"],
    [],
    ["x"],
    ["latent state " * 40],
    ["", "after an empty document"],
]


def direct(model, words, documents, *, start=(), context=64):
    """Nats and number of the scored tokens of one text."""
    ids = list(start)
    for number, document in enumerate(documents):
        ids += [words.eos_id] if number else []
        ids += words.encode(document)
    ids = ids[:context]
    if len(ids) < 2:
        return 0.0, 0
    with torch.no_grad():
        log_probs = model.double()(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    nats = -sum(log_probs[place, token].item() for place, token in enumerate(ids[1:]))
    return nats, len(ids) - 1


@pytest.mark.parametrize("bos", [False, True])
def test_likelihoods_are_those_of_each_text_alone(save_gpt2, bos):
    model, words, folder = save_gpt2(bos)
    start = [words.eos_id] if bos else []  # never the EOS that this tokenizer puts after
    expected = [direct(model, words, text, start=start) for text in TEXTS]
    judge = Judge(Pretrained(str(folder), CPU, key="judge"))
    for batch_size in (1, 2, 8):
        judged = judge.score(TEXTS, batch_size)
        assert judged.tokens.tolist() == [count for _, count in expected]
        assert judged.nats.tolist() == pytest.approx([nats for nats, _ in expected], rel=1e-5)
        assert judged.cut == 1
    nats, tokens = (sum(part) for part in zip(*expected, strict=True))
    assert judged.totals.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    each = [math.exp(nats / count) for nats, count in expected if count]
    assert judged.mean_of_perplexities == pytest.approx(sum(each) / len(each), rel=1e-4)


def test_texts_without_tokens_give_no_number(tiny_gpt2):
    _, _, folder = tiny_gpt2
    judged = Judge(Pretrained(str(folder), CPU, key="judge")).score([[], ["x"]])
    assert (judged.totals.nats, judged.totals.tokens) == (0.0, 0)
    assert math.isnan(judged.totals.perplexity)
    assert math.isnan(judged.mean_of_perplexities)


def test_a_model_without_a_head_is_no_judge(save_gpt2):
    _, _, folder = save_gpt2(base=True)
    with pytest.raises(
        ValueError, match=r"judge \(.*\): 1 weights .* not in it \(lm_head.weight\)"
    ):
        Pretrained(str(folder), CPU, key="judge")
    assert Pretrained(str(folder), CPU, head="none").context == 64


def test_weights_that_are_missing_are_refused_without_a_head_too(save_gpt2):
    from safetensors.torch import load_file, save_file

    _, _, folder = save_gpt2()
    Pretrained(str(folder), CPU, head="none")  # the head of a whole model is not missed
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"featurizer \(.*\): 1 weights .*h.1.mlp.c_fc.weight"):
        Pretrained(str(folder), CPU, head="none", key="featurizer")
