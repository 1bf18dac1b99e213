"""Trained backbones: of a published folder, and from the checkpoint of another model."""

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch

from callbacks import SaveCheckpoints
from lightning_models import base, load
from lightning_models.checkpoint import CheckpointError
from lightning_models.generation import SamplingConfig, generate
from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.backbone import AnswerCache, read
from lightning_models.thinking_states.baselines.starting import load_backbone
from lightning_models.thinking_states.baselines.text import NoCoTConfig, TextNetwork
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.module import ThinkingStatesLM
from tests.methods import decoder
from tests.thinking_states.cases import FAMILIES, exact
from tests.thinking_states.questions import (
    MODELS,
    PREFIX,
    Questions,
    V,
    build,
    questions,
    resumable_trainer,
    rows,
)
from tests.tokenizer_files import begun, byte_level, pieces
from training import main

STAGES = {"max_latent_stage": 2, "epochs_per_stage": 1}


def checkpoint_of(folder, name, **changes):
    """A checkpoint of a model that was not trained, and its backbone's weights."""
    model, path = build(name, double=False, seed=1, **changes), folder / "taught.ckpt"
    trainer = resumable_trainer(folder)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path)
    return str(path), model.network.backbone.state_dict()


@pytest.mark.parametrize(
    ("name", "stages"), [("coconut", {**STAGES, "first_stage": 1}), ("codi", {}), ("no_cot", {})]
)
def test_training_starts_with_the_backbone_of_another_model(name, stages, tmp_path):
    (path, taught), seen = checkpoint_of(tmp_path, "cot"), {}

    class Look(L.Callback):
        def on_train_start(self, trainer, model):
            weights = model.network.backbone.state_dict()
            seen.update({name: value.clone() for name, value in weights.items()})

    changes = {**stages, "start_from": path, "special_rows_from": 7}
    student = build(name, double=False, optimizer=OptimizerConfig(), **changes)
    trainer = resumable_trainer(tmp_path, Look(), max_steps=1, limit_val_batches=0)
    trainer.fit(student, Questions())
    for key, value in taught.items():
        torch.testing.assert_close(seen[key][: len(value)], value)
    embedding = seen["model.embed_tokens.weight"]
    assert (embedding[V : V + len(student.config.special_tokens)] == embedding[7]).all()
    resumed = tmp_path / "resumed.ckpt"
    trainer.save_checkpoint(resumed)
    Path(path).unlink()
    again = build(name, double=False, optimizer=OptimizerConfig(), **changes)
    trainer = resumable_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(again, Questions(), ckpt_path=str(resumed), weights_only=True)
    assert trainer.global_step == 2


