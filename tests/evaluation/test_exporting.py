"""Checkpoints leave: as models of ``transformers``, as folders of weights and JSON, as one file."""

import copy
import json
import re
import shutil

import pytest
import torch
from methods import FIRST
from safetensors.torch import save_file
from tokenizer_files import PUBLISHED, begun, byte_level, unigram, word_pieces
from tokenizers import normalizers
from tokenizers.processors import BertProcessing, TemplateProcessing
from torch.distributed.checkpoint.hf_storage import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from datamodules.tokenizers import (
    BytesTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
    tokenizer_from_state,
    train_bpe,
)
from evaluation.exporting import write_tokenizer
from evaluation.load import build_model
from lightning_models.checkpoint import read_checkpoint, shards
from tests.verbs import VERBS
from training import main as train_main

TEXTS = ["The thought reads.\n\n  It writes 12 tokens, naïvely: ponder's state…", "", " a", "\x00é"]


@pytest.fixture
def loss_of(reports):
    def run(checkpoint, *options):
        return reports("perplexity", "--ckpt", checkpoint, *options)[0]["nats_per_token"]

    return run


# ---- model folders


@pytest.mark.parametrize("name", [method.name for method in FIRST.values()])
def test_every_method_is_read_from_its_folder(name, write_method, evaluates, loss_of, tmp_path):
    path, folder = write_method(name), tmp_path / "folder"
    assert "model folder" in evaluates(
        "export", "--ckpt", path, "--output", folder, "--format", "folder"
    )
    ours = {"model.safetensors", "recipe.json"}
    theirs = {"tokenizer.json", "tokenizer_config.json"}  # sentences have no equivalent
    files = {file.name for file in folder.iterdir()}
    assert files == (ours if name in ("thought-gestalt", "gist") else ours | theirs)
    before, after = (build_model(read_checkpoint(place)) for place in (path, folder))
    assert json.dumps(after.recipe()) == json.dumps(before.recipe())  # tuples may be lists
    for key, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[key], tensor), key
    few = ("--limit_batches", 1, "--device", "cpu")
    found = [loss_of(place, *few) for place in (path, folder)]
    assert found[0] == found[1]


@pytest.fixture
def folder(checkpoint_path, evaluates, tmp_path):
    evaluates("export", "--ckpt", checkpoint_path, "--output", tmp_path / "m", "--format", "folder")
    return tmp_path / "m"


QUICK = ("perplexity", "generate", "sweep", "compare")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.name in QUICK], ids=str)
def test_verbs_take_the_folder(verb, folder, evaluates, tmp_path):
    assert evaluates(*verb.command(folder, {"folder": tmp_path}))


def test_the_trainer_goes_on_from_the_folder(folder, tmp_path):
    options = (f"--ckpt_path={folder}", "--trainer.accelerator=cpu")
    assert train_main(["validate", *options, "--trainer.limit_val_batches=1"]) == 0
    root = f"--trainer.default_root_dir={tmp_path / 'run'}"
    assert train_main(["fit", *options, root, "--trainer.max_steps=3"]) == 0
    assert read_checkpoint(tmp_path / "run").step == 3


def test_what_belongs_to_the_run_stays_known(folder, checkpoint_path):
    checkpoint, exported = read_checkpoint(checkpoint_path), read_checkpoint(folder)
    assert exported.step == checkpoint.step == 2
    assert exported.data_state["tokenizer"] == checkpoint.data_state["tokenizer"]
    assert exported.data_state["fingerprint"] == checkpoint.data_state["fingerprint"]


def change_recipe(folder, edit):
    content = json.loads((folder / "recipe.json").read_text())
    edit(content)
    (folder / "recipe.json").write_text(json.dumps(content))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def put_a_hole(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))


def put_a_pickle(folder):
    torch.save({"state_dict": {}}, folder / "model.safetensors")


