"""Contexts that several continuations share are read once, and change no answer."""

import pytest
from methods import METHODS
from task_data import request

from lightning_models import TransformerLM
from tests.evaluation.test_tasks_scores import PLAIN, harness_model, tokenizer_of

BLOCK = 48
CASES = [method for method in METHODS if method.reads_windows]
SHARING = {
    method.name
    for method in CASES
    if not method.name.startswith("latent-thought")
    and method.name
    not in (
        "thoughtbubbles",  # later tokens decide who survives
        "thoughtbubbles-residual",
        "mixture-of-recursions-topk",
        "ponderlm",  # Jacobi iterations over whole rows
        "ponderlm2",
    )
}
TEXTS = [
    ("Ab c. De", " fgh"),
    ("Ab c. De", " f"),
    ("Ab c. De", " a longer one. Two"),
    ("Ab c. De", " fgh"),  # asked twice
    ("Ab c. De ", "fgh"),  # white space goes to the continuation: the same tokens
    ("Xy", "z"),
    ("Xy", "zz"),
    ("Q", "a"),  # contexts of one token
    ("Q", "bc"),
    ("", "no context"),
    ("", "none"),
    ("alone", " in its context"),
    ("A context that fits. It has many words", " yes"),
    ("A context that fits. It has many words", " no."),
    ("A context that does not fit, so that it is cut on the left for each", " continuation"),
    ("A context that does not fit, so that it is cut on the left for each", " other cut"),
    ("short", " and " + "a very long one " * 6),  # several windows
    ("short", " and"),
]


def answers(model, tokenizer, batch_size, share, monkeypatch):
    with monkeypatch.context() as patch:
        if not share:
            patch.setattr(type(model), "shares_prefixes", False)
        lm = harness_model(model, tokenizer, batch_size=batch_size)
        return lm.loglikelihood([request(*pair) for pair in TEXTS])


@pytest.mark.parametrize("method", CASES, ids=lambda method: method.name)
@pytest.mark.parametrize("batch_size", [2, 5, 32])
def test_answers_are_those_of_whole_rows(method, batch_size, monkeypatch):
    """In float64; steps and FLOPs are counted as if each request were read alone."""
    model = method.build(block_size=BLOCK).eval().double()
    assert model.shares_prefixes == (method.name in SHARING)
    tokenizer = tokenizer_of(model)
    alone = answers(model, tokenizer, 1, False, monkeypatch)
    mine = answers(model, tokenizer, batch_size, True, monkeypatch)
    assert [one[0] for one in mine] == pytest.approx([one[0] for one in alone], rel=1e-12)
    assert [one[1] for one in mine] == [one[1] for one in alone]
    for one, other in zip(mine, alone, strict=True):
        assert one.facts.flops == pytest.approx(other.facts.flops, rel=1e-12)
        assert {**vars(one.facts), "flops": 0} == {**vars(other.facts), "flops": 0}


@pytest.mark.parametrize(
    "method",
    [method for method in CASES if method.name in SHARING],
    ids=lambda method: method.name,
)
def test_a_context_is_embedded_once(method):
    model, context = method.build(block_size=BLOCK).eval(), "Ab c. De"
    lm = harness_model(model, tokenizer_of(model), batch_size=4)
    texts, seen = [" f", " g", " h", " i"], []

    def count(module, inputs):
        seen.append(inputs[0].numel())

    handle = model.network.embedding.register_forward_pre_hook(count)
    pieces = [lm.reader.piece(context, text) for text in texts]
    lm.loglikelihood([request(context, text) for text in texts])
    handle.remove()
    given, size = pieces[0].given, len(pieces[0].tokens)
    if method.name in ("ponderlm-sequential",):
        assert sum(seen) <= 3 * (given - 1 + 4 * (size - given))  # a row of slots at each step
    else:
        assert sum(seen) == given - 1 + 4 * (size - given)


def test_compiled_networks_read_whole_rows():
    model = next(method for method in CASES if method.name == "gpt2").build(compile=True)
    assert not model.shares_prefixes


def test_a_batch_has_no_more_rows_than_allowed_and_fits_learned_positions(monkeypatch):
    model, own, sizes = CASES[0].build(block_size=BLOCK).eval(), TransformerLM.score, []

    def score(self, batch):
        longest = int(batch["prefix_lengths"].max()) - 1 if "prefix" in batch else 0
        sizes.append((len(batch["tokens"]), longest + batch["tokens"].shape[1]))
        return own(self, batch)

    monkeypatch.setattr(TransformerLM, "score", score)
    lm = harness_model(model, PLAIN, batch_size=6)
    texts = [("c" * n, "d" * m) for n in (2, 20, 40) for m in (2, 7, 1, 3, 4, 5, 6, 8)]
    texts += [("e", "f" * 40), ("ee", "f" * 40), ("ee", "f" * 41)]
    lm.loglikelihood([request(*pair) for pair in texts])
    assert sum(rows for rows, _ in sizes) == len(texts)
    assert max(rows for rows, _ in sizes) <= 6
    assert max(width for _, width in sizes) <= BLOCK
