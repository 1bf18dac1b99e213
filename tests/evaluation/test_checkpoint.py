"""A checkpoint is read without trust, and what is wrong with it is reported in one line."""

import pickle
import sys

import pytest
import torch

import lightning_models.recipe as recipe_module
from evaluation.load import build_model
from evaluation.runs import find_checkpoints
from lightning_models.checkpoint import CheckpointError, read_checkpoint


def build(path):
    return build_model(read_checkpoint(path))


@pytest.mark.parametrize("asked", ["runs/frist", "rnus/first", "runs/first/lst.ckpt", "first"])
def test_a_misspelt_path_is_answered_by_those_that_are_there(asked, tmp_path, monkeypatch):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "last.ckpt").touch()
    (tmp_path / "runs" / "first" / "lst.txt").touch()
    monkeypatch.chdir(tmp_path)
    meant = "runs/first/last.ckpt" if asked.endswith("ckpt") else "runs/first"
    with pytest.raises(CheckpointError, match=f"at {asked}; did you mean {meant}"):
        read_checkpoint(asked)
    with pytest.raises(ValueError, match=f"; did you mean {meant}"):
        find_checkpoints([asked])
    with pytest.raises(CheckpointError, match=r"at no/such/thing$"):
        read_checkpoint("no/such/thing")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_file_is_named(checkpoint_path, tmp_path, share):
    whole = checkpoint_path.read_bytes()
    path = tmp_path / "cut.ckpt"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.ckpt .* is truncated or not a checkpoint"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [b"hello", b"\x80\x02", b"\x00" * 300, b"PK\x03\x04garbage"])
def test_other_files_are_named(tmp_path, content):
    path = tmp_path / "other.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is truncated or not a checkpoint"):
        read_checkpoint(path)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def write_pickle(value, path):
    path.write_bytes(pickle.dumps(value, protocol=2))


@pytest.mark.parametrize("write", [torch.save, write_pickle])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, write):
    trace = tmp_path / "trace"
    path = tmp_path / "evil.ckpt"
    write({"state_dict": {}, "recipe": Evil(str(trace))}, path)
    with pytest.raises(CheckpointError, match=r"is refused: .*open.*could run any code") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def test_code_in_a_newer_pickle_is_not_run_either(tmp_path):
    trace = tmp_path / "trace"
    path = tmp_path / "evil.ckpt"
    path.write_bytes(pickle.dumps(Evil(str(trace))))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_checkpoint(path)
    assert not trace.exists()


def test_bare_tensors_are_named(tmp_path):
    path = tmp_path / "tensor.ckpt"
    torch.save(torch.ones(3), path)
    with pytest.raises(CheckpointError, match="holds a Tensor, not a checkpoint"):
        read_checkpoint(path)


def config(content):
    return content["recipe"]["model"]["init_args"]["config"]


def lose_a_block(content):
    state = content["state_dict"]
    state["network.extra"] = torch.ones(1)
    for key in [key for key in state if ".blocks.1." in key]:
        del state[key]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda content: config(content).update(old_field=3, older=1),
            r"no option .*config\.old_field, .*config\.older;",
        ),
        (
            lambda content: content["recipe"]["model"]["init_args"].update(extra=True),
            r"TransformerLM has no option .*init_args\.extra;",
        ),
        (
            lambda content: config(content).pop("block_size"),
            r"cannot rebuild TransformerLM: .*'block_size'",
        ),
        (
            lambda content: config(content).update(num_heads=3),
            r"num_heads \(3\) must divide dim \(32\)",
        ),
        (
            lose_a_block,
            r"Missing key\(s\) .*network\.blocks\.1\.",
        ),
        (
            lambda content: content["state_dict"].update(
                {"network.position.weight": torch.ones(7, 32)}
            ),
            r"size mismatch for network\.position\.weight: .*\[7, 32\].*\[32, 32\]",
        ),
    ],
    ids=["field", "argument", "field needed", "range", "weights", "shape"],
)
def test_what_does_not_fit_this_version_is_named(edited, edit, expected):
    with pytest.raises(CheckpointError, match=expected):
        build(edited(edit))


@pytest.mark.parametrize(
    ("class_path", "expected"),
    [
        ("os.system", "os.system is of no package named"),
        ("subprocess.nothing", "--packages subprocess"),
        ("torch.nn.Linear", "--packages torch.nn"),
        ("lightning_models.Scores", "lightning_models.Scores is not a LanguageModel"),
        ("lightning_models.os.system", "lightning_models.os.system is unknown"),
        ("lightning_models.LostLM", "lightning_models.LostLM is unknown"),
        ("lightning_models.lost.module.LostLM", "is unknown"),
        ("lightning_models", "lightning_models is unknown"),
        ("TransformerLM", "TransformerLM is of no package named"),
        ("", "is of no package named"),
    ],
)
def test_only_our_language_models_are_built(edited, class_path, expected):
    path = edited(lambda content: content["recipe"]["model"].update(class_path=class_path))
    with pytest.raises(CheckpointError, match=expected):
        build(path)


METHOD = """
from lightning_models import TransformerLM


class OwnLM(TransformerLM):
    pass
"""


def test_packages_are_imported_by_the_user_only(edited, fails, evaluates, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_module, "_trusted", set(recipe_module.OWN_PACKAGES))
    (tmp_path / "own_methods.py").write_text(METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = edited(lambda content: content["recipe"]["model"].update(class_path="own_methods.OwnLM"))
    line = fails("perplexity", "--ckpt", path)
    assert "--packages own_methods" in line
    assert "own_methods" not in sys.modules
    assert "exact" in evaluates("perplexity", "--ckpt", path, "--packages", "[own_methods]")
    monkeypatch.delitem(sys.modules, "own_methods")
    assert "exact" in evaluates("perplexity", "--ckpt", path, "--packages+", "own_methods")
    monkeypatch.delitem(sys.modules, "own_methods")
    line = fails("perplexity", "--ckpt", path, "--packages", "[nowhere_to_be_found]")
    assert "packages: cannot import 'nowhere_to_be_found'" in line


def test_a_path_into_a_file_that_moved_is_found_by_its_name(edited):
    moved = "lightning_models.transformer.former_place.TransformerLM"
    model = build(edited(lambda content: content["recipe"]["model"].update(class_path=moved)))
    assert type(model).__name__ == "TransformerLM"


def test_a_compiled_models_checkpoint_runs_uncompiled(edited):
    path = edited(lambda content: content["recipe"]["model"]["init_args"].update(compile=True))
    assert build(path).compile_network is False
