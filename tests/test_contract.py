"""What every method and baseline must hold; ``methods.py`` lists them, and which in full."""

import copy
import dataclasses
import math
from contextlib import ExitStack
from importlib import import_module

import pytest
import torch
from formats import REASONING
from methods import BLOCK, IN_FULL, METHODS
from torch.utils.data import DataLoader

from callbacks import PendingValidation, ResumeState, SaveCheckpoints
from lightning_models import output_layer
from lightning_models.generation import SamplingConfig, generate
from tests.largest import Largest
from tests.quiet import quiet_trainer
from tests.reference import double
from tests.reliability.runs import same

GREEDY = SamplingConfig(temperature=0)
EXACT = {"atol": 1e-10, "rtol": 1e-10}
in_full = pytest.mark.parametrize("method", IN_FULL, ids=lambda method: method.name)
"""For whole trainings, which an option of a method hardly changes."""


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def method(request):
    return request.param


@pytest.fixture
def make_loaders(method, request):
    """Builds the datamodule of the method's batches."""
    return request.getfixturevalue(method.format.fixture)


@pytest.fixture
def in_double(method, exact):
    """All that a model makes of weights in float64 is float64; ``transformers`` rounds norms."""
    with ExitStack() as stack:
        for family in ("qwen2", "qwen3", "llama") if method.format is REASONING else ():
            module = import_module(f"transformers.models.{family}.modeling_{family}")
            stack.enter_context(double.in_double(module))
        yield


def objective(model, batch):
    return sum(term.sum / term.normaliser for term in model.loss(batch).terms.values())


def test_scores_have_the_shape_of_the_targets(method):
    model, batch = method.build().eval(), method.batch()
    batch["targets"].view(2, -1)[0, :5] = -100
    scores = model.score(batch)
    assert scores.log_prob.shape == batch["targets"].shape
    assert scores.log_prob.dtype == torch.float32
    assert scores.sequence_term.shape == (2,)
    assert scores.kind == model.likelihood
    assert torch.equal(scores.log_prob < 0, batch["targets"] >= 0)
    assert (scores.log_prob[batch["targets"] < 0] == 0).all()
    assert torch.equal(scores.num_targets, (batch["targets"] >= 0).flatten(1).sum(dim=1))


def test_a_later_token_never_changes_an_earlier_prediction(method):
    model, batch = method.build().eval(), method.batch()
    changed, earlier = method.format.change(batch)
    before, after = (model.score(b).log_prob for b in (batch, changed))
    assert not torch.equal(before[~earlier], after[~earlier])
    same = torch.equal(before[earlier], after[earlier])
    assert same == model.causal, "a model that is not causal must show it, or say that it is"
    assert model.causal or model.likelihood != "exact"


def test_the_loss_starts_near_that_of_guessing(method):
    model = method.build()
    loss = objective(model, method.batch(rows=8)).item()
    guess = method.guesses * math.log(model.config.padded_vocab_size)
    assert loss == pytest.approx(guess, rel=0.05)


@in_full
def test_one_batch_can_be_learned_by_heart(method):
    model, batch = method.build(), method.batch(rows=2, length=16)
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1e-2, weight_decay=0.0)
    first = loss = objective(model, batch)
    for _ in range(120):
        if loss < 0.1 * first:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = objective(model, batch)
    assert loss < 0.1 * first


def test_every_trainable_parameter_gets_a_gradient(method):
    model = method.build()
    objective(model, method.batch()).backward()
    trained = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert without == []


def test_gradient_checkpointing_saves_memory_and_changes_no_gradient(method):
    if not method.recomputes:
        pytest.skip("it refuses to")
    batch, found = method.batch(), []
    for how in (False, True, "selective"):
        model = method.build(gradient_checkpointing=how, **method.noise)
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = objective(model, batch)
        loss.backward()
        found.append((sum(kept.values()), [p.grad for p in model.network.parameters()]))
    (most, gradients), *others = found
    for size, recomputed in others:
        torch.testing.assert_close(recomputed, gradients, atol=0.0, rtol=0.0)
        assert size < most


