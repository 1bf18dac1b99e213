"""Weights of ``transformers`` become a checkpoint that everything else can use."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizer_files import begun, byte_level

from datamodules import LocalText
from datamodules.tokenizers import tokenizer_from_state, train_bpe
from evaluation.importing import import_ponder
from evaluation.load import build_data, check_meaning
from lightning_models import TransformerLM
from lightning_models.checkpoint import read_checkpoint

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


@pytest.fixture
def perplexity(reports):
    def run(checkpoint, corpus, *options):
        words = [word for key, value in corpus.items() for word in (f"--data.{key}", value)]
        data = ("--data", "datamodules.LocalText", *words)
        return reports("perplexity", "--ckpt", checkpoint, *data, *options)[0]

    return run


def test_perplexity_is_that_of_the_original(imported, perplexity, corpus, local):
    model, checkpoint = imported
    result = perplexity(checkpoint, corpus)
    assert result["nats_per_token"] == pytest.approx(transformers_nats(model, local), rel=1e-6)


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


def test_a_folders_own_tokenizer_with_a_padded_vocabulary(
    gpt2_folder, evaluates, perplexity, corpus, tmp_path
):
    model, folder = gpt2_folder(300)
    tokenizer = train_bpe("bpe:270", ["thought latent state token memory ponder " * 20])
    (folder / "tokenizer.json").write_text(tokenizer.json_text)
    checkpoint = tmp_path / "imported.ckpt"
    evaluates("import", "--hf", folder, "--output", checkpoint)
    config = torch.load(checkpoint, weights_only=True)["hyper_parameters"]["config"]
    assert (config["vocab_size"], config["vocab_multiple"]) == (270, 300)
    own = {key: value for key, value in corpus.items() if key != "tokenizer"}
    result = perplexity(checkpoint, own)
    data = LocalText(**own, tokenizer=str(folder / "tokenizer.json"))
    data.prepare_data()
    assert result["nats_per_token"] == pytest.approx(transformers_nats(model, data), rel=1e-6)
    # The folder may go: the checkpoint has the tokenizer.
    (folder / "tokenizer.json").unlink()
    again = perplexity(checkpoint, own)
    assert again["nats_per_token"] == result["nats_per_token"]


ADDED = {"id": 270, "content": "<pad>", "special": True, "single_word": False, "lstrip": False}
ADDED |= {"rstrip": False, "normalized": False}


def tokenizer_file(folder, **changes):
    """A tokenizer with 270 entries and ``<pad>``, which a model of 270 rows has no row for."""
    tokenizer = train_bpe("bpe:270", ["thought latent state token memory ponder " * 20])
    content = json.loads(tokenizer.json_text)
    content["added_tokens"].append(ADDED)
    content["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 270}
    content["padding"] |= {"pad_type_id": 0, "pad_token": "<pad>", "pad_to_multiple_of": None}
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_an_added_entry_without_a_row_is_left_out(
    gpt2_folder, evaluates, perplexity, corpus, tmp_path, special, monkeypatch
):
    import tokenizers

    monkeypatch.setitem(ADDED, "special", special)
    model, folder = gpt2_folder(270)
    whole = tokenizer_file(folder)
    checkpoint = tmp_path / "imported.ckpt"
    with pytest.warns(UserWarning, match=r"270 rows, none for '<pad>' \(id 270\); a tokenizer"):
        evaluates("import", "--hf", folder, "--output", checkpoint)
    own = {key: value for key, value in corpus.items() if key != "tokenizer"}
    result = perplexity(checkpoint, own)
    written = tmp_path / "imported.tokenizer" / "tokenizer.json"
    published = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = tokenizers.Tokenizer.from_file(str(written))
    text = "a token of thought, <pad> and memory\n"
    without = text.replace("<pad>", "")
    assert ours.encode(without).ids == published.encode(without).ids == whole.encode(without)
    assert 270 in published.encode(text).ids
    assert ours.decode(ours.encode(text).ids) == text
    assert max(ours.encode(text).ids) < 270
    data = LocalText(**own, tokenizer=str(written.parent))
    data.prepare_data()
    assert result["nats_per_token"] == pytest.approx(transformers_nats(model, data), rel=1e-6)
    # The folder may go: the checkpoint has the tokenizer.
    shutil.rmtree(written.parent)
    again = perplexity(checkpoint, own)
    assert again["nats_per_token"] == result["nats_per_token"]


PLACES = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
PAD_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<pad>", "type_id": 0}}, PLACES[0]],
    "pair": PLACES,
    "special_tokens": {"<pad>": {"id": "<pad>", "ids": [270], "tokens": ["<pad>"]}},
}


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (270, {"post_processor": PAD_FIRST}, "and it puts '<pad>' around texts"),
        (269, {}, "(id 269) was not added to it"),
    ],
)
def test_an_entry_that_a_tokenizer_needs_is_named(
    gpt2_folder, fails, tmp_path, rows, changes, expected
):
    _, folder = gpt2_folder(rows)
    tokenizer_file(folder, **changes)
    line = fails("import", "--hf", folder, "--output", tmp_path / "imported.ckpt")
    assert expected in line
    assert "name the tokenizer it was trained with" in line
    assert not list(tmp_path.glob("imported*"))


def test_an_end_of_text_without_a_row_is_named(gpt2_folder, fails, tmp_path, monkeypatch):
    monkeypatch.setitem(ADDED, "content", "<|end_of_text|>")
    _, folder = gpt2_folder(270)
    tokenizer_file(folder)
    content = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<|other|>")
    (folder / "tokenizer.json").write_text(content)
    (folder / "generation_config.json").write_text('{"eos_token_id": 270}')
    line = fails("import", "--hf", folder, "--output", tmp_path / "imported.ckpt")
    assert "its end-of-text token (id 270) is one without a row" in line


# ---- special tokens of the folder


@pytest.fixture
def with_bos(gpt2_folder):
    """A saved model whose texts begin with ``<s>`` and end with the second of three tokens."""
    _, folder = gpt2_folder(300)
    begun(byte_level("<s>", "</s>", "<|stop|>"), "<s>").save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')
    return folder


def saved_tokenizer(checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    return tokenizer_from_state(content["PythonDocs"]["tokenizer"])


@pytest.mark.parametrize("name", ["tokenizer.json", "a link"])
def test_bos_and_eos_are_those_of_the_folder(with_bos, evaluates, tmp_path, caplog, name):
    if name == "a link":  # as in the hub's cache
        (with_bos / "tokenizer.json").rename(tmp_path / "blob")
        (with_bos / "tokenizer.json").symlink_to(tmp_path / "blob")
    with caplog.at_level("INFO"):
        evaluates("import", "--hf", with_bos, "--output", tmp_path / "imported.ckpt")
    tokenizer = saved_tokenizer(tmp_path / "imported.ckpt")
    assert (tokenizer.text_bos_id, tokenizer.stop_ids) == (256, (258, 257))
    (line,) = [r.getMessage() for r in caplog.records if "EOS" in r.getMessage()]
    assert line.endswith("has BOS '<s>' (256), EOS '<|stop|>' (258), '</s>' (257).")


@pytest.mark.parametrize("removed", ["file", "folder"])
def test_special_tokens_stay_when_the_tokenizer_is_gone(
    with_bos, train_checkpoint, corpus, removed
):
    name = str(with_bos / "tokenizer.json") if removed == "file" else str(with_bos)
    data = LocalText(**{**corpus, "tokenizer": name})
    path = train_checkpoint(with_bos.parent / "trained.ckpt", data)
    shutil.rmtree(with_bos)
    again = build_data(read_checkpoint(path))
    assert Path(again.hparams["tokenizer"]).is_relative_to(corpus["cache_dir"])
    assert (again.tokenizer.text_bos_id, again.tokenizer.stop_ids) == (256, (258, 257))
    check_meaning(again.tokenizer, read_checkpoint(path), "the tokenizer")


def as_older(path):
    """Makes a checkpoint one of a version that knew no BOS, and took EOS by its name."""
    content = torch.load(path, weights_only=True)
    content["LocalText"]["tokenizer"].pop("special")
    torch.save(content, path)
    return read_checkpoint(path)


def test_an_older_checkpoint_keeps_its_special_tokens(with_bos, train_checkpoint, corpus):
    options = {**corpus, "tokenizer": str(with_bos / "tokenizer.json")}
    path = train_checkpoint(with_bos.parent / "trained.ckpt", LocalText(**options))
    older = as_older(path)
    data = build_data(older)  # the file would now give BOS, and another EOS
    data.prepare_data()
    assert (data.tokenizer.text_bos_id, data.tokenizer.stop_ids) == (None, (257,))
    stream = data.stream("val")
    ids = stream.gather(np.arange(len(stream))).tolist()
    assert 257 in ids
    assert not {256, 258} & set(ids)
    check_meaning(data.tokenizer, older, "the tokenizer")


def test_an_older_checkpoint_of_a_hub_tokenizer_keeps_its_special_tokens(
    with_bos, train_checkpoint, corpus, monkeypatch
):
    def cached(_, file):
        return str(with_bos / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cached)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    options = {**corpus, "tokenizer": "somebody/something"}
    path = train_checkpoint(with_bos.parent / "trained.ckpt", LocalText(**options))
    data = build_data(as_older(path))
    data.prepare_data()
    assert (data.tokenizer.text_bos_id, data.tokenizer.stop_ids) == (None, (257,))


def test_a_tokenizer_with_another_beginning_is_refused(with_bos, train_checkpoint, corpus, fails):
    (with_bos / "generation_config.json").write_text('{"eos_token_id": 257}')
    name = str(with_bos / "tokenizer.json")
    path = train_checkpoint(with_bos.parent / "t.ckpt", LocalText(**{**corpus, "tokenizer": name}))
    as_older(path)
    line = fails("generate", "--ckpt", path, "--tokenizer", name, "--prompt", "a")
    assert "begins texts with BOS (id 256), the checkpoint's" in line
    assert "with no BOS; use the tokenizer it was trained with" in line


@pytest.mark.parametrize(
    ("vocab_size", "options", "expected"),
    [
        (257, [], "has no tokenizer.json; name the tokenizer with --tokenizer"),
        (100, ["--tokenizer", "bytes"], "(bytes) has 257 entries, the model's vocabulary 100 rows"),
        (257, ["--tokenizer", "nonsense"], "tokenizer='nonsense' is unknown"),
        (257, ["--tokenizer", "bytes", "--set.dimm", "3"], "unexpected keyword argument 'dimm'"),
        (257, ["--tokenizer", "bytes", "--set.window", "0"], "window (0) must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named(gpt2_folder, fails, tmp_path, vocab_size, options, expected):
    _, folder = gpt2_folder(vocab_size)
    target = tmp_path / "imported.ckpt"
    assert expected in fails("import", "--hf", folder, "--output", target, *options)
    assert not target.exists()


def test_a_model_that_is_not_there_is_named(fails, tmp_path):
    options = ("--tokenizer", "bytes", "--output", tmp_path / "imported.ckpt")
    assert "no model found" in fails("import", "--hf", tmp_path / "none", *options)


# ---- the PonderLM family


def spread(model):
    """Draws weights far from their initial zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def published(kind, **fields):
    """A random model of a family, whose config has what the public code adds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32, "recurrent_model": True}
    sizes |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes, **fields)
    return spread(AutoModelForCausalLM.from_config(config))


def run_theirs(model, x, positions):
    """Hidden states (B, N, D) after the final norm, causal over all N inputs."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
    places = {"position_ids": positions.expand(len(x), -1), "attention_mask": mask}
    return model.base_model(inputs_embeds=x, use_cache=False, **places).last_hidden_state


