"""``perplexity`` and ``generate`` on checkpoints of reasoning rows."""

import json
import math

import pytest

from datamodules import StateTracking
from evaluation.load import build_model
from lightning_models.checkpoint import read_checkpoint


@pytest.mark.parametrize("name", ["ts", "cot", "no_cot", "icot", "coconut"])
def test_answers_are_scored_and_prompts_continued(
    evaluates, reasoners, reason_options, tmp_path, name
):
    """Perplexity is that of the answers of the val split, EOS included."""
    target, data = tmp_path / "scored.json", StateTracking(**reason_options)
    data.prepare_data()
    data.setup()
    evaluates("perplexity", "--ckpt", reasoners[name], "--output", target)
    scored = json.loads(target.read_text())
    answers = [data.tokenizer.encode(example.answer) for example in data.examples("val")]
    assert scored["tokens"] == sum(len(answer) + 1 for answer in answers)
    assert scored["likelihood"] == "exact"
    assert 0 < scored["nats_per_token"] < 2 * math.log(data.vocab_size)
    prompts = [example.query for example in data.examples("val")][:2]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    greedy = ("--max_new_tokens", 6, "--temperature", 0, "--output", target)
    evaluates("generate", "--ckpt", reasoners[name], *words, *greedy)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    written = build_model(read_checkpoint(reasoners[name])).generate_ids(
        [data.tokenizer.prompt_ids(prompt) for prompt in prompts],
        tokenizer=data.tokenizer,
        max_new_tokens=6,
        temperature=0,
    )
    for row, prompt, ids in zip(rows, prompts, written, strict=True):
        text = data.tokenizer.decode([i for i in ids if i != data.tokenizer.stop_id])
        assert (row["prompt"], row["continuation"]) == (prompt, text)


def test_tokens_cannot_be_scored_one_by_one(fails, reasoners):
    line = fails("perplexity", "--ckpt", reasoners["ts"], "--mode", "autoregressive")
    assert "mode (autoregressive) draws from windows, which StateTracking has none of" in line
