"""The training objective: weights of EOS targets, statistics, and the warm-in of the dropouts."""

import csv
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_models.outputs import objective
from lightning_models.thought_gestalt import ThoughtGestaltConfig, ThoughtGestaltLM
from tests.quiet import quiet_trainer
from tests.thought_gestalt.cases import EOD as EOD_ID
from tests.thought_gestalt.cases import SIZES, VARIANTS, gestalt, streams
from training.loggers import MetricsFile

SHAPE = [[3, 1, 6, 2], [2, 5], [4, 4, 1, 1, 2, 3]]
LEXICAL, EOS, EOD = 34, 12, 2  # targets of each kind in SHAPE


def trainer(**values):
    """As much of a run as a model looks at."""
    values = {"current_epoch": 0, "global_step": 0, "estimated_stepping_batches": 10} | values
    return SimpleNamespace(**values)


def sums_by_kind(model, batch):
    """Nats of lexical, EOS and EOD targets, from the scores."""
    nats, targets = -model.score(batch).log_prob.double(), batch["targets"]
    eos, eod = targets == model.config.eos_id, targets == model.config.eod_id
    return nats[batch["lexical"]].sum(), nats[eos].sum(), nats[eod].sum()


@pytest.mark.parametrize(("epoch", "weight"), [(None, 1.0), (0, 1.0), (1, 0.05), (7, 0.05)])
def test_eos_targets_weigh_less_behind_the_first_epoch(epoch, weight):
    model, batch = gestalt(), streams(SHAPE)
    model._trainer = None if epoch is None else trainer(current_epoch=epoch)
    term = model.loss(batch).terms["nll"]
    lexical, eos, eod = sums_by_kind(model, batch)
    torch.testing.assert_close(term.sum, lexical + weight * eos + eod, atol=1e-4, rtol=1e-6)
    assert term.normaliser == pytest.approx(LEXICAL + weight * EOS + EOD)
    assert term.over == {"lexical": 1.0, "eos": weight, "eod": 1.0}


def test_longer_warm_ups_and_other_weights_can_be_chosen():
    model, batch = gestalt(eos_weight=0.5, eos_weight_epochs=3), streams(SHAPE)
    for epoch, weight in ((2, 1.0), (3, 0.5)):
        model._trainer = trainer(current_epoch=epoch)
        assert model.loss(batch).terms["nll"].over["eos"] == weight


def test_the_step_divides_by_the_weighted_counts_of_all_ranks():
    model, batch = gestalt(), streams(SHAPE)
    model._trainer = trainer(current_epoch=1)
    output = model.loss(batch)
    totals = {"targets": 999.0, "lexical": 100.0, "eos": 40.0, "eod": 3.0, "micro_batches": 1.0}
    value = objective(output, totals, accumulate=1, world_size=2, device=model.device)
    expected = 2 * output.terms["nll"].sum / (100 + 0.05 * 40 + 3)
    torch.testing.assert_close(value, expected, check_dtype=False)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_statistics_tell_the_kinds_of_targets_apart(checkpointed):
    model, batch = gestalt(checkpoint_sentences=checkpointed), streams(SHAPE)
    model._trainer = trainer(current_epoch=1)
    stats = model.loss(batch).stats
    names, numbers = ("lexical_loss", "eos_loss", "eod_loss"), (LEXICAL, EOS, EOD)
    for name, number, nats in zip(names, numbers, sums_by_kind(model, batch), strict=True):
        torch.testing.assert_close(stats[name].sum, nats, atol=1e-4, rtol=1e-6)
        assert stats[name].normaliser == number
        assert not stats[name].sum.requires_grad


