"""Published folders as import, judges and backbones read them: the numbers of ``transformers``."""

import json

import pytest
import torch

from datamodules.tokenizers import BytesTokenizer
from evaluation.exporting import write_tokenizer
from evaluation.pretrained import Pretrained
from lightning_models.thinking_states import NoCoTConfig, NoCoTLM
from lightning_models.transformer.import_weights import import_transformers

V = 257
CPU = torch.device("cpu")


def imported(folder):
    network = import_transformers(str(folder)).eval().network
    return lambda tokens: network(tokens) @ network.output_matrix.t()


def judged(folder):
    model = Pretrained(str(folder), CPU, key="judge").model
    return lambda tokens: model(tokens).logits


def as_backbone(folder, tokenizer_entries=V):
    config = NoCoTConfig(backbone=str(folder), vocab_size=tokenizer_entries, block_size=32)
    model = NoCoTLM(config)
    model.configure_model()
    return model.eval().network.backbone


def backbone(folder):
    network = as_backbone(folder)

    def logits(tokens):
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return network(network.embed(tokens), positions).last @ network.output_matrix.t()

    return logits


READERS = {"import": imported, "judge": judged, "backbone": backbone}
"""Every place that reads published weights: folder to logits."""


@pytest.fixture(params=READERS)
def read(request):
    return READERS[request.param]


@pytest.fixture
def published(tmp_path):
    """A folder with a Qwen2 model of two layers whose head is not its embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen2Config(vocab_size=V, **sizes, tie_word_embeddings=False, eos_token_id=256)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    write_tokenizer(BytesTokenizer(), tmp_path)
    return model.eval(), tmp_path


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def largest_difference(logits, model):
    tokens = torch.randint(0, V, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (logits(tokens) - model(tokens).logits).abs().max().item()


def in_transformers(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_head_of_its_own_is_kept_whatever_the_config_says(read, published):
    model, folder = published
    change_config(folder, tie_word_embeddings=True)
    logits = read(folder)
    assert largest_difference(logits, in_transformers(folder)) < 1e-5
    assert largest_difference(logits, model) < 1e-5


def test_a_head_that_equals_the_embedding_is_tied(read, published):
    model, folder = published
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    change_config(folder, tie_word_embeddings=True)
    assert largest_difference(read(folder), model) < 1e-5
    assert as_backbone(folder).head is None
    assert import_transformers(str(folder)).config.tie_head


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_file_keeps_its_numbers_whatever_the_config_says(read, published, dtype):
    model, folder = published
    change_config(folder, dtype=dtype, torch_dtype=dtype)
    assert largest_difference(read(folder), model) < 1e-5
    for weight in (
        import_transformers(str(folder)).network.embedding.weight,
        as_backbone(folder).model.embed_tokens.weight,
        Pretrained(str(folder), CPU).model.model.embed_tokens.weight,
    ):
        assert torch.equal(weight, model.model.embed_tokens.weight)


def test_a_bfloat16_file_is_computed_with_in_float32(read, published):
    model, folder = published
    model.bfloat16().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert largest_difference(read(folder), in_transformers(folder)) < 1e-5
    assert as_backbone(folder).model.embed_tokens.weight.dtype == torch.float32


def test_a_missing_weight_is_named(read, published):
    from safetensors.torch import load_file, save_file

    _, folder = published
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 of the model's weights are not in it") as caught:
        read(folder)
    assert str(folder) in str(caught.value)
    assert f"({name})" in str(caught.value)


def test_a_missing_head_is_named(read, published):
    """Without ``tie_word_embeddings`` the embedding does not stand in for it."""
    from safetensors.torch import load_file, save_file

    _, folder = published
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"\(lm_head.weight\)"):
        read(folder)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickled"])
def test_a_missing_shard_is_named(read, published, safe):
    model, folder = published
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    if not safe:
        shards = as_pickles(folder, shards)
    assert len(shards) >= 5
    assert largest_difference(read(folder), model) < 1e-5
    shards[2].unlink()
    with pytest.raises(ValueError, match="1 of the files that its index names") as caught:
        read(folder)
    assert str(folder) in str(caught.value)
    assert f"({shards[2].name})" in str(caught.value)
    assert "\n" not in str(caught.value)


def as_pickles(folder, shards):
    """Rewrites safetensors shards in the older format, with the index under its older name."""
    from safetensors.torch import load_file

    old = folder / "model.safetensors.index.json"
    text, paths = old.read_text(), []
    for shard in shards:
        path = shard.with_name(f"pytorch_{shard.stem}.bin")
        torch.save(load_file(shard), path)
        shard.unlink()
        text = text.replace(shard.name, path.name)
        paths.append(path)
    (folder / "pytorch_model.bin.index.json").write_text(text)
    old.unlink()
    return paths


def test_a_folder_without_weights_is_not_looked_for_on_the_hub(read, published):
    _, folder = published
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model found in this folder"):
        read(folder)
    with pytest.raises(ValueError, match=str(folder / "absent")):
        read(folder / "absent")


def test_the_device_of_training_is_no_device_map(read, published, monkeypatch):
    """Lightning builds networks under its device; transformers would ask for accelerate."""
    model, folder = published
    for module in ("transformers.integrations.accelerate", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.is_accelerate_available", lambda *_, **__: False)
    with torch.device("cpu:0"):
        logits = read(folder)
    assert largest_difference(logits, model) < 1e-5


# ---- entries that a tokenizer has beyond the embedding


def test_an_entry_beyond_the_backbones_embedding_begins_as_its_end_of_text(published):
    model, folder = published
    change_config(folder, tie_word_embeddings=True)  # resizing must not tie the head
    with pytest.warns(UserWarning, match=r"more than the 257 rows .* ids 257 to 258"):
        network = as_backbone(folder, V + 2)
    for ours, theirs in (
        (network.model.embed_tokens.weight, model.model.embed_tokens.weight),
        (network.output_matrix, model.lm_head.weight),
    ):
        assert torch.equal(ours[:V], theirs)
        assert torch.equal(ours[V : V + 2], theirs[256].expand(2, -1))


def test_another_models_tokenizer_is_refused(published):
    _, folder = published
    with pytest.raises(ValueError, match=r"vocab_size \(300\) is more than the 257 rows"):
        as_backbone(folder, 300)
