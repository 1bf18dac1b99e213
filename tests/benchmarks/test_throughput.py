"""Rivals of a config have its FLOPs and tokens, and every column is a number that can be."""

import pytest
import torch

from benchmarks import throughput
from lightning_models import TransformerConfig, TransformerLM
from tests.programs import ROOT


@pytest.mark.parametrize(("layers", "expected"), [(1, 1), (5, 5), (9, 6)])
def test_the_rival_is_as_deep_as_its_flops_say(layers, expected):
    sizes = {"vocab_size": 100, "block_size": 24, "dim": 16}
    model = TransformerLM(TransformerConfig(**sizes, num_layers=layers, num_heads=2))
    with torch.device("meta"):
        model.configure_model()
    flops = model.flops_per_token(24, training=True)
    assert throughput.equal_layers(flops, 100, 24, 16, 2, most=6) == expected


def rows_of(config, text_file, data_cache, *options, table=throughput.speed, key="data"):
    data = [f"--{key}=datamodules.LocalText", f"--{key}.data_files={text_file}"]
    data += [f"--{key}.tokenizer=bytes", f"--{key}.cache_dir={data_cache}"]
    words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), "--tiny", "--rounds", "2"]
    words += ["--no_memory", *options, "--", *data]
    return list(table(throughput.build_parser().parse_args(words)))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("latent_thought/tiny", "data"),
        ("thought_gestalt/tiny", "data.corpus"),
    ],
)
def test_each_side_of_a_config_is_measured(config, key, text_file, data_cache):
    rows = rows_of(config, text_file, data_cache, "--most_layers", "3", key=key)
    found = {row["side"]: row for row in rows}
    assert set(found) == set(throughput.SIDES)
    for row in rows:
        assert row["tokens/s"] > 0
        assert 0 < row["MFU"] < 1
        assert row["GFLOP/s"] == pytest.approx(row["tokens/s"] * row["MFLOP/token"] / 1e3)
    assert found["ours"]["to ours"] == 1
    assert 0 < found["ours"]["waits for data"] < 1
    assert found["plain"]["MFLOP/token"] == found["transformers"]["MFLOP/token"]


def test_batches_go_on_after_an_epoch(make_data):
    data = make_data()
    data.prepare_data()
    data.setup("fit")
    model = TransformerLM(TransformerConfig(vocab_size=257, block_size=32))
    batches = throughput.EndlessBatches(throughput.Job(model, data, False), "cpu")
    epoch = len(data.train_dataloader())
    seen = [batches.next()["sequence_id"].tolist() for _ in range(epoch + 1)]
    assert len(batches.tokens) == len(batches.waited) == epoch + 1
    rows = [row for batch in seen[:epoch] for row in batch]
    assert len(set(rows)) == len(rows)
    assert seen[epoch] == seen[0]  # the same epoch again
