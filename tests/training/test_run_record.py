"""config.yaml beside the logs."""

import torch
import yaml

from tests.training.conftest import checkpoint_folder, load
from training.run_record import free_path, git_commit


def test_the_record_names_command_commit_and_versions(trained):
    text = (trained / "TransformerLM" / "version_0" / "config.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert f"# torch: {torch.__version__}" in header
    assert f"# commit: {git_commit()}" in header
    assert any(line.startswith("# command: ") for line in header)
    assert any(line.startswith("# latent-thinking: ") for line in header)


def test_the_record_reproduces_the_run(fit, trained, tmp_path):
    record = trained / "TransformerLM" / "version_0" / "config.yaml"
    root = f"--trainer.default_root_dir={tmp_path}"
    assert fit(tmp_path, f"--config={record}", root, bare=True) == 0
    ours = load(checkpoint_folder(tmp_path) / "last.ckpt")["state_dict"]
    theirs = load(checkpoint_folder(trained) / "last.ckpt")["state_dict"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_existing_record_is_kept_and_never_in_the_way(fit, own_run):
    folder = own_run / "TransformerLM" / "version_0"
    first = (folder / "config.yaml").read_text()
    for max_steps in (8, 10):
        steps = f"--trainer.max_steps={max_steps}"
        assert fit(own_run, "--ckpt_path=last", steps, bare=True) == 0
    assert (folder / "config.yaml").read_text() == first
    resumed = yaml.safe_load((folder / "config_8.yaml").read_text())
    assert resumed["trainer"]["max_steps"] == 10
    assert resumed["model"]["init_args"]["config"]["dim"] == 16


def test_names_are_never_used_twice(tmp_path):
    names = []
    for _ in range(3):
        path = free_path(tmp_path, 7)
        path.write_text("")
        names.append(path.name)
    assert names == ["config.yaml", "config_7.yaml", "config_7_2.yaml"]
