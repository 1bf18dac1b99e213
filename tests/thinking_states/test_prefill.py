"""Speculative reading against sequential reading, and both against thinking from scratch."""

from dataclasses import replace

import pytest
import torch

from evaluation.reason.controls import latents_of, replacement, replacing
from lightning_models.generation import SamplingConfig, generate
from lightning_models.thinking_states.backbone import causal_mask
from lightning_models.thinking_states.reading import finish_thoughts, open_thoughts, read_queries
from tests.thinking_states.cases import (
    FAMILIES,
    GRIDS,
    V,
    build,
    exact,
    outspoken,
    query_of,
    ragged,
)

EXACT = {"atol": 1e-9, "rtol": 0}
LENGTHS = [19, 3, 12, 1, 17, 8]


def both(model, query, lengths):
    with torch.no_grad():
        return [
            read_queries(model.network, query, lengths, how)
            for how in ("speculative", "sequential")
        ]


def check_same(one, other, rows=slice(None), tail=None):
    """That two readings found the same states, caches and thoughts, of rows of the second."""
    for name in ("state", "tapped", "last"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name)[rows], **EXACT)
    assert one.thoughts() == other.thoughts()[rows]
    tail = one.past.real.shape[1] if tail is None else tail
    real = one.past.real[:, -tail:]
    assert torch.equal(real, other.past.real[rows, -tail:])
    assert torch.equal(one.past.lengths, other.past.lengths[rows])
    assert len(one.past.past.layers) == len(other.past.past.layers)
    for mine, theirs in zip(one.past.past.layers, other.past.past.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            a, b = (x[:, :, -tail:].transpose(1, 2)[real] for x in (a, b[rows]))
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("c", "seed", "changes"),
    [
        (1, 0, {}),
        (3, 1, {}),
        (4, 0, {}),
        (4, 2, {"window": 5}),
        (3, 0, {"window": 2}),
        *((4, 1, {"family": family, "input_layer": 0}) for family in FAMILIES),
    ],
)
def test_speculative_and_sequential_reading_are_the_same(grid, c, seed, changes):
    model = exact(outspoken(seed, grid=grid, chunk_size=c, **changes))
    speculative, sequential = both(model, *ragged(LENGTHS, seed))
    check_same(speculative, sequential)
    thoughts = [thought.tokens for row in sequential.thoughts() for thought in row]
    assert any(thoughts), "the model must think"
    assert not all(thoughts), "not always"
    assert any(len(tokens) > 1 for tokens in thoughts)
    check_rounds(speculative, sequential)


@pytest.mark.parametrize("grid", GRIDS)
def test_thoughts_can_be_switched_off(grid):
    """What is left is the backbone, whose plain pass over a query has no states."""
    model = exact(outspoken(0, grid=grid, chunk_size=4, think=False))
    query, lengths = ragged(LENGTHS, 0)
    speculative, sequential = both(model, query, lengths)
    check_same(speculative, sequential)
    assert not any(thought.tokens for row in speculative.thoughts() for thought in row)
    assert speculative.rounds == [1] * len(LENGTHS)
    backbone, tokens = model.network.backbone, query[:1, : LENGTHS[0]]
    with torch.no_grad():
        plain = backbone(backbone.embed(tokens), torch.arange(LENGTHS[0])[None]).last
    torch.testing.assert_close(speculative.last[0], plain[0, -1], **EXACT)


