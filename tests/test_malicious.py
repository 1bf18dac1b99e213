"""Files that would run code when they are loaded: refused in one line, and nothing has run."""

import contextlib
import copy
import json
import os
import pickle
import sys

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_models.recipe as recipe_module
from datamodules import LocalText, Sentences
from evaluation.cli import main as evaluate_main
from lightning_models import LanguageModel, NoCoTConfig, NoCoTLM, TransformerLM
from lightning_models.checkpoint import CheckpointError, read_checkpoint
from training import main as train_main


class Evil:
    """Creates a file when it is unpickled, in the way that any code could run."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def trace(tmp_path):
    """Exists as soon as any of the files has run its code."""
    path = tmp_path / "trace"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    sizes = ("dim=16", "num_layers=1", "num_heads=2")
    arguments = ["--data=datamodules.LocalText", f"--data.data_files={text_file}"]
    arguments += ["--data.block_size=32", "--data.batch_size=4", f"--data.cache_dir={root}/cache"]
    arguments += [f"--model.config.{size}" for size in sizes]
    arguments += ["--trainer.accelerator=cpu", "--trainer.max_steps=1"]
    arguments += ["--trainer.limit_val_batches=0", f"--trainer.default_root_dir={root}"]
    assert train_main(["fit", *arguments]) == 0
    return root / "TransformerLM" / "version_0" / "checkpoints" / "last.ckpt"


def bare_pickle(path, evil, good):
    path.write_bytes(pickle.dumps(evil, protocol=2))


def newer_pickle(path, evil, good):
    path.write_bytes(pickle.dumps({"state_dict": evil}))


def torch_file(path, evil, good):
    torch.save(evil, path)


def in_hyper_parameters(path, evil, good):
    good["hyper_parameters"]["config"]["dim"] = evil
    torch.save(good, path)


def in_callback_state(path, evil, good):
    good["callbacks"]["ResumeState"] = {"state": [evil]}
    torch.save(good, path)


def in_the_older_format(path, evil, good):
    good["hyper_parameters"]["extra"] = evil
    torch.save(good, path, _use_new_zipfile_serialization=False)


WRITERS = (
    bare_pickle,
    newer_pickle,
    torch_file,
    in_hyper_parameters,
    in_callback_state,
    in_the_older_format,
)


@pytest.fixture(params=WRITERS, ids=[write.__name__ for write in WRITERS])
def evil_file(request, trained, trace, tmp_path):
    path = tmp_path / "evil.ckpt"
    request.param(path, Evil(trace), torch.load(trained, weights_only=True))
    return path


def test_the_files_are_what_they_claim(trained, tmp_path):
    """Loaded with trust, each of them runs its code; so refusing them means something."""
    for number, write in enumerate(WRITERS):
        trace, path = tmp_path / f"trace{number}", tmp_path / "evil.ckpt"
        write(path, Evil(trace), torch.load(trained, weights_only=True))
        if write in (bare_pickle, newer_pickle):
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert trace.exists(), write.__name__


def refused(main, capfd, *argv):
    capfd.readouterr()
    assert main([str(word) for word in argv]) == 2
    errors = capfd.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in errors
    return line


@pytest.mark.parametrize("main", ["fit", "perplexity"])
def test_every_kind_is_refused(main, evil_file, capfd):
    if main == "fit":
        line = refused(train_main, capfd, "fit", "--ckpt_path", evil_file)
    else:
        line = refused(evaluate_main, capfd, "perplexity", "--ckpt", evil_file)
    assert f"{evil_file}" in line
    assert "could run any code while loading" in line or "not a checkpoint" in line


def test_load_from_checkpoint_refuses_them_by_default(evil_file):
    with pytest.raises(CheckpointError, match=r"could run any code|not a checkpoint"):
        TransformerLM.load_from_checkpoint(evil_file)


@pytest.fixture
def hidden(trained, trace, tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    in_hyper_parameters(path, Evil(trace), torch.load(trained, weights_only=True))
    return path


@pytest.mark.parametrize("weights_only", ["true", "false"])
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_no_verb_loads_it(verb, weights_only, hidden, capfd):
    """Not even where the user asks Lightning to trust files: ours are never that."""
    options = (f"--ckpt_path={hidden}", f"--weights_only={weights_only}")
    line = refused(train_main, capfd, verb, *options)
    assert f"{hidden} is refused: besides tensors and plain values it contains" in line
    assert "posix.system" in line


@pytest.mark.parametrize("path", ["perplexity", "generate"])
def test_no_command_loads_it(path, hidden, capfd):
    options = ("--prompt", "a") if path == "generate" else ()
    for place in (hidden, hidden.parent):
        line = refused(evaluate_main, capfd, path, "--ckpt", place, *options)
        assert "posix.system" in line or "no whole checkpoint" in line


@pytest.mark.filterwarnings("ignore:skipping a damaged checkpoint")
def test_last_passes_over_it(hidden, capfd):
    root = f"--trainer.default_root_dir={hidden.parent}"
    assert "no whole checkpoint" in refused(train_main, capfd, "fit", "--ckpt_path=last", root)


def test_an_honest_checkpoint_still_loads(trained):
    model = TransformerLM.load_from_checkpoint(trained)
    assert model.config.dim == 16
    assert model.network is not None


# ---- what the plain values of a recipe may name


@pytest.fixture
def canary(trace, tmp_path, monkeypatch):
    """A module that can be imported, and leaves a trace when it is."""
    lines = (
        f"open({str(trace)!r}, 'w')",
        "from datamodules import LocalText",
        "class Thing(LocalText): pass",
        "def make(**kwargs): pass",
    )
    (tmp_path / "lies_around.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recipe_module, "_trusted", set(recipe_module.OWN_PACKAGES))
    yield "lies_around"
    sys.modules.pop("lies_around", None)


def shell(trace):
    """What runs a command as soon as it is instantiated."""
    arguments = {"args": f"touch {trace}", "shell": True}
    return {"class_path": "subprocess.Popen", "init_args": arguments}


def foreign(place="lies_around.Thing"):
    return {"class_path": place, "init_args": {}}


def with_recipe(trained, path, change):
    """Writes a checkpoint whose recipe ``change`` has altered in place."""
    content = torch.load(trained, weights_only=True)
    change(content["recipe"])
    path.parent.mkdir(exist_ok=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # pickling walks into nested lists by recursion
    torch.save(content, path)
    sys.setrecursionlimit(limit)
    return path


def refused_everywhere(path, capfd):
    """Refused in one line by both programs; returns the lines."""
    lines = [
        refused(train_main, capfd, verb, f"--ckpt_path={path}") for verb in ("fit", "validate")
    ]
    lines.append(refused(evaluate_main, capfd, "perplexity", "--ckpt", path))
    assert all(str(path) in line for line in lines), lines
    return lines


def set_model(recipe):
    recipe["model"]["class_path"] = "lies_around.Thing"


def set_data(recipe):
    recipe["data"]["class_path"] = "lies_around.Thing"


def set_optimizer(recipe):
    recipe["model"]["init_args"]["optimizer"] = foreign()


def set_optimizer_name(recipe):
    recipe["model"]["init_args"]["optimizer"] = "lies_around.Thing"


def set_field(recipe):
    recipe["model"]["init_args"]["config"]["dim"] = foreign()


def set_unknown_field(recipe):
    recipe["model"]["init_args"]["config"]["more"] = [{"deeper": foreign()}]


CORPUS = {"class_path": "datamodules.LocalText", "init_args": {"text_field": "a"}}


def set_dotted(recipe):
    recipe["model"]["init_args"]["optimizer.class_path"] = "lies_around.Thing"


def set_dotted_field(recipe):
    recipe["model"]["init_args"]["config"]["init.class_path"] = "lies_around.Thing"


def set_dotted_corpus(recipe):
    init_args = {"corpus.class_path": "lies_around.Thing", "corpus": CORPUS}
    recipe["data"] = {"class_path": "datamodules.Sentences", "init_args": init_args}


def set_empty_key(recipe):
    recipe["model"]["init_args"]["config"][""] = foreign()


def set_self(recipe):
    recipe["model"]["init_args"]["self"] = "lies_around.Thing"


def set_deep(recipe):
    value = []
    for _ in range(3000):
        value = [value]
    recipe["model"]["init_args"]["config"]["dim"] = value


def set_corpus(corpus):
    def change(recipe):
        recipe["data"] = {"class_path": "datamodules.Sentences", "init_args": {"corpus": corpus}}

    return change


CHANGES = {
    "dotted": set_dotted,
    "dotted-field": set_dotted_field,
    "dotted-corpus": set_dotted_corpus,
    "empty-key": set_empty_key,
    "self": set_self,
    "deep": set_deep,
    "model": set_model,
    "data": set_data,
    "optimizer": set_optimizer,
    "optimizer-name": set_optimizer_name,
    "field": set_field,
    "unknown-field": set_unknown_field,
    "corpus": set_corpus(foreign()),
    "corpus-name": set_corpus("lies_around.Thing"),
    "corpus-yaml": set_corpus("class_path: lies_around.Thing"),
    "corpus-json": set_corpus(json.dumps(foreign())),
    "corpus-escaped": set_corpus('{"class\\u005fpath": "lies_around.Thing"}'),
    "corpus-file": set_corpus("FILE"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_class_path_imports_nothing(name, trained, canary, tmp_path, capfd):
    """Plain strings are enough to make a parser import a module that lies around."""
    if name == "corpus-file":
        file = tmp_path / "corpus.yaml"
        file.write_text("class_path: lies_around.Thing")
        change = set_corpus(str(file))
    else:
        change = CHANGES[name]
    path = with_recipe(trained, tmp_path / "run" / "evil.ckpt", change)
    if name == "data" or "corpus" in name:  # the model itself is ours
        with pytest.raises(CheckpointError, match="refused"):
            _ = read_checkpoint(path).data_recipe
    refused_everywhere(path, capfd)
    assert canary not in sys.modules


@pytest.mark.parametrize("field", ["num_layers", "dim"])
def test_endless_networks_are_not_built(field, trained, tmp_path, capfd):
    def change(recipe):
        recipe["model"]["init_args"]["config"][field] = 10**12

    path = with_recipe(trained, tmp_path / "run" / "evil.ckpt", change)
    options = (f"--ckpt_path={path}", "--trainer.accelerator=cpu")
    assert f"{field} ({10**12})" in refused(train_main, capfd, "test", *options)
    assert str(path) in refused(evaluate_main, capfd, "perplexity", "--ckpt", path)
    with pytest.raises(ValueError, match=field):
        TransformerLM.load_from_checkpoint(path)


INSTANTIATOR = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}


@pytest.mark.parametrize("key", ["hyper_parameters", "hparams", "module_arguments"])
@pytest.mark.parametrize(
    "load", [TransformerLM.load_from_checkpoint, LanguageModel.from_checkpoint]
)
def test_what_lightning_saves_of_arguments_is_not_used(key, load, trained, canary, tmp_path):
    """Lightning builds from ``hyper_parameters``, with a parser of its own if they ask for it."""
    content = copy.deepcopy(torch.load(trained, weights_only=True))
    content["hyper_parameters"] = dict(content["hyper_parameters"])
    content[key] = {**INSTANTIATOR, "optimizer": "lies_around.Thing"}
    path = tmp_path / "evil.ckpt"
    torch.save(content, path)
    assert load(path).config.dim == 16
    assert canary not in sys.modules


@pytest.mark.parametrize("corpus", ["lies_around.Thing", {"class_path": "lies_around.Thing"}])
@pytest.mark.parametrize("key", ["recipe", "datamodule_hyper_parameters"])
def test_data_are_built_from_plain_values(key, corpus, trained, canary, tmp_path):
    content = torch.load(trained, weights_only=True)
    path = tmp_path / "evil.ckpt"
    if key == "recipe":
        content["recipe"]["data"] = {
            "class_path": "datamodules.Sentences",
            "init_args": {"corpus": corpus},
        }
        torch.save(content, path)
        with pytest.raises(ValueError, match="corpus"):
            Sentences.load_from_checkpoint(path)
    else:
        content[key] = {**INSTANTIATOR, "corpus": corpus}
        torch.save(content, path)
        loaded = LocalText.load_from_checkpoint(path)
        assert loaded.fingerprint == content["LocalText"]["fingerprint"]
        with pytest.raises(ValueError, match=r"recipe\.data"):
            Sentences.load_from_checkpoint(path)
    assert canary not in sys.modules


def test_pickled_data_are_not_loaded(trained, trace, tmp_path):
    path = tmp_path / "evil.ckpt"
    in_callback_state(path, Evil(trace), torch.load(trained, weights_only=True))
    with pytest.raises(ValueError, match="plain values"):
        LocalText.load_from_checkpoint(path)


def test_a_ranking_deletes_no_other_files(trained, tmp_path):
    """What falls out of a restored ranking is deleted: only checkpoints of the run's own folder."""
    folder, victim = tmp_path / "checkpoints", tmp_path / "victim"
    folder.mkdir()
    victim.mkdir()
    (victim / "file").write_text("kept")
    content = torch.load(trained, weights_only=True)
    (name,) = [name for name in content["callbacks"] if "SaveCheckpoints" in name]
    path = f"{folder}/../victim"
    content["callbacks"][name] |= {
        "dirpath": str(folder),
        "best_k_models": {path: torch.tensor(9.0)},
        "kth_best_model_path": path,
        "kth_value": torch.tensor(9.0),
        "best_model_path": path,
        "best_model_score": torch.tensor(9.0),
        "last_model_path": path,
    }
    torch.save(content, tmp_path / "evil.ckpt")
    options = [f"--ckpt_path={tmp_path}/evil.ckpt", f"--checkpoint.dirpath={folder}"]
    options += ["--trainer.max_steps=3", "--trainer.limit_val_batches=1"]
    options += ["--trainer.val_check_interval=1", f"--trainer.default_root_dir={tmp_path}/root"]
    assert train_main(["fit", *options]) == 0
    assert (victim / "file").read_text() == "kept"


