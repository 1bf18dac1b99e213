"""What predict writes is what the model says of each prompt alone."""

import json

import pytest
import torch

from callbacks import Predictions

PROMPTS = ["state memory", "t", "fork reads and writes", "", "ponder"]


@pytest.fixture
def predict(make_model, make_trainer, make_data, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    model = make_model()
    model.configure_model()

    def run(batch_size=2, **options):
        output = tmp_path / "out" / "p.jsonl"
        data = make_data(eval_batch_size=batch_size, predict_file=str(prompts))
        make_trainer(Predictions(str(output), **options)).predict(model, data)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        return model, data.tokenizer, rows

    return run


def test_each_token_has_its_log_probability(predict):
    model, tokenizer, rows = predict(max_new_tokens=0)
    assert [row["prompt"] for row in rows] == PROMPTS
    for row in rows:
        ids = tokenizer.encode(row["prompt"])
        assert row["tokens"] == ids
        assert row["likelihood"] == "exact"
        assert row["continuation"] == ""
        with torch.no_grad():
            h = model.network(torch.tensor([[tokenizer.eos_id, *ids]]))[0, :-1]
        log_probs = (h @ model.network.output_matrix.t()).log_softmax(-1)
        expected = log_probs[torch.arange(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(row["log_probs"]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuations_do_not_depend_on_batching(predict, temperature):
    options = {"max_new_tokens": 6, "temperature": temperature, "seed": 3}
    model, tokenizer, rows = predict(batch_size=2, **options)
    _, _, alone = predict(batch_size=1, **options)
    assert [row["continuation"] for row in rows] == [row["continuation"] for row in alone]
    together = model.generate_text(
        PROMPTS, tokenizer=tokenizer, max_new_tokens=6, temperature=temperature, seed=3
    )
    assert [row["continuation"] for row in rows] == together
    assert len(set(together)) > 1


def test_without_prompts_it_says_what_is_missing(make_model, make_trainer, make_data, tmp_path):
    trainer = make_trainer(Predictions(str(tmp_path / "p.jsonl")))
    with pytest.raises(ValueError, match=r"data\.predict_file"):
        trainer.predict(make_model(), make_data())


def test_continuations_end_where_learned_positions_do(predict):
    """The longest of these prompts leaves room for 11 tokens of the 32."""
    model, tokenizer, rows = predict(batch_size=5, max_new_tokens=50)
    assert model.config.positions == "learned"
    for row, prompt in zip(rows, PROMPTS, strict=True):
        room = model.config.block_size - len(tokenizer.encode(prompt))
        alone = model.generate_text(
            [prompt], tokenizer=tokenizer, max_new_tokens=room, temperature=0.0
        )
        assert row["continuation"] == alone[0]
