"""Typed arguments against those in a checkpoint."""

import logging
from dataclasses import dataclass

import pytest
import torch
import yaml

import lightning_models.recipe as recipe_module
from datamodules import LanguageDataModule
from lightning_models import LanguageModel, OptimizerConfig, TransformerConfig, TransformerLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.recipe import complete
from lightning_models.recipe_options import lay_over, parse_over
from tests.training.conftest import checkpoint_folder, load
from training import main
from training.arguments import LINKED_KEYS, Conflict, as_table, find_conflicts
from training.help import TrainingParser


@dataclass(frozen=True, kw_only=True)
class OtherConfig(TransformerConfig):
    steps: int = 1


NAMED = f"--packages={__name__}"


class OtherLM(TransformerLM):
    """Another method, with an argument that the transformer does not know."""

    def __init__(self, config: OtherConfig, optimizer: OptimizerConfig = OptimizerConfig()) -> None:
        super().__init__(config, optimizer)


@pytest.fixture
def start(trained):
    return f"--ckpt_path={checkpoint_folder(trained)}/step=4.ckpt"


def resumed_config(root):
    return load(checkpoint_folder(root) / "last.ckpt")["hyper_parameters"]["config"]


def test_a_typed_value_is_of_no_other_version(start):
    """Only what a checkpoint holds may have been written by one."""
    recipe = read_checkpoint(start.partition("=")[2]).model_recipe
    typed = lay_over(recipe, [("init_args.config.dim", "wide")], TrainingParser())
    with pytest.raises(ValueError, match=r"config\.dim \('wide'\) must be int$"):
        complete(typed, "model")


def test_what_is_not_typed_comes_from_the_checkpoint(fit, start, tmp_path):
    assert fit(tmp_path, start, "--trainer.max_steps=5", bare=True) == 0
    config = resumed_config(tmp_path)
    assert (config["dim"], config["num_layers"], config["dropout"]) == (16, 1, 0.2)


def test_equal_typed_arguments_are_no_conflict(fit, start, tmp_path):
    assert fit(tmp_path, start, "--trainer.max_steps=5") == 0


def test_a_typed_difference_stops_with_a_table(fit, start, tmp_path, capsys):
    typed = ("--model.config.dim=24", "--model.optimizer.lr=0.5")
    assert fit(tmp_path, start, *typed, "--trainer.max_steps=5", bare=True) == 2
    error = capsys.readouterr().err
    rows = [line.split() for line in error.splitlines()]
    assert ["key", "typed", "checkpoint"] in rows
    assert ["model.config.dim", "24", "16"] in rows
    assert ["model.optimizer.lr", "0.5", "0.001"] in rows
    assert "--on_conflict" in error
    assert "Traceback" not in error
    assert not (tmp_path / "TransformerLM").exists()


def test_a_typed_default_is_typed(fit, start, tmp_path, capsys):
    """12 layers is what the config has without typing; typing it is a wish nevertheless."""
    assert fit(tmp_path, start, "--model.config.num_layers=12", bare=True) == 2
    assert ["model.config.num_layers", "12", "1"] in [
        line.split() for line in capsys.readouterr().err.splitlines()
    ]


def test_a_config_file_counts_as_typed(fit, start, tmp_path, capsys):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"model": {"init_args": {"config": {"dim": 24}}}}))
    assert fit(tmp_path, start, f"--config={path}", bare=True) == 2
    assert "model.config.dim" in capsys.readouterr().err


def test_the_checkpoint_may_be_named_in_a_config_file(fit, start, tmp_path, capsys):
    path = tmp_path / "resume.yaml"
    path.write_text(yaml.safe_dump({"ckpt_path": start.partition("=")[2]}))
    assert fit(tmp_path, f"-c={path}", "--model.config.dim=24", bare=True) == 2
    assert "model.config.dim" in capsys.readouterr().err


