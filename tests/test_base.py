"""How the base weighs terms, reports them, and runs methods that need gradients to score."""

from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from methods import BLOCK, METHODS, window_batch
from quiet import quiet_trainer

from lightning_models import LossOutput, Mean, Scores, Term, TransformerLM
from lightning_models.runtime import gradients_on, ordinary
from lightning_models.thinking_states.baselines.curricula import StagedLM
from training import FullySharded

COLUMNS = torch.arange(BLOCK)


class Penalised(TransformerLM):
    """Adds terms that depend on the model: a mean over the micro-batch, and one over nothing."""

    share = 1.0
    batches = 0
    gradients: list

    def loss(self, batch):
        weight = self.network.norm.weight
        rows = len(batch["tokens"])
        terms = {
            "nll": super().loss(batch).terms["nll"],
            "penalty": Term(self.share * rows * weight[0], rows),
            "rare": Term(weight[1] * 0.0, 0),
        }
        self.batches += 1
        places = batch["targets"][: self.batches % 3] % 7  # of one row, two, none
        share = Mean((places == 0).sum(), places.numel())
        return LossOutput(terms, {"width": weight.detach().norm(), "sevenths": share})

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.network.norm.weight.grad.clone())
        super().on_before_optimizer_step(optimizer)


def build(kind=Penalised, **changes):
    model = kind(METHODS[0].build(**changes).config)
    model.configure_model()
    model.gradients = []
    return model


OTHERS = {
    "of transformers": {"input_ids": torch.ones(4, 9).long(), "labels": torch.ones(4, 9).long()},
    "pairs": [torch.ones(4, 9).long(), torch.ones(4, 9).long()],
    "without targets": {"tokens": torch.ones(4, 9).long()},
}
REFUSED = {"of transformers": "input_ids, labels", "pairs": "list", "without targets": "tokens"}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_batches_of_other_keys_are_refused_with_the_cure(name, verb, tmp_path):
    run = getattr(quiet_trainer(tmp_path, max_steps=1), verb)
    match = rf"batch \({REFUSED[name]}\).*tokens = input_ids\[:, :-1\]"
    with pytest.raises(ValueError, match=match):
        run(build(TransformerLM), torch.utils.data.DataLoader([OTHERS[name]], batch_size=None))
    step = {"fit": "training_step", "validate": "validation_step"}[verb]
    with pytest.raises(ValueError, match=match):  # in a loop of the user's
        getattr(build(TransformerLM), step)(OTHERS[name], 0)


UNREADABLE = {
    "tokens from 1 to 320 must be at least 0 and below vocab_size": [1, 320],
    "tokens from -1 to 1 must be at least 0": [1, -1],
    r"rows of 17 tokens exceed the 16 learned positions \(block_size\)": [1] * 17,
}


@pytest.mark.parametrize("message", UNREADABLE)
def test_tokens_that_the_network_cannot_read_are_refused_before_they_reach_a_device(
    message, tmp_path
):
    model = build(TransformerLM, vocab_size=320, block_size=16, positions="learned")
    tokens = torch.tensor([UNREADABLE[message]])
    loader = torch.utils.data.DataLoader([{"tokens": tokens, "targets": tokens}], batch_size=None)
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(model, loader)
    with pytest.raises(ValueError, match=message):
        model.on_before_batch_transfer(next(iter(loader)), 0)


BY_CLASS = {type(method.build()): method for method in reversed(METHODS)}.values()


