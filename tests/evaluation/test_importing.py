"""Weights of ``transformers`` become a checkpoint that everything else can use."""

import json

import pytest
import torch

from datamodules import LocalText
from datamodules.tokenizers import train_bpe
from lightning_models import TransformerLM

BLOCK = 32


@pytest.fixture
def gpt2_folder(tmp_path):
    """Builds a saved GPT-2 with weights far from their initial zeros and ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def build(vocab_size):
        torch.manual_seed(0)
        sizes = {"n_positions": BLOCK, "n_embd": 16, "n_layer": 2, "n_head": 2}
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes, **ids)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(tmp_path / "gpt2")
        return model, tmp_path / "gpt2"

    return build


@pytest.fixture
def imported(gpt2_folder, evaluates, tmp_path):
    model, folder = gpt2_folder(257)
    target = tmp_path / "imported.ckpt"
    evaluates("import", "--hf", folder, "--tokenizer", "bytes", "--output", target)
    return model, target


def transformers_nats(model, data):
    """Mean negative log-likelihood of the validation split under the original model."""
    nats, tokens = 0.0, 0
    source = data.evaluation_source("val")
    for n in range(len(source)):
        batch = source.batch(n)
        with torch.no_grad():
            logits = model.double()(batch["tokens"]).logits
        targets = batch["targets"]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        nats += losses.item()
        tokens += int((targets >= 0).sum())
    return nats / tokens


@pytest.fixture
def local(corpus):
    data = LocalText(**corpus)
    data.prepare_data()
    return data


def perplexity(evaluates, checkpoint, corpus, target, *options):
    words = [word for key, value in corpus.items() for word in (f"--data.{key}", value)]
    data = ("--data", "datamodules.LocalText", *words)
    evaluates("perplexity", "--ckpt", checkpoint, *data, "--output", target, *options)
    return json.loads(target.read_text())


def test_perplexity_is_that_of_the_original(imported, evaluates, corpus, local, tmp_path):
    model, checkpoint = imported
    result = perplexity(evaluates, checkpoint, corpus, tmp_path / "result.json")
    assert result["nats_per_token"] == pytest.approx(transformers_nats(model, local), rel=1e-6)


def test_lightning_reads_the_checkpoint(imported, local, quiet_trainer):
    model, checkpoint = imported
    expected = transformers_nats(model, local)
    loaded = TransformerLM.load_from_checkpoint(checkpoint, weights_only=True)
    (logged,) = quiet_trainer().validate(loaded, local, verbose=False)
    assert logged["val/loss"] == pytest.approx(expected, rel=1e-6)
    fresh = TransformerLM(loaded.config)
    trainer = quiet_trainer()
    (logged,) = trainer.validate(
        fresh, local, ckpt_path=checkpoint, verbose=False, weights_only=True
    )
    assert logged["val/loss"] == pytest.approx(expected, rel=1e-6)
    (logged,) = trainer.test(fresh, local, ckpt_path=checkpoint, verbose=False, weights_only=True)
    assert logged["test/loss"] > 0


def test_training_goes_on_from_the_imported_weights(imported, local, quiet_trainer, tmp_path):
    _, checkpoint = imported
    lm = TransformerLM.load_from_checkpoint(checkpoint, weights_only=True)
    start = lm.network.embedding.weight.detach().clone()
    fresh = TransformerLM(lm.config)
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(fresh, local, ckpt_path=checkpoint, weights_only=True)
    moved = (fresh.network.embedding.weight.detach() - start).abs().max()
    assert trainer.global_step == 1
    assert 0 < moved < 2 * lm.optimizer_config.lr


def test_the_recipe_names_data_of_the_models_length(imported):
    _, checkpoint = imported
    content = torch.load(checkpoint, weights_only=True)
    data = content["recipe"]["data"]
    assert data["class_path"] == "datamodules.PythonDocs"
    assert data["init_args"]["block_size"] == BLOCK
    assert data["init_args"]["tokenizer"] == "bytes"
    assert content["recipe"]["model"]["init_args"] == content["hyper_parameters"]


def test_it_generates(imported, evaluates):
    _, checkpoint = imported
    out = evaluates("generate", "--ckpt", checkpoint, "--prompt", "ab", "--max_new_tokens", "4")
    assert out.startswith("--- ab\n")


def test_a_folders_own_tokenizer_with_a_padded_vocabulary(gpt2_folder, evaluates, corpus, tmp_path):
    model, folder = gpt2_folder(300)
    tokenizer = train_bpe("bpe:270", ["thought latent state token memory ponder " * 20])
    (folder / "tokenizer.json").write_text(tokenizer.json_text)
    checkpoint = tmp_path / "imported.ckpt"
    evaluates("import", "--hf", folder, "--output", checkpoint)
    config = torch.load(checkpoint, weights_only=True)["hyper_parameters"]["config"]
    assert (config["vocab_size"], config["vocab_multiple"]) == (270, 300)
    own = {key: value for key, value in corpus.items() if key != "tokenizer"}
    result = perplexity(evaluates, checkpoint, own, tmp_path / "result.json")
    data = LocalText(**own, tokenizer=str(folder / "tokenizer.json"))
    data.prepare_data()
    assert result["nats_per_token"] == pytest.approx(transformers_nats(model, data), rel=1e-6)
    # The folder may go: the checkpoint has the tokenizer.
    (folder / "tokenizer.json").unlink()
    again = perplexity(evaluates, checkpoint, own, tmp_path / "result.json")
    assert again["nats_per_token"] == result["nats_per_token"]


@pytest.mark.parametrize(
    ("vocab_size", "options", "expected"),
    [
        (257, [], "has no tokenizer.json; name the tokenizer with --tokenizer"),
        (100, ["--tokenizer", "bytes"], "(bytes) has 257 entries, the model's vocabulary 100"),
        (257, ["--tokenizer", "nonsense"], "tokenizer='nonsense' is not known"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_named(
    gpt2_folder, fails, tmp_path, vocab_size, options, expected
):
    _, folder = gpt2_folder(vocab_size)
    target = tmp_path / "imported.ckpt"
    assert expected in fails("import", "--hf", folder, "--output", target, *options)
    assert not target.exists()


def test_a_model_that_is_not_there_is_named(fails, tmp_path):
    options = ("--tokenizer", "bytes", "--output", tmp_path / "imported.ckpt")
    assert "no model found" in fails("import", "--hf", tmp_path / "none", *options)
