"""Thinking slot by slot with a cache, against the slow version, which has none."""

import contextlib
import math

import pytest
import torch

from callbacks.dials import dialled
from lightning_models.layers import recording
from lightning_models.ponderlm import PonderLM
from tests.ponderlm.cases import (
    ALL_STYLES,
    EXACT,
    V,
    build,
    recorded,
    row_of,
    rows_of,
    some_tokens,
    weights_of,
)
from tests.reference import ponderlm as reference

pytestmark = pytest.mark.usefixtures("exact_tables")
TAU = 0.05
STOPPING = {
    "shifted": {"thinking_steps": 3},
    "literal": {"thinking_steps": 3, "mask_index": "literal", "augmentation": "literal"},
    "sequential-positions": {"thinking_steps": 3, "latent_positions": "sequential"},
    "alpha": {"thinking_steps": 3, "alpha": -1.5},
}


def stopping(style="shifted", **changes):
    """A model some of whose tokens stop early."""
    return build(router=2.0, tau=TAU, **{**STOPPING[style], **changes})


def slow_thoughts(model, tokens, **options):
    """The slow version of a row, with the model's own ``tau`` and ``alpha``."""
    dials = {name: getattr(model.config, name, 0.0) for name in ("tau", "alpha")}
    with torch.no_grad():
        return reference.sequential(weights_of(model), model.config, tokens, **dials, **options)


def reading(model, iterations, tokens):
    """A prompt as the slow version reads it in parallel."""
    dials = {name: getattr(model.config, name, 0.0) for name in ("tau", "alpha")}
    weights = weights_of(model)
    with torch.no_grad():
        return reference.read_in_parallel(weights, model.config, tokens, iterations, **dials)


def assert_scores(model, batch):
    names = ("states", "thinking_steps", "router")
    scores, found = recorded(model, batch, *names)
    (states,), (steps,) = found["states"], found["thinking_steps"]
    assert states["iteration"] is None
    assert steps["most"] == model.config.thinking_steps
    taken = []
    for row in range(len(batch["tokens"])):
        tokens, targets = row_of(batch, row)
        for t, thought in enumerate(slow_thoughts(model, tokens)):
            own = states["states"][row, t]
            taken.append(thought.executed)
            assert steps["executed"][row, t] == thought.executed
            expected = torch.stack(thought.states)
            torch.testing.assert_close(own[: len(expected)], expected, **EXACT)
            nll = reference.cross_entropy(weights_of(model), thought.read_out, targets[t])
            assert -scores.log_prob[row, t].item() == pytest.approx(nll.item(), rel=1e-5)
            if thought.log_tail is not None:
                log_tail = found["router"][0]["log_tail"][row, t]
                torch.testing.assert_close(log_tail, thought.log_tail, **EXACT)
        for nothing in (scores.log_prob, steps["executed"], states["states"]):
            assert (nothing[row, len(tokens) :] == 0).all()
    return taken


@pytest.mark.parametrize("style", ALL_STYLES)
def test_scores_without_stopping(style):
    kind, changes = ALL_STYLES[style]
    never = {"tau": 0.0} if kind is PonderLM else {}
    model = build(kind, inference="sequential", **changes, **never)
    taken = assert_scores(model, rows_of([3, 1, 2]))
    assert set(taken) == {model.config.thinking_steps}


@pytest.mark.parametrize("style", STOPPING)
def test_scores_with_stopping(style):
    """Rows of several lengths whose tokens take several numbers of steps."""
    taken = assert_scores(stopping(style, inference="sequential"), rows_of([4, 2, 3]))
    assert len(set(taken)) > 2


def decoded(model, prompts, lengths, continuation):
    """Decodes given tokens: logits of every token, decode steps it took, and the cache."""
    with torch.no_grad():
        cache = model.init_cache(prompts, lengths, len(continuation[0]))
        tokens = prompts.gather(1, lengths[:, None] - 1)[:, 0]
        rows = [([], []) for _ in prompts]
        steps, read = [0] * len(prompts), [0] * len(prompts)
        while min(read) <= len(continuation[0]):
            logits, ready = model.decode_step(cache, tokens)
            for row, is_ready in enumerate(ready.tolist()):
                steps[row] += 1
                if not is_ready:
                    continue
                if read[row] <= len(continuation[0]):
                    rows[row][0].append(logits[row])
                    rows[row][1].append(steps[row])
                steps[row], following = 0, continuation[row]
                tokens[row] = following[min(read[row], len(following) - 1)]
                read[row] += 1
            if max(read) > len(continuation[0]):
                break  # the cache has room for no more
    return rows, cache


def assert_decodes(model, thoughts, found):
    """Logits and steps of the latest tokens, of which the slowest rows have seen fewer."""
    logits, steps = found
    assert len(logits) > 0
    for thought, own, count in zip(thoughts, logits, steps, strict=False):
        torch.testing.assert_close(own, thought.logits.float(), atol=1e-5, rtol=1e-5)
        assert count == thought.executed + 1, "a decode step is a slot"


@pytest.mark.parametrize("prefill", ["sequential", "jacobi"])
@pytest.mark.parametrize("style", STOPPING)
def test_cached_decoding_is_uncached(style, prefill):
    """T2 and T3, for ragged rows that stop at different steps; converged prefill is the same."""
    model = stopping(style, prefill=prefill, eval_iterations=None)
    prompts, lengths = rows_of([3, 1, 2])["tokens"], torch.tensor([3, 1, 2])
    continuation = [some_tokens(2, 5 + row) for row in range(3)]
    found, _ = decoded(model, prompts, lengths, continuation)
    for row, length in enumerate(lengths.tolist()):
        tokens = prompts[row, :length].tolist() + continuation[row]
        assert_decodes(model, slow_thoughts(model, tokens)[length - 1 :], found[row])