def test_training_may_start_with_the_best_checkpoint_of_a_run(tmp_path):
    accuracies = iter([0.3, 0.4, 0.2])

    class Accuracy(L.Callback):
        def on_validation_epoch_end(self, trainer, model):
            model.log("val/accuracy", next(accuracies))

    save = SaveCheckpoints(str(tmp_path / "checkpoints"), monitor="val/accuracy", mode="max")
    teacher = build("cot", double=False)
    trainer = resumable_trainer(tmp_path, Accuracy(), save, max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(teacher, Questions())
    student, key = build("coconut", double=False), "model.layers.0.mlp.up_proj.weight"
    found = []
    for which in ("last", "best"):
        load_backbone(student.network, student.config, str(tmp_path), which)
        found.append(student.network.backbone.state_dict()[key].clone())
    assert torch.equal(found[0], teacher.network.backbone.state_dict()[key])
    best = torch.load(save.best_model_path, weights_only=True)
    assert best["global_step"] == 8
    assert torch.equal(found[1], best["state_dict"][f"network.backbone.{key}"])
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("taught", "key"),
    [
        ({"dim": 8}, "embed_tokens"),
        ({"ffn_dim": 32}, "mlp"),
        ({"num_layers": 1}, "layers.1"),
        ({"num_layers": 3}, "layers.2"),
        ({"tie_head": False}, "head.weight"),
    ],
)
def test_a_backbone_of_another_shape_is_refused(taught, key, tmp_path):
    path, _ = checkpoint_of(tmp_path, "cot", **taught)
    student = build("coconut", double=False)
    with pytest.raises(CheckpointError, match=rf"start_from .*{key}.* is in one of the two only"):
        load_backbone(student.network, student.config, path)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_added_tokens_are_those_of_a_method_that_adds_the_same(tied, tmp_path):
    path, taught = checkpoint_of(tmp_path, "coconut", tie_head=tied)
    student = build("codi", double=False, tie_head=tied, special_rows_from=7)
    load_backbone(student.network, student.config, path)
    found = student.network.backbone.state_dict()
    for key in ("model.embed_tokens.weight", *(() if tied else ("head.weight",))):
        assert torch.equal(found[key][: V + 3], taught[key][: V + 3])


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_added_tokens_are_not_those_of_another_vocabulary(tied, tmp_path):
    """Their ids mean something else there."""
    path, taught = checkpoint_of(tmp_path, "coconut", tie_head=tied, vocab_size=V + 1)
    student = build("coconut", double=False, tie_head=tied)
    before = {k: v.clone() for k, v in student.network.backbone.state_dict().items()}
    load_backbone(student.network, student.config, path)
    for key, value in student.network.backbone.state_dict().items():
        by_token = key.endswith(("embed_tokens.weight", "head.weight"))
        rows = V if by_token else len(value)
        assert torch.equal(value[:rows], taught[key][:rows])
        assert torch.equal(value[rows:], before[key][rows:])
        assert not by_token or not torch.equal(value[rows:], taught[key][rows:])


# ---- published backbones of every family


