"""Files that would run code when they are loaded: refused in one line, and nothing has run."""

import os
import pickle

import pytest
import torch

from evaluation.cli import main as evaluate_main
from lightning_models import TransformerLM
from lightning_models.checkpoint import CheckpointError
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


@pytest.mark.parametrize("place", ["model", "data", "nested", "corpus"])
def test_a_class_path_imports_nothing(place, trained, trace, tmp_path, monkeypatch, capfd):
    """Plain strings are enough to make a parser import a module that lies around."""
    (tmp_path / "lies_around.py").write_text(f"open({str(trace)!r}, 'w')\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    content = torch.load(trained, weights_only=True)
    recipe = content["recipe"]
    if place == "nested":
        nested = {"class_path": "lies_around.Thing", "init_args": {}}
        recipe["model"]["init_args"]["optimizer"] = nested
    elif place == "corpus":
        corpus = {"class_path": "lies_around.Thing", "init_args": {}}
        recipe["data"] = {"class_path": "datamodules.Sentences", "init_args": {"corpus": corpus}}
    else:
        recipe[place]["class_path"] = "lies_around.Thing"
    path = tmp_path / "evil.ckpt"
    torch.save(content, path)
    for verb in ("fit", "validate"):
        line = refused(train_main, capfd, verb, f"--ckpt_path={path}")
        assert "its arguments name the class lies_around.Thing" in line
        assert "--model=lies_around.Thing" in line
    refused(evaluate_main, capfd, "perplexity", "--ckpt", path)


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
    import json

    folder, model = folder_to_import
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "modeling_evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    options = ("--hf", folder, "--tokenizer", "bytes", "--output", tmp_path / "imported.ckpt")
    assert str(folder) in refused(evaluate_main, capfd, "import", *options)
