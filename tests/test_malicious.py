"""Files that would run code when they are loaded: refused in one line, and nothing has run."""

import contextlib
import copy
import functools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

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
    """The one line in which a program refuses, with exit code 2."""
    capfd.readouterr()
    assert main([str(word) for word in argv]) == 2
    errors = capfd.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in errors
    return line


TRIES = [
    *((train_main, verb, "--ckpt_path={}") for verb in ("fit", "validate", "test", "predict")),
    (train_main, "fit", "--ckpt_path={}", "--weights_only=false"),  # which Lightning would obey
    (train_main, "test", "--ckpt_path={}", "--weights_only=true"),
    (evaluate_main, "perplexity", "--ckpt={}"),
    (evaluate_main, "generate", "--ckpt={}", "--prompt=a"),
]


def test_no_verb_loads_a_pickle(evil_file, capfd):
    for main, *words in TRIES:
        assert str(evil_file) in refused(main, capfd, *(word.format(evil_file) for word in words))
    with pytest.raises(CheckpointError):
        TransformerLM.load_from_checkpoint(evil_file)


@pytest.mark.filterwarnings("ignore:skipping a damaged checkpoint")
def test_none_is_found_in_a_folder(evil_file, capfd):
    folder = evil_file.rename(evil_file.with_name("last.ckpt")).parent
    root = f"--trainer.default_root_dir={folder}"
    assert str(folder) in refused(train_main, capfd, "fit", "--ckpt_path=last", root)
    for words in (("perplexity",), ("generate", "--prompt=a")):
        assert str(folder) in refused(evaluate_main, capfd, *words, "--ckpt", folder)


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
    monkeypatch.setattr(recipe_module, "_trusted_classes", set())
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


THING = "lies_around.Thing"
CORPUS = {"class_path": "datamodules.LocalText", "init_args": {"text_field": "a"}}
DEEP = functools.reduce(lambda inner, _: [inner], range(3000), [])


def sentences(**init_args):
    return {"class_path": "datamodules.Sentences", "init_args": init_args}


THINKING = {
    "class_path": "lightning_models.ThinkingStatesLM",
    "init_args": {"config": {"architecture": {"a": {"b": 1}, "c": [1]}, "dim": 8}, "optimizer": {}},
}
CHANGES = {
    "model": ("model class_path", THING),
    "model-deep": ("model class_path", DEEP),
    "data": ("data class_path", THING),
    "optimizer": ("model init_args optimizer", foreign()),
    "optimizer-name": ("model init_args optimizer", THING),
    "field": ("model init_args config dim", foreign()),
    "unknown-field": ("model init_args config more", [{"deeper": foreign()}]),
    "dotted": ("model init_args optimizer.class_path", THING),
    "dotted-field": ("model init_args config init.class_path", THING),
    "dotted-corpus": ("data", sentences(**{"corpus.class_path": THING, "corpus": CORPUS})),
    "empty-key": ("model init_args config  ", foreign()),
    "self": ("model init_args self", THING),
    "deep": ("model init_args config dim", DEEP),
    "corpus": ("data", sentences(corpus=foreign())),
    "corpus-name": ("data", sentences(corpus=THING)),
    "corpus-yaml": ("data", sentences(corpus=f"class_path: {THING}")),
    "corpus-json": ("data", sentences(corpus=json.dumps(foreign()))),
    "corpus-escaped": ("data", sentences(corpus='{"class\\u005fpath": "lies_around.Thing"}')),
    "corpus-file": ("data", sentences(corpus="corpus.yaml")),
}
"""Keys down to a value of a recipe, and what is put there."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_class_path_imports_nothing(name, trained, canary, tmp_path, monkeypatch, capfd):
    """Plain strings are enough to make a parser import a module that lies around."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.yaml").write_text(f"class_path: {THING}")
    keys, value = CHANGES[name]

    def change(recipe):
        *parents, last = keys.split(" ") if keys[-1] != " " else [*keys.split(), ""]
        functools.reduce(dict.__getitem__, parents, recipe)[last] = value

    path = with_recipe(trained, tmp_path / "run" / "evil.ckpt", change)
    if name == "data" or "corpus" in name:  # the model itself is ours
        with pytest.raises(CheckpointError):
            _ = read_checkpoint(path).data_recipe
    refused_everywhere(path, capfd)
    assert canary not in sys.modules