def slots_of(model, x, steps, iterations):
    """PonderLM-2: K growing passes, J refinements, and the one that predicts."""
    length, slots = x.shape[1], [x]
    for number in range(steps + iterations + 1):
        flat = torch.stack(slots, dim=2).flatten(1, 2)
        positions = torch.arange(length).repeat_interleave(len(slots))
        h = run_theirs(model, flat, positions).unflatten(1, (length, -1))
        if number < steps + iterations:
            slots = [x, *h.unbind(2)][: steps + 1]
    return h[:, :, -1]


def looped_states(model, x, steps):
    base, places = model.base_model, torch.arange(x.shape[1]).expand(len(x), -1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
    for _ in range(steps + 1):
        for layer in base.layers:
            tables = base.rotary_emb(x, places)
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=tables)
    return base.norm(x)


def pondered_states(model, x, steps, table, accumulate, times=1):
    current, places = x * times, torch.arange(x.shape[1])
    for _ in range(steps):
        mean = model.lm_head(run_theirs(model, current, places)).softmax(dim=-1) @ table
        current = (current if accumulate else x) + mean
    return run_theirs(model, current, places)


def paused_states(model, x, pause, steps):
    slots = torch.stack([x, *[pause.expand_as(x)] * steps], dim=2).flatten(1, 2)
    places = torch.arange(x.shape[1]).repeat_interleave(steps + 1)
    return run_theirs(model, slots, places)[:, steps :: steps + 1]