def test_on_conflict_checkpoint_follows_the_checkpoint(fit, start, tmp_path):
    typed = ("--model.config.dropout=0.1", "--data.block_size=16", "--on_conflict=checkpoint")
    assert fit(tmp_path, start, *typed, "--trainer.max_steps=5", bare=True) == 0
    config = resumed_config(tmp_path)
    assert (config["dropout"], config["block_size"]) == (0.2, 32)


def test_on_conflict_typed_follows_what_was_typed(fit, start, tmp_path):
    typed = ("--model.config.dropout=0.1", "--on_conflict=typed", "--trainer.max_steps=5")
    assert fit(tmp_path, start, *typed, bare=True) == 0
    assert resumed_config(tmp_path)["dropout"] == 0.1


def test_a_typed_learning_rate_has_effect_when_followed(fit, start, tmp_path, caplog):
    schedule = ("--model.optimizer.schedule=constant", "--model.optimizer.warmup=0")
    typed = (
        "--model.optimizer.lr=0.5",
        "--model.optimizer.betas=[0.5, 0.6]",
        "--on_conflict=typed",
    )
    with caplog.at_level(logging.INFO):
        assert fit(tmp_path, start, *schedule, *typed, "--trainer.max_steps=5", bare=True) == 0
    (state,) = load(checkpoint_folder(tmp_path) / "last.ckpt")["optimizer_states"]
    for group in state["param_groups"]:
        assert group["lr"] == group["initial_lr"] == 0.5
        assert tuple(group["betas"]) == (0.5, 0.6)
    assert state["state"][0]["step"] == 5  # moments and counts are restored, not restarted
    assert "lr: 0.5 replaces the checkpoint's 0.001" in caplog.text


def test_another_length_warns_of_the_learning_rate(fit, start, tmp_path, caplog, capsys):
    """``start`` is in the middle of a schedule of six steps."""
    with caplog.at_level(logging.INFO):
        assert fit(tmp_path, start, "--trainer.max_steps=60", bare=True) == 0
    told = "warning: the schedule now ends at step 60: the learning rate goes from"
    assert sum(message.startswith(told) for message in caplog.messages) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("checkpoint: ")


def test_the_learning_rate_of_the_checkpoint_is_kept_otherwise(fit, start, tmp_path):
    typed = ("--model.optimizer.lr=0.5", "--on_conflict=checkpoint", "--trainer.max_steps=5")
    assert fit(tmp_path, start, *typed, bare=True) == 0
    (state,) = load(checkpoint_folder(tmp_path) / "last.ckpt")["optimizer_states"]
    assert {group["initial_lr"] for group in state["param_groups"]} == {0.001}


def test_evaluation_at_another_block_size_is_a_conflict(start, capsys):
    evaluate = ["validate", start, "--trainer.accelerator=cpu"]
    assert main([*evaluate, "--data.block_size=16"]) == 2
    assert "data.block_size" in capsys.readouterr().err


def test_other_text_with_the_same_tokenizer_is_no_conflict(start, tmp_path, capsys):
    path = tmp_path / "other.txt"
    path.write_text("other words entirely\n\n" * 50)
    files = [f"--data.data_files={path}", f"--data.val_files={path}", "--data.test_fraction=0"]
    evaluate = ["validate", start, "--trainer.accelerator=cpu", f"--data.cache_dir={tmp_path}"]
    train = tmp_path / "train.txt"
    train.write_text("text")
    files[0] = f"--data.data_files={train}"
    assert main([*evaluate, *files]) == 0
    assert "val/loss" in capsys.readouterr().out


