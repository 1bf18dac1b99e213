"""Prompts for predict: read, batched, every token scored, shared between ranks."""

import json

import pytest
import torch

from datamodules import load_tokenizer, read_prompts
from datamodules.text import PromptSource

PROMPTS = ["one", "twenty-two", "three", "4", "fifth prompt"]


def source(**options):
    return PromptSource(PROMPTS, load_tokenizer("bytes"), **{"block_size": 16, **options})


def test_both_formats_are_read(tmp_path):
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwenty-two\r\n")
    rows.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    assert read_prompts(text) == ["one", "twenty-two"]
    assert read_prompts(rows) == PROMPTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n\n", "is empty"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{oops\n', "line 2: not JSON"),
        ("p.jsonl", b'{"text": "a"}\n', "line 1: expected"),
        ("p.jsonl", b"[" * 100_000, "line 1: not JSON .*nested too deeply"),
        ("p.jsonl", b'{"prompt": "a\\udc00"}\n', "line 1: .*\\\\ud...', half a surrogate pair"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)
    with pytest.raises(ValueError, match="there is no prompts file"):
        read_prompts(tmp_path / "absent.txt")


def test_every_prompt_token_is_a_target_behind_an_eos():
    tokenizer = load_tokenizer("bytes")
    batch = source(batch_size=2).batch(0)
    assert batch["prompt"] == PROMPTS[:2]
    assert batch["tokens"][:, 0].tolist() == [tokenizer.eos_id] * 2
    for row, prompt in enumerate(PROMPTS[:2]):
        ids = tokenizer.encode(prompt)
        targets = batch["targets"][row]
        assert targets[targets >= 0].tolist() == ids
        assert batch["tokens"][row, 1 : len(ids)].tolist() == ids[:-1]
    assert batch["num_bytes"].tolist() == [3, 10]
    assert batch["sequence_id"].tolist() == [0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_have_every_prompt_and_equally_many_batches(world_size):
    seen = []
    for rank in range(world_size):
        ranked = source(batch_size=2, rank=rank, world_size=world_size)
        assert len(ranked) == -(-5 // (2 * world_size))
        for n in range(len(ranked)):
            seen += ranked.batch(n)["sequence_id"].tolist()
    assert set(seen) == set(range(5))


def test_an_empty_prompt_has_no_target():
    alone = PromptSource([""], load_tokenizer("bytes"), block_size=4, batch_size=1).batch(0)
    assert torch.equal(alone["targets"], torch.tensor([[-100]]))


def test_too_long_a_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 2 has 10 tokens"):
        source(batch_size=2, block_size=9)
