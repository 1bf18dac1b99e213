"""``train.py list``: every config that is a run, with its parameters and tokens."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from lightning_models import TransformerConfig, TransformerLM
from tests.programs import ROOT
from training import main
from training.listing import look_up, run_configs

CONFIG = """
model:
  class_path: lightning_models.TransformerLM
  init_args:
    config: {num_layers: 2, dim: 32, num_heads: 4, positions: rope}
data:
  class_path: datamodules.LocalText
  init_args: {data_files: none.txt, tokenizer: bytes, block_size: 16, batch_size: 3}
trainer:
  max_steps: 10
  accumulate_grad_batches: 2
"""


def test_a_run_has_parameters_and_tokens(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(CONFIG)
    listed = look_up(path)
    assert listed["tokens"] == 10 * 2 * 3 * 16
    sizes = OmegaConf.create(CONFIG).model.init_args.config
    model = TransformerLM(TransformerConfig(vocab_size=257, block_size=16, **sizes))
    model.configure_model()
    assert listed["parameters"] == sum(p.numel() for p in model.network.parameters())
    assert listed["flops_per_token"] == model.flops_per_token(16, training=True)


def test_a_run_that_ends_by_epochs_knows_its_tokens_once_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CONFIG.replace("max_steps: 10", "max_epochs: 2").replace("none.txt", "a.txt")
    text = text.replace("tokenizer: bytes", "tokenizer: bytes, separator: '#'")
    Path("a.yaml").write_text(text)
    Path("a.txt").write_text("some words#" * 50)
    listed = look_up(Path("a.yaml"))
    assert (listed["tokens"], listed["epochs"]) == (None, 2)
    from datamodules import LocalText

    data = LocalText(data_files="a.txt", tokenizer="bytes", separator="#", block_size=16)
    data.prepare_data()
    assert look_up(Path("a.yaml"))["tokens"] == 2 * data.counts("train").tokens


def test_the_command_lists_configs_and_leaves_out_what_it_cannot_build(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(CONFIG)
    (tmp_path / "b.yaml").write_text(CONFIG.replace("TransformerLM", "TransfomerLM"))
    code = tmp_path / "code_ran"
    (tmp_path / "c.yaml").write_text(
        CONFIG.replace("datamodules.LocalText", "os.system").replace(
            "data_files", f"command: touch {code}, x"
        )
    )
    (tmp_path / "d.yaml").write_text(CONFIG.replace("  class_path: datamodules.LocalText\n", ""))
    (tmp_path / "e.yaml").write_text(CONFIG.replace("max_steps: 10", "max_steps: ${none}"))
    (tmp_path / "part.yaml").write_text("trainer:\n  max_steps: 1\n")
    assert main(["list", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [Path(run["config"]).name for run in document["runs"]] == ["a.yaml"]
    assert printed.err.count("left out") == 4
    assert not code.exists()
    assert "TransfomerLM" in printed.err
    assert main(["list", str(tmp_path)]) == 0
    assert "960" in capsys.readouterr().out
    assert main(["list", str(tmp_path / "none")]) == 2


def test_all_configs_of_methods_are_runs():
    rooms = {path.parent.name for path in run_configs(ROOT / "configs")}
    assert rooms.isdisjoint({"data", "trainer", "studies", "tasks"})
    folders = (ROOT / "configs").iterdir()
    methods = {f.name for f in folders if f.is_dir()} - {"data", "trainer", "studies", "tasks"}
    assert rooms == {name for name in methods if not name.startswith("_")}
