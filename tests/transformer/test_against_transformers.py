"""Our plain transformer computes what the classes of ``transformers`` compute, both ways."""

import json

import pytest
import torch
from torch.nn import functional as F

from evaluation.exporting import write_transformers
from lightning_models import TransformerConfig, TransformerLM
from lightning_models.generation import SamplingConfig, generate
from lightning_models.output_layer import linear_cross_entropy
from lightning_models.transformer.families import family_of
from lightning_models.transformer.import_weights import import_transformers

VOCAB, BLOCK = 101, 48
SIZES = {"vocab_size": VOCAB, "block_size": BLOCK, "num_layers": 2, "dim": 32, "num_heads": 4}
LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": BLOCK, "n_embd": 32, "n_layer": 3, "n_head": 4}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, **options)
    )


def rotary(kind, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "max_position_embeddings": BLOCK,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, **options)
    return AutoModelForCausalLM.from_config(config)


def llama(**options):
    return rotary("llama", **options)


SHARED = {"num_key_value_heads": 2}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
"""Of heads of 8 channels: a frequency that stays, two between, and one that is divided."""
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
MODELS = {
    "gpt2": lambda: gpt2(),
    "gpt2-exact-gelu": lambda: gpt2(activation_function="gelu", n_inner=80),
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True, rope_theta=500.0),
    "llama3": lambda: llama(**SHARED, rope_theta=500000.0),
    "llama3.1": lambda: llama(**SHARED, rope_parameters=LLAMA31),
    "qwen3": lambda: rotary("qwen3", **SHARED, head_dim=8, rope_theta=1e6),
    "qwen3-wide-heads": lambda: rotary("qwen3", **SHARED, head_dim=16, rope_parameters=LLAMA31),
    "qwen3-window": lambda: rotary("qwen3", head_dim=8, num_key_value_heads=4, **WINDOW),
    "qwen2.5": lambda: rotary("qwen2", **SHARED, tie_word_embeddings=True, rope_theta=1e6),
    "qwen2-window": lambda: rotary("qwen2", **SHARED, **WINDOW),
    "pythia": lambda: rotary("gpt_neox", rotary_pct=0.25, hidden_dropout=0.0),
    "neox-serial": lambda: rotary("gpt_neox", rotary_pct=1.0, use_parallel_residual=False),
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


def saved_and_read(lm, folder):
    from transformers import AutoModelForCausalLM

    write_transformers(lm, folder, eos_token_id=0)
    assert not list(folder.glob("*.bin"))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def largest_difference(ours, theirs, tokens):
    with torch.no_grad():
        mine = ours.network(tokens) @ ours.network.output_matrix.t()
        return (mine - theirs(tokens).logits).abs().max().item()


def test_an_import_is_exported_with_the_same_logits(pair, tmp_path):
    theirs, ours = pair
    again = saved_and_read(ours, tmp_path)
    assert again.config.model_type == theirs.config.model_type
    tokens = torch.randint(0, VOCAB, (3, BLOCK))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_logits_are_equal_in_float64(pair, in_float64, tmp_path):
    theirs, ours = (model.double() for model in pair)
    again = saved_and_read(ours, tmp_path)
    assert again.dtype == torch.float64
    tokens = torch.randint(0, VOCAB, (3, BLOCK))
    for model in (theirs, again):
        assert largest_difference(ours, model, tokens) < 1e-10


STYLES = {
    "unbiased, padded": ({"bias": False}, "gpt2"),
    "neox without biases": ({"bias": False, "positions": "rope", "rope_fraction": 0.5}, "gpt_neox"),
    "scaled embeddings": (LLAMA | {"init": "ponderlm", "tie_head": False}, "llama"),
    "biases": (LLAMA | {"bias": True}, "llama"),
    "window": (LLAMA | {"window": 5, "num_kv_heads": 1}, "qwen2"),
}


@pytest.mark.parametrize("name", STYLES)
def test_other_styles_are_exported(name, in_float64, tmp_path):
    changes, family = STYLES[name]
    torch.manual_seed(0)
    ours = TransformerLM(TransformerConfig(**SIZES, **changes))
    ours.configure_model()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs = saved_and_read(ours.double().eval(), tmp_path)
    assert theirs.config.model_type == family
    tokens = torch.randint(0, VOCAB, (2, BLOCK))
    assert largest_difference(ours, theirs, tokens) < 1e-10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 4}, "has window"),
        ({"num_kv_heads": 2}, "has num_kv_heads"),
        ({"qk_norm": True, "head_size": 4}, "has head_size, qk_norm"),
        (LLAMA | {"qk_norm": True, "qkv_bias": True}, "has qk_norm next to biases"),
        ({"norm": "rms"}, "has positions=learned, norm=rms, activation=gelu together"),
        (LLAMA | {"rope_fraction": 0.5}, "has rope_fraction"),
        (LLAMA | {"init": "ponderlm"}, "has tied head under init=ponderlm"),
        (LLAMA | {"bias": True, "qkv_bias": False}, "has window or qkv_bias next to bias"),
    ],
)
def test_what_no_architecture_has_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        family_of(TransformerConfig(**SIZES, **changes))


def test_as_many_heads_of_keys_change_no_bit():
    def logits(**changes):
        torch.manual_seed(0)
        model = TransformerLM(TransformerConfig(**SIZES, **LLAMA, **changes))
        model.configure_model()
        return model.network(torch.arange(BLOCK)[None] % VOCAB)

    assert torch.equal(logits(), logits(num_kv_heads=4))


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
    windows = torch.randint(0, VOCAB, (4, BLOCK + 1)).expand(5, -1, -1)

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


FAMILIES = {
    "gpt2": lambda: gpt2(tie_word_embeddings=False),
    "llama": lambda: llama(tie_word_embeddings=False),
    "qwen2": lambda: rotary("qwen2", **SHARED, tie_word_embeddings=False),
    "qwen3": lambda: rotary("qwen3", **SHARED, tie_word_embeddings=False),
    "gpt_neox": lambda: rotary("gpt_neox", tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_head_counts_more_than_the_flag_that_ties_it(name, tmp_path):
    """``transformers`` ties a head to the embedding only where the file's two are equal."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = FAMILIES[name]()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, VOCAB, (3, BLOCK))
    assert torch.equal(read(tokens).logits, theirs.eval()(tokens).logits)
    for source in (str(tmp_path), read):
        ours = import_transformers(source).eval()
        assert largest_difference(ours, read, tokens) < 1e-5
    again = saved_and_read(ours, tmp_path / "exported")
    assert torch.equal(again(tokens).logits, read(tokens).logits)


def test_options_we_cannot_express_are_refused():
    with pytest.raises(ValueError, match="rope_type=linear"):
        import_transformers(llama(rope_parameters={"rope_type": "linear", "factor": 2.0}))
    with pytest.raises(ValueError, match="layers with and without a window"):
        import_transformers(rotary("qwen2", **{**WINDOW, "max_window_layers": 1}))
    with pytest.raises(ValueError, match="activation_function=relu"):
        import_transformers(gpt2(activation_function="relu"))
