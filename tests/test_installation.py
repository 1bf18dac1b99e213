"""Installed from a wheel, away from the clone: console scripts, configs and tasks are there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the tracked files; setuptools writes next to what it builds."""
    base = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (base / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, base / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(base)]
    pip(sys.executable, "wheel", *options, str(base / "source"))
    (built,) = base.glob("*.whl")
    return built


@pytest.fixture
def environment(wheel, tmp_path):
    """An environment with the wheel, and the libraries of this one, which take minutes again."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    python = str(environment / "bin" / "python")
    pip(sys.executable, f"--python={python}", "install", "--no-deps", "--no-index", str(wheel))
    return environment


def pip(python, *arguments):
    subprocess.run([python, "-m", "pip", *arguments], check=True)


def run(environment, folder, script, *arguments):
    return subprocess.run(
        [str(environment / "bin" / script), *arguments], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_model_is_trained_and_evaluated_from_any_folder(environment, text_file, tmp_path):
    options = ["--data=datamodules.LocalText", f"--data.data_files={text_file}"]
    options += ["--data.tokenizer=bytes", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    config = "configs/transformer/tiny.yaml"
    done = run(environment, tmp_path, "latent-train", "fit", "-c", config, *options)
    assert done.returncode == 0, done.stderr
    output = ["--output", "result.json", "--limit_batches", "1"]
    done = run(environment, tmp_path, "latent-evaluate", "perplexity", "--ckpt", "runs", *output)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.json").is_file()
    where = "import training; print(training.__file__)"
    done = run(environment, tmp_path, "python", "-c", where)
    assert Path(done.stdout).is_relative_to(environment)


def test_every_config_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names
