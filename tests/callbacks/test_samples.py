"""Text samples, and that they leave training alone."""

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import Samples
from callbacks.samples import as_markdown
from lightning_models import TransformerLM


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A TensorBoard logger, and what is written to it as (tag, text, step)."""
    logger = TensorBoardLogger(tmp_path)
    texts = []
    monkeypatch.setattr(logger.experiment, "add_text", lambda *args: texts.append(args))
    return logger, texts


def test_texts_are_written_after_every_nth_validation(make_model, make_data, make_trainer, written):
    logger, texts = written
    samples = Samples(prompts=["", "latent"], every_n_validations=2, max_new_tokens=5)
    trainer = make_trainer(samples, logger=logger, max_steps=8, val_check_interval=2)
    trainer.fit(make_model(), make_data())
    assert [(tag, step) for tag, _, step in texts] == [("samples", 3), ("samples", 7)]
    assert "**'latent'**" in texts[0][1]
    assert "**(start of a document)**" in texts[0][1]


def test_lengths_are_cut_to_the_context(make_model, make_data, make_trainer, written, recwarn):
    """Learned positions end at the block size; asking for more must not switch the samples off."""
    logger, texts = written
    samples = Samples(prompts=["x" * 20], max_new_tokens=500)
    trainer = make_trainer(samples, logger=logger, max_steps=2, val_check_interval=2)
    trainer.fit(make_model(), make_data())
    assert len(texts) == 1
    assert not any("text samples are disabled" in str(warning.message) for warning in recwarn)


class Mute(TransformerLM):
    calls = 0

    def decode_step(self, cache, tokens):
        Mute.calls += 1
        raise RuntimeError("this method cannot write yet")


def test_a_model_that_cannot_write_trains_on(make_model, make_data, make_trainer, written):
    logger, texts = written
    trainer = make_trainer(Samples(), logger=logger, max_steps=4, val_check_interval=1)
    with pytest.warns(UserWarning, match="Mute.generate_text failed .*cannot write yet"):
        trainer.fit(make_model(Mute), make_data())
    assert trainer.global_step == 4
    assert (Mute.calls, texts) == (1, [])


def test_nothing_is_generated_without_a_place_for_text(make_model, make_data, make_trainer):
    before = Mute.calls
    trainer = make_trainer(Samples(), max_steps=2, val_check_interval=1)
    trainer.fit(make_model(Mute), make_data())
    assert Mute.calls == before


def test_the_same_seed_writes_the_same_text(make_model, make_data, make_trainer, written):
    logger, texts = written
    data = make_data()
    for seed in (1, 1, 2):
        samples = Samples(prompts=["ponder"], max_new_tokens=9, seed=seed)
        trainer = make_trainer(samples, logger=logger, max_steps=1, val_check_interval=1)
        trainer.fit(make_model(), data)
    assert texts[0][1] == texts[1][1] != texts[2][1]


def test_text_is_shown_verbatim():
    assert as_markdown(["a"], ["*x*\ny"]) == "**'a'**\n\n    *x*\n    y"