@pytest.mark.parametrize(
    ("control", "grid"),
    [
        ("zero", "left_align"),
        ("pause", "partial"),
        ("noise", "absolute"),
        ("swap", "absolute"),
        ("swap", "left_align"),
    ],
)
def test_replaced_states_are_the_same_in_both_ways_and_in_any_batch(control, grid):
    """Answers think, too: rows are told apart after others have left the batch."""
    model = exact(outspoken(0, grid=grid, think_in_decode=True))
    query, lengths = ragged(LENGTHS, 0)
    prompts = [row[:length].tolist() for row, length in zip(query, lengths, strict=True)]
    stops, numbers = tuple(range(0, V, 5)), [40 + row for row in range(len(prompts))]

    def written(rows, how):
        model.config = model.network.config = replace(model.config, prefill=how)
        chosen = [numbers[row] for row in rows]

        def write(rows=rows):
            return generate(
                model,
                [prompts[row] for row in rows],
                max_new_tokens=9,
                sampling=SamplingConfig(temperature=0),
                stop_ids=stops,
                vocab_size=V,
            )

        def others():
            return latents_of(model, lambda: write([(row + 1) % len(prompts) for row in rows]))

        change = replacement(control, model, chosen, 0, others)
        seen = {}

        def keep(latents, places, counts):
            changed = change(latents, places, counts)
            for was, now, row, count in zip(latents, changed, places, counts, strict=True):
                seen[int(row), int(count)] = was, now
            return changed

        with replacing(model, keep):
            return write(), seen

    everyone = range(len(prompts))
    texts, seen = written(everyone, "speculative")
    assert len({len(text) for text in texts}) > 1, "rows leave at different times"
    assert max(count for _, count in seen) > 0, "rows think several times"
    same = [torch.equal(was, now) for was, now in seen.values()]
    assert not all(same) if control == "swap" else not any(same), "questions may think the same"
    if control == "noise":
        for was, now in seen.values():
            torch.testing.assert_close(now.norm(dim=-1), was.norm(dim=-1), **EXACT)
    again, theirs = written(everyone, "sequential")
    assert again == texts
    torch.testing.assert_close(theirs, seen, **EXACT)
    for row in everyone:
        (alone,), own = written([row], "speculative")
        assert alone == texts[row]
        expected = {(0, count): pair for (other, count), pair in seen.items() if other == row}
        torch.testing.assert_close(own, expected, **EXACT)


def test_zero_states_are_those_of_no_thought():
    query, lengths = ragged(LENGTHS, 0)
    silent = both(exact(outspoken(0, think=False)), query, lengths)[0]
    model = exact(outspoken(0))
    with replacing(model, replacement("zero", model, range(len(LENGTHS)), 0, dict)):
        zero = both(model, query, lengths)[0]
    assert any(thought.tokens for row in zero.thoughts() for thought in row)
    for name in ("state", "last"):
        torch.testing.assert_close(getattr(zero, name), getattr(silent, name), **EXACT)


def check_rounds(speculative, sequential):
    """One round a thought with tokens, and one more unless the last chunk has one."""
    for row, thoughts in enumerate(sequential.thoughts()):
        spoken = [bool(thought.tokens) for thought in thoughts]
        complete = bool(sequential.blocks.thinks[row, -1])
        through = complete and bool(spoken) and spoken[-1]
        assert speculative.rounds[row] == sum(spoken) + (not through)
        assert sequential.rounds[row] == int(sequential.blocks.chunks[row])


def test_states_change_what_is_thought_later():
    """Else the order of reading would not matter, and nothing here would be tested."""
    model = outspoken()
    query, lengths = ragged([19] * 8, 1)
    before = both(model, query, lengths)[1].thoughts()
    with torch.no_grad():
        for weight in model.network.compression.parameters():
            weight.add_(torch.randn_like(weight))
    after = both(model, query, lengths)[1].thoughts()
    first = [next(n for n, t in enumerate(row) if t.tokens) for row in before]
    for row, n in enumerate(first):
        assert before[row][: n + 1] == after[row][: n + 1]
    assert before != after


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("loud", "rounds"), [((), 1), ((1,), 2), ((0, 3), 3), ((4,), 1), ((2, 4), 2), (range(5), 5)]
)
def test_rounds_are_the_thoughts_and_one_more_unless_the_last_chunk_thinks(grid, loud, rounds):
    model = outspoken(strength=20.0, grid=grid)
    query = query_of(5, 4, loud)
    speculative, sequential = both(model, query, torch.tensor([20]))
    assert speculative.rounds == [rounds]
    assert sequential.rounds == [5]
    for read in (speculative, sequential):
        (thoughts,) = read.thoughts()
        assert [n for n, thought in enumerate(thoughts) if thought.tokens] == list(loud)
        assert [thought.end for thought in thoughts] == [3, 7, 11, 15, 19]
        assert bool(read.state.any()) == (4 in loud)


