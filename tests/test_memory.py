"""The memory of a network is known on the meta device, and compared with the right memory."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from methods import METHODS

from lightning_models import NoCoTLM, TransformerConfig, TransformerLM, memory
from lightning_models.memory import TooLargeError, host_memory, weights_size
from lightning_models.thinking_states.baselines.text import NoCoTConfig

SMALL = TransformerConfig(vocab_size=300, block_size=16, num_layers=1, dim=8, num_heads=2)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_size_is_that_of_the_built_network(method):
    built = method.build(**method.alone)
    tensors = itertools.chain(built.network.parameters(), built.network.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    model = type(built)(built.config, built.optimizer_config)
    before = torch.get_rng_state()
    assert weights_size(model, size) == size
    assert weights_size(model, size // 4 + 1, share=4) == size
    assert model.network is None
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TooLargeError, match="is too large"):
        weights_size(model, size - 1)
    with pytest.raises(TooLargeError, match="each of 4 processes"):
        weights_size(model, size // 4 - 1, share=4)
    torch.nn.Linear(1000, size // 1000 + 1, device="meta")  # nothing is counted any more


QWEN = "Qwen/Qwen2.5-0.5B"
SHAPE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
SHAPE |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
BACKBONES = {
    "published": ({"backbone": QWEN}, rf"^model\.config\.backbone \({QWEN}\) is .*a smaller one$"),
    "kept": ({"backbone": QWEN, "architecture": SHAPE}, r"^model\.config\.architecture is "),
    "width": ({"dim": 896}, r"^model\.config\.dim \(896\) is .*lower it$"),
    "vocabulary": ({}, r"^data\.tokenizer, vocab_size \(151000\) is .*lower it$"),
}


@pytest.mark.parametrize("case", BACKBONES)
def test_the_option_that_decides_the_size_is_named(case):
    changes, message = BACKBONES[case]
    config = NoCoTConfig(vocab_size=151000, block_size=64, **changes)
    with pytest.raises(TooLargeError, match=message):
        weights_size(NoCoTLM(config), 2**20)


def test_an_error_of_the_network_is_not_taken_for_a_size():
    class Broken(TransformerLM):
        def build_network(self):
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        weights_size(Broken(SMALL), 2**30)


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu]
)
def test_a_network_that_reads_its_tensors_is_reported_as_unchecked(read):
    class Reading(TransformerLM):
        def build_network(self):
            read(torch.ones(()))
            return super().build_network()

    with pytest.warns(UserWarning, match="Reading .*nothing checks"):
        assert weights_size(Reading(SMALL), 2**30) == 0


def test_endless_layers_of_a_published_backbone_are_refused(tmp_path):
    """Before transformers makes a list of them, which takes minutes."""
    content = {"model_type": "qwen2", "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = NoCoTLM(NoCoTConfig(vocab_size=300, block_size=8, backbone=str(tmp_path)))
    with pytest.raises(ValueError, match=rf"backbone \({tmp_path}\).*num_hidden_layers"):
        weights_size(model, 1e9)


CGROUPS = {
    "version 2": ("0::/job/step", {"job/memory.max": "5000", "job/step/memory.max": "max"}),
    "own limit": ("0::/job/step", {"job/memory.max": "9000", "job/step/memory.max": "5000"}),
    "root of a container": ("0::/", {"memory.max": "5000"}),
    "version 1": (
        "4:memory:/job\n3:cpu:/other",
        {"memory/job/memory.limit_in_bytes": "5000", "memory/memory.limit_in_bytes": str(2**63)},
    ),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_smallest_limit_counts(case, tmp_path, monkeypatch):
    line, files = CGROUPS[case]
    contents = {"proc/self/cgroup": line, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    monkeypatch.setattr(memory, "Path", lambda name: Path(f"{tmp_path}{name}"))
    assert host_memory() == 5000


def test_without_cgroups_the_host_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "Path", lambda name: Path(f"{tmp_path}{name}"))
    kilobytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert host_memory() == pytest.approx(1024 * kilobytes, rel=0.01)
    assert host_memory() > os.sysconf("SC_PAGE_SIZE")