def test_cached_and_uncached_greedy_tokens_are_equal(method):
    if not method.continues:
        pytest.skip("what it has written is no part of a prompt")
    """Each token is written again as the first one behind all before it, in one batch."""
    model = method.build(seed=1).eval()
    prompts = method.format.prompts
    cached = generate(model, prompts, max_new_tokens=7, sampling=GREEDY)
    known = [
        (stream, [*prompt, *cached[stream][:count]])
        for stream, prompt in enumerate(prompts)
        for count in range(7)
    ]
    streams, texts = zip(*known, strict=True)
    uncached = generate(model, texts, max_new_tokens=1, sampling=GREEDY, streams=streams)
    assert [token for row in cached for token in row] == [token for (token,) in uncached]


def test_bf16_autocast_decodes_close_to_float32(method):
    model, batch, found = method.build().eval(), method.batch(), []
    tokens, _ = method.format.in_order(batch)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            cache = model.init_cache(*method.format.begin(batch), 4)
            ready = torch.zeros(1, dtype=torch.bool)
            while not ready.any():
                logits, ready = model.decode_step(cache, tokens[:, 0])
        assert logits.dtype == torch.float32
        found.append(logits[ready].log_softmax(-1))
    torch.testing.assert_close(*found, atol=0.1, rtol=0)


def test_decoding_and_scoring_agree(method):
    model, batch = method.build().eval(), method.batch(rows=2, length=20)
    if model.likelihood != "exact":
        pytest.skip("only exact scores are sums of next-token log-probabilities")
    if getattr(model, "writes_chain", False):
        pytest.skip("what is decoded first is a chain, which scores do not count")
    expected = model.score(batch).log_prob
    tokens, places = method.format.in_order(batch)
    targets, expected = batch["targets"].flatten()[places], expected.flatten()[places]
    found, read = torch.zeros(tokens.shape), [0, 0]  # how many tokens each row has read
    with torch.no_grad():
        cache = model.init_cache(*method.format.begin(batch), tokens.shape[1])
        while min(read) < tokens.shape[1]:
            place = torch.tensor(read).clamp(max=tokens.shape[1] - 1)[:, None]
            logits, ready = model.decode_step(cache, tokens.gather(1, place)[:, 0])
            target = targets.gather(1, place).clamp(min=0)
            mine = logits.log_softmax(-1).gather(1, target)
            rows = torch.tensor(read) < tokens.shape[1]
            found[rows] = found[rows].scatter(1, place[rows], mine[rows])
            read = [count + flag for count, flag in zip(read, ready.tolist(), strict=True)]
    torch.testing.assert_close(found[targets >= 0], expected[targets >= 0], atol=1e-4, rtol=1e-4)


def test_a_row_in_a_batch_is_the_row_alone(method, in_double):
    """In another order, and among padding; the loss and its gradients are sums over rows."""
    model = method.build(**method.alone).double()
    curriculum = {} if method.reads_windows else {"epochs": 0.5}  # rows draw what is left

    def learned(batch):
        own = copy.deepcopy(model)  # running statistics go on
        terms = own.loss({**batch, **curriculum}).terms
        sum(term.sum for term in terms.values()).backward()
        parts = {
            (name, key): torch.as_tensor(getattr(term, key)).detach().double()
            for name, term in terms.items()
            for key in ("sum", "normaliser")
        }
        weights = own.network.named_parameters()
        return parts | {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights
        }

    batch = method.format.pad(method.batch(rows=3, length=20))
    alone = [method.format.row(batch, row) for row in range(3)]
    order = torch.arange(len(batch["targets"])).roll(1)
    batch = {key: value[order] for key, value in batch.items()}
    whole, each = learned(batch), [learned(row) for row in alone]
    summed = {key: sum(row[key] for row in each) for key in whole}
    torch.testing.assert_close(whole, summed, **EXACT)
    scores = model.eval().score(batch)
    expected = torch.zeros_like(scores.log_prob)
    for place, row in enumerate(order.tolist()):
        if row < 3:
            own = model.score(alone[row])
            expected[place][tuple(map(slice, own.log_prob.shape[1:]))] = own.log_prob[0]
            torch.testing.assert_close(scores.sequence_term[place], own.sequence_term[0], **EXACT)
    torch.testing.assert_close(scores.log_prob, expected, **EXACT)


