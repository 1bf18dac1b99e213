"""The analysis of steps within real trainings and validations."""

import logging
import warnings
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import StepAllocation
from callbacks.analysis import files
from callbacks.step_allocation.report import Report
from lightning_models import (
    OptimizerConfig,
    PonderConfig,
    PonderLM,
    PonderLM2,
    PonderLM2Config,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.layers import record
from tests.callbacks.written import (
    check_second_validation,
    check_training_is_the_same,
    names,
    scalars,
    table,
)

K = 3
PICTURES = {f"{name}.png" for name in ("steps", "tokens", "words", "utility")}
TABLES = {f"{name}.csv" for name in ("scalars", "steps", "tokens", "words", "utility")}
OF_SWEEP, OF_ITERATIONS = {"sweep.csv", "sweep.png"}, {"convergence.csv", "convergence.png"}
FILES = PICTURES | TABLES | {"text.html"}
SIZES = {"vocab_size": 257, "block_size": 32, "dim": 16, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True, kw_only=True)
class FixedConfig(TransformerConfig):
    thinking_steps: int = K


@dataclass(frozen=True, kw_only=True)
class MadeUpConfig(FixedConfig):
    alpha: float = 0.0
    inference: str = "jacobi"
    eval_iterations: int | None = 3
    tau: float = 0.5


class Fixed(TransformerLM):
    """A decoder that pretends that all tokens take K steps."""

    def __init__(self, config: FixedConfig, optimizer: OptimizerConfig = OptimizerConfig()) -> None:
        super().__init__(config, optimizer)

    def executed(self, tokens):
        return torch.full_like(tokens, K)

    def score(self, batch):
        scores, executed = super().score(batch), self.executed(batch["tokens"])
        has_target = batch["targets"] >= 0
        left = (executed[..., None] - torch.arange(K + 1)).clamp(min=0)  # steps that still help
        losses = (-scores.log_prob[..., None] + 0.5 * left) * has_target[..., None]
        record("thinking_steps", executed=executed, most=K)
        record("depth_losses", losses=losses)
        return scores


class MadeUp(Fixed):
    """It pretends that steps are a token's id modulo 4, that each saves half a nat, and all else.

    A unit of alpha is a step, and a step that is left out costs 0.125 nats.
    """

    def __init__(
        self, config: MadeUpConfig, optimizer: OptimizerConfig = OptimizerConfig()
    ) -> None:
        super().__init__(config, optimizer)

    def executed(self, tokens):
        return (tokens % (K + 1) + int(self.config.alpha)).clamp(0, K)

    def score(self, batch):
        scores, tokens = super().score(batch), batch["tokens"]
        steps = torch.zeros(*tokens.shape, K + 1)
        record("router", log_steps=steps, log_tail=steps)
        fixed = torch.ones(*tokens.shape, K + 1, 8)
        if self.config.inference == "sequential":
            record("states", states=fixed, iteration=None)
        else:
            for n in range(self.config.eval_iterations + 1):
                record("states", states=fixed + 0.25 * 0.5**n + self.config.tau, iteration=n)
        missing = (tokens % (K + 1) - self.executed(tokens)) * (batch["targets"] >= 0)
        return scores._replace(log_prob=scores.log_prob - 0.125 * missing)


def build(kind=MadeUp, config=MadeUpConfig, **changes):
    torch.manual_seed(0)
    return kind(config(**{**SIZES, **changes}), OptimizerConfig(schedule="constant", warmup=0))


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(files, "as_png", lambda figure: b"")
    monkeypatch.setattr(Report, "pictures", lambda report: {})


@pytest.fixture
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns the folder and what was logged."""

    def run(model=None, trainer=None, data=None, **options):
        analysis = StepAllocation(**{"num_batches": 1, "alphas": (), **options})
        trainer = make_trainer(analysis, **(trainer or {}))
        model = model or build()
        trainer.validate(model, data or make_data(), verbose=False)
        return tmp_path / "step_allocation", trainer.callback_metrics

    return run


# ---- what is written


def test_everything_is_written_behind_every_nth_validation(make_data, make_trainer, tmp_path):
    trainer = make_trainer(
        StepAllocation(num_batches=1, every_n_validations=2),
        logger=TensorBoardLogger(tmp_path),
        max_steps=3,
        val_check_interval=1,
    )
    trainer.fit(build(), make_data())
    log = tmp_path / "lightning_logs" / "version_0"  # what is dear is left to the verb validate
    check_second_validation(log, "step_allocation", "steps/", FILES)


def test_a_validation_alone_sweeps_and_iterates(make_data, make_trainer, tmp_path):
    model = build()
    config = model.config
    trainer = make_trainer(StepAllocation(num_batches=2, alphas=(-1, 1)), limit_val_batches=2)
    trainer.validate(model, make_data(), verbose=False)
    folder = tmp_path / "step_allocation"
    assert names(folder) == FILES | OF_SWEEP | OF_ITERATIONS
    assert model.config is model.network.config is config
    lines = {(line["alpha"], line["bucket"]): line for line in table(folder, "sweep")}
    assert {alpha for alpha, _ in lines} == {"-1", "0", "1"}
    steps = scalars(folder)["steps/mean"]
    for alpha in ("-1", "1"):
        line = lines[alpha, "all"]
        change = 0.125 * (steps - float(line["mean_steps"]))
        assert float(line["loss_change"]) == pytest.approx(change, abs=1e-5)
        assert line["tokens"] == str(2 * 4 * 32)
    assert float(lines["0", "all"]["mean_steps"]) == pytest.approx(steps, rel=1e-5)
    found = [float(line["rmse"]) for line in table(folder, "convergence")]
    assert found == pytest.approx([0.25 * 0.5**n for n in range(9)], rel=1e-4)  # tau is 0
    assert scalars(folder)["steps/convergence/rate"] == pytest.approx(0.5, rel=1e-4)
    assert scalars(folder)["steps/convergence/r2"] == pytest.approx(1, abs=1e-5)


def test_sweeps_may_be_part_of_a_training(make_data, make_trainer, tmp_path, undrawn):
    analysis = StepAllocation(num_batches=1, alphas=(2,), sweep_every_n_validations=2)
    trainer = make_trainer(analysis, max_steps=3, val_check_interval=1)
    trainer.fit(build(), make_data())
    folder = tmp_path / "step_allocation"
    swept = [{"sweep.csv", "convergence.csv"} & names(folder, step) for step in (1, 2, 3)]
    assert swept == [set(), {"sweep.csv", "convergence.csv"}, set()]


def test_numbers_are_those_of_the_validation(analyse, make_data):
    """Sums over all of its batches: the loss after all steps is what is logged."""
    folder, logged = analyse(num_batches=3, trainer={"limit_val_batches": 3})
    lines, found = table(folder, "steps"), scalars(folder)
    loss = sum(float(line["share"]) * float(line["loss"] or 0) for line in lines)
    assert loss == pytest.approx(float(logged["val/loss"]), rel=1e-4)
    assert sum(int(line["tokens"]) for line in lines) == 3 * 4 * 32
    for line in lines:  # a step saves half a nat
        if int(line["tokens"]):
            saved = float(line["step0_loss"]) - float(line["loss"])
            assert saved == pytest.approx(0.5 * int(line["steps"]), abs=1e-4)
    data = make_data()
    data.setup("validate")
    loader = iter(data.val_dataloader())
    steps = torch.cat([next(loader)["tokens"].flatten() for _ in range(3)]) % (K + 1)
    assert found["steps/mean"] == pytest.approx(steps.double().mean().item(), rel=1e-5)
    assert found["steps/below_most"] == pytest.approx((steps < K).double().mean().item(), rel=1e-5)


def test_named_and_frequent_tokens_are_listed(analyse):
    """Of the named ones " " is one byte and " of" is none."""
    folder, _ = analyse(tokens=(" of", "q", " "), top_tokens=2)
    lines = table(folder, "tokens")
    assert [line["text"] for line in lines[:2]] == ["q", " "]
    assert lines[0]["count"] == "0"
    assert lines[0]["mean_steps"] == ""
    assert len(lines) in (3, 4)  # a space may be among the most frequent
    for line in lines[1:]:
        assert float(line["mean_steps"]) == int(line["id"]) % (K + 1)
        assert line["pruned"] == str(int(int(line["id"]) % (K + 1) < K))


def test_tables_need_no_tokenizer(make_data, make_trainer, tmp_path, undrawn):
    data = make_data()
    data.setup("validate")
    trainer = make_trainer(StepAllocation(num_batches=1, alphas=(), convergence_rows=0))
    trainer.validate(build(), data.val_dataloader(), verbose=False)
    assert names(tmp_path / "step_allocation") == TABLES - {"words.csv"}
    assert {line["text"] for line in table(tmp_path / "step_allocation", "tokens")} == {""}


# ---- models that have not everything


def test_what_a_model_has_not_is_left_out(analyse, caplog):
    with caplog.at_level(logging.INFO):
        folder, _ = analyse(build(Fixed, FixedConfig), num_batches=2, alphas=(1,))
    assert names(folder) == TABLES | {"text.html"}
    (told,) = [line for line in caplog.messages if "step allocation" in line]
    assert "Fixed has no setting 'alpha'" in told
    assert scalars(folder)["steps/share_3"] == 1
    assert "&#10;w " not in (folder / "val-step=0-text.html").read_text()


def test_a_model_without_steps_is_told_of_once(make_data, make_trainer, make_model, tmp_path):
    trainer = make_trainer(StepAllocation(), max_steps=2, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_model(), make_data())
    told = [str(warning.message) for warning in caught if "step alloc" in str(warning.message)]
    assert len(told) == 1
    assert "TransformerLM records no thinking steps" in told[0]
    assert not (tmp_path / "step_allocation").exists()


# ---- real models


def test_ponderlm3_from_end_to_end(make_data, make_trainer, tmp_path, undrawn):
    config = {"num_layers": 2, "thinking_steps": 2, "tau": 0.3, "router_init": "uniform"}
    model = build(PonderLM, PonderConfig, **config)
    analysis = StepAllocation(alphas=(-8, 8), convergence_tokens=16, convergence_rows=2)
    trainer = make_trainer(analysis)
    trainer.validate(model, make_data(), verbose=False)
    folder = tmp_path / "step_allocation"
    assert names(folder) == TABLES | {"sweep.csv", "convergence.csv", "text.html"}
    found, logged = scalars(folder), trainer.callback_metrics
    lines = table(folder, "steps")
    loss = sum(float(line["share"]) * float(line["loss"] or 0) for line in lines)
    assert loss == pytest.approx(float(logged["val/loss"]), rel=1e-4)
    swept = {line["alpha"]: line for line in table(folder, "sweep") if line["bucket"] == "all"}
    assert float(swept["0"]["mean_steps"]) == pytest.approx(found["steps/mean"], rel=1e-5)
    assert float(swept["0"]["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(swept["-8"]["mean_steps"]) < 0.1
    assert float(swept["8"]["mean_steps"]) > 1.9
    assert 0 < found["steps/convergence/rate"] < 1
    assert len(table(folder, "convergence")) == 9


def test_ponderlm2_takes_all_steps(analyse):
    model = build(PonderLM2, PonderLM2Config, thinking_steps=2)
    folder, _ = analyse(model, convergence_tokens=8, convergence_rows=1)
    assert names(folder) == TABLES | {"convergence.csv", "text.html"}
    assert scalars(folder)["steps/mean"] == 2
    assert scalars(folder)["steps/convergence/rate"] < 1


# ---- training is not touched


def test_training_is_the_same_with_and_without(make_data, make_trainer, undrawn):
    def train(added):
        analysis = StepAllocation(num_batches=1, alphas=(1,), sweep_every_n_validations=1)
        model = build(dropout=0.2)
        callbacks = [analysis] if added else []
        trainer = make_trainer(*callbacks, max_steps=2, val_check_interval=1)
        trainer.fit(model, make_data())
        return trainer, model

    check_training_is_the_same(train)


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_batches", 0),
        ("every_n_validations", -1),
        ("top_tokens", -1),
        ("sweep_every_n_validations", -1),
        ("convergence_rows", -1),
        ("convergence_tokens", 0),
        ("convergence_iterations", 0),
        ("html_rows", -1),
    ],
)
def test_values_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least"):
        StepAllocation(**{name: value})
