"""Contexts that several continuations share are read once, and change no answer."""

import pytest
import torch
from methods import METHODS
from task_data import request

from lightning_models import TransformerLM
from lightning_models.latent_thought import reading
from lightning_models.layers import Branches
from lightning_models.transformer import module as transformer_module
from tests.evaluation.test_tasks_scores import PLAIN, harness_model, tokenizer_of

BLOCK = 48
CASES = [method for method in METHODS if method.reads_windows]
SENTENCES = [method for method in METHODS if method.name.startswith("thought-gestalt")]
SHARING = {
    method.name
    for method in CASES + SENTENCES
    if method.name
    not in (
        "thoughtbubbles",  # later tokens decide who survives
        "thoughtbubbles-residual",
        "mixture-of-recursions-topk",
        "ponderlm",  # Jacobi iterations over whole rows
        "ponderlm2",
        "huginn-kl",  # tokens exit one by one
        "huginn-latent",
        "ouro-exits",
    )
}
CACHED = ("gist", "mixture-of-recursions", "thoughtbubbles-threshold", "thoughtbubbles-window")
"""Continuations go on from copies of a cache; others stand in one row, behind their context."""
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
    ("A context that fits. It has many words", " yes. Yes"),  # a branch of a branch
    ("A context that fits. It has many words", " yes. Yet"),
    ("A context that fits. It has many words", " yes"),
    ("A context that does not fit, so that it is cut on the left for each", " continuation"),
    ("A context that does not fit, so that it is cut on the left for each", " other cut"),
    ("short", " and " + "a very long one " * 6),  # several windows
    ("short", " and"),
    ("Some words. Other ones. More of it. And so on. I", " j"),  # more sentences than memory holds
    ("Some words. Other ones. More of it. And so on. I", " jk. L m"),
    ("Some words. Other ones. More of it. And so on. I", ". J"),
    ("Some words. Other ones. More of it. Or others. I", " j"),  # a context that ends otherwise
    ("Some words. Other ones. More of it. Or others. I", " k"),
]


def texts_for(method):
    """A method that shares nothing reads whole rows in any case, some token by token."""
    return TEXTS if method.name in SHARING else TEXTS[::4]


def answers(model, tokenizer, texts, batch_size, share, monkeypatch):
    with monkeypatch.context() as patch:
        if not share:
            patch.setattr(type(model), "shares_prefixes", False)
        lm = harness_model(model, tokenizer, batch_size=batch_size)
        return lm.loglikelihood([request(*pair) for pair in texts])


@pytest.fixture(scope="module")
def read_alone():
    """Answers of each method, in float64, to requests that are read one by one."""
    read = {}

    def answer(method):
        if method.name not in read:
            model = method.build(block_size=BLOCK, **method.few).eval().double()
            with pytest.MonkeyPatch.context() as patch:
                read[method.name] = answers(
                    model, tokenizer_of(model), texts_for(method), 1, False, patch
                )
        return read[method.name]

    return answer


@pytest.mark.parametrize(
    ("method", "batch_size"),
    [
        pytest.param(method, size, id=f"{method.name}-{size}")
        for method in CASES + SENTENCES
        for size in ((2, 5, 32) if method.name in SHARING else (5,))  # or whole rows in any case
    ],
)
def test_answers_are_those_of_whole_rows(method, batch_size, read_alone, monkeypatch):
    """In float64; steps and FLOPs are counted as if each request were read alone."""
    model = method.build(block_size=BLOCK, **method.few).eval().double()
    assert model.shares_prefixes == (method.name in SHARING)
    alone = read_alone(method)
    texts = texts_for(method)
    mine = answers(model, tokenizer_of(model), texts, batch_size, True, monkeypatch)
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
def test_what_texts_begin_with_is_read_and_scored_once(method):
    model, context = method.build(block_size=BLOCK, **method.few).eval(), "Ab c. De"
    lm = harness_model(model, tokenizer_of(model), batch_size=4)
    texts, seen, scored = [" fgh", " fgi", " fjk", " lmn"], [], []
    own = model.score

    def score(batch):
        scored.append(int((batch["targets"] >= 0).sum()))
        return own(batch)

    def count(module, inputs):
        seen.append(inputs[0].numel())

    model.score = score
    handle = model.network.embedding.register_forward_pre_hook(count)
    pieces = [lm.reader.segment(context, text) for text in texts]
    lm.loglikelihood([request(context, text) for text in texts])
    handle.remove()
    given, size = pieces[0].given, len(pieces[0].tokens)
    starts = {piece.tokens[:end] for piece in pieces for end in range(given + 1, size + 1)}
    assert sum(scored) == len(starts) < 4 * (size - given)
    if method.name.startswith("latent-thought"):  # inferred from first, then read
        inferred = 2 * given if method.name.endswith("amortised") else given
        assert sum(seen) == inferred + given - 1 + 4 * (size - given)
    elif method.name in ("ponderlm-sequential",):
        assert sum(seen) <= 3 * (given - 1 + 4 * (size - given))  # a row of slots at each step
    elif method.name in CACHED:
        assert sum(seen) == given - 1 + 4 * (size - given)
    else:  # one row: the last given token is read once, too, and last tokens are not read
        assert sum(seen) == given + len(starts) - len({piece.tokens for piece in pieces})


