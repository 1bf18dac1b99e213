"""The one decode loop, on models small enough to know every answer."""

import math
import warnings

import pytest
import torch
from methods import METHODS

from datamodules.tokenizers import BytesTokenizer
from lightning_models import TransformerConfig, TransformerLM
from lightning_models.generation import SamplingConfig, generate
from tests.reference.sampling import distribution

GREEDY = SamplingConfig(temperature=0)


class Histories:
    """The cache of a Markov chain: what each row has consumed, and how long it still thinks."""

    def __init__(self, histories):
        self.histories = histories
        self.waiting = [None] * len(histories)

    def select(self, rows):
        self.histories = [self.histories[row] for row in rows.tolist()]
        self.waiting = [self.waiting[row] for row in rows.tolist()]


class Chain:
    """A decoder whose next-token logits are a row of a table.

    Before each token a row needs ``thinks(history)`` steps in which it is not ready and its
    logits are not numbers.
    """

    def __init__(self, table, thinks=lambda history: 0):
        self.table = table
        self.thinks = thinks
        self.batches = []

    def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
        self.streams = streams
        self.prompts, self.lengths, self.max_new_tokens = prompts, lengths, max_new_tokens
        return Histories(
            [row[: n - 1].tolist() for row, n in zip(prompts, lengths.tolist(), strict=True)]
        )

    def decode_step(self, cache, tokens):
        assert not torch.is_grad_enabled()
        assert len(tokens) == len(cache.histories) > 0
        self.batches.append(len(tokens))
        logits = torch.full((len(tokens), len(self.table)), math.nan)
        ready = torch.zeros(len(tokens), dtype=torch.bool)
        for row, token in enumerate(tokens.tolist()):
            if cache.waiting[row] is None:
                cache.waiting[row] = (token, self.thinks([*cache.histories[row], token]))
            asked, left = cache.waiting[row]
            assert token == asked, "a waiting row was stepped with another token"
            if left:
                cache.waiting[row] = (token, left - 1)
                continue
            cache.waiting[row] = None
            cache.histories[row].append(token)
            logits[row], ready[row] = self.table[token], True
        return logits, ready


def random_table(size=7, seed=0):
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 2


def successor_table(size=10):
    """Token n is followed by n + 1 for certain."""
    return torch.roll(torch.eye(size), 1, dims=1) * 100


# ---- greedy


def test_greedy_is_a_loop_of_argmax():
    table = random_table()
    prompts = [[3], [1, 2, 5], [0, 6]]
    expected = []
    for prompt in prompts:
        tokens = [prompt[-1]]
        for _ in range(8):
            tokens.append(table[tokens[-1]].argmax().item())
        expected.append(tokens[1:])
    assert generate(Chain(table), prompts, max_new_tokens=8, sampling=GREEDY) == expected


def language_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "block_size": 24, "num_layers": 2, "dim": 16, "num_heads": 2}
    model = TransformerLM(TransformerConfig(**{**sizes, "init_std": 0.5, **changes}))
    model.configure_model()
    return model.eval()


@torch.no_grad()
def without_cache(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        h = model.network(torch.tensor([tokens]))[0, -1]
        tokens.append((model.network.output_matrix @ h)[:40].argmax().item())
    return tokens[len(prompt) :]


def test_learned_positions_serve_every_position_and_none_more():
    """The last token is never consumed: P prompt tokens and n new ones need P + n - 1 positions."""
    model = language_model()
    prompt = [n % 40 for n in range(24)]
    with pytest.raises(ValueError, match="block_size"):
        generate(model, [prompt], max_new_tokens=2, sampling=GREEDY)
    mine = generate(model, [prompt], max_new_tokens=1, sampling=GREEDY, vocab_size=40)
    assert mine == [without_cache(model, prompt, 1)]


ROTARY = {method.name: method for method in METHODS if "gestalt" not in method.name}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_past_the_training_say_so_once(name):
    model = ROTARY[name].build().eval()
    if model.config.position_limit is not None:
        pytest.skip("positions are learned, and refuse")
    size = model.config.block_size
    prompts = [[1] * (size - 3), [2] * 3]
    how = {"sampling": GREEDY, "vocab_size": model.config.vocab_size}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        generate(model, prompts, max_new_tokens=4, **how)  # the last token is not read again
        assert not [one for one in said if "longer than" in str(one.message)]
        for _ in range(2):
            generate(model, prompts, max_new_tokens=6, **how)
    (one,) = [str(one.message) for one in said if "longer than" in str(one.message)]
    assert f"longer than the {size} tokens of the model's training (block_size)" in one


# ---- sampling


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 3},
    "cold-top-k": {"top_k": 4, "temperature": 0.7},
    "top-p": {"top_p": 0.7},
    "hot-top-p": {"top_p": 0.6, "temperature": 2.0},
    "top-k-then-top-p": {"top_k": 4, "top_p": 0.8, "temperature": 1.5},
    "top-k-of-all": {"top_k": 100},
    "top-p-of-all": {"top_p": 1.0},
}
ROWS = 3000


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_follow_the_distribution(name):
    """Chi-square against the exact odds; fixed seeds, so the test passes always or never."""
    options = SETTINGS[name]
    logits = [1.0, -1.5, 2.0, 0.3, 1.6, -6.0]
    chain = Chain(torch.tensor([logits] * 6))
    rows = generate(chain, [[0]] * ROWS, max_new_tokens=2, sampling=SamplingConfig(**options))
    for position in range(2):
        counts = torch.zeros(6, dtype=torch.float64)
        for row in rows:
            counts[row[position]] += 1
        expected = torch.tensor(distribution(logits, **options), dtype=torch.float64) * ROWS
        possible = expected > 0
        assert (counts[~possible] == 0).all()
        if expected.max() == ROWS:
            continue
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
        assert torch.special.gammaincc(freedom, statistic / 2) > 1e-3  # odds of a larger one


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}], ids=str)
def test_narrow_sampling_is_greedy(options):
    table = random_table()
    prompts = [[n] for n in range(7)]
    greedy = generate(Chain(table), prompts, max_new_tokens=6, sampling=GREEDY)
    sampling = SamplingConfig(**options)
    assert generate(Chain(table), prompts, max_new_tokens=6, sampling=sampling) == greedy


