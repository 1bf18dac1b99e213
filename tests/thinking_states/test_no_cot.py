"""No CoT against a loop over single rows."""

import pytest
import torch

from tests.thinking_states.questions import PREFIX, answer_score, build, questions, row_of


def test_rows_are_query_prefix_and_answer():
    batch = questions([(3, [2], 1), (1, [], 2)])
    rows = build("no_cot").layout.training(batch)
    (q, _, a), (p, _, b) = row_of(batch, 0), row_of(batch, 1)
    assert rows.tokens.tolist() == [[*q, *PREFIX, *a], [*p, *PREFIX, *b, 0]]
    no = -100
    assert rows.targets.tolist() == [[no] * 4 + [*a, no], [no, no, *b, no, no]]
    assert torch.equal(rows.answers, rows.targets >= 0)


def test_the_query_is_learned_where_that_is_asked_for():
    batch = questions([(3, [2], 1)])
    targets = build("no_cot", lm_on_query=True).layout.training(batch).targets[0].tolist()
    query, _, answer = row_of(batch, 0)
    assert targets == [*query[1:], -100, -100, *answer, -100]


@pytest.mark.parametrize("prefix", [PREFIX, ()])
def test_scores_and_loss_are_those_of_single_rows(prefix):
    model, batch = build("no_cot", answer_prefix=prefix).eval(), questions()
    with torch.no_grad():
        found = model.score(batch)
        loss = model.loss(batch).terms["nll"].sum
        total = 0.0
        for row in range(len(batch["query"])):
            query, _, answer = row_of(batch, row)
            expected = answer_score(model, [*query, *prefix], answer)
            torch.testing.assert_close(found.log_prob[row, : len(answer)].double(), expected)
            total -= expected.sum()
    torch.testing.assert_close(loss, total)
