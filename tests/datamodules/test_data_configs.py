"""Every file of configs/data goes after a method's file and leaves that method's settings."""

import warnings
from pathlib import Path

import pytest
import yaml

import datamodules
from datamodules.corpus import absolute
from training import LatentCLI


def kind_in(path: Path) -> type[datamodules.LanguageDataModule]:
    """The class of the data that a file configures, where it does not leave that to the method."""
    name = yaml.safe_load(path.read_text())["data"].get("class_path", "LanguageDataModule")
    return getattr(datamodules, name.removeprefix("datamodules."))


CONFIGS = Path(__file__).parents[2] / "configs"
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
FOR_SENTENCES = [path for path in DATA if "sentences" in path.stem]
FOR_REASONING = [path for path in DATA if kind_in(path).rows == "reasoning"]


def test_there_is_one_for_every_corpus():
    names = {"openwebtext", "pes2o", "wikitext103", "pile", "python_docs", "local_text"}
    assert names <= {path.stem for path in DATA}


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_it_is_a_data_section_that_leaves_windows_to_the_method(path):
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["data"]
    settings = content["data"]["init_args"]
    assert not {"block_size", "batch_size", "tokenizer", "train_windows"} & set(settings)


@pytest.mark.parametrize("path", FOR_SENTENCES, ids=lambda path: path.stem)
def test_one_for_sentences_leaves_their_splitting_to_the_method(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = CONFIGS / "thought_gestalt" / "spans25_85m.yaml"
    arguments = [f"--config={method}", f"--config={path}"]
    cli = LatentCLI([*arguments, "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
    data, expected = cli.datamodule, yaml.safe_load(path.read_text())["data"]["init_args"]["corpus"]
    assert type(data).__name__ == "Sentences"
    assert (data.splitter.name, data.block_size) == ("spans:25", 28)
    assert data.vocab_size == cli.model.config.vocab_size == 50260
    recipe = data.recipe()["init_args"]["corpus"]
    assert recipe["class_path"] == expected["class_path"]
    given = {key: recipe["init_args"][key] for key in expected["init_args"]}
    assert given == expected["init_args"]


@pytest.mark.parametrize("path", FOR_REASONING, ids=lambda path: path.stem)
def test_one_for_reasoning_takes_what_a_method_sets(path):
    expected = yaml.safe_load(path.read_text())["data"]["init_args"]
    method = {"tokenizer": "gpt2", "block_size": 512, "batch_size": 16, "train_windows": "random"}
    data = kind_in(path)(**expected, **method)
    recipe = data.recipe()["init_args"]
    for key in data.path_arguments & expected.keys():
        expected[key] = absolute(expected[key])
    assert {key: recipe[key] for key in expected | method} == expected | method


WINDOWS = [path for path in DATA if path not in FOR_SENTENCES + FOR_REASONING]


@pytest.mark.parametrize("path", WINDOWS, ids=lambda path: path.stem)
def test_it_combines_with_a_method(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = CONFIGS / "transformer" / "thoughtbubbles_150m.yaml"
    settings = yaml.safe_load(path.read_text())["data"]
    arguments = [f"--config={method}", f"--config={path}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        cli = LatentCLI([*arguments, "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
    data = cli.datamodule
    assert f"datamodules.{type(data).__name__}" == settings["class_path"]
    assert (data.block_size, data.batch_size, data.train_windows) == (512, 16, "random")
    assert data.vocab_size == cli.model.config.vocab_size == 50257
    recipe, expected = data.recipe()["init_args"], settings["init_args"]
    for key in data.path_arguments & expected.keys():
        expected[key] = absolute(expected[key])
    assert {key: recipe[key] for key in expected} == expected