def test_logits_of_a_batch_are_never_held(method, monkeypatch):
    """Of 4096 columns; a chunk may grow by the streams of one token, and embeddings are as wide."""
    words, limit = 4096, 16
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", limit)
    model, batch = method.build(vocab_multiple=words), method.batch(rows=4)
    with Largest() as step:
        objective(model, batch).backward()
        model.score(batch)
    assert step.numel <= max(limit + 4, model.config.dim) * words


def test_bf16_autocast_is_close_to_float32(method):
    model, batch = method.build().eval(), method.batch()
    exact = objective(model, batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(model, batch)
        scores = model.score(batch)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=0.02)
    mean = -scores.log_prob.sum() / scores.num_targets.sum()
    assert method.guesses * mean.item() == pytest.approx(exact, rel=0.02)
    gradients = [p.grad for p in model.network.parameters() if p.requires_grad]
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


def test_flops_count_more_context_and_more_training_as_more(method):
    model = method.build()
    short, long = model.flops_per_token(8), model.flops_per_token(BLOCK)
    assert 0 < short < long or (short > 0 and not method.far_sighted)
    assert model.flops_per_token(BLOCK, training=True) >= method.training_factor * long


def test_flops_that_texts_decide_are_recorded(method):
    model, found = method.build().eval(), []
    model.recorded(method.batch(), flops=lambda flops, tokens: found.append((flops, tokens)))
    if model.adaptive or found:
        ((flops, tokens),) = found
        assert flops.dtype == torch.float64
        assert tokens.tolist() == [BLOCK] * len(tokens)
        expected = model.flops_per_token(BLOCK) * BLOCK
        assert model.adaptive or flops.tolist() == pytest.approx([expected] * len(flops))


def test_a_saved_model_loads_from_its_checkpoint_alone(method, make_loaders, tmp_path):
    model, data = method.build(), make_loaders(batch_size=2)
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(model, data)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["recipe"]["model"]["class_path"] == f"lightning_models.{type(model).__name__}"
    assert checkpoint["recipe"]["data"]["class_path"] == method.format.datamodule
    loaded = type(model).load_from_checkpoint(path, weights_only=True)
    assert loaded.config == model.config
    assert loaded.optimizer_config == model.optimizer_config
    batch = method.batch()
    expected = model.eval().score(batch).log_prob
    assert torch.equal(loaded.eval().score(batch).log_prob, expected)


@in_full
def test_a_resumed_run_ends_with_the_same_bits(method, make_loaders, tmp_path):
    """``max_steps`` cuts an epoch after its second micro-batch; dropout makes every draw count."""

    def run(folder, ckpt_path=None, **limit):
        model = method.build(**method.noise)
        model.optimizer_config = dataclasses.replace(model.optimizer_config, schedule="constant")
        writer = SaveCheckpoints(str(tmp_path / folder), save_top_k=0)
        trainer = quiet_trainer(
            tmp_path,
            *(ResumeState(), PendingValidation(), writer),
            **{"max_epochs": 2, "limit_train_batches": 3, **limit},
            accumulate_grad_batches=2,
            val_check_interval=2,
            limit_val_batches=1,
        )
        torch.manual_seed(5)
        data = make_loaders(batch_size=2)
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
        return torch.load(tmp_path / folder / "last.ckpt", weights_only=True)

    whole = run("whole")
    assert run("stopped", max_steps=1)["global_step"] == 1
    resumed = run("stopped", str(tmp_path / "stopped" / "last.ckpt"))
    assert resumed["global_step"] == whole["global_step"] == 4  # of 2 and 1 micro-batches an epoch
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(resumed[key], whole[key]), key


