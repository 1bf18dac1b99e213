"""Batches of sentences: training by streams, evaluation by documents, prompts."""

import numpy as np
import pytest
import torch

from datamodules import Sentences
from datamodules.sentences import batches as building
from datamodules.sentences.batches import DocumentSource, StreamSource
from datamodules.sentences.streams import Bounds, Curriculum
from datamodules.text import IGNORE

BOS, EOS, EOD = 257, 258, 259
OPTIONS = {"batch_tokens": 400, "batch_size": 6, "max_sentences": 4, "curriculum_step": 3}


@pytest.fixture
def data(sentences) -> Sentences:
    return sentences(**OPTIONS, curriculum_epochs=2, eval_batch_size=3)


def source(data, rank=0, world_size=1, seed=0, longest=4) -> StreamSource:
    return StreamSource(
        data.sentences("train"),
        bounds=Bounds(lexical=400, streams=6, sentence=64),
        curriculum=Curriculum(max_sentences=longest, step=3, epochs=2),
        seed=seed,
        rank=rank,
        world_size=world_size,
    )


def rows(batch) -> list[list[tuple[list[int], bool]]]:
    found = []
    for tokens, lengths, last in zip(
        batch["tokens"], batch["lengths"], batch["is_last"], strict=True
    ):
        used = int((lengths > 0).sum())
        assert (lengths[:used] > 0).all()
        assert not last[used:].any()
        row = [(tokens[s, : lengths[s]].tolist(), bool(last[s])) for s in range(used)]
        found.append(row)
    return found


def check_grid(batch, is_open=False) -> None:
    """Checks every slot of a batch against its sentence."""
    B, S, U = batch["tokens"].shape
    for b, row in enumerate(rows(batch)):
        for s in range(S):
            ids, last = row[s] if s < len(row) else ([], False)
            open_end = is_open and s == len(row) - 1
            words = ids[1 : -2 if last else -1]
            if ids:
                assert ids == [BOS, *words, *([EOD] if last else []), EOS]
            targets = ids[1:-1] if open_end else ids[1:]
            assert batch["targets"][b, s].tolist() == targets + [IGNORE] * (U - len(targets))
            assert batch["mask"][b, s].tolist() == [True] * len(ids) + [False] * (U - len(ids))
            lexical = [True] * len(words) + [False] * (U - len(words))
            assert batch["lexical"][b, s].tolist() == lexical
    assert batch["lengths"].max() == U
    assert batch["sequence_id"].shape == (B,)


# Training


def test_training_batches_hold_the_stored_sentences(data):
    training = data.training_source()
    stream, index = data.stream("train"), data.sentences("train")
    for n in range(4):
        batch = training.batch(n)
        check_grid(batch)
        for number, row in zip(batch["sequence_id"].tolist(), rows(batch), strict=True):
            joined = [i for ids, _ in row for i in ids]
            start = int(index.starts(np.array(number)))
            assert joined == stream.gather(np.arange(start, start + len(joined))).tolist()
            assert any(last for _, last in row[:-1]) is False
    dtypes = {key: value.dtype for key, value in batch.items() if key != "sentence_steps"}
    ints = dict.fromkeys(["tokens", "lengths", "targets", "sequence_id"], torch.int64)
    assert dtypes == {**ints, **dict.fromkeys(["is_last", "mask", "lexical"], torch.bool)}


def test_counts_are_those_of_the_batches_of_all_ranks(data):
    ranks = [source(data, rank, 3, longest=30) for rank in range(3)]
    widths = set()
    for n in range(len(ranks[0]) + 2):
        parts = [rank.batch(n) for rank in ranks]
        targets = torch.cat([part["targets"].flatten() for part in parts])
        counts = {
            "targets": (targets >= 0).sum(),
            "lexical": sum(part["lexical"].sum() for part in parts),
            "eos": (targets == EOS).sum(),
            "eod": (targets == EOD).sum(),
        }
        assert {rank.counts(n) == counts for rank in ranks} == {True}
        steps = max(part["tokens"].shape[1] for part in parts)
        assert {part["sentence_steps"] for part in parts} == {steps}
        assert all(part["lexical"].sum() <= 400 and len(part["tokens"]) <= 6 for part in parts)
        widths.add(len({part["tokens"].shape[1] for part in parts}))
    assert widths != {1}  # ranks had streams of other lengths


def test_sentence_steps_of_a_stated_step_do_not_depend_on_what_devices_hold(make_sentences):
    """Streams that are cut for a device have fewer sentences than the step's."""
    counts, longest = [], []
    for batch_tokens in (300, 60):
        made = make_sentences(global_batch_tokens=300, batch_tokens=batch_tokens)
        made.prepare_data()
        made.setup()
        training, accumulate = made.training_source(), made.step_batch(1).accumulate
        steps = [[training.batch(n * accumulate + m) for m in range(accumulate)] for n in range(6)]
        counts.append([sum(batch["sentence_steps"] for batch in step) for step in steps])
        longest.append([max(batch["tokens"].shape[1] for batch in step) for step in steps])
    assert counts[0] == counts[1] == longest[0] != longest[1]


