"""From the terms of a micro-batch to its share of an optimiser step."""

import pytest
import torch

from lightning_models import LossOutput, Term
from lightning_models.outputs import objective

CPU = torch.device("cpu")
KINDS = {"lexical": 1.0, "eos": 0.05, "eod": 1.0}


def value(totals, accumulate=1, world_size=1, **terms):
    output = LossOutput(terms)
    options = {"accumulate": accumulate, "world_size": world_size, "device": CPU}
    return objective(output, totals, **options).item()


def test_weighted_counts_are_added_up_before_they_divide():
    term = Term(torch.tensor(12.0), 5.0, KINDS)
    totals = {"lexical": 20.0, "eos": 40.0, "eod": 2.0, "targets": 62.0, "micro_batches": 1.0}
    assert value(totals, nll=term) == pytest.approx(12 / (20 + 2 + 2))


def test_without_counts_a_term_is_divided_by_its_own_normaliser():
    assert value({}, nll=Term(torch.tensor(12.0), 5.0, KINDS)) == pytest.approx(12 / 5)


@pytest.mark.parametrize("over", ["targets", {"targets": 1.0}], ids=str)
def test_shares_add_up_to_the_mean_over_the_step(over):
    """Of two ranks with three micro-batches each, whose mean is what is minimised."""
    sums = [3.0, 1.0, 7.0, 2.0, 2.0, 9.0]
    totals = {"targets": 48.0, "micro_batches": 3.0}
    shares = [value(totals, 3, 2, nll=Term(torch.tensor(s), 1.0, over)) for s in sums]
    assert sum(shares) / len(shares) == pytest.approx(sum(sums) / 48)


def test_a_weighted_count_of_nothing_has_no_share():
    term = Term(torch.tensor(12.0), 0.0, {"eos": 0.5, "eod": 0.0})
    assert value({"eos": 0.0, "eod": 7.0}, nll=term) == 0.0


@pytest.mark.parametrize("missing", KINDS)
def test_every_count_of_a_mapping_must_be_there(missing):
    totals = {name: 1.0 for name in KINDS if name != missing}
    with pytest.raises(ValueError, match=f"term nll: the batch has no normaliser '{missing}'"):
        value(totals, nll=Term(torch.ones(()), 1, KINDS))


def test_means_over_micro_batches_stand_beside_counted_terms():
    totals = {"targets": 10.0, "micro_batches": 2.0}
    terms = {"nll": Term(torch.tensor(5.0), 1, "targets"), "penalty": Term(torch.tensor(6.0), 3)}
    assert value(totals, 4, 1, **terms) == pytest.approx(4 * 5 / 10 + 4 / 2 * 6 / 3)
