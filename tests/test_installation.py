"""Installed from a wheel, away from the clone: console scripts, configs and tasks are there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT


def execute(*words, **options):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the tracked files; setuptools writes next to what it builds."""
    base = tmp_path_factory.mktemp("wheel")
    for name in execute("git", "ls-files", cwd=ROOT).splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (base / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, base / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", base]
    execute(sys.executable, "-m", "pip", "wheel", *options, base / "source")
    (built,) = base.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_model_is_trained_and_evaluated_from_any_folder(wheel, text_file, tmp_path, monkeypatch):
    """In an environment with the wheel, and the libraries of this one, which take minutes again."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs = tmp_path / "environment" / "bin"
    execute(sys.executable, "-m", "venv", "--without-pip", programs.parent)
    (site,) = programs.parent.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", f"--python={programs / 'python'}"]
    execute(*pip, "install", "--no-deps", "--no-index", wheel)
    options = ["--data=datamodules.LocalText", f"--data.data_files={text_file}"]
    options += ["--data.tokenizer=bytes", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    fit = ["fit", "-c", "configs/transformer/tiny.yaml", *options]
    execute(programs / "latent-train", *fit, cwd=tmp_path)
    score = ["perplexity", "--ckpt", "runs", "--output", "result.json", "--limit_batches", "1"]
    execute(programs / "latent-evaluate", *score, cwd=tmp_path)
    assert (tmp_path / "result.json").is_file()
    where = execute(
        programs / "python", "-c", "import training as t; print(t.__file__)", cwd=tmp_path
    )
    assert Path(where).is_relative_to(programs.parent)


def test_every_config_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names