def test_a_backbone_brings_no_code(trace, tmp_path, monkeypatch):
    """Not even if whoever runs it answers that the code may run."""
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    (tmp_path / "configuration_evil.py").write_text(
        f"open({str(trace)!r}, 'w')\nfrom transformers import Qwen2Config as Evil\n"
    )
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = NoCoTConfig(backbone=str(tmp_path), vocab_size=8, block_size=8)
    with pytest.raises(ValueError, match="cannot be read"):
        NoCoTLM(config=config).configure_model()


@pytest.mark.parametrize("state", [[1], {"kind": "json"}, {"kind": "tiktoken"}, {"kind": "other"}])
def test_a_broken_tokenizer_ends_in_one_line(state, trained, tmp_path, capfd):
    content = torch.load(trained, weights_only=True)
    content["LocalText"]["tokenizer"] = state
    path = tmp_path / "evil.ckpt"
    torch.save(content, path)
    assert "tokenizer" in refused(evaluate_main, capfd, "perplexity", "--ckpt", path)
    assert "tokenizer" in refused(evaluate_main, capfd, "generate", "--ckpt", path, "--prompt", "a")


@pytest.mark.parametrize("spelling", ["dict", "field-yaml", "field-json", "config-yaml"])
@pytest.mark.parametrize("method", ["ThinkingStatesLM", "CoTLM", "NoCoTLM"])
def test_a_backbone_runs_no_command(method, spelling, trained, trace, tmp_path, capfd):
    """The shape of a backbone is a free mapping; a parser would build what it finds in it."""
    inner = {"x": shell(trace)}

    def change(recipe):
        config = {
            "dict": {"architecture": inner},
            "field-yaml": {"architecture": yaml.safe_dump(inner)},
            "field-json": {"architecture": json.dumps(inner)},
            "config-yaml": yaml.safe_dump({"architecture": inner}),
        }[spelling]
        model = {"class_path": f"lightning_models.{method}", "init_args": {"config": config}}
        recipe["model"] = model
        recipe["data"] = {"class_path": "datamodules.StateTracking", "init_args": {}}

    path = with_recipe(trained, tmp_path / "evil.ckpt", change)
    assert str(path) in refused(train_main, capfd, "test", f"--ckpt_path={path}")
    refused_everywhere(path, capfd)
    assert not trace.exists()