@in_full
def test_validation_leaves_training_untouched(method, make_loaders, tmp_path):
    """Trained with and without validation between two accumulated micro-batches."""

    def train(**options):
        model = method.build(**method.noise)
        torch.manual_seed(5)
        trainer = quiet_trainer(
            tmp_path,
            max_steps=2,
            accumulate_grad_batches=2,
            check_val_every_n_epoch=None,
            callbacks=[ResumeState()],
            **options,
        )
        trainer.fit(model, make_loaders(batch_size=2))
        return model, trainer

    validated = {"val_check_interval": 3, "limit_val_batches": 2}
    (without, _), (interrupted, trainer) = train(limit_val_batches=0), train(**validated)
    assert trainer.callback_metrics["val/loss"] > 0
    assert interrupted.training
    for (name, mine), expected in zip(
        interrupted.network.state_dict().items(),
        without.network.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, expected), name


@in_full
def test_the_logged_validation_loss_is_the_corpus_mean(method, make_loaders, tmp_path):
    """Of batches of five rows; here it is summed row by row."""
    model = method.build(**method.few).eval()
    trainer = quiet_trainer(tmp_path)
    (logged,) = trainer.validate(model, make_loaders(eval_batch_size=5), verbose=False)
    nats = reported = tokens = num_bytes = 0.0
    data = make_loaders(eval_batch_size=1)
    data.prepare_data()
    data.setup("validate")
    for batch in data.val_dataloader():
        with torch.no_grad():
            scores = model.score(batch)
        counted = batch.get("lexical", batch["targets"] >= 0)
        term = scores.sequence_term.double().sum().item()
        nats -= scores.log_prob.double().sum().item() + term
        reported -= scores.log_prob[counted].double().sum().item() + term
        tokens += counted.sum().item()
        num_bytes += batch["num_bytes"].sum().item()
    assert logged["val/loss"] == pytest.approx(reported / tokens, rel=1e-6)
    assert logged["val/bpb"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-6)
    name = {"exact": "ppl"}.get(model.likelihood, f"ppl_{model.likelihood}")
    assert logged[f"val/{name.replace('lower_', '')}"] == pytest.approx(
        math.exp(reported / tokens), rel=1e-5
    )


@in_full
def test_it_trains_with_a_plain_trainer_on_any_loader_of_dicts(method, tmp_path):
    """No datamodule, no callbacks, no command line."""
    model = method.build()
    curriculum = {} if method.reads_windows else {"epochs": 0.0}
    rows = [{**method.batch(seed=seed), **curriculum} for seed in range(2)]
    loader, before = DataLoader(rows, batch_size=None), copy.deepcopy(model.network.state_dict())
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(model, loader)
    after = model.network.state_dict()
    assert trainer.global_step == 2
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())
    (values,) = trainer.validate(model, loader, verbose=False)
    reported = [model.score(batch).reported(batch) for batch in rows]
    nats, tokens = (sum(part) for part in zip(*reported, strict=True))
    assert values["val/loss"] == pytest.approx((-nats / tokens).item(), rel=1e-5)


def test_sampled_texts_do_not_depend_on_the_batch(method):
    """Nor on its order. Rows leave at different times, and draw real tokens from their streams."""
    model, prompts = method.build(seed=1).eval(), method.format.prompts
    options = {"max_new_tokens": 6, "vocab_size": method.format.sizes["vocab_size"]}
    whole = generate(model, prompts, **options)
    assert {len(row) for row in whole} == {6}
    assert all(0 <= token < options["vocab_size"] for row in whole for token in row)
    stop = whole[0][3]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert generate(model, prompts, stop_ids=(stop,), **options) == expected
    turned = list(range(len(prompts)))[::-1]
    again = generate(model, prompts[::-1], stop_ids=(stop,), streams=turned, **options)
    assert again == expected[::-1]
    for row, prompt in enumerate(prompts):
        (alone,) = generate(model, [prompt], stop_ids=(stop,), first_row=row, **options)
        assert alone == expected[row]
