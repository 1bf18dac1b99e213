"""Help: the first options work as they are written, and nothing is left out of the groups."""

import pytest

from tests.programs import ROOT, run
from training import LatentCLI
from training.help import FIRST, VERBS, public_classes

VALUES = {
    "--config": ("configs/trainer/gpu.yaml", "trainer.precision", "bf16-mixed"),
    "--data": ("LocalText", "data.class_path", "datamodules.LocalText"),
    "--model": ("PonderLM", "model.class_path", "lightning_models.PonderLM"),
    "--name": ("one", "name", "one"),
    "--trainer.max_steps": ("7", "trainer.max_steps", 7),
    "--model.optimizer.lr": ("0.5", "model.init_args.optimizer.lr", 0.5),
    "--data.batch_size": ("3", "data.init_args.batch_size", 3),
    "--seed_everything": ("5", "seed_everything", 5),
    "--trainer.precision": ("bf16-true", "trainer.precision", "bf16-true"),
    "--trainer.devices": ("1", "trainer.devices", "1"),
}


def help_of(*words):
    done = run(ROOT / "train.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("option", VALUES)
def test_first_options_are_understood_as_they_are_written(option, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    value, key, meaning = VALUES[option]
    quick = ["--trainer.accelerator=cpu", "--data.data_files=x.txt"][: 1 + (option == "--data")]
    config = LatentCLI([option, value, *quick], run=False).config
    assert config[key] == meaning


def test_every_first_option_is_tested_or_resumes():
    assert {first.option for first in FIRST} == {*VALUES, "--ckpt_path"}


def test_help_of_a_verb_is_short_and_names_every_option():
    text = help_of("fit", "--config=configs/ponderlm/tiny.yaml", "--help")
    assert len(text.splitlines()) < 100
    for name in (*public_classes("lightning_models"), *public_classes("datamodules")):
        assert name in text
    words = set(text.replace(",", " ").split())
    parser = LatentCLI(["--trainer.accelerator=cpu"], run=False).parser
    options = {max(a.option_strings, key=len).strip("-+") for a in parser._actions}
    typed = {name for name in options if not name.endswith("help") and name != "print_shtab"}
    groups = {name.partition(".")[0] for name in typed if "." in name}
    names = {name.partition(".")[2] or name for name in typed - groups - {"model", "data"}}
    assert {name for name in names if not name.startswith("init_args")} <= words
    assert "config.tau" in words  # of the config's class


def test_the_full_list_and_the_verbs_stay_reachable():
    assert len(help_of("fit", "--help_all").splitlines()) > 500
    assert set(VERBS) <= set(help_of("--help").split())