def publish(folder, family, **changes):
    """Writes a small model whose attention drops half of its weights in training; returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 0}
    sizes |= {"bos_token_id": 0, "initializer_range": 0.3, "max_position_embeddings": 64}
    settings = {**decoder(family, dropout=0.5, **sizes), "max_position_embeddings": 64, **changes}
    shape = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():  # biases begin at zero, norms at one
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory):
    """A folder of a small model of each family."""
    folder = tmp_path_factory.mktemp("published")
    publish(folder, request.param)
    return str(folder)


def loss_of(model, batch):
    return sum(term.sum for term in model.loss(batch).terms.values()).detach()


@pytest.mark.parametrize("name", MODELS)
def test_dropout_of_a_published_backbone_acts_in_training_alone(name, published):
    model = build(name, double=False, backbone=published)
    batch = questions(epochs=0.0)
    first, second = loss_of(model, batch), loss_of(model, batch)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(loss_of(model, batch), loss_of(model, batch))
    batch = questions()
    assert torch.equal(model.score(batch).log_prob, model.score(batch).log_prob)


def test_recomputing_layers_knows_the_dropout_of_a_published_backbone(published, monkeypatch):
    """Kernels on a GPU draw their masks inside attention, which must be computed again then."""
    seen = []
    monkeypatch.setattr(base, "checkpoint_blocks", lambda *args: seen.append(args[1:]))
    build("cot", double=False, backbone=published, gradient_checkpointing="selective")
    build("cot", double=False, attention_dropout=0.25, gradient_checkpointing="selective")
    assert seen == [("selective", 0.5), ("selective", 0.25)]


def test_copies_of_a_published_backbones_layers_are_in_training_mode(published):
    sizes = {"vocab_size": V, "block_size": 40, "input_layer": 0}
    config = ThinkingStatesConfig(backbone=published, **sizes)
    for training in (True, False):
        model = ThinkingStatesLM(config).train(training)
        model.configure_model()
        assert {part.training for part in model.modules()} == {training}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_padded_or_cached(family, tied, tmp_path):
    theirs = publish(tmp_path, family, tie_word_embeddings=tied)
    network = TextNetwork(NoCoTConfig(backbone=str(tmp_path), vocab_size=V, block_size=40)).eval()
    backbone = network.backbone
    lengths = torch.tensor([17, 9, 1])
    tokens = torch.randint(0, V, (3, 17), generator=torch.Generator().manual_seed(0))
    right = torch.arange(17) < lengths[:, None]
    real = torch.arange(17) >= 17 - lengths[:, None]
    with torch.no_grad():
        found = network(tokens).last @ network.output_matrix.t()
        assert torch.equal(found[:, :, :V], theirs(tokens).logits)
        theirs, network = exact(theirs), exact(network)
        expected = theirs(tokens, attention_mask=right.long()).logits
        found = network(tokens).last @ network.output_matrix.t()
        torch.testing.assert_close(found[:, :, :V][right], expected[right], atol=1e-10, rtol=0)
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)  # padding has none
        expected = theirs(tokens, attention_mask=real.long(), position_ids=positions).logits
        cache = AnswerCache(3, tokens.device)
        parts = [  # the whole, and cached in parts of 8, 1 and 8 tokens
            read(backbone, cache, backbone.embed(tokens[:, part]), real[:, part]).last
            for part in (slice(8), slice(8, 9), slice(9, 17))
        ]
        found = torch.cat(parts, dim=1) @ network.output_matrix.t()
        whole = network(tokens, real=real, cache=AnswerCache(3, tokens.device)).last
    for own in (found, whole @ network.output_matrix.t()):
        torch.testing.assert_close(own[:, :, :V][real], expected[real], atol=1e-10, rtol=0)


def rope(rope_type, **settings):
    """The ``rope_parameters`` of rotary positions that stretch beyond 8 tokens."""
    settings |= {"factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
    return {"rope_type": rope_type, **settings}


@pytest.mark.parametrize(
    ("family", "changes", "fault"),
    [
        ("mistral", {}, "is of the family mistral; it must be one of gpt2, llama, qwen2, qwen3"),
        ("gpt2", {"add_cross_attention": True}, "has layers with cross_attention, full_attention"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "has layers with full_attention, sliding_attention",
        ),
        ("llama", {"rope_parameters": rope("dynamic")}, "has rotary .* of the rope_type dynamic"),
        (
            "qwen2",
            {"rope_parameters": rope("longrope", short_factor=[1.0] * 2, long_factor=[2.0] * 2)},
            "has rotary positions of the rope_type longrope; use .* default, linear, llama3, yarn",
        ),
    ],
)
def test_other_backbones_are_refused_by_name(family, changes, fault, tmp_path):
    publish(tmp_path, family, **changes)
    for name, kind in (("backbone", str(tmp_path)), ("architecture", None)):
        settings = {"backbone": kind}
        if kind is None:
            settings = {"architecture": {**decoder(family), **changes}}
        with pytest.raises(ValueError, match=fault) as caught:
            build("cot", double=False, **settings)
        assert str(caught.value).startswith(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "fault"),
    [
        ("gpt2", {"model_type": ["gpt2"]}, r"is of the family \['gpt2'\]; it must be one of gpt2"),
        ("gpt2", {"activation_function": "zzz"}, "cannot be built .*zzz"),
        ("gpt2", {"n_layer": "x"}, "cannot be built .*n_layer.* expected int, got str"),
        ("llama", {"layer_types": 3}, "cannot be built .*int.* not iterable"),
        ("llama", {"rope_parameters": {"rope_type": "zzz"}}, "has rotary .* of the rope_type zzz"),
        ("llama", {"dtype": "evil"}, "cannot be built .*evil"),
        ("llama", {"num_attention_heads": 0}, "cannot be built .*ZeroDivisionError"),
    ],
)
def test_wrong_values_of_an_architecture_are_refused_in_one_line(family, changes, fault):
    with pytest.raises(ValueError, match=f"^architecture {fault}") as caught:
        build("cot", double=False, architecture={**decoder(family), **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "added", "changes"),
    [
        ("cot", 0, {}),
        ("cot", 40 + len(PREFIX), {"max_chain_tokens": 40}),
        ("coconut", 8, {"max_latent_stage": 3}),
        ("coconut", 22, {"eval_latents": 20}),
        ("coconut", 22 + len(PREFIX), {"max_latent_stage": 3, "max_chain_tokens": 14}),
    ],
)
def test_rows_longer_than_learned_positions_are_refused(name, added, changes, tmp_path):
    """Latents, their markers and a chain of a stated length need positions, too."""
    publish(tmp_path, "gpt2")
    settings = {"double": False, "backbone": str(tmp_path), **changes}
    build(name, block_size=64 - added, **settings)
    with pytest.raises(ValueError, match=rf"block_size \({65 - added}\).* to {64 - added} or less"):
        build(name, block_size=65 - added, **settings)


def test_a_stated_chain_longer_than_the_learned_positions_is_refused(tmp_path):
    publish(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="learned positions of the backbone; lower max_chain_to"):
        build("cot", double=False, backbone=str(tmp_path), max_chain_tokens=64)


@pytest.mark.parametrize(
    ("name", "block_size", "latents", "changes"),
    [
        ("cot", 48, 0, {}),
        ("cot", 64, 0, {}),
        ("cot", 40, 0, {"max_chain_tokens": 22}),
        ("icot", 64, 0, {}),
        ("coconut", 50, 4, {"max_latent_stage": 3, "first_stage": 2}),
        ("coconut", 40, 4, {"max_latent_stage": 3, "first_stage": 2}),
        ("coconut", 56, 4, {"max_latent_stage": 3, "first_stage": 2}),
    ],
)
def test_chains_end_within_learned_positions_alone_or_in_a_batch(
    name, block_size, latents, changes, tmp_path
):
    """Chains end by themselves, at their limit, or where prefix and answer just fit."""
    publish(tmp_path, "gpt2")
    model = build(name, backbone=str(tmp_path), block_size=block_size, **changes).eval()
    batch = questions([(30, [], 3), (12, [], 3), (3, [1], 3)])  # 4 with EOS
    added = latents + 2 if name == "coconut" else 0
    room = 64 - added - len(PREFIX) - 64 // 16 - batch["query_lengths"]
    limits = torch.minimum(block_size - batch["query_lengths"], room)
    if "max_chain_tokens" in changes:
        limits = torch.full_like(limits, changes["max_chain_tokens"])
    query, lengths = batch["query"], batch["query_lengths"]
    tokens, written = model.write_chains(query, lengths)
    assert (written <= limits + len(PREFIX)).all()
    assert (written == limits + len(PREFIX)).any()  # one at least reaches its limit
    scored = model.score(batch).log_prob
    for row, length in enumerate(lengths.tolist()):
        alone = {**rows(batch, [row]), "query": query[[row], :length]}
        chain, _ = model.write_chains(alone["query"], alone["query_lengths"])
        assert torch.equal(chain[0], tokens[row, : written[row]])
        torch.testing.assert_close(model.score(alone).log_prob[0], scored[row])


def test_a_text_longer_than_learned_positions_is_refused_in_one_line(tmp_path):
    """As many tokens as there are positions are read; padding needs none."""
    publish(tmp_path, "gpt2")
    model = build("no_cot", double=False, backbone=str(tmp_path)).eval()
    generated = partial(generate, model, max_new_tokens=5, sampling=SamplingConfig(temperature=0))
    room = 64 - len(PREFIX) - 4  # the last token is not read again
    assert [len(row) for row in generated([[1] * room, [1]])] == [5, 5]
    with pytest.raises(ValueError, match="context of 65 tokens is longer than the 64") as caught:
        generated([[1] * (room + 1), [1]])
    assert "\n" not in str(caught.value)
    asked = torch.ones(2, 90, dtype=torch.int64)  # a batch with much padding
    assert model.init_cache(asked, torch.tensor([60, 3]), 1).lengths.tolist() == [60, 3]


class Modes(L.Callback):
    """Notes in every training step whether all modules of the network train."""

    def __init__(self):
        self.training, self.evaluating = [], []

    def on_train_batch_start(self, trainer, model, *rest):
        self.training.append({part.training for part in model.network.modules()})

    def on_validation_batch_start(self, trainer, model, *rest):
        self.evaluating.append({part.training for part in model.network.modules()})


def trained(name, backbone, folder, steps, ckpt_path=None):
    """Weights and modes after a training that is validated every second batch."""
    options = {**STAGES, "first_stage": 1} if name == "coconut" else {}
    model = build(name, double=False, backbone=backbone, **options)
    modes = Modes()
    trainer = resumable_trainer(folder, modes, max_steps=steps, val_check_interval=2)
    trainer.fit(model, Questions(), ckpt_path=ckpt_path, weights_only=ckpt_path and True)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return {key: value.clone() for key, value in model.state_dict().items()}, modes


@pytest.mark.parametrize("name", ["cot", "coconut"])
def test_training_after_a_validation_drops_and_resumes_exactly(name, published, tmp_path):
    whole, modes = trained(name, published, tmp_path, 4)
    assert modes.training == [{True}] * 4
    assert set(map(str, modes.evaluating)) == {"{False}"}
    trained(name, published, tmp_path, 2)
    resumed, modes = trained(name, published, tmp_path, 4, str(tmp_path / "2.ckpt"))
    assert modes.training == [{True}] * 2
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key


# ---- the published recipes, by the command line

CONFIGS = Path(__file__).parents[2] / "configs" / "thinking_states"
SHORT = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_steps=2",
    "--data.global_batch=2",
    "--trainer.val_check_interval=2",
    "--trainer.num_sanity_val_steps=0",
    "--samples.max_new_tokens=4",
    "--model.config.special_rows_from=7",
    "--model.config.max_chain_tokens=16",
    "--data.val_fraction=0.2",
    "--data.test_fraction=0.2",
    "--data.block_size=200",
    "--data.batch_size=2",
]


def publish_with_tokenizer(folder, family):
    """Writes a model and a tokenizer of its kind, Llama's with BOS before every text."""
    from transformers import PreTrainedTokenizerFast

    if family == "llama":
        inner, special = begun(pieces(), "<s>"), {"bos_token": "<s>", "eos_token": "</s>"}
    else:
        inner, special = byte_level("<|endoftext|>"), {"eos_token": "<|endoftext|>"}
    eos = inner.token_to_id(special["eos_token"])
    sizes = {"vocab_size": inner.get_vocab_size(), "eos_token_id": eos, "attention_dropout": 0.0}
    publish(folder, family, max_position_embeddings=256, **sizes)
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "recipes"),
    [
        ("gpt2", ["cot", "coconut", "simcot_coconut"]),
        ("llama", ["icot"]),
        ("qwen3", ["cot"]),
        ("gpt2", ["simcot_codi"]),
        ("llama", ["pccot"]),
    ],
)
def test_published_recipes_train_on_a_folder_with_its_tokenizer(family, recipes, tmp_path):
    """Coconut starts from the best checkpoint of the run before, as its public code does."""
    if "lora_rank" in (CONFIGS / f"{recipes[0]}_gpt2_gsm8k.yaml").read_text():
        pytest.importorskip("peft")
    folder, problems = tmp_path / "published", tmp_path / "problems.txt"
    publish_with_tokenizer(folder, family)
    problems.write_text("Anna has 2 + 3 pears. How many?||<<2+3=5>> #### 5\n" * 12)
    common = [f"--model.config.backbone={folder}", f"--data.tokenizer={folder}", *SHORT]
    common += [f"--data.data_files={problems}", f"--data.cache_dir={tmp_path / 'cache'}"]
    for before, recipe in pairwise([None, *recipes]):
        config, run = CONFIGS / f"{recipe}_gpt2_gsm8k.yaml", tmp_path / recipe
        start = [] if before is None else [f"--model.config.start_from={tmp_path / before}"]
        options = [f"--config={config}", *common, *start, f"--trainer.default_root_dir={run}"]
        if "max_chain_tokens" not in config.read_text():
            options.remove("--model.config.max_chain_tokens=16")
        assert main(["fit", *options]) == 0
        assert len(list(run.rglob("best-*.ckpt"))) == 1  # ranked by right answers
    shutil.rmtree(folder)  # the checkpoint holds all that is needed
    best = load(tmp_path / recipes[-1], which="best")
    assert best.model.network.backbone.shape.model_type == family
    asked = "Anna has 2 + 3 pears. How many?"
    assert isinstance(best.generate(asked, max_new_tokens=5, temperature=0.0), str)
