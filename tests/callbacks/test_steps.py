"""What the analysis of steps finds: in validations, and against numbers found by hand."""

import logging
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from callbacks import StepAllocation
from callbacks.analysis.base import Findings, first_tokens, real_tokens, rows_of
from callbacks.analysis.convergence import (
    NOISE,
    collect_iterations,
    convergence,
    fit_iterations,
    rmse_by_iteration,
)
from callbacks.analysis.steps import (
    StepRecorder,
    buckets,
    collect_sweep,
    collect_tokens,
    frequent,
    step_report,
    steps,
    sweep,
    texts_by_id,
    tokens,
    utility,
)
from callbacks.analysis.token_text import EOS, PART, pieces
from callbacks.analysis.words import ELSEWHERE, FINAL, INTERNAL, word_places, words
from datamodules.tokenizers import BytesTokenizer
from lightning_models import (
    OptimizerConfig,
    PonderConfig,
    PonderLM,
    PonderLM2,
    PonderLM2Config,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.layers import record, recording
from tests.callbacks.written import names, scalars, table

K = 3
TABLES = {f"{name}.csv" for name in ("scalars", "steps", "tokens", "words", "utility")}
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
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns the folder and what was logged."""

    def run(model=None, trainer=None, data=None, **options):
        analysis = StepAllocation(**{"num_batches": 1, "alphas": (), **options})
        trainer = make_trainer(analysis, **(trainer or {}))
        trainer.validate(model or build(), data or make_data(), verbose=False)
        return tmp_path / "step_allocation", trainer.callback_metrics

    return run


# ---- in validations


def test_a_validation_alone_sweeps_and_iterates(analyse):
    options = {"num_batches": 2, "trainer": {"limit_val_batches": 2}}
    folder, _ = analyse(alphas=(-1, 1), **options)
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


# ---- models that have not everything


def test_what_a_model_has_not_is_left_out(analyse, caplog):
    with caplog.at_level(logging.INFO):
        folder, _ = analyse(
            build(Fixed, FixedConfig), num_batches=2, alphas=(1,), trainer={"limit_val_batches": 2}
        )
    assert names(folder) == TABLES
    (line,) = [line for line in caplog.messages if "step allocation" in line]
    assert "Fixed has no setting 'alpha'" in line
    assert scalars(folder)["steps/share_3"] == 1


# ---- real models


def test_ponderlm3_from_end_to_end(analyse):
    config = {"num_layers": 2, "thinking_steps": 2, "tau": 0.3, "router_init": "uniform"}
    model = build(PonderLM, PonderConfig, **config)
    options = {"convergence_tokens": 16, "convergence_rows": 2}
    folder, logged = analyse(model, alphas=(-8, 8), **options)
    assert names(folder) == TABLES | {"sweep.csv", "convergence.csv"}
    found = scalars(folder)
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
    assert names(folder) == TABLES | {"convergence.csv"}
    assert scalars(folder)["steps/mean"] == 2
    assert scalars(folder)["steps/convergence/rate"] < 1


# ---- by hand

AN_OX = list(b"an ox")

# Two rows of K = 2: a text whose last token has no target, and one token that is padded.
BATCH = {
    "tokens": torch.tensor([AN_OX, [97, 0, 0, 0, 0]]),
    "targets": torch.tensor([[110, 32, 111, 120, -100], [98, -100, -100, -100, -100]]),
    "mask": torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool),
}
EXECUTED = torch.tensor([[0, 1, 2, 2, 2], [1, 0, 0, 0, 0]])
NONE = [0.0, 0, 0]
LOSSES = torch.tensor(
    [[[1.0, 1, 1], [2, 1, 1], [4, 3, 1], [6, 5, 2], NONE], [[3, 2, 2], NONE, NONE, NONE, NONE]]
)
TAIL = torch.tensor([1.0, 0.5, 0.25]).log().expand(2, 5, 3)


def seen(executed=EXECUTED, losses=LOSSES, tail=TAIL):
    found = StepRecorder()
    with recording(**found.consumers()):
        record("thinking_steps", executed=executed, most=2)
        record("depth_losses", losses=losses)
        tail = tail[: executed.shape[0], : executed.shape[1]]
        record("router", log_steps=tail, log_tail=tail)
    return found


def found(tokenizer=BytesTokenizer(), batch=BATCH):
    findings = Findings()
    collect_tokens(findings, batch, seen(), tokenizer)
    return findings


def lines_of(frame):
    return frame.to_dict("records")


def by(frame, key):
    return {record[key]: record for record in lines_of(frame)}


NAN = pytest.approx(math.nan, nan_ok=True)


def test_executed_steps_and_difficulty():
    none, one, two = lines_of(steps(found()["tokens"]))
    assert none == {"steps": 0, "tokens": 1, "share": 0.2, "step0_loss": 1, "loss": 1}
    assert one == {"steps": 1, "tokens": 2, "share": 0.4, "step0_loss": 2.5, "loss": 1.5}
    assert two == {"steps": 2, "tokens": 2, "share": 0.4, "step0_loss": 5, "loss": 1.5}
    values = step_report(found(), {}).finite
    assert (values["steps/mean"], values["steps/below_most"]) == (6 / 5, 3 / 5)
    chosen = BATCH["targets"] >= 0
    expected = TAIL.exp()[..., 1:].sum(-1)[chosen]
    assert values["steps/expected"] == pytest.approx(expected.mean().item())


def test_single_tokens():
    assert frequent(found(), 2) == [97, 32]
    a, space, none = lines_of(tokens(found()["tokens"], {97: "a", 32: " ", 7: "x"}))
    assert a == {"id": 97, "text": "a", "count": 2, "mean_steps": 0.5, "pruned": 1}
    assert space == {"id": 32, "text": " ", "count": 1, "mean_steps": 2, "pruned": 0}
    assert none == {"id": 7, "text": "x", "count": 0, "mean_steps": NAN, "pruned": NAN}


def test_buckets_are_thirds():
    """Borders of 1, 2, 3, 4, 6 are 2 1/3 and 3 2/3."""
    chosen = buckets(np.array([1.0, 2, 4, 6, 3]))
    assert list(chosen) == ["easy", "easy", "hard", "hard", "medium"]
    assert set(buckets(np.full(4, 2.0))) == {"easy"}
    assert len(buckets(np.zeros(0))) == 0


def test_marginal_utility():
    lines = by(utility(found()["tokens"]), "bucket")
    easy, medium, hard = (lines[name] for name in ("easy", "medium", "hard"))
    assert (easy["step_1"], easy["step_2"]) == (0.5, 0)
    assert (medium["step_1"], medium["step_2"]) == (1, 0)  # its step 2 is not executed
    assert (hard["step_1"], hard["step_2"]) == (1, 2.5)
    assert (hard["tokens"], hard["from"], hard["to"]) == (2, 4, 6)
    assert (hard["step0_loss"], hard["loss"], hard["mean_steps"]) == (5, 1.5, 2)


def test_an_empty_bucket_has_no_utility():
    same = torch.full((2, 5, 3), 2.0)
    findings = Findings()
    collect_tokens(findings, BATCH, seen(losses=same), None)
    hard = by(utility(findings["tokens"]), "bucket")["hard"]
    assert (hard["tokens"], hard["step_1"], hard["from"]) == (0, NAN, NAN)


def test_steps_within_words():
    """Of "an ox" the a and the o go on and n ends a word; x may go on after the row."""
    lines = lines_of(words(found()["tokens"], 2))
    assert [line["internal"] for line in lines] == [1, 0, 1]
    assert [line["final"] for line in lines] == [0, 1, 0]
    assert [line["internal_share"] for line in lines] == [0.5, 0, 0.5]
    assert [line["final_share"] for line in lines] == [0, 1, 0]
    assert len(words(found(tokenizer=None)["tokens"], 2)) == 0


def test_a_sweep_is_compared_with_alpha_zero():
    findings = found()
    base = -LOSSES[..., 2]
    collect_sweep(findings, 0.0, BATCH, seen(), base)
    fewer = StepRecorder()
    fewer.consumers()["thinking_steps"](executed=EXECUTED.clamp(max=1), most=2)
    worse = base - torch.tensor([0.25, 0.25, 2, 3, 9])
    collect_sweep(findings, -4.0, BATCH, fewer, worse)
    lines = {(line["alpha"], line["bucket"]): line for line in lines_of(sweep(findings))}
    easy, hard = lines[-4, "easy"], lines[-4, "hard"]
    assert (easy["mean_steps"], easy["loss"], easy["loss_change"]) == (0.5, 1.25, 0.25)
    assert (hard["mean_steps"], hard["loss"], hard["loss_change"]) == (1, 4, 2.5)
    assert lines[-4, "medium"]["loss_change"] == 0.25  # the padded row
    assert lines[0, "hard"]["mean_steps"] == 2
    assert {line["loss_change"] for (alpha, _), line in lines.items() if not alpha} == {0}
    assert (lines[-4, "all"]["tokens"], lines[-4, "all"]["loss_change"]) == (5, pytest.approx(1.15))


# ---- words


def test_words_of_several_tokens():
    texts = ["The", " un", "think", "able", ",", " sun", "'", "s", " 1", "st", " end"]
    inside = {1: INTERNAL, 2: INTERNAL, 3: FINAL}
    places = word_places(texts).tolist()
    assert places == [inside.get(i, ELSEWHERE) for i in range(len(texts))]


def test_what_is_no_letter_ends_words():
    places = word_places(["ab", "c. ", "de", "f", EOS, "g", "h\n", "i", "j"])
    expected = [INTERNAL, FINAL, INTERNAL, FINAL, ELSEWHERE, INTERNAL, FINAL, INTERNAL, ELSEWHERE]
    assert places.tolist() == expected
    assert word_places([]).tolist() == []
    assert word_places(["a", "", "b", " "]).tolist() == [ELSEWHERE] * 4


def test_bytes_of_a_character_are_letters_as_it_is():
    ids = BytesTokenizer().encode("\u00e9t\u00e9\u2014\u00fc.")
    texts = pieces(BytesTokenizer(), ids)
    assert texts[:2] == [PART, "\u00e9"]
    # two bytes, one, two; three of the dash; two of the last word
    expected = [INTERNAL] * 4 + [FINAL] + [ELSEWHERE] * 3 + [INTERNAL, FINAL, ELSEWHERE]
    assert word_places(texts).tolist() == expected


def test_special_tokens_are_no_part_of_words():
    class Marked(BytesTokenizer):
        special_ids = (256, 257)

    tokens = torch.tensor([[257, *b"ab c"]])
    batch = {"tokens": tokens, "targets": torch.zeros_like(tokens)}
    findings = Findings()
    collect_tokens(findings, batch, seen(EXECUTED[:1], LOSSES[:1]), Marked())
    assert findings["tokens"]["place"].tolist() == [
        ELSEWHERE,
        INTERNAL,
        FINAL,
        ELSEWHERE,
        ELSEWHERE,
    ]


def test_texts_of_tokens_are_those_of_whole_characters():
    tokens = torch.tensor([BytesTokenizer().encode("\u00e9ab"), list(b"abab")])
    batch = {"tokens": tokens, "targets": tokens}
    findings = Findings()
    collect_tokens(findings, batch, seen(EXECUTED[:, :4], LOSSES[:, :4]), BytesTokenizer())
    assert texts_by_id(findings) == {0xC3: PART, 0xA9: PART, 97: "a", 98: "b"}


# ---- the report


def report(findings):
    return step_report(findings, {97: "a"})


def test_rows_without_a_target_are_reported():
    findings = found(batch={**BATCH, "targets": torch.full_like(BATCH["targets"], -100)})
    reported = report(findings)
    assert not reported.finite
    assert set(reported.files()) >= {"steps.csv", "tokens.csv"}
    assert reported.drawn()


def test_scalars():
    findings = found()
    collect_sweep(findings, 0.0, BATCH, seen(), -LOSSES[..., 2])
    values = report(findings).finite
    assert values["steps/mean"] == 1.2
    assert values["steps/share_2"] == 0.4
    assert values["steps/step0_loss_1"] == 2.5
    assert values["steps/utility/hard/step_2"] == 2.5
    assert values["steps/words/internal/mean"] == 1
    assert values["steps/words/final/below_most"] == 1
    assert values["steps/sweep/alpha_0/easy/mean_steps"] == 0.5
    assert not [tag for tag in values if "all" in tag or "convergence" in tag]


def test_a_decoder_without_steps_has_no_utility():
    only = StepRecorder()
    with recording(**only.consumers()):
        record("thinking_steps", executed=torch.zeros_like(EXECUTED), most=0)
        record("depth_losses", losses=LOSSES[..., :1])
    findings = Findings()
    collect_tokens(findings, BATCH, only, None)
    assert set(report(findings).files()) == {"scalars.csv", "steps.csv", "tokens.csv"}
    assert report(findings).finite["steps/below_most"] == 0


# ---- Jacobi iterations


@dataclass(frozen=True)
class Config:
    inference: str = "jacobi"
    eval_iterations: int | None = 3
    tau: float = 1e-4


class Iterates(nn.Module):
    """Its iteration n is off by ``error(n)`` everywhere, and by far more on padding."""

    def __init__(self, error, config=Config(), dtype=torch.float64):
        super().__init__()
        self.error, self.config, self.dtype, self.taus = error, config, dtype, []

    def recorded(self, batch, **consumers):
        mask = batch["mask"][:, :, None, None]
        shape = (*batch["tokens"].shape, 3, 4)
        fixed = torch.full(shape, 2.0, dtype=self.dtype)
        self.taus.append(getattr(self.config, "tau", None))
        with recording(**consumers):
            if self.config.inference == "sequential":
                record("states", states=fixed, iteration=None)
                return
            for n in range(self.config.eval_iterations + 1):
                states = fixed + torch.where(mask, self.error(n), 100.0).to(self.dtype)
                record("states", states=states, iteration=n)


def iterated(error, iterations, **options):
    """RMSE by iteration, and the noise."""
    lines = collect_iterations(Iterates(error, **options), BATCH, iterations)
    return rmse_by_iteration(lines)


def test_iterations_are_fitted_by_an_exponential():
    model = Iterates(lambda n: 0.5 * 0.25**n)
    lines = collect_iterations(model, BATCH, 6)
    rmse, noise = rmse_by_iteration(lines)
    assert rmse == pytest.approx([0.5 * 0.25**n for n in range(7)])
    fit = fit_iterations(rmse, noise)
    assert fit[:3] == pytest.approx((0.5, 0.25, 1))
    assert fit.points == 7
    assert model.taus == [0, 0]  # nothing is left out
    assert model.config == Config()
    assert set(lines["number"]) == {6 * 3 * 4}  # of six real tokens


def test_the_fit_by_hand():
    """Logarithms 0, -3, -3: the best line falls by 1.5, and leaves 1.5 of 6 unexplained."""
    fit = fit_iterations(*iterated(lambda n: math.exp(-3 * min(n, 1)), 2))
    assert math.log(fit.rate) == pytest.approx(-1.5)
    assert math.log(fit.start) == pytest.approx(-0.5)
    assert fit.r2 == pytest.approx(1 - 1.5 / 6)


def test_rounding_is_not_fitted():
    rmse, noise = iterated(lambda n: 0.01**n / 2, 8, dtype=torch.float32)
    assert noise == pytest.approx(NOISE * 2.0**-23 * 2)
    fit = fit_iterations(rmse, noise)
    assert fit.points == 3  # 0.5, 5e-3, 5e-5; 5e-7 is below 7.6e-6
    assert fit.rate == pytest.approx(0.01, rel=1e-2)
    lines = lines_of(convergence(rmse, fit))
    assert [line["fitted"] for line in lines] == [1] * 3 + [0] * 6
    assert lines[2]["fit"] == pytest.approx(5e-5, rel=0.05)


def test_without_enough_points_there_is_no_fit():
    exact = iterated(lambda n: 0.0, 4)
    assert exact[0].tolist() == [0] * 5
    assert fit_iterations(*exact) is None
    assert fit_iterations(*iterated(lambda n: 0.1, 1)) is None
    level = fit_iterations(*iterated(lambda n: 0.1, 3))
    assert (level.rate, level.r2) == (pytest.approx(1), NAN)


def test_models_without_both_ways_of_inference_are_left_alone():
    @dataclass(frozen=True)
    class Plain:
        inference: str = "jacobi"

    assert not len(collect_iterations(Iterates(lambda n: 0.0, Plain()), BATCH, 2))

    class Silent(Iterates):
        def recorded(self, batch, **consumers):
            return None

    assert not len(collect_iterations(Silent(lambda n: 0.0), BATCH, 2))


# ---- parts of batches


def test_parts_of_batches():
    batch = {**BATCH, "num_bytes": torch.tensor([5, 1]), "sequence_id": torch.tensor([7, 8])}
    part = first_tokens(rows_of(batch, 0, 1), 2)
    assert part["tokens"].tolist() == [AN_OX[:2]]
    assert part["mask"].shape == part["targets"].shape == (1, 2)
    assert (part["num_bytes"].tolist(), part["sequence_id"].tolist()) == ([5], [7])
    assert real_tokens({"tokens": BATCH["tokens"]}).all()
