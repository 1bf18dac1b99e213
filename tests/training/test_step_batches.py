"""The recipe of docs/scale.md finds the batches of an optimiser step again."""

import re
from pathlib import Path

import pytest

from tests.reliability.runs import logged
from tests.training.conftest import checkpoint_folder

ROOT = Path(__file__).parents[2]


def test_the_recipe_finds_the_batches_of_a_step(fit, tmp_path, capsys):
    """Their loss with the weights before the step is the one that training logged there."""
    options = ("--trainer.max_steps=6", "--trainer.accumulate_grad_batches=2")
    options += ("--trainer.log_every_n_steps=1", "--model.config.dropout=0.0")
    kept = ("--checkpoint.save_top_k=-1", "--checkpoint.every_n_train_steps=1")
    assert fit(tmp_path, *options, *kept) == 0
    (before,) = (
        path for path in checkpoint_folder(tmp_path).glob("*.ckpt") if "step=4" in path.name
    )
    text = (ROOT / "docs" / "scale.md").read_text()
    (recipe,) = re.findall(r"```python\n(step, .*?|from .*?step, .*?)```", text, re.DOTALL)
    recipe = recipe.replace("48210", "5").replace(
        "runs/first/TransformerLM/version_0/checkpoints/last.ckpt", str(before)
    )
    capsys.readouterr()
    exec(recipe, {})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(n) for n, _, _ in rows] == [8] * 4 + [9] * 4
    assert [int(row) for _, row, _ in rows] == list(range(32, 40))
    values = logged(next(tmp_path.rglob("version_0")))
    mean = sum(float(nats) for *_, nats in rows) / (8 * 32)
    assert mean == pytest.approx(values["train/loss", 4], rel=1e-5)