def test_seeds():
    prompts = [[0], [0], [0]]

    def sample(seed):
        sampling = SamplingConfig(seed=seed)
        return generate(Chain(random_table()), prompts, max_new_tokens=20, sampling=sampling)

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first
    assert len({tuple(row) for row in first}) == 3


def test_every_part_returns_to_the_mode_it_was_in():
    model = language_model(vocab_size=257).train()
    model.network.blocks[0].eval()  # frozen by hand
    modes = [part.training for part in model.modules()]
    model.generate_text(["a"], tokenizer=BytesTokenizer(), max_new_tokens=2)
    assert [part.training for part in model.modules()] == modes


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    generate(Chain(random_table()), [[0]], max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_do_not_depend_on_how_many_others_there_are_or_when_they_finish():
    prompts = [[n % 7] * (1 + n % 3) for n in range(8)]
    whole = generate(Chain(random_table()), prompts, max_new_tokens=12)
    for count in (1, 3, 7):
        part = generate(Chain(random_table()), prompts[:count], max_new_tokens=12)
        assert part == whole[:count]
    chain = Chain(random_table())
    stopped = generate(chain, prompts, max_new_tokens=12, stop_ids=(2,))
    assert chain.batches[-1] < chain.batches[0] == 8
    for row, full in zip(stopped, whole, strict=True):
        assert row == full[: full.index(2) + 1 if 2 in full else 12]


def test_prompts_in_several_calls_keep_their_streams():
    prompts = [[n % 7] for n in range(8)]
    whole = generate(Chain(random_table()), prompts, max_new_tokens=12)
    parts = []
    for first, last in ((0, 3), (3, 4), (4, 8)):
        chain = Chain(random_table())
        parts += generate(chain, prompts[first:last], max_new_tokens=12, first_row=first)
    assert parts == whole


# ---- rows that think


def test_rows_that_are_not_ready_wait_and_draw_nothing():
    """Rows think for different times before each token; the text is that of quick rows."""
    prompts = [[n] for n in range(7)]

    def thinks(history):
        return (3 * history[0] + 2 * len(history)) % 5

    for sampling in (GREEDY, SamplingConfig(seed=4, top_k=5, top_p=0.95)):
        quick, slow = Chain(random_table()), Chain(random_table(), thinks)
        options = {"max_new_tokens": 10, "sampling": sampling, "stop_ids": (3,)}
        expected = generate(quick, prompts, **options)
        assert generate(slow, prompts, **options) == expected
        assert sampling is GREEDY or len({len(row) for row in expected}) > 1
        assert len(slow.batches) > len(quick.batches)


def test_finished_rows_leave_and_waiting_rows_stay():
    chain = Chain(successor_table(), thinks=lambda history: 4 if history[0] == 5 else 0)
    rows = generate(chain, [[0], [5], [1]], max_new_tokens=3, sampling=GREEDY)
    assert rows == [[1, 2, 3], [6, 7, 8], [2, 3, 4]]
    assert chain.batches == [3] * 3 + [1] * 12


# ---- ends


def test_a_row_ends_behind_eos_or_at_its_bound():
    chain = Chain(successor_table())
    rows = generate(chain, [[5], [0], [7, 8]], max_new_tokens=4, sampling=GREEDY, stop_ids=(8,))
    assert rows == [[6, 7, 8], [1, 2, 3, 4], [9, 0, 1, 2]]
    assert chain.max_new_tokens == 4
    assert chain.batches == [3, 3, 3, 2]
    both = generate(chain, [[5], [0]], max_new_tokens=9, sampling=GREEDY, stop_ids=(8, 2))
    assert both == [[6, 7, 8], [1, 2]]
    endless = generate(Chain(successor_table()), [[5]], max_new_tokens=4, sampling=GREEDY)
    assert endless == [[6, 7, 8, 9]]


def test_prompts_arrive_padded_on_the_right():
    chain = Chain(successor_table())
    generate(chain, [[1], [2, 3, 4], [5, 6]], max_new_tokens=1)
    assert chain.lengths.tolist() == [1, 3, 2]
    assert chain.prompts.dtype == torch.int64
    for row, prompt in zip(chain.prompts.tolist(), [[1], [2, 3, 4], [5, 6]], strict=True):
        assert row[: len(prompt)] == prompt


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(), SamplingConfig(top_p=0.99)])
def test_padding_of_the_vocabulary_is_never_chosen(sampling):
    table = random_table()
    table[:, 5:] = 50.0
    rows = generate(Chain(table), [[0]] * 50, max_new_tokens=5, sampling=sampling, vocab_size=5)
    assert {token for row in rows for token in row} <= set(range(5))
    free = generate(Chain(table), [[0]] * 50, max_new_tokens=1, sampling=sampling)
    assert {token for row in free for token in row} <= {5, 6}


def test_nothing_to_generate():
    assert generate(Chain(random_table()), [[1], [2]], max_new_tokens=0) == [[], []]


@pytest.mark.parametrize("prompts", [[[]], [[1], []], []], ids=str)
def test_empty_prompts_are_errors(prompts):
    with pytest.raises(ValueError, match="EOS"):
        generate(Chain(random_table()), prompts, max_new_tokens=3)