STEPS = {"num_latent_thoughts": 2, "scale_embeds": True}
GROUPS = {"num_key_value_heads": 2}
ORIGINAL = {
    "ponderinglm": True,
    "pondering_steps": 2,
    "scale_embeds": True,
    "mutiply_pondering_steps": True,
}
PUBLISHED = {
    "ponderlm2": ("ponderlm2", "llama", STEPS | {"num_jacobi_iterations": 3}),
    "ponderlm2-unscaled": ("ponderlm2", "llama", GROUPS | STEPS | {"scale_embeds": False}),
    "ponderlm2-pythia": ("ponderlm2", "gpt_neox", STEPS | {"num_jacobi_iterations": 1}),
    "ponderlm1": ("ponderlm1", "llama", STEPS | {"interpolation": True}),
    "ponderlm1-sums": ("ponderlm1", "llama", STEPS | {"residual_interpolated_embeds": True}),
    "ponderlm1-pythia": ("ponderlm1", "gpt_neox", ORIGINAL),
    "looped": ("looped", "llama", STEPS),
    "pause": ("pause", "llama", STEPS | {"pause_token_id": 61}),
}


def their_states(theirs, method, tokens):
    config, table = theirs.config, theirs.get_input_embeddings().weight
    original = hasattr(config, "ponderinglm")
    dim = config.hidden_size
    steps = config.pondering_steps if original else config.num_latent_thoughts
    wide = method in ("ponderlm2", "looped")
    scale = (2.5 * dim if wide else dim) ** 0.5 if config.scale_embeds else 1.0
    x = table[tokens] * scale
    if method == "ponderlm2":
        return slots_of(theirs, x, steps, getattr(config, "num_jacobi_iterations", 3))
    if method == "ponderlm1":
        sums = original or getattr(config, "residual_interpolated_embeds", False)
        times = steps if original else 1
        return pondered_states(theirs, x, steps, table * scale, sums, times)
    if method == "looped":
        return looped_states(theirs, x, steps)
    return paused_states(theirs, x, table[config.pause_token_id] * scale, steps)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_score_as_their_code_does(name, exact, in_float64):
    method, kind, fields = PUBLISHED[name]
    theirs = published(kind, **fields)
    ours = import_ponder(theirs, method).eval()
    stream = torch.randint(0, 60, (2, 13))
    tokens, targets = stream[:, :-1], stream[:, 1:]
    with torch.no_grad():
        logits = theirs.lm_head(their_states(theirs, method, tokens))
        if method == "ponderlm2":
            h = ours.network(tokens, ours.config.eval_iterations).read_out
        else:
            h = ours.network(tokens)
        mine = h @ ours.network.output_matrix.t()
        scores = ours.score({"tokens": tokens, "targets": targets})
    assert (mine - logits).abs().max() < 1e-10
    expected = logits.log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]
    # scores are float32
    assert (scores.log_prob - expected).abs().max() < 1e-6


