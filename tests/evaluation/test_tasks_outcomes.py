"""Costs and kinds of several log-likelihoods together."""

from evaluation.tasks.adapter import Facts, LogLikelihood, Spent
from evaluation.tasks.report import WEAKER


def facts(scored, likelihood):
    return Facts(
        scored=scored, read=scored + 1, flops=10.0, steps=None, likelihood=likelihood, causal=True
    )


def test_what_scores_nothing_has_no_kind():
    """An empty answer is certain whatever the model; it makes estimates of others no less."""
    told = [
        LogLikelihood(0.0, True, facts(0, "exact")),
        LogLikelihood(-3.0, False, facts(2, "estimate")),
    ]
    spent = Spent.of(told)
    assert spent.kinds == ("estimate",)
    assert (spent.scored, spent.requests) == (2, 2)


def test_several_kinds_are_the_one_that_says_least():
    kinds = ("exact", "estimate", "lower_bound")
    assert max(kinds, key=WEAKER.index) == "estimate"
    assert max((*kinds, "noncausal"), key=WEAKER.index) == "noncausal"
