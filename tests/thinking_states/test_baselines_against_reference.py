"""No CoT, CoT, iCoT and Coconut against the literal texts and passes in float64."""

import math

import pytest
import torch

from evaluation.reason.controls import latents_of, replacement, replacing
from lightning_models.layers import recording
from lightning_models.runtime import seeded_generator
from lightning_models.thinking_states.baselines import curricula
from lightning_models.thinking_states.baselines.coconut import num_latents
from lightning_models.thinking_states.baselines.curricula import StepStages
from tests.reference import chain, coconut, icot, qwen2
from tests.thinking_states import questions
from tests.thinking_states.literal import (
    LOSS,
    assert_same_gradients,
    batch_of,
    draw,
    in_float64,
    moved,
    weights_of,
)
from tests.thinking_states.questions import PREFIX, SEPARATOR, V

QUESTIONS = [
    (3, [(1, 2), (2, 3), (2, 1)], 2),
    (2, [], 3),
    (5, [(4, 1)], 1),
    (4, [(0, 2), (1, 1), (2, 2), (3, 1)], 2),
]
MARKERS = (V, V + 1)
GROUPED = {"num_heads": 4, "num_kv_heads": 2}


@pytest.fixture(autouse=True)
def double():
    with in_float64():
        yield


def build(name, **changes):
    return moved(questions.build(name, double=False, **{**GROUPED, **changes}), size=0.15)


def asked(epochs=None, seed=0):
    rows = draw(QUESTIONS, V, seed)
    batch = batch_of(rows)
    return rows, batch if epochs is None else {**batch, "epochs": epochs}


def assert_learns(model, batch, expected, weights):
    """The loss and the gradients of a batch are those expected."""
    term = model.loss(batch).terms["nll"]
    assert model.counter(batch)["targets"] == float(term.normaliser)
    loss = term.sum / term.normaliser
    torch.testing.assert_close(loss, expected, **LOSS)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, weights)


def mean_nll(weights, shape, texts):
    return -torch.cat([chain.log_probs(weights, shape, text) for text in texts]).mean()


def asking(text, row):
    """The text whose query is learned too."""
    return text._replace(labels=[*row.query[1:], *text.labels[len(row.query) - 1 :]])


def greedy(read, pieces, limit):
    """What is written greedily after some pieces up to the prefix, which ends a chain."""
    written, size = [], len(PREFIX)
    while tuple(written[-size:]) != PREFIX:
        late = len(written) - limit
        logits = read([*pieces, *written])[-1, :V]
        written.append(PREFIX[late] if late >= 0 else int(logits.argmax()))
    return written


@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        (PREFIX, {"tie_head": False}),
        (PREFIX, {"tie_head": True, "lm_on_query": True}),
        ((), {}),
        ((), {"window": 3}),
    ],
    ids=str,
)
def test_no_cot(prefix, changes):
    model, (rows, batch) = build("no_cot", answer_prefix=prefix, **changes), asked()
    weights, shape = weights_of(model)
    texts = [chain.no_cot_text(row.query, prefix, row.answer) for row in rows]
    if model.config.lm_on_query:
        texts = [asking(text, row) for text, row in zip(texts, rows, strict=True)]
    assert_learns(model, batch, mean_nll(weights, shape, texts), weights)
    scores = model.score(batch).log_prob
    for number, text in enumerate(texts):
        own = len(rows[number].answer)
        found = chain.log_probs(weights, shape, text)[-own:]
        torch.testing.assert_close(scores[number, :own], found.detach(), **LOSS)


@pytest.mark.parametrize("asks", [False, True])
def test_cot(asks):
    model, (rows, batch) = build("cot", lm_on_query=asks), asked()
    weights, shape = weights_of(model)
    texts = []
    for row in rows:
        written = chain.chain_tokens(row.steps, SEPARATOR)
        text = chain.cot_text(row.query, written, PREFIX, row.answer)
        texts.append(asking(text, row) if asks else text)
    assert_learns(model, batch, mean_nll(weights, shape, texts), weights)


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_cot_scores_after_its_own_chain(window):
    model, (rows, batch) = build("cot", max_chain_tokens=6, window=window), asked()
    weights, shape = weights_of(model)
    weights["model.embed_tokens.weight"][list(PREFIX)] *= 1.5  # said a little more often
    model.network.backbone.model.embed_tokens.weight[list(PREFIX)] *= 1.5
    scores, lengths = model.score(batch).log_prob, set()
    for number, row in enumerate(rows):
        written = greedy(lambda ids: qwen2.causal_lm(weights, shape, ids), row.query, 6)
        text = chain.text_of((row.query, False), (written, False), (row.answer, True))
        found = chain.log_probs(weights, shape, text)
        torch.testing.assert_close(scores[number, : len(found)], found, **LOSS)
        lengths.add(len(written))
    assert 6 + len(PREFIX) in lengths
    assert min(lengths) < 6 + len(PREFIX), "one ends by itself"


