"""Decoding slot by slot against the packed network on the same sentences."""

import pytest
import torch

from lightning_models.thought_gestalt.cache import GestaltCache
from lightning_models.thought_gestalt.packing import pack
from tests.thought_gestalt.cases import BOS, EOD, EOS, SLOTS, VARIANTS, VOCAB, build

STYLES = {
    **VARIANTS,
    "in_context-static-bos": {"memory": "in_context", "context_seeding": False},
    "memory-of-one": {"memory_size": 1, "sentence_layer": 1},
}
FULL = SLOTS - 3  # most words of a sentence
EXACT = {"atol": 1e-10, "rtol": 1e-10}


# ---- the texts


def words(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 37, (count,), generator=generator).tolist()


def marked(counts, seed=0, last=True):
    """A document of sentences of so many words."""
    tokens = []
    for t, count in enumerate(counts):
        tokens += [BOS, *words(count, seed + t), *([EOD] if last and t + 1 == len(counts) else [])]
        tokens.append(EOS)
    return tokens


def anything(count, seed):
    weights = torch.ones(VOCAB)
    weights[BOS:] = 6
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, count, replacement=True, generator=generator).tolist()


TEXTS = {
    "forgets": marked([3, 1, FULL, 2, FULL, 4]),  # more sentences than memory holds, full ones
    "plain": words(4 * FULL + 2),
    "generated": [token for token in marked([2, 3, 1, FULL, 2, 1], seed=7) if token != BOS],
    "documents": [*marked([2, 3]), *marked([1, FULL, 2, 2]), *words(2)],
    "unclosed": [BOS, 4, EOD, 5, 6, EOD, EOD, BOS, 7, EOS, EOS, 8, BOS, 9],
    "cut-at-bos": [*words(FULL), BOS, BOS, 3, EOS, *words(FULL), EOD, EOS, 2],
    "anything": anything(40, seed=1),
    "anything-else": anything(40, seed=2),
}


def read(tokens):
    """Documents of sentences without BOS and EOS, and where each token's prediction stands."""
    documents, places = [[[]]], []
    for token in tokens:
        sentence = documents[-1][-1]
        ended = EOD in sentence
        if token == EOS or ended or (len(sentence) == FULL and token != EOD):
            if ended:
                documents.append([[]])
            else:
                documents[-1].append([])
        sentence = documents[-1][-1]
        if token != EOS and (token != BOS or sentence):
            sentence.append(token)
        places.append((len(documents) - 1, len(documents[-1]) - 1, len(sentence)))
    return documents, places


def packed(network, tokens):
    """The states (N, D) after each of ``tokens``, each document a stream of the packed network."""
    documents, places = read(tokens)
    shape = len(documents), max(map(len, documents)), SLOTS
    batch, lengths = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[:2]).long()
    is_last = torch.zeros(shape[:2], dtype=torch.bool)
    for row, document in enumerate(documents):
        for t, sentence in enumerate(document):
            slots = torch.tensor([BOS, *sentence, EOS])
            batch[row, t, : len(slots)], lengths[row, t] = slots, len(slots)
            is_last[row, t] = EOD in sentence
    steps, _ = pack(batch, lengths, is_last, SLOTS)
    with torch.no_grad():
        h = network(steps)
    states = h.new_zeros(batch.numel(), h.shape[1])
    states[torch.cat([step.source for step in steps])] = h
    row, t, slot = torch.tensor(places).t()
    return states.view(*shape, -1)[row, t, slot]


def test_the_reader_cuts_as_it_says():
    documents, places = read([*words(FULL), 1, EOS, BOS, 2, EOD, EOS, 3])
    assert documents == [[words(FULL), [1], [2, EOD]], [[3]]]
    assert places[FULL - 1 :] == [
        (0, 0, FULL), (0, 1, 1), (0, 2, 0), (0, 2, 0), (0, 2, 1), (0, 2, 2), (1, 0, 0), (1, 0, 1)
    ]  # fmt: skip


# ---- driving the cache


def start(network, texts, lengths):
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = torch.tensor(text)
    return GestaltCache.prefill(network, padded, torch.tensor(lengths), 1)