def test_weights_that_do_not_fit_end_in_one_line(fit, start, tmp_path, capsys):
    typed = ("--model.config.dim=24", "--on_conflict=typed", "--trainer.max_steps=5")
    assert fit(tmp_path, start, *typed, bare=True) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "weights do not fit" in last_line
    assert "size mismatch" in last_line


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"gone": 1}, "model.init_args.config.gone"), ({"dim": "wide"}, "must be int")],
)
def test_a_checkpoint_of_another_version_is_named(start, changes, says, tmp_path, capsys):
    path = tmp_path / "odd.ckpt"
    content = torch.load(start.partition("=")[2], weights_only=True)
    content["recipe"]["model"]["init_args"]["config"] |= changes
    torch.save(content, path)
    assert main(["validate", f"--ckpt_path={path}"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert f"{says}; was it written by another version?" in error


def test_the_table_escapes_control_characters():
    table = as_table([Conflict("model.\x1bkey", 1, "\x1b[31mX\nerror: all fine")])
    assert table.splitlines()[1].split() == [
        "'model.\\x1bkey'",
        "1",
        "'\\x1b[31mX\\nerror:",
        "all",
        "fine'",
    ]


@pytest.fixture
def start_of_other(start, tmp_path):
    """A checkpoint of ``OtherLM``."""
    path = tmp_path / "other.ckpt"
    content = torch.load(start.partition("=")[2], weights_only=True)
    arguments = content["recipe"]["model"]["init_args"]
    arguments = {"config": {**arguments["config"], "steps": 3}, "optimizer": arguments["optimizer"]}
    content["recipe"]["model"] = {"class_path": f"{__name__}.OtherLM", "init_args": arguments}
    torch.save(content, path)
    return f"--ckpt_path={path}"


THINKING = {
    "class_path": "lightning_models.ThinkingStatesLM",
    "init_args": {"config": {"architecture": {"num_hidden_layers": 2, "act": "silu"}}},
}
TEXT = {"class_path": "datamodules.LocalText", "init_args": {"data_files": ["t.txt"]}}
ONE_FILE = {**TEXT, "init_args": {"data_files": "t.txt"}}
OF_TEXT = {"class_path": "datamodules.Sentences", "init_args": {"corpus": TEXT}}


@pytest.mark.parametrize(
    ("role", "recipe", "words", "key", "expected"),
    [
        ("data", TEXT, ["--data.data_files+=u.txt"], "data_files", ["t.txt", "u.txt"]),
        ("data", ONE_FILE, ["--data.data_files+=u.txt"], "data_files", ["t.txt", "u.txt"]),
        ("data", TEXT, ["--data.data_files=u.txt"], "data_files", "u.txt"),
        ("data", TEXT, ["--data.data_files=u", "--data.data_files+=v"], "data_files", ["u", "v"]),
        ("data", TEXT, ["--data.block_size=8"], "data_files", ["t.txt"]),
        (
            "data",
            OF_TEXT,
            ["--data.corpus.data_files+=u.txt"],
            "corpus.init_args.data_files",
            ["t.txt", "u.txt"],
        ),
        (
            "model",
            THINKING,
            ["--model.config.architecture.num_hidden_layers=3"],
            "config.architecture",
            {"num_hidden_layers": 3, "act": "silu"},
        ),
        (
            "model",
            THINKING,
            ["--model.config.architecture={num_hidden_layers: 3}"],
            "config.architecture",
            {"num_hidden_layers": 3},
        ),
    ],
)
def test_what_is_added_is_added_to_the_saved_value(role, recipe, words, key, expected):
    parser = TrainingParser(exit_on_error=False)
    parser.add_subclass_arguments(LanguageModel, "model")
    parser.add_subclass_arguments(LanguageDataModule, "data")
    for linked in LINKED_KEYS:
        parser.link_arguments(f"data.{linked.split('.')[-1]}", linked, apply_on="instantiate")
    typed = parse_over(parser, {role: recipe}, words)[role]
    value = lay_over(recipe, typed.items(), parser)["init_args"]
    for name in key.split("."):
        value = value[name]
    assert value == expected


@pytest.mark.parametrize(
    ("name", "changes", "lost"),
    [
        ("lightning_models.PauseLM", {"positions": "learned"}, {"positions"}),
        (f"{__name__}.OtherLM", {"positions": "learned", "thinking_steps": 2}, {"thinking_steps"}),
    ],
)
def test_another_class_keeps_each_field_that_fits(name, changes, lost, start, monkeypatch):
    monkeypatch.setattr(recipe_module, "_trusted", {*recipe_module.OWN_PACKAGES, __name__})
    recipe = read_checkpoint(start.partition("=")[2]).model_recipe
    recipe["init_args"]["config"] |= changes
    result = lay_over(recipe, [("class_path", name)], TrainingParser())["init_args"]
    saved = recipe["init_args"]
    kept = {key: value for key, value in saved["config"].items() if key not in lost}
    assert result["config"] == kept
    assert list(result["config"]) == list(kept)
    assert list(result) == [
        key for key in saved if key in result
    ]  # in an order that no hash decides


def test_the_class_comes_from_the_checkpoint(start_of_other, capsys):
    assert main(["validate", start_of_other, NAMED, "--trainer.accelerator=cpu"]) == 0
    assert "val/loss" in capsys.readouterr().out


def test_its_own_arguments_can_be_typed_without_the_class(start_of_other, capsys):
    assert main(["validate", start_of_other, NAMED, "--model.config.steps=4"]) == 2
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["model.config.steps", "4", "3"] in rows


def test_another_typed_class_is_a_conflict(start_of_other, capsys):
    typed = "--model=lightning_models.TransformerLM"
    assert main(["validate", start_of_other, NAMED, typed]) == 2
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["model.class_path", "lightning_models.TransformerLM", f"{__name__}.OtherLM"] in rows


def sentences(**changes):
    """Recipes of a run on sentences, with other arguments of the data."""
    text = {"tokenizer": changes.pop("tokenizer", "bpe:300"), "data_files": "a.txt"}
    arguments = {
        "corpus": {"class_path": "datamodules.LocalText", "init_args": text},
        "splitter": "sat:sat-3l-sm",
        "max_sentence_tokens": 64,
        "seed": 0,
    }
    data = {"class_path": "datamodules.Sentences", "init_args": arguments | changes}
    return {"model": {"class_path": "lightning_models.TransformerLM"}, "data": data}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"tokenizer": "bytes"}, ["data.corpus.tokenizer", "bytes", "bpe:300"]),
        ({"splitter": "rules"}, ["data.splitter", "rules", "sat:sat-3l-sm"]),
        ({"max_sentence_tokens": 32}, ["data.max_sentence_tokens", "32", "64"]),
    ],
)
def test_what_makes_sentences_must_agree(changes, row):
    conflicts = find_conflicts(sentences(**changes), sentences())
    assert [line.split() for line in as_table(conflicts).splitlines()][1:] == [row]


