"""Questions answered rightly are counted after validations, and runs can be chosen by it."""

import pytest
import torch

from callbacks import AnswerAccuracy, SaveCheckpoints
from callbacks.answer_accuracy import Question, judge, longest_text, questions_in
from datamodules import Kinship
from lightning_models import CoTConfig, CoTLM, NoCoTConfig, NoCoTLM, OptimizerConfig

SIZES = {"vocab_size": 257, "block_size": 96, "num_layers": 3, "dim": 16, "num_heads": 2}
ALL = {"limit_val_batches": 1.0}


def build(kind=NoCoTLM, config=NoCoTConfig, **changes):
    torch.manual_seed(0)
    return kind(config(**{**SIZES, **changes}), OptimizerConfig(schedule="constant", warmup=0))


class Parrot(NoCoTLM):
    """Answers every question with one text, whatever it is."""

    text = b" a=1 b=2"

    def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
        return Said()

    def decode_step(self, cache, tokens):
        ids = [*self.text, 256]
        logits = torch.zeros(len(tokens), 320)
        logits[:, ids[cache.number]] = 1.0
        cache.number += 1
        return logits, torch.ones(len(tokens), dtype=torch.bool)


class Said:
    number = 0

    def select(self, rows):
        """All rows say the same."""


def parrot(text):
    model = build(Parrot)
    model.text = text.encode()
    return model


@pytest.fixture
def data(make_reasoning):
    """Six questions with one assignment or two, in batches of four."""
    module = make_reasoning()
    module.prepare_data()
    module.setup("validate")
    return module


def batches_of(data, split="val"):
    source = data.evaluation_source(split)
    return [source.batch(n) for n in range(len(source))]


# ---- what is counted


def test_right_answers_are_counted_by_group(data, make_trainer):
    examples = list(data.examples("val"))
    text = examples[0].answer
    trainer = make_trainer(AnswerAccuracy(), **ALL)
    (logged,) = trainer.validate(parrot(text), data, verbose=False)
    right = [example.answer == text for example in examples]
    assert logged["val/accuracy"] == pytest.approx(sum(right) / 6)
    assert 0 < sum(right) < 6
    for group in (1, 2):
        own = [
            flag for flag, example in zip(right, examples, strict=True) if example.group == group
        ]
        assert logged[f"val/accuracy/operations_{group}"] == pytest.approx(sum(own) / len(own))
    (logged,) = trainer.test(parrot(text), data, verbose=False)
    own = [example.answer == text for example in data.examples("test")]
    assert logged["test/accuracy"] == pytest.approx(sum(own) / 6)
    assert "test/accuracy/operations_3" not in logged  # there is no other group
    assert "val/accuracy" not in logged


def test_only_the_first_batches_are_asked_and_short_texts_are_wrong(data, make_trainer):
    text = next(iter(data.examples("val"))).answer
    trainer = make_trainer(AnswerAccuracy(num_batches=1, by_group=False), **ALL)
    (logged,) = trainer.validate(parrot(text), data, verbose=False)
    first = [example.answer == text for example in list(data.examples("val"))[:4]]
    assert logged["val/accuracy"] == sum(first) / 4
    assert not [name for name in logged if "operations" in name]
    trainer = make_trainer(AnswerAccuracy(max_new_tokens=len(text) - 1), **ALL)
    (logged,) = trainer.validate(parrot(text), data, verbose=False)
    assert logged["val/accuracy"] == 0


def test_a_training_goes_on_without_the_questions_that_are_too_long(make_reasoning, make_trainer):
    """A row has an EOS, its texts, and an EOS, of a token a byte."""
    long, expected = make_reasoning(test_operations=[2, 20]), 0
    long.prepare_data()
    for one in long.examples("test"):
        texts = (one.query, *(f"\n{step}" for step in one.steps), " Final values:", one.answer)
        expected += 2 + sum(map(len, texts)) > 96
    assert 0 < expected < 6
    trainer = make_trainer(AnswerAccuracy(), max_steps=1, **ALL)
    with pytest.warns(UserWarning, match=rf"{expected} of 6 questions of the test split"):
        trainer.fit(build(), long)
    assert trainer.global_step == 1
    (logged,) = trainer.test(build(), long, verbose=False)
    assert logged["test/accuracy/left_out"] == expected > 0
    assert "val/accuracy/left_out" not in logged


def test_models_of_windows_are_asked(make_model, make_trainer, tmp_path):
    """As ``evaluate.py reason --mode generate`` asks them."""
    sizes = {"train_stories": 4, "val_stories": 5, "test_stories": 0, "hops": [2, 3]}
    stories = Kinship(**sizes, block_size=320, batch_size=2, cache_dir=str(tmp_path))

    class Sure(type(make_model())):
        def generate_ids(self, prompts, *, tokenizer, **_):
            return [[*tokenizer.encode(right), tokenizer.eos_id] for _ in prompts]

    expected = [answer for _, answer in stories.questions("val")]
    right = expected[0]
    model = make_model(block_size=320)
    model.__class__ = Sure
    (logged,) = make_trainer(AnswerAccuracy(), **ALL).validate(model, stories, verbose=False)
    assert logged["val/accuracy"] == pytest.approx(expected.count(right) / 5)
    assert {"val/accuracy/hops_2", "val/accuracy/hops_3"} <= logged.keys()