def test_a_published_folder_is_scored(evaluates, perplexity, fails, corpus, tmp_path):
    folder, target = tmp_path / "published", tmp_path / "imported.ckpt"
    theirs = published("gpt_neox", **STEPS, auto_map={"AutoModelForCausalLM": "modeling.Ponder"})
    theirs.resize_token_embeddings(300)
    theirs.float().save_pretrained(folder)
    options = ("import", "--hf", folder, "--tokenizer", "bytes", "--output", target)
    assert "name the method, with --method ponderlm2" in fails(*options)
    assert "pause): model_type (gpt_neox)" in fails(*options, "--method", "pause")
    printed = evaluates(*options, "--method", "ponderlm2", "--set.eval_iterations", "2")
    assert "PonderLM2" in printed
    result = perplexity(target, corpus, "--limit_batches", "1")
    assert result["nats_per_token"] > 0
    config = torch.load(target, weights_only=True)["hyper_parameters"]["config"]
    assert (config["thinking_steps"], config["eval_iterations"]) == (2, 2)
    assert (config["vocab_size"], config["parallel_residual"]) == (257, True)


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("ponderlm2", STEPS | {"interpolation": True}, "not support interpolation=true of"),
        ("ponderlm1", STEPS | {"hidden_layer_num": 2}, "not support hidden_layer_num of"),
        ("looped", {}, "no num_latent_thoughts; give the number"),
        ("pause", STEPS, r"64 rows, none for pause_token_id \(50288\)"),
        ("looped", STEPS | {"tie_word_embeddings": True}, "not support tie_word_embeddings of"),
        ("pause", STEPS | {"recurrent_model": False}, "not support recurrent_model=false of"),
    ],
)
def test_what_a_method_has_not_is_named(method, fields, words):
    theirs = published("llama")
    for key, value in fields.items():
        setattr(theirs.config, key, value)
    theirs.tie_weights()  # where the config asks for it
    with pytest.raises(ValueError, match=words):
        import_ponder(theirs, method)