def branches_of(contexts, continuations):
    """Returns the layout of continuations of these numbers of tokens after each context."""
    row = torch.arange(len(contexts)).repeat_interleave(len(continuations))
    lengths = torch.tensor(contexts)
    more = torch.tensor(continuations).repeat(len(contexts))
    tokens = torch.arange(len(row) * (max(continuations) + 1)).view(len(row), -1)
    return Branches(
        {
            "prefix": torch.zeros(len(contexts), max(contexts), dtype=torch.int64),
            "prefix_lengths": lengths,
            "prefix_row": row,
            "tokens": tokens,
            "mask": torch.arange(tokens.shape[1]) <= more[:, None],
        }
    )


@pytest.mark.parametrize(
    ("contexts", "continuations", "shape"),
    [
        ([20, 50, 9], [3, 4], (1, 100)),  # short texts stand in one row without padding
        ([600, 590, 600, 580], [5], (4, 605)),  # attention to another long text costs more
        ([600, 20, 30, 40], [5], (1, 710)),  # nor do short ones stand in rows as long as it
    ],
)
def test_rows_have_little_padding_and_short_attention(contexts, continuations, shape):
    assert branches_of(contexts, continuations).tokens.shape == shape


def test_whole_sentences_of_a_context_are_embedded_once():
    """The open one is read with each continuation: its words, BOS and EOS."""
    model, seen = SENTENCES[0].build(block_size=BLOCK).eval(), []
    lm = harness_model(model, tokenizer_of(model), batch_size=4)
    pairs = [("Ab c. De f. G", text) for text in (" f", " ghi", ". H i", " j. K")]
    pieces = [lm.reader.segment(*pair) for pair in pairs]
    handle = model.network.embedding.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].numel())
    )
    lm.loglikelihood([request(*pair) for pair in pairs])
    handle.remove()
    (end,) = {piece.ends[0] for piece in pieces}  # short sentences stand together
    assert end == len("Ab c. De f.") < pieces[0].given
    once = end + 2
    assert sum(seen) == once + sum(lm.reader.read_tokens(piece) - once for piece in pieces)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_inner_steps_compute_logits_of_known_tokens_only(batch_size, monkeypatch):
    """A context of n tokens has n - 1 targets; in a batch it is inferred from once."""
    method = next(method for method in CASES if method.name == "latent-thought")
    model, rows = method.build(block_size=BLOCK, **method.few).eval(), []
    own = reading.linear_cross_entropy_each

    def each(h, *arguments):
        rows.append(h.shape[:-1].numel())
        return own(h, *arguments)

    monkeypatch.setattr(reading, "linear_cross_entropy_each", each)
    lm = harness_model(model, tokenizer_of(model), batch_size=batch_size)
    texts = [("Ab c. De", " f"), ("Ab c. De", " ghi"), ("Xyz", "a"), ("Xyz", "bc")]
    lm.loglikelihood([request(*pair) for pair in texts])
    known = [lm.reader.segment(*pair).given - 1 for pair in texts]
    once = sum(known) if batch_size == 1 else sum(known[::2])
    assert sum(rows) == model.config.inner_steps * once


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


def test_rows_of_long_continuations_stay_short(monkeypatch):
    """Attention grows with the square of a row: 32 answers of 400 tokens are not one row."""
    widths = []

    class Watched(Branches):
        def __init__(self, *options):
            super().__init__(*options)
            widths.append(self.tokens.shape[1])

    monkeypatch.setattr(transformer_module, "Branches", Watched)
    method = next(method for method in METHODS if method.name == "gpt2")
    model = method.build(block_size=1024).eval()
    requests = [request("C" * 20, " " + chr(97 + i) * 400) for i in range(8)]
    requests += [request("D" * 20, " " + chr(97 + i) * 9) for i in range(8)]
    shared = harness_model(model, tokenizer_of(model), batch_size=32).loglikelihood(requests)
    assert widths
    assert max(widths) < 2 * 430
    alone = harness_model(model, tokenizer_of(model), batch_size=1).loglikelihood(requests)
    assert [score for score, _ in shared] == pytest.approx([score for score, _ in alone], rel=1e-5)