@pytest.mark.parametrize("style", ALL_STYLES)
def test_decoding_behind_a_prompt_read_by_few_iterations(style):
    """Keys are those of the last pass, attenuated by the w of that pass."""
    kind, changes = ALL_STYLES[style]
    model = build(kind, **changes, eval_iterations=1)
    prompts, lengths = rows_of([3, 2])["tokens"], torch.tensor([3, 2])
    continuation = [some_tokens(1, 5 + row) for row in range(2)]
    found, _ = decoded(model, prompts, lengths, continuation)
    for row, length in enumerate(lengths.tolist()):
        prompt = reading(model, 1, prompts[row, : length - 1].tolist())
        tokens = [prompts[row, length - 1].item(), *continuation[row]]
        assert_decodes(model, slow_thoughts(model, tokens, behind=prompt), found[row])


@pytest.mark.parametrize("style", STOPPING)
def test_decoding_behind_a_prompt_of_skipped_steps(style):
    """The same where slots are skipped; few iterations are not the fixed point."""
    model = stopping(style, eval_iterations=0)
    tokens, following = some_tokens(4, 1), [some_tokens(1, 6)]
    found, cache = decoded(model, torch.tensor([tokens]), torch.tensor([4]), following)
    prompt = reading(model, 0, tokens[:3])
    thoughts = slow_thoughts(model, [tokens[3], *following[0]], behind=prompt)
    assert_decodes(model, thoughts, found[0])
    kept = sum(not math.isinf(slot.bias.item()) for slot in prompt.slots)
    assert kept < 3 * 4
    assert cache.kv.lengths.tolist() == [kept + sum(1 + x.executed for x in thoughts)]
    exact = slow_thoughts(model, tokens)[3].logits
    assert (exact - thoughts[0].logits).abs().max() > 1e-2, "converged too early to tell"


@pytest.mark.parametrize("prefill", ["sequential", "jacobi"])
def test_skipped_slots_leave_no_keys(prefill):
    """T2: a row has as many entries as its tokens have taken steps, and one each; in order."""
    model = stopping(prefill=prefill, eval_iterations=None)
    prompts, lengths = rows_of([4, 3])["tokens"], torch.tensor([4, 3])
    with torch.no_grad():
        cache = model.init_cache(prompts, lengths, 1)
    for row, length in enumerate(lengths.tolist()):
        thoughts = slow_thoughts(model, prompts[row, : length - 1].tolist())
        counts = [1 + thought.executed for thought in thoughts]
        assert sum(counts) < 4 * (length - 1)
        assert cache.kv.lengths[row] == sum(counts)
        expected = [
            thought.log_tail[k].item() if k else 0.0
            for thought in thoughts
            for k in range(1 + thought.executed)
        ]
        assert cache.bias[row, : sum(counts)].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", [1, 3])
def test_what_a_hard_stop_changes(seed):
    """T5: O(tau) with w_k on slot k; with the labels of Fig. 7, whatever the slots hold."""
    change, batch = {}, {"tokens": torch.tensor([some_tokens(4, seed)])}
    batch["targets"] = batch["tokens"]
    for mask_index in ("shifted", "literal"):
        found = []
        for tau in (0.0, 1e-4):
            styles = {"mask_index": mask_index, "thinking_steps": 3, "tau": tau}
            model = build(seed=seed, router=6.0, **styles, inference="sequential")
            _, statistics = recorded(model, batch, "states", "router", "thinking_steps")
            s = statistics["router"][0]["log_steps"].exp()[..., None]
            found.append((s * statistics["states"][0]["states"]).sum(dim=2))
        assert statistics["thinking_steps"][0]["executed"].sum() < 4 * 3
        change[mask_index] = (found[0] - found[1]).abs().max()
    assert change["shifted"] < 1e-3
    assert change["literal"] > 0.05


@pytest.mark.parametrize("tau", [0.0, 0.9])
def test_all_or_nothing(tau):
    """tau = 0 never stops, however small w; a high one always does, and slot 0 remains."""
    model = build(thinking_steps=3, tau=tau, inference="sequential")
    with torch.no_grad():
        model.network.router.weight.zero_()
        model.network.router.bias.copy_(torch.tensor([0.0, -300.0, -600.0, -900.0]))
    assert set(assert_scores(model, rows_of([2, 2]))) == ({3} if tau == 0 else {0})


def test_dials_are_read_anew():
    """Of a model that has been used before, without building it again."""
    model, batch = stopping(inference="sequential"), rows_of([3])

    def measured(**dials):
        with contextlib.ExitStack() as stack:
            for name, value in dials.items():
                stack.enter_context(dialled(model, name, value))
            _, found = recorded(model, batch, "thinking_steps", "states")
        return found["thinking_steps"][0]["executed"].sum().item(), len(found["states"])

    usual = measured()
    assert measured(tau=0.0) == (9, 1)
    assert measured(alpha=-9.0)[0] < usual[0] < 9
    assert measured(inference="jacobi") == (usual[0], 4)
    assert measured(inference="jacobi", eval_iterations=1)[1] == 2
    assert measured() == usual


def test_logits_of_rows_that_still_think():
    """They are zeros, and the row is not ready."""
    model = build(thinking_steps=1, tau=0.0)
    taken = []
    with torch.no_grad(), recording(generated_steps=lambda steps: taken.extend(steps.tolist())):
        cache = model.init_cache(torch.tensor([[3]]), torch.tensor([1]), 1)
        first, ready = model.decode_step(cache, torch.tensor([3]))
        assert not ready.any()
        assert (first == 0).all()
        second, ready = model.decode_step(cache, torch.tensor([3]))
    assert ready.all()
    assert second.shape == (1, V)
    assert taken == [1]