DAMAGES = {
    "cut off": (cut, "truncated or not a checkpoint"),
    "hole": (put_a_hole, "another sha256"),
    "pickle": (put_a_pickle, "not a checkpoint"),
    "weights missing": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.saf"),
    "no JSON": (lambda folder: (folder / "recipe.json").write_text("{"), "cannot be read"),
    "deep": (lambda folder: (folder / "recipe.json").write_text("[" * 100_000), "cannot be read"),
    "a list": (lambda folder: (folder / "recipe.json").write_text("[]"), "not an object"),
    "no recipe": (lambda f: change_recipe(f, lambda c: c.pop("recipe")), "has no recipe"),
    "other class": (
        lambda f: change_recipe(f, lambda c: c["recipe"]["model"].update(class_path="os.system")),
        "os.system",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_are_named(name, folder, fails):
    damage, words = DAMAGES[name]
    damage(folder)
    line = fails("perplexity", "--ckpt", folder)
    assert words in line
    assert str(folder) in line


def test_what_json_has_not_is_refused(edited, fails, tmp_path):
    def edit(content):
        content["recipe"]["data"]["init_args"]["batch_size"] = torch.ones(2)

    options = ("--output", tmp_path / "folder", "--format", "folder")
    assert "recipe: not plain enough" in fails("export", "--ckpt", edited(edit), *options)
    assert list(tmp_path.glob("*folder*")) == []


def test_folders_with_something_in_them_are_left_alone(folder, checkpoint_path, fails):
    before = (folder / "recipe.json").read_bytes()
    line = fails("export", "--ckpt", checkpoint_path, "--output", folder)
    assert "exists already; name a new folder" in line
    assert (folder / "recipe.json").read_bytes() == before


def test_a_model_of_transformers_is_no_checkpoint(tiny_gpt2, fails):
    line = fails("perplexity", "--ckpt", tiny_gpt2[2])
    assert "is a model of transformers; make a checkpoint of it with evaluate.py import" in line


# ---- one file


def test_parts_become_one_file(checkpoint_path, evaluates, tmp_path):
    content = torch.load(checkpoint_path, weights_only=True)
    whole = copy.deepcopy(content)
    name, weight = next(iter(content["state_dict"].items()))
    moment = content["optimizer_states"][0]["state"][0]["exp_avg"]
    places = {
        ("state_dict", name): weight,
        ("optimizer_states", 0, "state", 0, "exp_avg"): moment,
    }
    del content["state_dict"][name], content["optimizer_states"][0]["state"][0]["exp_avg"]
    content[shards.KEY] = {"folder": "last.ckpt.shards-0", "tensors": shards.describe(places)}
    (tmp_path / "last.ckpt.shards-0").mkdir()
    own = {shards.name_of(place): tensor for place, tensor in places.items()}
    offsets = {key: {SAVED_OFFSETS_KEY: [0] * tensor.dim()} for key, tensor in own.items()}
    save_file(
        own,
        tmp_path / "last.ckpt.shards-0" / "rank0.safetensors",
        metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)},
    )
    torch.save(content, tmp_path / "last.ckpt")
    evaluates("export", "--ckpt", tmp_path / "last.ckpt", "--output", tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert shards.KEY not in one
    assert torch.equal(one["state_dict"][name], whole["state_dict"][name])
    state = one["optimizer_states"][0]["state"][0]
    assert torch.equal(state["exp_avg"], whole["optimizer_states"][0]["state"][0]["exp_avg"])
    assert one.keys() == whole.keys()
    shutil.rmtree(tmp_path / "last.ckpt.shards-0")
    assert read_checkpoint(tmp_path / "one.ckpt").step == 2


def test_a_folder_becomes_a_file_again(folder, checkpoint_path, evaluates, loss_of, tmp_path):
    printed = evaluates("export", "--ckpt", folder, "--output", tmp_path / "one.ckpt")
    assert "weights, without an optimiser" in printed
    few = ("--limit_batches", 1)
    found = [loss_of(place, *few) for place in (checkpoint_path, tmp_path / "one.ckpt")]
    assert found[0] == found[1]


# ---- models of transformers


def test_the_plain_transformer_is_read_by_transformers(checkpoint_path, evaluates, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    printed = evaluates("export", "--ckpt", checkpoint_path, "--output", tmp_path / "m")
    assert "GPT2LMHeadModel" in printed
    assert "bytes" in printed
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ours = build_model(read_checkpoint(checkpoint_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    tokens = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][:, :32]
    with torch.no_grad():
        mine = ours.network(tokens) @ ours.network.output_matrix.t()
        assert (mine - theirs(tokens).logits).abs().max() < 1e-5
    assert theirs.config.eos_token_id == tokenizer.eos_token_id == 256


@pytest.mark.parametrize("name", ["ts", "cot", "coconut"])
def test_the_backbone_of_questions_is_read_by_transformers(name, reasoners, evaluates, tmp_path):
    from transformers import AutoModelForCausalLM

    printed = evaluates("export", "--ckpt", reasoners[name], "--output", tmp_path / "m")
    assert "Qwen2ForCausalLM" in printed
    left = int(re.search(r"left out +([\d,]+)", printed)[1].replace(",", ""))
    assert (left > 1000) == (name == "ts")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64).eval()
    backbone = build_model(read_checkpoint(reasoners[name])).double().network.backbone
    tokens = torch.arange(40).view(2, 20)
    positions = torch.arange(20).expand(2, -1)
    with torch.no_grad():
        mine = backbone(backbone.embed(tokens), positions).last @ backbone.output_matrix.t()
        assert (mine - theirs(tokens).logits).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("thinking-states-window", "Qwen2ForCausalLM"),
        ("coconut-gpt2", "GPT2LMHeadModel"),
        ("thinking-states-llama", "LlamaForCausalLM"),
        ("icot-qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_the_backbone_of_every_family_is_exported(name, kind, write_method, evaluates, tmp_path):
    from transformers import AutoModelForCausalLM

    path = write_method(name)
    assert kind in evaluates("export", "--ckpt", path, "--output", tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    backbone = build_model(read_checkpoint(path)).network.backbone
    tokens, positions = torch.arange(20)[None], torch.arange(20)[None]
    with torch.no_grad():
        mine = backbone(backbone.embed(tokens), positions).last @ backbone.output_matrix.t()
        assert (mine - theirs(tokens).logits).abs().max() < 1e-5


def test_methods_that_transformers_has_not_get_the_other_folder(write_method, evaluates, fails):
    path = write_method("looped")
    to = ("--ckpt", path, "--output", path.parent / "m")
    line = fails("export", *to, "--format", "transformers")
    assert "transformers has no LoopedLM; use --format folder" in line
    printed = evaluates("export", *to)
    assert "model folder" in printed
    assert "transformers has no LoopedLM" in printed
    path = write_method("coconut-gpt2", window=8)
    line = fails("export", "--ckpt", path, "--output", path.parent / "n", "--format=transformers")
    assert "gpt2 has no attention window (8) there; use --format folder" in line


def small_encoding():
    """Bytes, three merges, and special tokens after a gap."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" w": 258}
    return tiktoken.Encoding(
        "small",
        pat_str=r" ?\w+| ?[^\w\s]+|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endofprompt|>": 270, "<|endoftext|>": 265},
    )


@pytest.mark.parametrize("name", ["bytes", "bpe", "tiktoken"])
def test_tokenizers_keep_their_ids(name, monkeypatch, tmp_path):
    from transformers import AutoTokenizer

    monkeypatch.setattr("tiktoken.get_encoding", lambda name: small_encoding())
    tokenizer = {
        "bytes": BytesTokenizer,
        "bpe": lambda: train_bpe("bpe:270", ["the thought writes the state " * 20]),
        "tiktoken": lambda: TiktokenTokenizer("small"),
    }[name]()
    assert write_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_id
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == text


def t5():
    inner = unigram()
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return inner


def bert():
    inner = word_pieces()
    inner.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return inner


KINDS = {**PUBLISHED, "t5": t5, "bert": bert, "opt": lambda: begun(byte_level(), "<|endoftext|>")}


def ids_there(folder, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def ids_here(tokenizer, text):
    bos = [] if tokenizer.text_bos_id is None else [tokenizer.text_bos_id]
    return [*bos, *tokenizer.encode(text)]


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gpt_neox", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_tokenizers_have_the_same_ids_whatever_the_model(kind, model_type, tmp_path):
    source = tmp_path / "tokenizer.json"
    KINDS[kind]().save(str(source))
    ours = load_tokenizer(str(source))
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert write_tokenizer(ours, folder)
    again = load_tokenizer(str(folder))
    assert (again.text_bos_id, again.stop_ids) == (ours.text_bos_id, ours.stop_ids)
    for text in TEXTS:
        expected = ours.prompt_ids(text) if kind == "opt" else ids_here(ours, text)
        assert ids_there(folder, text) == expected
        assert again.encode(text) == ours.encode(text)


def test_an_older_tokenizer_is_exported_without_bos(tmp_path):
    text = begun(byte_level("<s>", "</s>"), "<s>").to_str()
    old = tokenizer_from_state({"kind": "json", "name": "old", "json": text})
    write_tokenizer(old, tmp_path)
    assert ids_there(tmp_path, "ab") == old.encode("ab") == JsonTokenizer("new", text).encode("ab")


@pytest.fixture
def published(tmp_path):
    """Saves a random model of transformers with a tokenizer; returns its folder."""

    def save(inner, model_type="llama", **ids):
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 340}
        config = AutoConfig.for_model(model_type, max_position_embeddings=32, **sizes, **ids)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / "published")
        PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "published")
        return tmp_path / "published"

    return save


@pytest.mark.parametrize("kind", ["byte_level_bos", "pieces", "t5", "bert", "byte_level"])
def test_import_and_export_keep_ids_bos_and_every_eos(kind, published, evaluates, tmp_path):
    inner = KINDS[kind]()
    names = ("</s>", "[SEP]", "<|endoftext|>")
    eos = next(i for name in names if (i := inner.token_to_id(name)) is not None)
    ordinary = inner.encode("the cat", add_special_tokens=False).ids[-1]
    stops = [eos, ordinary]  # like the line end of some models, which ends answers, not documents
    folder = published(inner, bos_token_id=None, eos_token_id=stops)
    plain = inner.encode("the cat", add_special_tokens=False).ids
    first = inner.encode("the cat").ids[0]
    bos = None if first == plain[0] else first
    for turn in ("1", "2"):
        checkpoint, target = tmp_path / f"{turn}.ckpt", tmp_path / f"exported{turn}"
        evaluates("import", "--hf", folder, "--output", checkpoint)
        evaluates("export", "--ckpt", checkpoint, "--output", target)
        model_folder = tmp_path / f"folder{turn}"
        evaluates("export", "--ckpt", checkpoint, "--output", model_folder, "--format", "folder")
        for name in ("config.json", "generation_config.json"):
            config = json.loads((target / name).read_text())
            assert config["eos_token_id"] == stops
            assert config.get("bos_token_id") == bos
        for written in (target, model_folder):
            tokenizer = load_tokenizer(str(written))
            assert (tokenizer.text_bos_id, tokenizer.stop_ids) == (bos, tuple(stops))
            assert tokenizer.encode("the cat") == plain
            assert tokenizer.decode(plain) == inner.decode(plain)
            assert ids_there(written, "the cat") == [*([] if bos is None else [bos]), *plain]
        folder = target


@pytest.mark.parametrize("format", ["transformers", "folder"])
def test_an_exported_folder_is_a_tokenizer(format, published, evaluates, loss_of, corpus, tmp_path):
    source = published(begun(byte_level("<s>", "</s>"), "<s>"), bos_token_id=256, eos_token_id=257)
    checkpoint, target = tmp_path / "imported.ckpt", tmp_path / "m"
    evaluates("import", "--hf", source, "--output", checkpoint)
    evaluates("export", "--ckpt", checkpoint, "--output", target, "--format", format)
    options = [word for key, value in corpus.items() for word in (f"--data.{key}", value)]
    data = ("--data", "datamodules.LocalText", *options, "--limit_batches", 1)
    scores = [loss_of(checkpoint, *data, "--data.tokenizer", name) for name in (target, source)]
    assert scores[0] == scores[1]


def test_a_tokenizer_that_a_models_class_would_change_is_named(published, evaluates, tmp_path):
    from transformers import PreTrainedTokenizerFast

    inner = byte_level(normalizer=normalizers.Lowercase())
    source = published(inner, "qwen2", bos_token_id=None, eos_token_id=256)
    evaluates("import", "--hf", source, "--output", tmp_path / "imported.ckpt")
    printed = evaluates("export", "--ckpt", tmp_path / "imported.ckpt", "--output", tmp_path / "m")
    assert "AutoTokenizer reads it as Qwen2Tokenizer, with other ids" in printed
    assert ids_there(tmp_path / "m", "The") != inner.encode("The").ids
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    assert theirs("The")["input_ids"] == inner.encode("The").ids