@pytest.mark.parametrize(
    ("epochs", "r", "side"),
    [
        (0.0, 0, "left"),
        (1.5, 3, "left"),
        (1.99, 3, "right"),
        (4.0, 8, "left"),
        (4.5, math.inf, "left"),
    ],
)
def test_icot_without_its_first_tokens(epochs, r, side, monkeypatch):
    extra = torch.tensor([1, 0, 2, 4])
    monkeypatch.setattr(curricula, "offsets", lambda numbers, smoothing, seed: extra)
    changes = {"remove_per_epoch": 2, "remove_all_beyond": 9, "removal_side": side}
    model, (rows, batch) = build("icot", **changes), asked(epochs)
    weights, shape = weights_of(model)
    texts = []
    for row, offset in zip(rows, extra.tolist(), strict=True):
        written = chain.chain_tokens(row.steps, SEPARATOR)
        turn = slice(None, None, 1 if side == "left" else -1)
        left = icot.left_chain(written[turn], r, offset)[turn]
        text = chain.cot_text(row.query, left, PREFIX, row.answer, score_prefix=r < math.inf)
        texts.append(text)
    assert_learns(model, batch, mean_nll(weights, shape, texts), weights)


@pytest.mark.parametrize(("epochs", "stage"), [(2.5, 0), (3.0, 1), (8.9, 2), (9.0, 3)])
def test_icot_without_its_first_steps(epochs, stage):
    model, (rows, batch) = build("icot", removal="steps", max_latent_stage=2), asked(epochs)
    weights, shape = weights_of(model)
    texts = []
    for row in rows:
        gone = len(row.steps) if stage > 2 else stage
        left = chain.chain_tokens(icot.left_steps(row.steps, gone), SEPARATOR)
        text = chain.cot_text(row.query, left, PREFIX, row.answer, score_prefix=stage <= 2)
        texts.append(text)
    assert_learns(model, batch, mean_nll(weights, shape, texts), weights)


@pytest.mark.parametrize("smoothing", [4.0, 0.5])
def test_offsets_have_their_distribution(smoothing):
    odds = icot.offset_distribution(smoothing, size=101)
    drawn = curricula.offsets(torch.arange(1500), smoothing, seed=1)
    shares = torch.bincount(drawn, minlength=101) / 1500
    torch.testing.assert_close(shares.tolist()[:6], odds[:6], rtol=0, atol=0.04)


def coconut_text(row, stage, pad=True, last=2, each=2):
    n, m = coconut.stage_counts(stage, len(row.steps), last, each, pad)
    left = coconut.remaining(row.steps, n, SEPARATOR)
    learned = stage <= last
    return coconut.text_of(row.query, m, left, PREFIX, row.answer, MARKERS, score_prefix=learned)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (0, {}),
        (1, {"pad_latent_to_max": False}),
        (2, {"tie_head": False}),
        (3, {}),
        (3, {"pad_latent_to_max": False}),
        (2, {"window": 3}),
    ],
)
def test_coconut(stage, changes):
    model = build("coconut", epochs_per_stage=2, max_latent_stage=2, **changes)
    rows, batch = asked(2.0 * stage + 1.5)
    weights, shape = weights_of(model)
    texts = [coconut_text(row, stage, changes.get("pad_latent_to_max", True)) for row in rows]
    fed = {}
    with recording(latents=lambda states, latent: fed.update(states=states, latent=latent)):
        model.loss(batch)
    for number, text in enumerate(texts):
        with torch.no_grad():
            inputs = coconut.read(weights, shape, text.pieces).inputs
        where = [t for t, piece in enumerate(text.pieces) if piece == coconut.LATENT]
        own = [
            s[number]
            for s, is_latent in zip(fed["states"], fed["latent"][number], strict=True)
            if is_latent
        ]
        assert len(own) == len(where)
        for state, t in zip(own, where, strict=True):
            torch.testing.assert_close(state, inputs[t], **LOSS)
    assert_learns(model, batch, coconut.nll(weights, shape, texts), weights)


