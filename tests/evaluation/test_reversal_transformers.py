"""The father-son probe of models of ``transformers``, against direct computations."""

import json

import pytest
import torch

from datamodules.tokenizers import train_bpe
from evaluation.reversal import HubModel, draw_pairs, single_tokens

KNOWN = ["James", "John", "Mark", "Paul"]
TEXT = "The son of James is John. The father of Mark is Paul. "
ENTRIES = 288
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    """A BPE in which the known names, and no others, are single tokens."""
    return train_bpe(f"bpe:{ENTRIES}", [TEXT * 50])


def nll(logits, row, token):
    """Negative log-likelihood in float64."""
    return -logits[row].double().log_softmax(dim=-1)[token].item()


@pytest.fixture
def gpt2(tokenizer, tmp_path):
    """Saves a random GPT-2 with the tokenizer; ``bos`` makes that one put a BOS in front."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    def save(bos=False, positions=32):
        torch.manual_seed(0)
        inner = tokenizers.Tokenizer.from_str(tokenizer.json_text)
        eos = "<|endoftext|>"
        if bos:
            inner.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_id)]
            )
        sizes = {"n_positions": positions, "n_embd": 16, "n_layer": 2, "n_head": 2}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=ENTRIES, **sizes)).eval()
        model.save_pretrained(tmp_path / "gpt2")
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=eos)
        fast.save_pretrained(tmp_path / "gpt2")
        return model, tmp_path / "gpt2"

    return save


@pytest.mark.parametrize("bos", [False, True])
def test_transformers_models_give_what_they_say_themselves(
    gpt2, evaluates, tokenizer, tmp_path, bos
):
    model, folder = gpt2(bos)
    target = tmp_path / "result.json"
    evaluates("reversal", "--hf", folder, "--output", target)
    result = json.loads(target.read_text())
    margins = []
    start = [tokenizer.eos_id] if bos else []  # never the EOS that this one puts after
    for father, son in draw_pairs(KNOWN, 1000, 0):
        text = f"The son of {father} is {son}. The father of {son} is"
        with torch.no_grad():
            logits = model(torch.tensor([start + tokenizer.encode(text)])).logits[:, -1]
        (right,), (wrong,) = tokenizer.encode(f" {father}"), tokenizer.encode(f" {son}")
        margins.append(nll(logits, 0, wrong) - nll(logits, 0, right))
    assert len(margins) == result["pairs"] == 12
    assert "flops_per_token" not in result
    assert result["reversed_margin"] == pytest.approx(sum(margins) / 12, abs=1e-5)
    assert result["reversed_error_rate"] == sum(margin < 0 for margin in margins) / 12
    assert (result["hf"], result["checkpoint"]) == (str(folder), None)
    assert result["model"] == "GPT2LMHeadModel"


def test_a_tokenizer_that_puts_a_space_in_front_of_every_text_has_its_names():
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(["?", "▁", "▁is", "▁John", "▁Mark"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    assert len(inner.encode(" John").ids) == 2
    found = single_tokens(["John", "Mark"], lambda texts: inner.encode(texts[0]).ids)
    assert found == {"John": 3, "Mark": 4}


def test_bf16_weights(gpt2):
    _, folder = gpt2()
    model = HubModel(str(folder), CPU, "bf16")
    assert model.model.dtype == torch.bfloat16
    prompts = torch.tensor([model.prompt(["The son of James is Paul.", " The son of James is"])])
    rounded = model.next_log_probs(prompts)
    exact = HubModel(str(folder), CPU).next_log_probs(prompts)
    assert rounded.dtype == torch.float32
    assert rounded.exp().sum().item() == pytest.approx(1.0, rel=1e-5)
    assert 0 < (rounded - exact).abs().max() < 0.2


def test_a_context_that_is_too_short_is_named(gpt2, fails):
    _, folder = gpt2(positions=8)
    assert "tokens and the model's context 8; take one with" in fails("reversal", "--hf", folder)


def test_what_is_not_there_or_broken_is_one_line(gpt2, fails, tmp_path):
    assert "no tokenizer found" in fails("reversal", "--hf", tmp_path / "none")
    _, folder = gpt2()
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "the model cannot be read" in fails("reversal", "--hf", folder)
    (folder / "model.safetensors").unlink()
    assert "no model found" in fails("reversal", "--hf", folder)