def test_finished_rows_are_not_computed_again(monkeypatch):
    model = outspoken(strength=20.0)
    query = torch.cat([query_of(5, 4, loud) for loud in ((), (1, 3), (0,))])
    rows, through = [], model.network.run_layers

    def counted(h, layers, *rest):
        if layers == (1, 2):
            rows.append(h.shape[:2])
        return through(h, layers, *rest)

    monkeypatch.setattr(model.network, "run_layers", counted)
    with torch.no_grad():
        read = read_queries(model.network, query, torch.tensor([20] * 3), "speculative")
    assert read.rounds == [1, 3, 2]
    assert rows == [(3, 20), (2, 16), (1, 4)]


def naive_thought(network, tapped, most):
    """A thought decoded without any cache, the whole of it read again for each token."""
    c, tokens = network.config.chunk_size, []
    learned = getattr(network.backbone.model, "wpe", None)
    while len(tokens) < most:
        spoken = network.backbone.embed(torch.tensor(tokens, dtype=torch.int64))
        if learned is not None:
            spoken = spoken + learned.weight[c : c + len(tokens)]
        h = torch.cat((tapped, spoken))[None]
        positions = c - len(tapped) + torch.arange(h.shape[1])[None]
        state = network.thinking(h, network.backbone.rotary(h, positions))[0, -1]
        token = int((network.thinking_matrix[: V + 2] @ state).argmax())
        if token == V:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize(
    ("most", "family"), [(1, None), (2, None), (4, None), (30, None), (2, "gpt2"), (2, "llama")]
)
def test_thoughts_are_greedy_and_cut_at_their_most_tokens(most, family):
    model = exact(outspoken(max_thought_tokens=most, family=family))
    network, c = model.network, 4
    tapped = network.backbone.embed(torch.randint(0, V, (24, c)))
    tapped = tapped + 0.3 * torch.randn_like(tapped)
    real = torch.arange(c) >= torch.tensor([0, 1, 2, 3] * 6)[:, None]
    expected = [naive_thought(network, h[mask], most) for h, mask in zip(tapped, real, strict=True)]
    with torch.no_grad():
        opened = open_thoughts(network, tapped, real)
        own = (opened.first != V).nonzero()[:, 0]
        thoughts = finish_thoughts(network, opened, own).to_lists()
    assert own.tolist() == [row for row, tokens in enumerate(expected) if tokens]
    assert thoughts == [tokens for tokens in expected if tokens]
    assert max(map(len, thoughts)) == most or most == 30


def test_a_thought_never_holds_padding():
    """The padding's id and those after it are no tokens, however likely."""
    model = outspoken()
    with torch.no_grad():
        model.network.thinking_matrix[V + 2] = 50.0 * model.network.thinking_matrix[2]
        query, lengths = ragged([20] * 6, 3)
        (read, _) = both(model, query, lengths)
    tokens = {token for row in read.thoughts() for thought in row for token in thought.tokens}
    assert tokens
    assert max(tokens) <= V + 1


def test_masks_let_padding_see_itself():
    """No row of a softmax is empty, else padding would turn into nan and spread."""
    assert causal_mask(torch.zeros(1, 3, dtype=torch.bool), 3).any(dim=-1).all()
    model = build()
    read, _ = both(model, *ragged([1, 20], 0))
    assert read.last.isfinite().all()


@pytest.mark.parametrize(
    ("seed", "changes"),
    [(0, {}), (0, {"window": 5}), *((1, {"family": f, "strength": 20.0}) for f in FAMILIES)],
)
@pytest.mark.parametrize("grid", GRIDS)
def test_rows_do_not_depend_on_the_batch_nor_on_padding(grid, seed, changes):
    """Each row alone, without padding, is what it is among rows that need more rounds."""
    model = exact(outspoken(2, grid=grid, **changes))
    query, lengths = ragged(LENGTHS, seed)
    wide = torch.nn.functional.pad(query, (0, 9), value=3)
    speculative, sequential = both(model, wide, lengths)
    assert len(set(speculative.rounds)) > 2, "rows must leave the batch at different times"
    for row, length in enumerate(LENGTHS):
        alone, plain = both(model, query[row : row + 1, :length], lengths[row : row + 1])
        tail = alone.past.real.shape[1]
        check_same(alone, speculative, slice(row, row + 1), tail)
        check_same(plain, sequential, slice(row, row + 1), tail)
        assert alone.rounds == speculative.rounds[row : row + 1]
