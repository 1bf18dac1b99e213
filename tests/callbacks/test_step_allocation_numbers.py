"""What the analysis of steps computes, against numbers found by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from callbacks.analysis.batch_parts import first_tokens, real_tokens, rows_of
from callbacks.analysis.token_text import EOS, PART, pieces
from callbacks.step_allocation import measures
from callbacks.step_allocation.convergence import NOISE, Convergence, measure
from callbacks.step_allocation.findings import Findings, Pass
from callbacks.step_allocation.report import Report
from callbacks.step_allocation.words import ELSEWHERE, FINAL, INTERNAL, word_places
from datamodules.tokenizers import BytesTokenizer
from lightning_models.layers import record, recording

NAN = pytest.approx(math.nan, nan_ok=True)
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


def seen(executed=EXECUTED, losses=LOSSES):
    found = Pass()
    with recording(**found.consumers()):
        record("thinking_steps", executed=executed, most=2)
        record("depth_losses", losses=losses)
        record("router", log_steps=TAIL, log_tail=TAIL)
    return found


def found(tokenizer=BytesTokenizer(), rows=1, batch=BATCH):
    findings = Findings()
    findings.add(batch, seen(), tokenizer, rows)
    return findings


def by(records, key):
    return {record[key]: record for record in records}


# ---- tables


def test_executed_steps_and_difficulty():
    none, one, two = measures.steps(found())
    assert none == {"steps": 0, "tokens": 1, "share": 0.2, "step0_loss": 1, "loss": 1}
    assert one == {"steps": 1, "tokens": 2, "share": 0.4, "step0_loss": 2.5, "loss": 1.5}
    assert two == {"steps": 2, "tokens": 2, "share": 0.4, "step0_loss": 5, "loss": 1.5}
    assert measures.summary(found()) == {"mean": 6 / 5, "below_most": 3 / 5}


def test_single_tokens():
    assert measures.frequent(found(), 2) == [97, 32]
    a, space, none = measures.tokens(found(), {97: "a", 32: " ", 7: "x"})
    assert a == {"id": 97, "text": "a", "count": 2, "mean_steps": 0.5, "pruned": 1}
    assert space == {"id": 32, "text": " ", "count": 1, "mean_steps": 2, "pruned": 0}
    assert none == {"id": 7, "text": "x", "count": 0, "mean_steps": NAN, "pruned": NAN}


def test_buckets_are_thirds():
    """Borders of 1, 2, 3, 4, 6 are 2 1/3 and 3 2/3."""
    chosen = measures.buckets(np.array([1.0, 2, 4, 6, 3]))
    assert chosen["easy"].tolist() == [True, True, False, False, False]
    assert chosen["medium"].tolist() == [False, False, False, False, True]
    assert chosen["hard"].tolist() == [False, False, True, True, False]
    assert measures.buckets(np.full(4, 2.0))["easy"].all()
    assert measures.buckets(np.zeros(0)) == {}


def test_marginal_utility():
    lines = by(measures.utility(found()), "bucket")
    easy, medium, hard = (lines[name] for name in measures.BUCKETS)
    assert (easy["step_1"], easy["step_2"]) == (0.5, 0)
    assert (medium["step_1"], medium["step_2"]) == (1, 0)  # its step 2 is not executed
    assert (hard["step_1"], hard["step_2"]) == (1, 2.5)
    assert (hard["tokens"], hard["from"], hard["to"]) == (2, 4, 6)
    assert (hard["step0_loss"], hard["loss"], hard["mean_steps"]) == (5, 1.5, 2)


def test_an_empty_bucket_has_no_utility():
    same = torch.full((2, 5, 3), 2.0)
    findings = Findings()
    findings.add(BATCH, seen(losses=same), None, 0)
    hard = by(measures.utility(findings), "bucket")["hard"]
    assert (hard["tokens"], hard["step_1"], hard["from"]) == (0, NAN, NAN)


def test_steps_within_words():
    """Of "an ox" the a and the o go on and n ends a word; x may go on after the row."""
    lines = measures.words(found())
    assert [line["internal"] for line in lines] == [1, 0, 1]
    assert [line["final"] for line in lines] == [0, 1, 0]
    assert [line["internal_share"] for line in lines] == [0.5, 0, 0.5]
    assert [line["final_share"] for line in lines] == [0, 1, 0]
    assert measures.words(found(tokenizer=None)) == []


def test_a_sweep_is_compared_with_alpha_zero():
    findings = found()
    base = -LOSSES[..., 2]
    findings.add_point(0.0, BATCH, seen(), base)
    fewer = Pass()
    fewer.take_steps(executed=EXECUTED.clamp(max=1), most=2)
    findings.add_point(-4.0, BATCH, fewer, base - torch.tensor([0.25, 0.25, 2, 3, 9]))
    lines = {(line["alpha"], line["bucket"]): line for line in measures.sweep(findings)}
    easy, hard = lines[-4, "easy"], lines[-4, "hard"]
    assert (easy["mean_steps"], easy["loss"], easy["loss_change"]) == (0.5, 1.25, 0.25)
    assert (hard["mean_steps"], hard["loss"], hard["loss_change"]) == (1, 4, 2.5)
    assert lines[-4, "medium"]["loss_change"] == 0.25  # the padded row
    assert lines[0, "hard"]["mean_steps"] == 2
    assert {lines[0, name]["loss_change"] for name in (*measures.BUCKETS, "all")} == {0}
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
    findings.add(batch, seen(EXECUTED[:1], LOSSES[:1]), Marked(), 0)
    assert findings.tokens["place"].tolist() == [ELSEWHERE, INTERNAL, FINAL, ELSEWHERE, ELSEWHERE]


def test_texts_of_tokens_are_those_of_whole_characters():
    tokens = torch.tensor([BytesTokenizer().encode("\u00e9ab"), list(b"abab")])
    batch = {"tokens": tokens, "targets": tokens}
    findings = Findings()
    findings.add(batch, seen(EXECUTED[:, :4], LOSSES[:, :4]), BytesTokenizer(), 0)
    assert findings.texts == {0xC3: PART, 0xA9: PART, 97: "a", 98: "b"}


# ---- what is found adds up


def report(findings, **changes):
    options = {"title": "Steps", "listed": {97: "a"}, "shown_rows": 1}
    return Report(findings=findings, **{**options, **changes})


def test_ranks_and_batches_add_up():
    together, merged = found(), found()
    together.add(BATCH, seen(EXECUTED.flip(1)), BytesTokenizer(), 1)
    other = Findings()
    other.add(BATCH, seen(EXECUTED.flip(1)), BytesTokenizer(), 1)
    for findings in (together, other):
        findings.add_point(0.0, BATCH, seen(), -LOSSES[..., 2])
    merged.merge(other)
    assert report(merged).files() == report(together).files()
    assert report(merged).scalars() == report(together).scalars()
    assert merged.batches == 2
    assert len(merged.rows) == 2  # one of each rank; the first is shown
    assert len(report(merged).rows) == 1


def test_scalars():
    findings = found()
    findings.add_point(0.0, BATCH, seen(), -LOSSES[..., 2])
    values = report(findings).scalars()
    assert values["steps/mean"] == 1.2
    assert values["steps/share_2"] == 0.4
    assert values["steps/step0_loss_1"] == 2.5
    assert values["steps/utility/hard/step_2"] == 2.5
    assert values["steps/words/internal/mean"] == 1
    assert values["steps/words/final/below_most"] == 1
    assert values["steps/sweep/alpha_0/easy/mean_steps"] == 0.5
    assert not [tag for tag in values if "all" in tag or "convergence" in tag]


def test_a_decoder_without_steps_has_no_utility():
    only = Pass()
    with recording(**only.consumers()):
        record("thinking_steps", executed=torch.zeros_like(EXECUTED), most=0)
        record("depth_losses", losses=LOSSES[..., :1])
    findings = Findings()
    findings.add(BATCH, only, None, 2)
    assert report(findings).utility == []
    assert set(report(findings).files()) == {"scalars.csv", "steps.csv", "tokens.csv"}
    assert report(findings).scalars()["steps/below_most"] == 0


def test_the_page_shows_each_token():
    text = report(found()).files()["text.html"]
    spans = [
        part for part in text.split("<div class='text'>")[1].split("</span>") if "title" in part
    ]
    assert len(spans) == 5
    assert [part[part.index('class="s') + 8] for part in spans] == ["0", "1", "2", "2", "2"]
    lines = ("token 3, id 111", "steps 2", "step-0 loss 6 nats", "loss after all steps 2 nats")
    assert "&#10;".join((*lines, "w 1, 0.5, 0.25")) in spans[3]
    assert "loss" not in spans[4]  # it has no target
    assert '<span class="s2">2</span>' in text  # the legend


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


def test_iterations_are_fitted_by_an_exponential():
    model = Iterates(lambda n: 0.5 * 0.25**n)
    found = measure(model, BATCH, 6)
    assert found.rmse() == pytest.approx([0.5 * 0.25**n for n in range(7)])
    fit = found.fit()
    assert (fit.start, fit.rate, fit.r2) == pytest.approx((0.5, 0.25, 1))
    assert fit.points == 7
    assert model.taus == [0, 0]  # nothing is left out
    assert model.config == Config()
    assert found.number == 6 * 3 * 4  # of six real tokens


def test_the_fit_by_hand():
    """Logarithms 0, -3, -3: the best line falls by 1.5, and leaves 1.5 of 6 unexplained."""
    found = measure(Iterates(lambda n: math.exp(-3 * min(n, 1))), BATCH, 2)
    fit = found.fit()
    assert math.log(fit.rate) == pytest.approx(-1.5)
    assert math.log(fit.start) == pytest.approx(-0.5)
    assert fit.r2 == pytest.approx(1 - 1.5 / 6)


def test_rounding_is_not_fitted():
    found = measure(Iterates(lambda n: 0.01**n / 2, dtype=torch.float32), BATCH, 8)
    assert found.noise() == pytest.approx(NOISE * 2.0**-23 * 2)
    fit = found.fit()
    assert fit.points == 3  # 0.5, 5e-3, 5e-5; 5e-7 is below 7.6e-6
    assert fit.rate == pytest.approx(0.01, rel=1e-2)
    findings = Findings()
    findings.convergence.merge(found)
    lines = measures.convergence(findings)
    assert [line["fitted"] for line in lines] == [1] * 3 + [0] * 6
    assert lines[2]["fit"] == pytest.approx(5e-5, rel=0.05)


def test_without_enough_points_there_is_no_fit():
    exact = measure(Iterates(lambda n: 0.0), BATCH, 4)
    assert exact.rmse() == [0] * 5
    assert exact.fit() is None
    assert measure(Iterates(lambda n: 0.1), BATCH, 1).fit() is None
    level = measure(Iterates(lambda n: 0.1), BATCH, 3).fit()
    assert (level.rate, level.r2) == (pytest.approx(1), NAN)


def test_sums_over_ranks():
    one, two = (
        measure(Iterates(lambda n: 1.0), BATCH, 2),
        measure(Iterates(lambda n: 3.0), BATCH, 2),
    )
    found = Convergence()
    assert not found
    for each in (one, two):
        found.merge(each)
    assert found.rmse() == pytest.approx([math.sqrt(5)] * 3)
    assert found.noise() == one.noise()


def test_models_without_both_ways_of_inference_are_left_alone():
    @dataclass(frozen=True)
    class Plain:
        inference: str = "jacobi"

    assert measure(Iterates(lambda n: 0.0, Plain()), BATCH, 2) is None

    class Silent(Iterates):
        def recorded(self, batch, **consumers):
            return None

    assert measure(Silent(lambda n: 0.0), BATCH, 2) is None


# ---- parts of batches


def test_parts_of_batches():
    batch = {**BATCH, "num_bytes": torch.tensor([5, 1]), "sequence_id": torch.tensor([7, 8])}
    part = first_tokens(rows_of(batch, 0, 1), 2)
    assert part["tokens"].tolist() == [AN_OX[:2]]
    assert part["mask"].shape == part["targets"].shape == (1, 2)
    assert (part["num_bytes"].tolist(), part["sequence_id"].tolist()) == ([5], [7])
    assert real_tokens({"tokens": BATCH["tokens"]}).all()