def decode(network, texts, lengths):
    """The states after the tokens from each prompt's last one on; rows leave when they end."""
    cache, rows = start(network, texts, lengths), list(range(len(texts)))
    places, found, steps = [length - 1 for length in lengths], [[] for _ in texts], 0
    while rows:
        steps += 1
        assert steps <= 3 * max(map(len, texts)), "a token takes three steps at most"
        states, ready = cache.step(network, torch.tensor([texts[r][places[r]] for r in rows]))
        for row, state, is_ready in zip(rows, states, ready.tolist(), strict=True):
            if is_ready:
                found[row].append(state)
                places[row] += 1
        keep = [i for i, row in enumerate(rows) if places[row] < len(texts[row])]
        if len(keep) < len(rows):
            cache.select(torch.tensor(keep, dtype=torch.int64))
            rows = [rows[i] for i in keep]
    return [torch.stack(states) for states in found]


@pytest.mark.parametrize("changes", STYLES.values(), ids=STYLES)
def test_steps_are_the_packed_text(changes):
    """Rows of different lengths, of which each is in another sentence, slot and document."""
    network, texts = build(**changes), list(TEXTS.values())
    for lengths in ([1] * len(texts), [1 + 5 * n % len(text) for n, text in enumerate(texts)]):
        for text, length, states in zip(
            texts, lengths, decode(network, texts, lengths), strict=True
        ):
            torch.testing.assert_close(states, packed(network, text)[length - 1 :], **EXACT)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_prompt_may_end_anywhere(text):
    """All prefixes of a text as prompts of one batch, and one token more."""
    network = build()
    shorter, expected = [text[: n + 1] for n in range(len(text))], packed(network, text)
    for tail, states in enumerate(decode(network, shorter, [n + 1 for n in range(len(text))])):
        torch.testing.assert_close(states[0], expected[tail], **EXACT)


# ---- boundaries


def steps_of(network, text):
    cache, counts, found = start(network, [text], [1]), [], []
    for token in text:
        ready, count = torch.tensor([False]), 0
        while not ready and count < 9:
            states, ready = cache.step(network, torch.tensor([token]))
            count += 1
        counts.append(count)
        found.append(states[0])
    return counts, torch.stack(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([BOS, 1, 2, EOS, 3], [1, 1, 1, 2, 1]),
        ([1, 2, EOS, BOS, 3], [2, 1, 2, 1, 1]),
        ([BOS, BOS, 1], [1, 1, 1]),
        ([1, BOS, 2], [2, 1, 1]),
        ([EOS, 1], [3, 1]),
        ([*range(FULL), 1, 2], [2] + [1] * (FULL - 1) + [3, 1]),
        ([*range(FULL), EOS, 2], [2] + [1] * (FULL - 1) + [2, 1]),
        ([*range(FULL), EOD, EOS], [2] + [1] * (FULL - 1) + [1, 2]),
        ([*range(FULL), BOS, 1], [2] + [1] * (FULL - 1) + [2, 1]),
        ([1, EOD, EOS, 2], [2, 1, 2, 1]),
        ([1, EOD, 2, EOD, BOS, EOD, EOD], [2, 1, 3, 1, 2, 1, 3]),
    ],
    ids=str,
)
def test_a_step_is_one_slot(text, expected):
    assert steps_of(build(), text)[0] == expected


# ---- the cache


def kept_numbers(part):
    """All numbers in tensors that an object keeps."""
    if isinstance(part, torch.Tensor):
        return part.numel()
    if isinstance(part, list | tuple):
        return sum(map(kept_numbers, part))
    return sum(map(kept_numbers, vars(part).values())) if hasattr(part, "__dict__") else 0


@pytest.mark.parametrize("memory", ["differentiable", "in_context"])
def test_a_longer_text_takes_no_more_room(memory):
    network, text = build(memory=memory), marked([2] * 12, last=False)
    short, long = (start(network, [text], [length]) for length in (3 * 4 + 3, 11 * 4 + 3))
    assert kept_numbers(short._memory) == kept_numbers(long._memory) > 0
    assert kept_numbers(short._layers) == kept_numbers(long._layers) > 0
    assert int(long._memory.counts) == network.config.memory_size


def test_decoding_keeps_no_graph():
    network = build()
    cache = start(network, [TEXTS["forgets"]], [14])
    states, _ = cache.step(network, torch.tensor([3]))
    assert not states.requires_grad