# ---- in a training


def test_runs_are_chosen_by_it(data, make_trainer, tmp_path):
    """Some answers are right after the second of three validations only."""
    text = next(iter(data.examples("val"))).answer

    class Learns(Parrot):
        def on_validation_start(self):
            self.text = text.encode() if self.trainer.global_step == 4 else b"?"

    save = SaveCheckpoints(dirpath=str(tmp_path / "kept"), monitor="val/accuracy", mode="max")
    options = {"enable_checkpointing": True, "max_steps": 6, "val_check_interval": 2, **ALL}
    make_trainer(AnswerAccuracy(), save, **options).fit(build(Learns), data)
    assert save.best_model_path.endswith("best-step=4.ckpt")
    assert float(save.best_model_score) > 0


def test_training_is_the_same_with_and_without(data, make_trainer):
    """The check before training asks nothing."""

    class Mute(Parrot):
        def decode_step(self, cache, tokens):
            raise AssertionError("asked")

    options = {"num_sanity_val_steps": 1, "max_steps": 1, "limit_val_batches": 0}
    trainer = make_trainer(AnswerAccuracy(), **options)
    trainer.fit(build(Mute), data)
    assert "val/accuracy" not in trainer.callback_metrics

    ends = []
    for callbacks in ((), (AnswerAccuracy(max_new_tokens=8),)):
        trainer = make_trainer(*callbacks, max_steps=2, val_check_interval=1)
        model = build(CoTLM, CoTConfig, attention_dropout=0.2)
        trainer.fit(model, data)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        asked = {key: logged.pop(key) for key in list(logged) if "accuracy" in key}
        modes = [child.training for child in model.modules()]
        ends.append((model.state_dict(), logged, modes, torch.rand(1).item()))
    assert "val/accuracy" in asked
    (weights, *rest), (weights_with, *rest_with) = ends
    assert rest_with == rest
    assert all(torch.equal(weights_with[name], weight) for name, weight in weights.items())


# ---- questions


def question(number, steps=()):
    return Question([256, 1], [2, 3], [list(step) for step in steps], 0, number)


def test_questions_are_cut_out_of_batches(data):
    batches = batches_of(data)
    assert [len(batch["targets"]) for batch in batches] == [4, 4]  # two rows fill up
    found = [one for batch in batches for one in questions_in(batch)]
    examples = list(data.examples("val"))
    assert len(found) == len(examples)
    for number, (one, example) in enumerate(zip(found, examples, strict=True)):
        assert one.query == [256, *example.query.encode()]
        assert one.answer == [*example.answer.encode()]
        assert one.steps == [[*step.encode()] for step in example.steps]
        assert (one.group, one.sequence_id) == (example.group, number)


def test_the_longest_text_has_all_steps(data):
    """Here of two steps, a newline in front of each, and "Final values:" before the answer."""
    prefix = len(" Final values:")
    asked = [question(0, [[7] * 9]), question(1, [[7] * 3, [7] * 4])]
    assert longest_text(asked[:1], data) == 1 + 9 + prefix + 2 + 1
    assert longest_text(asked, data) == 1 + 9 + prefix + 2 + 1
    assert longest_text([*asked, question(2, [[7] * 8, [7] * 2])], data) == 12 + prefix + 3


def test_a_chain_of_thought_is_judged_by_what_follows_its_prefix(data):
    prefix = tuple(b" Final values:")
    model = build(CoTLM, CoTConfig, answer_prefix=prefix, step_separator=(10,))
    asked = next(iter(questions_in(batches_of(data)[0])))
    chain = [*b"\na=9\nb=1", *prefix]
    good, bad = [*chain, *asked.answer, 256], [*chain, *b" a=?", 256]
    assert judge(model, data, asked, good).right
    wrong = judge(model, data, asked, bad)
    assert (wrong.text, wrong.right) == (" a=?", False)
    none = judge(model, data, asked, [*asked.answer, 256])  # no prefix, no answer
    assert (none.text, none.right) == ("", False)
    plain = build(NoCoTLM, NoCoTConfig, answer_prefix=prefix)
    assert judge(plain, data, asked, [*asked.answer, 256]).right


# ---- what does not fit


def test_data_without_questions_are_refused(make_model, make_data, data, make_trainer):
    with pytest.raises(ValueError, match="do not define correct answers"):
        make_trainer(AnswerAccuracy()).validate(make_model(), make_data(), verbose=False)
    trainer = make_trainer(AnswerAccuracy())
    with pytest.raises(ValueError, match="do not define correct answers"):
        trainer.validate(build(), data.val_dataloader(), verbose=False)
