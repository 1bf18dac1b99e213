"""Prompts: their wording, which demonstrations they have, and what goes when there is no room."""

import pytest

from datamodules import load_tokenizer
from datamodules.gsm8k import Problem
from evaluation.gsm8k import draw_demonstrations, fit_prompt, make_prompts, prompt_text

TOKENIZER = load_tokenizer("bytes")
SHOWN = [Problem(f"Of {n}?", f"It is {n}.\n#### {n}") for n in range(30)]


def text_of(prompt) -> str:
    return TOKENIZER.decode(prompt.ids)


def test_wording():
    assert prompt_text("How many?") == "Question: How many?\nAnswer:"
    assert prompt_text("How many?", SHOWN[:2]) == (
        "Question: Of 0?\nAnswer: It is 0.\n#### 0\n\n"
        "Question: Of 1?\nAnswer: It is 1.\n#### 1\n\n"
        "Question: How many?\nAnswer:"
    )


def test_draws_depend_on_seed_and_question_only():
    drawn = {n: draw_demonstrations(SHOWN, 5, seed=0, question=n) for n in (3, 0, 3, 7)}
    assert drawn[3] == draw_demonstrations(SHOWN, 5, seed=0, question=3)
    assert drawn[3] != drawn[0]
    assert drawn[3] != draw_demonstrations(SHOWN, 5, seed=1, question=3)
    assert draw_demonstrations(SHOWN, 2, seed=0, question=3) == drawn[3][:2]
    for problems in drawn.values():
        assert len(set(problems)) == 5
    with pytest.raises(ValueError, match=r"shots \(31\) is more than the 30 training problems"):
        draw_demonstrations(SHOWN, 31, seed=0, question=0)


def test_every_problem_is_drawn_at_some_time():
    draws = [draw_demonstrations(SHOWN, 3, seed=0, question=n) for n in range(200)]
    counts = [sum(problem in drawn for drawn in draws) for problem in SHOWN]
    assert min(counts) >= 5  # 20 on average, with a standard deviation of 4.2
    assert max(counts) <= 40


def test_demonstrations_are_dropped_from_the_front():
    whole = fit_prompt("How many?", SHOWN[:3], TOKENIZER, room=None)
    assert (whole.shots, whole.cut) == (3, False)
    assert whole.ids[0] == TOKENIZER.eos_id
    lengths = [len(fit_prompt("How many?", SHOWN[n:3], TOKENIZER, room=None).ids) for n in range(4)]
    for room in range(lengths[3], lengths[0] + 3):
        prompt = fit_prompt("How many?", SHOWN[:3], TOKENIZER, room=room)
        dropped = next(n for n in range(4) if lengths[n] <= room)
        assert (prompt.shots, prompt.cut) == (3 - dropped, False)
        assert text_of(prompt) == prompt_text("How many?", SHOWN[dropped:3])


def test_the_end_of_a_long_question_stays():
    bare = fit_prompt("How many are there?", (), TOKENIZER, room=None)
    for room in (1, 7, 20, len(bare.ids) - 1):
        prompt = fit_prompt("How many are there?", SHOWN[:2], TOKENIZER, room=room)
        assert prompt.ids == bare.ids[-room:]
        assert (prompt.shots, prompt.cut) == (0, True)


def test_prompts_of_all_questions():
    asked = [Problem(f"How many are {n}?", "#### 1") for n in range(4)]
    prompts = make_prompts(asked, SHOWN, TOKENIZER, shots=2, seed=5)
    assert make_prompts(asked[:2], SHOWN, TOKENIZER, shots=2, seed=5) == prompts[:2]
    for number, prompt in enumerate(prompts):
        shown = draw_demonstrations(SHOWN, 2, seed=5, question=number)
        assert text_of(prompt) == prompt_text(asked[number].question, shown)
    assert text_of(make_prompts(asked, [], TOKENIZER)[1]) == prompt_text(asked[1].question)


def test_what_is_asked_is_not_shown():
    with pytest.raises(ValueError, match=r"files\.train has 1 of the questions that are asked"):
        make_prompts(SHOWN[:1], SHOWN, TOKENIZER, shots=1)