def test_a_config_file_builds_nothing_within_a_backbone(trace, tmp_path, capfd):
    """A user's own YAML may name any class where a class belongs; in plain fields it is data."""
    config = {"architecture": {"x": shell(trace)}}
    model = {"class_path": "lightning_models.ThinkingStatesLM", "init_args": {"config": config}}
    file = tmp_path / "evil.yaml"
    file.write_text(yaml.safe_dump({"model": model, "data": "datamodules.StateTracking"}))
    assert "architecture" in refused(train_main, capfd, "fit", "-c", file)


def test_a_named_package_may_be_named(trained, tmp_path, monkeypatch, capfd):
    """What the user names with --packages is found, wherever in the recipe it stands."""
    (tmp_path / "my_package.py").write_text("from datamodules import LocalText as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recipe_module, "_trusted", set(recipe_module.OWN_PACKAGES))

    def change(recipe):
        recipe["data"]["class_path"] = "my_package.Mine"

    path = with_recipe(trained, tmp_path / "mine.ckpt", change)
    assert "--packages my_package" in refused_everywhere(path, capfd)[0]
    try:
        named = ("--packages", "my_package")
        assert evaluate_main(["perplexity", "--ckpt", str(path), *named]) == 0
        assert train_main(["validate", f"--ckpt_path={path}", "--packages=[my_package]"]) == 0
    finally:
        sys.modules.pop("my_package", None)


SPELLINGS = st.sampled_from(("dict", "yaml", "json", "name", "argument-free", "listed", "file"))


def spelled(how, class_path, folder):
    """One of the forms in which a parser finds a class."""
    written = {"class_path": class_path, "init_args": {}}
    if how == "file":
        path = folder / "thing.yaml"
        path.write_text(yaml.safe_dump(written))
        return str(path)
    return {
        "dict": written,
        "yaml": yaml.safe_dump(written),
        "json": json.dumps(written),
        "name": class_path,
        "argument-free": {"class_path": class_path},
        "listed": [written],
    }[how]


def places_in(value, path=()):
    """All keys of nested mappings and lists, as paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places_in(item, (*path, key))


SENTENCES = {"class_path": "datamodules.Sentences", "init_args": {"corpus": CORPUS}}
THINKING = {
    "class_path": "lightning_models.ThinkingStatesLM",
    "init_args": {"config": {"architecture": {"a": {"b": 1}, "c": [1]}, "dim": 8}, "optimizer": {}},
}


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), how=SPELLINGS, deeper=st.integers(0, 3))
def test_no_recipe_imports_anything(data, how, deeper, trained, canary, tmp_path_factory):
    """A foreign class at any depth, in any spelling, under any key: nothing is imported."""
    folder = tmp_path_factory.mktemp("recipes")
    content = torch.load(trained, weights_only=True)
    recipe = content["recipe"]
    role, replaced = data.draw(
        st.sampled_from((("model", None), ("data", None), ("data", SENTENCES), ("model", THINKING)))
    )
    if replaced is not None:
        recipe[role] = copy.deepcopy(replaced)
    class_path = f"{canary}.{data.draw(st.sampled_from(('Thing', 'make')))}"
    value = spelled(how, class_path, folder)
    for _ in range(deeper):
        value = data.draw(st.sampled_from(({"more": value}, [value], {"init_args": value})))
    *parents, last = data.draw(st.sampled_from(sorted(places_in(recipe[role]), key=str)))
    place = recipe[role]
    for key in parents:
        place = place[key]
    added = data.draw(st.sampled_from(("", ".class_path", ".corpus", "more")))
    if added and isinstance(last, str):  # a name that a parser splits, or does not know
        place[f"{last}{added}"] = class_path if added == ".class_path" else value
    else:
        place[last] = value
    path = folder / "evil.ckpt"
    torch.save(content, path)
    for main, argv in (
        (train_main, ["fit", f"--ckpt_path={path}", "--print_config"]),
        (train_main, ["test", f"--ckpt_path={path}"]),
        (evaluate_main, ["perplexity", "--ckpt", str(path), "--limit_batches=1"]),
    ):
        # a string where any text may stand is harmless, and then accepted
        with contextlib.suppress(SystemExit):
            main(argv)
        assert canary not in sys.modules


@pytest.fixture
def folder_to_import(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    folder = tmp_path / "gpt2"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder, model


def test_pickled_weights_that_run_code_are_not_imported(folder_to_import, trace, tmp_path, capfd):
    folder, model = folder_to_import
    weights = {**model.state_dict(), "transformer.extra": Evil(trace)}
    torch.save(weights, folder / "pytorch_model.bin")
    target = tmp_path / "imported.ckpt"
    options = ("--hf", folder, "--tokenizer", "bytes", "--output", target)
    line = refused(evaluate_main, capfd, "import", *options)
    assert f"{str(folder)!r} is refused" in line
    assert ".safetensors" in line
    assert not target.exists()


def test_pickled_weights_of_tensors_are_imported(folder_to_import, tmp_path):
    folder, model = folder_to_import
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    target = tmp_path / "imported.ckpt"
    options = ["--hf", str(folder), "--tokenizer", "bytes", "--output", str(target)]
    assert evaluate_main(["import", *options]) == 0
    assert target.exists()


def test_code_of_a_model_folder_is_not_run(folder_to_import, trace, tmp_path, capfd):
    """transformers can fetch classes from a folder; only if it is told to trust them."""
    folder, model = folder_to_import
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "modeling_evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    options = ("--hf", folder, "--tokenizer", "bytes", "--output", tmp_path / "imported.ckpt")
    assert str(folder) in refused(evaluate_main, capfd, "import", *options)