# Evaluation


def evaluation(data, rank=0, world_size=1, batch_size=3) -> DocumentSource:
    return DocumentSource(
        data.sentences("train"),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
    )


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 3), (2, 3), (3, 5), (5, 100)])
def test_evaluation_scores_every_target_once(data, world_size, batch_size):
    ranks = [evaluation(data, rank, world_size, batch_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    batches = [rank.batch(n) for rank in ranks for n in range(len(rank))]
    documents, sizes = [], 0
    for batch in batches:
        check_grid(batch)
        assert len(batch["tokens"]) <= batch_size
        for number, row in zip(batch["sequence_id"].tolist(), rows(batch), strict=True):
            if number < 0:
                assert row == []
                continue
            assert [last for _, last in row] == [False] * (len(row) - 1) + [True]
            documents.append((number, [i for ids, _ in row for i in ids]))
        sizes += int(batch["num_bytes"].sum())
    stream = data.stream("train")
    ids = stream.gather(np.arange(len(stream)))
    expected = [part.tolist() for part in np.split(ids, stream.document_ends)[:-1]]
    assert [ids for _, ids in sorted(documents)] == expected
    assert sizes == data.counts("train").utf8_bytes
    # all tokens but the BOS in front of each sentence
    targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
    assert targets == len(stream) - len(data.sentences("train"))


def test_the_longest_documents_are_scored_first_and_evenly(data):
    source = evaluation(data)
    counts = [(source.batch(n)["lengths"] > 0).sum(dim=1).tolist() for n in range(len(source))]
    longest = [max(rows) for rows in counts]
    assert longest[0] == max(longest) > 2 * min(longest)
    assert longest != sorted(longest, reverse=True), "a part of the batches stands for all"
    ordered = sorted(counts, key=lambda rows: (max(rows), min(rows)), reverse=True)
    lasts = [min(rows) for rows in ordered]
    assert all(last >= max(rows) for last, rows in zip(lasts, ordered[1:], strict=False))
    pair = [evaluation(data, rank, 2) for rank in range(2)]
    widths = [[rank.batch(n)["tokens"].shape[1] for rank in pair] for n in range(len(pair[0]) - 1)]
    assert all(abs(a - b) <= 6 for a, b in widths)


def test_a_very_long_document_is_scored_alone(data, monkeypatch):
    monkeypatch.setattr(building, "_MAX_SENTENCES", 60)
    whole = evaluation(data, batch_size=50)
    sizes = [whole.batch(n)["lengths"].shape for n in range(len(whole))]
    assert all(rows == 1 or rows * width <= 60 for rows, width in sizes)
    assert sum(rows for rows, _ in sizes) == data.counts("train").documents


def test_a_rank_without_documents_has_a_row_without_sentences(data):
    ranks = [evaluation(data, rank, 50) for rank in range(50)]
    assert {len(rank) for rank in ranks} == {1}
    batch = ranks[-1].batch(0)
    check_grid_of_nothing = {key: value.sum().item() for key, value in batch.items()}
    assert batch["tokens"].shape == (1, 1, 1)
    assert check_grid_of_nothing["lengths"] == check_grid_of_nothing["num_bytes"] == 0
    assert not batch["mask"].any()
    assert batch["targets"].tolist() == [[[IGNORE]]]
    assert batch["sequence_id"].tolist() == [-1]
    assert batch.keys() == ranks[0].batch(0).keys()


# Prompts


def test_prompts_are_documents_whose_last_sentence_is_open(data):
    prompts = ["He ran. It", "Done.", "A long sentence without an end", "He said. "]
    batches = [data.prompt_source(prompts).batch(n) for n in range(2)]
    assert [batch["prompt"] for batch in batches] == [prompts[:3], prompts[3:]]
    for batch in batches:
        check_grid(batch, is_open=True)
        for prompt, row, size in zip(batch["prompt"], rows(batch), batch["num_bytes"], strict=True):
            assert data.tokenizer.decode([i for ids, _ in row for i in ids]) == prompt
            assert int(size) == len(prompt)
            assert [i for ids, _ in row for i in ids][:-1] == data.tokenizer.prompt_ids(prompt)
    assert batches[1]["sequence_id"].tolist() == [3]
    assert not batches[0]["is_last"].any()


def test_an_empty_prompt_is_a_sentence_without_targets(data):
    batch = data.prompt_source([""]).batch(0)
    check_grid(batch, is_open=True)
    assert rows(batch) == [[([BOS, EOS], False)]]
    assert (batch["targets"] == IGNORE).all()
