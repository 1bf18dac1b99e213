"""Our plain transformer computes what the GPT-2 and LLaMA classes of ``transformers`` compute."""

import pytest
import torch
from torch.nn import functional as F

from lightning_models.generation import SamplingConfig, generate
from lightning_models.output_layer import linear_cross_entropy
from lightning_models.transformer.import_weights import import_transformers

VOCAB, BLOCK = 101, 48


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": BLOCK, "n_embd": 32, "n_layer": 3, "n_head": 4}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, **options)
    )


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "max_position_embeddings": BLOCK,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0, **options))


MODELS = {
    "gpt2": lambda: gpt2(),
    "gpt2-exact-gelu": lambda: gpt2(activation_function="gelu", n_inner=80),
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True, rope_theta=500.0),
}


@pytest.fixture(params=MODELS)
def pair(request):
    """The reference with weights far from their initial zeros and ones, and our import of it."""
    torch.manual_seed(0)
    theirs = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return theirs, import_transformers(theirs).eval()


def test_logits_are_equal(pair):
    theirs, ours = pair
    tokens = torch.randint(0, VOCAB, (3, BLOCK))
    with torch.no_grad():
        mine = ours.network(tokens) @ ours.network.output_matrix.t()
        assert (mine - theirs(tokens).logits).abs().max() < 1e-5


def test_greedy_text_is_equal(pair):
    theirs, ours = pair
    prompt = torch.randint(1, VOCAB, (1, 7))
    expected = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    mine = generate(
        ours, prompt.tolist(), max_new_tokens=20, sampling=SamplingConfig(temperature=0)
    )
    assert mine == expected[:, 7:].tolist()


def test_five_adamw_steps_give_the_same_losses(pair):
    theirs, ours = pair
    windows = torch.randint(0, VOCAB, (5, 4, BLOCK + 1))

    def train(parameters, loss_of):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        losses = []
        for window in windows:
            loss = loss_of(window[:, :-1], window[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def their_loss(tokens, targets):
        return F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())

    def our_loss(tokens, targets):
        h = ours.network(tokens)
        return linear_cross_entropy(h, ours.network.output_matrix, targets) / targets.numel()

    expected = train(theirs.parameters(), their_loss)
    mine = train(ours.network.parameters(), our_loss)
    assert expected[0] > expected[-1]
    assert mine == pytest.approx(expected, abs=2e-5)


def test_options_we_cannot_express_are_refused():
    with pytest.raises(ValueError, match="num_key_value_heads"):
        import_transformers(llama(num_key_value_heads=2))
    with pytest.raises(ValueError, match="activation_function=relu"):
        import_transformers(gpt2(activation_function="relu"))


def test_a_saved_folder_is_imported_and_a_missing_one_named(tmp_path):
    torch.manual_seed(0)
    theirs = llama().eval()
    theirs.save_pretrained(tmp_path / "model")
    ours = import_transformers(str(tmp_path / "model"), attention_backend="math")
    tokens = torch.randint(0, VOCAB, (1, 9))
    with torch.no_grad():
        mine = ours.network(tokens) @ ours.network.output_matrix.t()
        assert torch.allclose(mine, theirs(tokens).logits, atol=1e-5)
    with pytest.raises(ValueError, match="no model found"):
        import_transformers(str(tmp_path / "absent"))