@pytest.mark.parametrize("method", BY_CLASS, ids=lambda method: method.name)
def test_every_method_names_the_keys_that_it_reads_and_they_are_enough(method, tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    model, loader = method.build(), partial(torch.utils.data.DataLoader, batch_size=None)
    named = f"{type(model).__name__} reads dicts with {', '.join(model.batch_keys)}"
    with pytest.raises(ValueError, match=named):
        trainer.fit(model, loader([OTHERS["of transformers"]]))
    batch = {**method.batch(), "epochs": 0.0}  # a curriculum follows them
    keys = (*model.batch_keys, *(["epochs"] if isinstance(model, StagedLM) else []))
    trainer.fit(model, loader([{key: batch[key] for key in keys}]))
    assert trainer.global_step == 1


def penalty_gradients(data, tmp_path, steps, **options):
    """Gradient of the penalty alone in each step: the difference that its share makes."""
    runs = []
    for share in (1.0, 0.0):
        torch.manual_seed(0)
        model = build()
        model.share = share
        with torch.no_grad():
            for parameter in model.network.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
        model.optimizer_config = type(model.optimizer_config)(lr=1e-12, weight_decay=0.0)
        quiet_trainer(tmp_path, max_steps=steps, limit_val_batches=0, **options).fit(model, data)
        runs.append(torch.stack(model.gradients)[:, 0])
    return runs[0] - runs[1]


def test_micro_batch_means_weigh_the_same_in_a_short_last_step(make_data, tmp_path):
    """Five micro-batches in steps of four and one: the penalty's gradient is one in both."""
    options = {"accumulate_grad_batches": 4, "limit_train_batches": 5}
    difference = penalty_gradients(make_data(), tmp_path, 2, **options)
    torch.testing.assert_close(difference, torch.ones(2), atol=1e-4, rtol=1e-4)


def test_token_terms_are_divided_by_the_count_of_the_whole_step():
    model, batch = build(), window_batch(rows=3)
    output = model.loss(batch)
    alone = model._objective(output, batch)
    nll = output.terms["nll"]
    torch.testing.assert_close(alone, nll.sum / nll.normaliser + model.network.norm.weight[0])
    counted = {**batch, "step_normalisers": {"targets": 1000.0, "micro_batches": 1.0}}
    shared = model._objective(output, counted)
    torch.testing.assert_close(shared, nll.sum / 1000 + model.network.norm.weight[0])


def test_a_sum_over_nothing_is_no_nan():
    model, batch = build(), window_batch()
    model._objective(model.loss(batch), batch).backward()
    assert all(p.grad.isfinite().all() for p in model.network.parameters())


def test_a_normaliser_that_the_data_do_not_count_is_named():
    model = build()
    output = LossOutput({"nll": Term(torch.ones(()), 1, "targts")})
    with pytest.raises(ValueError, match="no normaliser 'targts', only targets"):
        model._objective(output, {"step_normalisers": {"targets": 4.0}})


@pytest.mark.parametrize(("interval", "steps"), [(1, [0, 1, 2, 3]), (2, [1, 3])])
def test_the_rate_of_each_logged_step_is_one_curve(make_data, interval, steps, tmp_path):
    used, logged = [], []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            used.append(optimizer.param_groups[0]["lr"])

        def on_train_batch_end(self, trainer, *_):
            logged.append(float(trainer.callback_metrics.get("lr", -1)))

    options = {"max_steps": 4, "accumulate_grad_batches": 2, "log_every_n_steps": interval}
    options |= {"limit_val_batches": 0, "enable_checkpointing": False}
    quiet_trainer(tmp_path, Watch(), **options).fit(build(), make_data())
    assert len(set(used)) == 4
    assert [rate for rate in dict.fromkeys(logged) if rate >= 0] == pytest.approx(
        [used[step] for step in steps]
    )


def test_terms_and_statistics_are_logged_over_the_whole_step(make_data, tmp_path):
    model = build()
    options = {"accumulate_grad_batches": 2, "max_steps": 1, "limit_val_batches": 0}
    trainer = quiet_trainer(tmp_path, **options)
    losses, parts = [], []
    original = model.loss

    def spy(batch):
        output = original(batch)
        losses.append(output.terms["nll"])
        parts.append(output.stats["sevenths"])
        return output

    model.loss = spy
    trainer.fit(model, make_data())
    logged = trainer.callback_metrics
    expected = sum(t.sum for t in losses) / sum(t.normaliser for t in losses)
    assert len(losses) == 2
    torch.testing.assert_close(logged["train/loss"], expected.detach())
    assert logged["train/penalty"] == 1.0
    assert logged["train/width"] == pytest.approx(32**0.5)
    assert logged["train/bpb"] > 0
    assert "train/rare" not in logged, "a mean of nothing"
    quotients = [part.sum / part.normaliser for part in parts]
    assert quotients[0] != quotients[1]
    expected = sum(part.sum for part in parts) / sum(part.normaliser for part in parts)
    torch.testing.assert_close(logged["train/sevenths"], expected)


def scores(log_prob, sequence_term):
    log_prob = torch.tensor(log_prob)
    return Scores(log_prob, torch.tensor(sequence_term), (log_prob < 0).sum(dim=1), "exact")


def test_all_targets_are_reported_unless_some_are_lexical():
    mine = scores([[-1.0, -2.0, 0.0], [-4.0, 0.0, 0.0]], [-0.5, -0.25])
    assert mine.reported({}) == (-7.75, 3)
    lexical = torch.tensor([[True, False, False], [True, False, False]])
    nats, number = mine.reported({"lexical": lexical})
    assert (nats, number) == (-5.75, 2)
    assert nats.dtype == torch.float64
    assert mine.total() == -7.75


def test_rows_that_fill_up_a_batch_have_no_sequence():
    mine = scores([[-1.0, -2.0], [0.0, 0.0]], [-0.5, -9.0])
    for batch in ({}, {"lexical": torch.tensor([[True, True], [False, False]])}):
        assert mine.reported(batch) == (-3.5, 2)


def test_only_lexical_targets_count_in_the_loss_but_all_in_bits_per_byte(make_data, tmp_path):
    """Every third target of each window is called a boundary."""
    data, model = make_data(), build(TransformerLM).eval()
    trainer = quiet_trainer(tmp_path, limit_val_batches=2)

    def logged(**changes):
        loader = data.val_dataloader()
        rows = [{**batch, **{k: f(batch) for k, f in changes.items()}} for batch in loader]
        loader = torch.utils.data.DataLoader(rows, batch_size=None)
        return rows, trainer.validate(model, loader, verbose=False)[0]

    _, plain = logged()
    rows, marked = logged(lexical=lambda batch: (batch["targets"] >= 0) & (COLUMNS % 3 > 0))
    assert marked["val/bpb"] == plain["val/bpb"]
    nats = [-model.score(batch).log_prob[batch["lexical"]].double().sum() for batch in rows[:2]]
    number = sum(batch["lexical"].sum() for batch in rows[:2])
    assert marked["val/loss"] == pytest.approx((sum(nats) / number).item(), rel=1e-6)
    assert marked["val/ppl"] == pytest.approx((sum(nats) / number).exp().item(), rel=1e-5)
    assert marked["val/loss"] != pytest.approx(plain["val/loss"], rel=1e-6)


class ByGradient(TransformerLM):
    """Its score needs a backward pass, as inference by gradient does."""

    def score(self, batch):
        with gradients_on():
            batch = ordinary(batch)
            shift = torch.zeros((), requires_grad=True)
            log_prob = -(self.network(batch["tokens"]) * (1 + shift)).square().sum(dim=-1)
            (slope,) = torch.autograd.grad(log_prob.sum(), shift)
        log_prob = log_prob.detach()
        num_targets = (batch["targets"] >= 0).sum(dim=1)
        term = slope.expand(len(log_prob)) * 0
        return Scores(log_prob.float() + 0 * slope, term, num_targets, "exact")


@pytest.mark.parametrize("verb", ["validate", "test", "predict", "fit"])
def test_gradients_are_there_in_every_verb(verb, make_data, tmp_path):
    options = {"limit_val_batches": 1, "max_steps": 1, "val_check_interval": 1}
    trainer = quiet_trainer(tmp_path, **options)
    model = build(ByGradient)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("memory\n")
    data = make_data(predict_file=str(prompts))
    result = getattr(trainer, verb)(model, data)
    if verb == "predict":
        assert result[0].log_prob.isfinite().all()
    elif verb != "fit":
        assert result[0]["val/loss" if verb == "validate" else "test/loss"] > 0
    else:
        assert trainer.callback_metrics["val/loss"] > 0


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_data_of_the_other_kind_are_refused(verb, make_data, make_sentences, tmp_path):
    by_name = {method.name: method for method in METHODS}
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    pairs = [("gpt2", make_sentences(), "Sentences"), ("thought-gestalt", make_data(), "LocalText")]
    for name, data, kind in pairs:
        with pytest.raises(ValueError, match=rf"data \({kind}\) are .* choose data of that kind"):
            getattr(trainer, verb)(by_name[name].build(), data)


@pytest.mark.parametrize(
    ("precision", "in_bf16", "dtype"),
    [("bf16-mixed", True, torch.bfloat16), ("bf16-mixed", False, None), ("32-true", True, None)],
)
def test_precision_says_in_what_parameters_are_gathered(precision, in_bf16, dtype):
    strategy = FullySharded(gathers_in_bf16=in_bf16)
    L.Trainer(accelerator="cpu", strategy=strategy, precision=precision, logger=False)
    assert strategy.gathered_dtype is dtype


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_other_ways_to_shard_are_refused(name):
    model = build()
    model._trainer = SimpleNamespace(strategy=type(name, (), {})())
    model.network = None
    with pytest.raises(ValueError, match=f"trainer.strategy.*{name}.*training.FullySharded"):
        model.configure_model()
