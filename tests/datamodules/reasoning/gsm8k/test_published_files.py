"""The published problems: all are kept, and come back whole from batches."""

from pathlib import Path

import numpy as np
import pytest

from datamodules import ReasoningGSM8K

COPY = Path(__file__).parents[5] / "shared" / "data"
TEST, VALID = COPY / "gsm8k" / "test.jsonl", COPY / "gsm8k_aug" / "valid.txt"

pytestmark = pytest.mark.skipif(
    not COPY.is_dir(), reason="there is no copy of GSM8K next to the project"
)


def prepared(cache, train, test, **options):
    data = ReasoningGSM8K(
        data_files=str(train),
        test_files=str(test),
        val_fraction=0.0,
        block_size=2048,
        cache_dir=str(cache),
        num_proc=1,
        **options,
    )
    data.prepare_data()
    data.setup()
    return data


def beginning(path, folder, lines=40):
    """A copy of the first lines of a file."""
    copy = folder / path.name
    copy.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    return copy


def test_all_problems_are_kept_and_nearly_all_steps_placed(tmp_path):
    report = prepared(tmp_path, TEST, VALID).report()
    assert report["train"]["examples kept"] == 1319
    assert report["test"]["examples kept"] == 500
    for split in ("train", "test"):
        steps = [report[split][f"rule: steps {v}"] for v in ("decided alone", "decided by a tie")]
        assert sum(steps) / report[split]["steps"] > 0.9


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_problems_round_trip(tmp_path, tokenizer):
    files = [beginning(path, tmp_path) for path in (TEST, VALID)]
    data = prepared(tmp_path, *files, tokenizer=tokenizer, batch_size=40)
    decode = data.tokenizer.decode
    for split in ("train", "test"):
        batch = data.evaluation_source(split).batch(0)
        rows = {key: batch[key].numpy() for key in batch}
        for i, example in enumerate(data.examples(split)):
            query = rows["query"][i, 1 : rows["query_lengths"][i]].tolist()
            assert decode(query) == example.query
            assert (
                decode(rows["targets"][i][rows["targets"][i] >= 0].tolist()[:-1]) == example.answer
            )
            lengths = rows["step_lengths"][i]
            steps = [rows["steps"][i, r, : lengths[r]] for r in np.flatnonzero(lengths)]
            assert tuple(decode(step.tolist()) for step in steps) == example.steps
            places = rows["step_places"][i, : len(example.steps)]
            for place, marker in zip(places, example.markers, strict=True):
                assert decode(query[:place]).startswith(example.query[:marker].rstrip())