FORGED = "\x1b[31mX\nerror: all fine"


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (f"model|init_args|config|{FORGED}", 1),
        ("model|init_args|config|dim", FORGED),
        ("model|class_path", FORGED),
        ("model|class_path", f"lightning_models.{FORGED}"),
        ("data|class_path", f"lightning_models.{FORGED}.Thing"),
        ("model", {**THINKING, "init_args": {"config": {"architecture": {FORGED: {"a": []}}}}}),
    ],
)
def test_text_of_a_checkpoint_forges_no_message(keys, value, trained, tmp_path, capfd):
    def change(recipe):
        *parents, last = keys.split("|")
        functools.reduce(dict.__getitem__, parents, recipe)[last] = value

    path = with_recipe(trained, tmp_path / "run" / "evil.ckpt", change)
    for line in refused_everywhere(path, capfd):
        assert line.isprintable()
        assert "\\x1b[31mX" in line


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("--model=TransformerLM",), "TransformerLM"),
        (("--data", "LocalText"), "LocalText"),
        (("-c", "data: LocalText"), "LocalText"),
        (("-c", "model: {class_path: TransformerLM}"), "TransformerLM"),
        (("--data=datamodules.LocalText",), "LocalText"),
        (("--data=lies_around.make",), "lies_around"),
        (("--data=lies_around",), "lies_around"),
    ],
)
def test_a_typed_class_is_no_package(words, package, trained, canary, tmp_path, capfd):
    """Whoever types a class trusts that class alone, and no file that has its name."""
    (tmp_path / "lies_around.py").rename(tmp_path / f"{package}.py")
    change = functools.partial(dict.update, data=foreign(f"{package}.Thing"))
    path = with_recipe(trained, tmp_path / "run" / "evil.ckpt", change)
    for verb in ("fit", "validate"):
        refused(train_main, capfd, verb, f"--ckpt_path={path}", *words)
    assert sys.modules.pop(package, None) is None


@pytest.mark.parametrize(
    "text", [json.dumps(foreign()), json.dumps([foreign()]), f"class_path: {THING}"]
)
def test_text_for_a_value_of_any_type_imports_nothing(text, trained, canary, tmp_path, capfd):
    """A parser would read it as each type of a parameter; it stays the text that it is."""

    class Loose:
        def __init__(self, anything: str | Any) -> None:
            pass

    arguments = {"anything": text}
    assert recipe_module.complete_arguments(arguments, Loose, "data") == arguments
    data = {"class_path": "datamodules.HubText", "init_args": {"dataset": text}}
    path = with_recipe(trained, tmp_path / "evil.ckpt", lambda recipe: recipe.update(data=data))
    refused(train_main, capfd, "fit", f"--ckpt_path={path}")
    refused(evaluate_main, capfd, "perplexity", "--ckpt", path, f"--data.cache_dir={tmp_path}")
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


@pytest.mark.parametrize("corpus", [THING, {"class_path": THING}])
def test_data_are_built_from_plain_values(corpus, trained, canary, tmp_path):
    content, path = torch.load(trained, weights_only=True), tmp_path / "evil.ckpt"
    content["datamodule_hyper_parameters"] = {**INSTANTIATOR, "corpus": corpus}
    torch.save(content, path)
    loaded = LocalText.load_from_checkpoint(path)
    assert loaded.fingerprint == content["LocalText"]["fingerprint"]
    for recipe in (content["recipe"]["data"], sentences(corpus=corpus)):
        content["recipe"]["data"] = recipe
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"corpus|recipe\.data"):
            Sentences.load_from_checkpoint(path)
    assert canary not in sys.modules


def test_pickled_data_are_not_loaded(trained, trace, tmp_path):
    path = tmp_path / "evil.ckpt"
    in_callback_state(path, Evil(trace), torch.load(trained, weights_only=True))
    with pytest.raises(ValueError):
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
    with pytest.raises(ValueError, match=str(tmp_path)):
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
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places_in(item, (*path, key))


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
        st.sampled_from(
            (
                ("model", None),
                ("data", None),
                ("data", sentences(corpus=CORPUS)),
                ("model", THINKING),
            )
        )
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