def test_coconut_at_drawn_stages(monkeypatch):
    """Two rows are at the run's stage, two at others, one of these after the last."""
    draws = torch.tensor([[0.9, 0.0], [0.1, 0.5], [0.5, 0.0], [0.2, 0.99]], dtype=torch.float64)
    monkeypatch.setattr(curricula, "row_draws", lambda numbers, count, *key: draws)
    model = build("coconut", epochs_per_stage=2, max_latent_stage=2, uniform_prob=0.4)
    rows, batch = asked(3.0)
    weights, shape = weights_of(model)
    texts = [coconut_text(row, s) for row, s in zip(rows, (1, 0, 1, 4), strict=True)]
    assert_learns(model, batch, coconut.nll(weights, shape, texts), weights)


@pytest.mark.parametrize(
    ("first", "latents", "most", "window"),
    [
        (3, 4, None, None),
        (3, 3, 3, None),
        (3, 7, 7, None),
        (3, 0, 0, None),
        (1, 2, None, None),
        (0, 1, 1, None),
        (1, 2, None, 4),
    ],
)
@torch.no_grad()
def test_coconut_scores_after_latents_and_own_chain(first, latents, most, window):
    changes = {"first_stage": first, "max_latent_stage": 2, "eval_latents": most, "window": window}
    model, (rows, batch) = build("coconut", max_chain_tokens=4, **changes), asked()
    weights, shape = weights_of(model)
    scores = model.score(batch).log_prob
    if most is None:
        assert coconut.evaluation_latents(first, 4, 2, 2) == latents
    for number, row in enumerate(rows):
        pieces = [*row.query, MARKERS[0], *[coconut.LATENT] * latents, MARKERS[1]]
        written = list(PREFIX)
        if first <= 2:
            written = greedy(lambda ids: coconut.read(weights, shape, ids).logits, pieces, 4)
        text = coconut.text_of(row.query, latents, written, (), row.answer, MARKERS)
        found = coconut.log_probs(weights, shape, text)[-len(row.answer) :]
        torch.testing.assert_close(scores[number, : len(found)], found, **LOSS)


@pytest.mark.parametrize("control", ["zero", "noise", "swap", "pause"])
@torch.no_grad()
def test_coconut_scores_after_replaced_latents(control):
    model, (rows, batch) = build("coconut", first_stage=3, max_latent_stage=2), asked()
    weights, shape = weights_of(model)
    numbers, m = [7, 70, 3, 9], 4

    def pieces(row):
        return [*row.query, MARKERS[0], *[coconut.LATENT] * m, MARKERS[1]]

    def drawn(row, thought):
        generator = seeded_generator(5, numbers[row], thought)
        return torch.randn(16, generator=generator, dtype=torch.float64)

    def others():
        return latents_of(model, lambda: model.score(questions.rows(batch, [1, 2, 3, 0])))

    with replacing(model, replacement(control, model, numbers, 5, others)):
        scores = model.score(batch).log_prob
    assert not torch.allclose(scores, model.score(batch).log_prob, atol=1e-3), "they are read"
    for idx, row in enumerate(rows):
        theirs = coconut.read(weights, shape, pieces(rows[(idx + 1) % 4])).inputs[-m - 1 : -1]
        replaced = {
            "zero": lambda own, _: torch.zeros_like(own),
            "noise": lambda own, n, idx=idx: (
                own.square().sum().sqrt() * drawn(idx, n) / drawn(idx, n).square().sum().sqrt()
            ),
            "swap": lambda _, n, theirs=theirs: theirs[n],
            "pause": lambda *_: weights["model.embed_tokens.weight"][V + 2],
        }[control]
        text = coconut.text_of(row.query, m, PREFIX, (), row.answer, MARKERS)
        logits = coconut.read(weights, shape, text.pieces, replace=replaced).logits
        found = qwen2.label_log_probs(logits, text.labels)[-len(row.answer) :]
        torch.testing.assert_close(scores[idx, : len(found)], found, **LOSS)


@pytest.mark.parametrize("pad", [True, False])
def test_stage_tables(pad):
    steps = torch.arange(7)
    lengths = (torch.arange(6) < steps[:, None]).long()
    for each, last in ((1, 6), (2, 3), (3, 0)):
        table = StepStages(epochs_per_stage=3, last=last)
        for epoch in range(3 * last + 9):
            stage = coconut.stage_of(epoch, 3)
            at = table.at(float(epoch))
            assert at == min(stage, last + 1)
            own = torch.full_like(steps, at)
            batch = {"step_lengths": lengths}
            n = torch.minimum(own, steps) if at <= last else steps
            m = num_latents(own, steps, per_step=each, last=last, pad=pad)
            assert table.removed(batch, own).tolist() == n.tolist()
            counts = [coconut.stage_counts(stage, s, last, each, pad) for s in steps.tolist()]
            assert m.tolist() == [count for _, count in counts]
            assert n.tolist() == [min(gone, s) for s, (gone, _) in enumerate(counts)]