def test_a_step_without_the_end_of_a_document_logs_no_loss_of_it(tmp_path):
    """Streams of two documents, and then the first sentence of one; every cell is a number."""
    model = ThoughtGestaltLM(ThoughtGestaltConfig(**SIZES))
    rows = [streams(SHAPE), streams([[3], [3]])]
    rows[1]["is_last"].zero_()
    rows[1]["targets"][rows[1]["targets"] == EOD_ID] = -100
    logger = MetricsFile(tmp_path, "log", "0", None)
    limits = {"max_steps": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
    trainer = quiet_trainer(tmp_path, logger=logger, **limits)
    trainer.fit(model, DataLoader(rows, batch_size=None))
    with (tmp_path / "log" / "0" / "metrics.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["train/eod_loss"]) > 0
    assert second["train/eod_loss"] == ""
    assert float(second["train/eos_loss"]) > 0
    assert "train/eod_loss" not in trainer.callback_metrics
    assert not any(cell == "nan" for row in (first, second) for cell in row.values())


def test_targets_that_are_taken_out_do_not_count():
    model, batch = gestalt(), streams(SHAPE)
    batch["targets"][0] = -100
    output = model.loss(batch)
    assert output.terms["nll"].normaliser == (batch["targets"] >= 0).sum()
    nats = -model.score(batch).log_prob.double().sum()
    torch.testing.assert_close(output.terms["nll"].sum, nats, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", [[[3], [5], [1]], "nothing"], ids=str)
def test_streams_of_one_sentence_leave_no_parameter_without_gradient(shape, changes, checkpointed):
    model = gestalt(checkpoint_sentences=checkpointed, **changes).train()
    batch = streams([[3]] if shape == "nothing" else shape)
    if shape == "nothing":
        batch["lengths"].zero_()
    term = model.loss(batch).terms["nll"]
    term.sum.backward()
    parameters = [p for p in model.network.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
    if shape == "nothing":
        assert term.sum == term.normaliser == 0
        assert not any(p.grad.any() for p in parameters)


def test_the_head_of_a_detached_memory_is_not_trained():
    frozen = {
        name for name, p in gestalt(memory="detached").named_parameters() if not p.requires_grad
    }
    assert frozen == {"network.sentence_head.layers.0.weight"}
    assert all(p.requires_grad for p in gestalt().parameters())
    unread = gestalt(num_layers=1, sentence_layer=1, context_seeding=False)
    assert not unread.config.trains_sentence_head
    assert gestalt(num_layers=1, sentence_layer=1).config.trains_sentence_head


# ---- warm-in


def shares(model, batch):
    """The share of the dropouts in each sentence step of a training batch."""
    seen, run = [], model.network.run

    def spy(steps, dropouts, *rest):
        seen.extend(dropouts)
        return run(steps, dropouts, *rest)

    model.network.run = spy
    model.loss(batch)
    del model.network.run
    return seen


def test_dropouts_are_warmed_in_by_sentence_steps():
    model, batch = gestalt(warm_in=(2, 9)).train(), streams(SHAPE)
    assert shares(model, batch) == [0, 0, 0.5, 0.5, 0.5, 0.5]
    assert model.sentence_steps == 6
    assert shares(model, batch) == [0.5, 0.5, 0.5, 1, 1, 1]
    assert shares(model, batch) == [1] * 6
    assert model.loss(batch).stats["sentence_steps"] == 24


def test_the_rank_with_the_longest_stream_counts_for_all():
    model = gestalt(warm_in=(2, 9)).train()
    assert shares(model, {**streams([[1, 1, 1]]), "sentence_steps": 8}) == [0, 0, 0.5]
    assert model.sentence_steps == 8
    assert shares(model, streams([[1, 1]])) == [0.5, 1]


def test_only_training_counts():
    model, batch = gestalt(warm_in=(2, 9)), streams(SHAPE)
    assert shares(model, batch) == []
    model.train()
    model.score(batch)
    with torch.no_grad():
        assert shares(model, batch) == []
    assert model.sentence_steps == 0


def test_the_count_is_in_the_checkpoint():
    model, checkpoint = gestalt(warm_in=(2, 9)).train(), {}
    model.loss(streams(SHAPE))
    model.on_save_checkpoint(checkpoint)
    assert checkpoint["recipe"]["model"]["class_path"] == "lightning_models.ThoughtGestaltLM"
    again = gestalt(warm_in=(2, 9)).train()
    again.on_load_checkpoint(checkpoint)
    assert shares(again, streams([[1, 1, 1, 1]])) == [0.5, 0.5, 0.5, 1]


def test_numbers_up_to_one_are_fractions_of_the_run():
    model, batch = gestalt(warm_in=(0.2, 0.7)).train(), streams([[1, 1]])
    assert shares(model, batch) == [1, 1], "without a run nothing is warmed in"
    for step, share in ((0, 0), (1, 0), (2, 0.5), (6, 0.5), (7, 1), (9, 1)):
        model._trainer = trainer(global_step=step)
        assert shares(model, batch) == [share] * 2


def test_a_run_without_end_has_no_fractions():
    model = gestalt(warm_in=(0.2, 0.7)).train()
    model._trainer = trainer(estimated_stepping_batches=float("inf"))
    with pytest.raises(ValueError, match=r"warm_in \(\[0.2, 0.7\]\) .* set trainer.max_steps"):
        model.loss(streams([[1]]))


def test_no_warm_in_is_the_full_rate_at_once():
    model = gestalt(warm_in=(0, 0)).train()
    model._trainer = trainer()
    assert shares(model, streams([[1, 1]])) == [1, 1]


@pytest.mark.parametrize("key", ["token_dropout", "sentence_dropout"])
def test_shares_reach_the_dropouts(key):
    """Before the warm-in the loss draws nothing; after it, it does."""
    rates = {"token_dropout": 0.0, "sentence_dropout": 0.0, "attention_dropout": 0.0}
    model, batch = gestalt(warm_in=(6, 6), **{**rates, key: 0.9}).train(), streams(SHAPE)
    still = gestalt().loss(batch).terms["nll"].sum
    assert torch.equal(model.loss(batch).terms["nll"].sum, still)
    assert model.loss(batch).terms["nll"].sum != still
