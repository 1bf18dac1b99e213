"""Every file of configs/data goes behind a method's file and leaves that method's settings."""

import warnings
from pathlib import Path

import pytest
import yaml

from datamodules.recipe import absolute
from training import LatentCLI

CONFIGS = Path(__file__).parents[2] / "configs"
DATA = sorted((CONFIGS / "data").glob("*.yaml"))


def test_there_is_one_for_every_corpus():
    names = {"openwebtext", "pes2o", "wikitext103", "pile", "python_docs", "local_text"}
    assert names <= {path.stem for path in DATA}


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_it_is_a_data_section_that_leaves_windows_to_the_method(path):
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["data"]
    settings = content["data"]["init_args"]
    assert not {"block_size", "batch_size", "tokenizer", "train_windows"} & set(settings)


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
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