def test_other_names_of_the_same_splitter_are_no_conflict(tmp_path, monkeypatch):
    assert find_conflicts(sentences(splitter="sat", seed=3), sentences()) == []
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    saved = sentences(splitter=f"sat:{tmp_path / 'model'}")
    assert find_conflicts(sentences(splitter="sat:model"), saved) == []
    with pytest.raises(ValueError, match="splitter='dots' is unknown"):
        find_conflicts(sentences(splitter="dots"), saved)


def test_what_other_data_do_not_take_is_not_carried_over(start, text_file, tmp_path, capsys):
    """block_size of the checkpoint's windows is no argument of sentences."""
    corpus = {"data_files": str(text_file), "cache_dir": str(tmp_path)}
    data = {"corpus": {"class_path": "datamodules.LocalText", "init_args": corpus}}
    path = tmp_path / "data.yaml"
    path.write_text(
        yaml.safe_dump({"data": {"class_path": "datamodules.Sentences", "init_args": data}})
    )
    typed = [start, f"--config={path}", "--trainer.accelerator=cpu"]
    assert main(["validate", *typed]) == 2
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["data.block_size", "(none)", "32"] in rows
    assert main(["validate", *typed, "--on_conflict=checkpoint"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: data")  # of sentences, which this model does not read
    assert "(none)" not in error
