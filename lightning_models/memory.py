"""Memory that networks and batches need, known before any of it is allocated."""

import contextlib
import copy
import dataclasses
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks

MOST_TENSORS = 20_000
"""Weight tensors of a network; a network of 1,000 layers has about 10,000."""
USUAL = 1024
"""Stands in for the default of a size that has none."""

GPT2_VOCABULARY = 50_257


class TooLargeError(ValueError):
    """A network or a batch that memory cannot hold, or that would take forever to build."""


def host_memory() -> int:
    """Returns the bytes of memory of this host, or of the process's cgroup if that has less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            root, file = Path("/sys/fs/cgroup"), "memory.max"
            if controllers:  # version 1
                root, file = root / "memory", "memory.limit_in_bytes"
            group = root / name.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # 'max', or another container's
                    sizes.append(int((folder / file).read_text()))
    return min(sizes)


def largest(values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Returns the name and value of the size that is largest against its usual value.

    Args:
        values: Numbers by name; others are left out.
        usual: Their defaults; ``USUAL`` where there is none.
    """

    def ratio(key: str) -> float:
        default = usual.get(key)
        return values[key] / (default if _is_size(default) and default else USUAL)

    sizes = (k for k, value in values.items() if _is_size(value) and not k.endswith("_multiple"))
    key = max(sizes, key=ratio)
    return f"{key} ({values[key]})"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_layers(values: Mapping[str, Any], prefix: str) -> None:
    """Checks numbers of layers, which even their names take too long to list.

    Args:
        values: A network's config, mappings within it included.
        prefix: What names of fields begin with in messages.

    Raises:
        TooLargeError: If one is above ``MOST_TENSORS``.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_layers(value, f"{prefix}{key}.")
        elif _is_size(value) and "layer" in key and value > MOST_TENSORS:
            raise TooLargeError(f"{prefix}{key} ({value}) must be at most {MOST_TENSORS}; lower it")


@contextlib.contextmanager
def bounded_weights(most: float) -> Iterator[None]:
    """Stops the building of modules, on the meta device best, once it is plain they do not fit.

    Args:
        most: Bytes. Building stops at twice as many: it may register tensors that it replaces.

    Raises:
        TooLargeError: If modules register more tensors than ``MOST_TENSORS``, or more bytes.
    """
    tensors, size = 0, 0

    def count(module: Any, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal tensors, size
        if tensor is not None:
            tensors, size = tensors + 1, size + tensor.nbytes
        if tensors > MOST_TENSORS:
            raise TooLargeError(f"the network has more than {MOST_TENSORS} tensors of weights")
        if size > 2 * most:
            raise TooLargeError(f"the network has more than {as_gib(size)} of weights")

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def weights_size(model: Any, memory: float, *, share: int = 1) -> int:
    """Returns the bytes of a model's network, which is built on the meta device.

    A network that reads values of its tensors cannot be built there. Its size is 0, with a warning.

    Args:
        model: A ``LanguageModel`` without a network, which gets none here.
        memory: Bytes for the weights of one process.
        share: Processes that hold one copy together.

    Raises:
        TooLargeError: If the weights do not fit; the message names the option to change.
        Exception: Whatever building the real network would raise.
    """
    config = dataclasses.asdict(model.config)
    check_layers(config, "model.config.")
    outline = copy.deepcopy(model)
    outline.compile_network = False
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(bounded_weights(memory * share))
            outline.configure_model()
        network = outline.network
        size = sum(x.nbytes for x in itertools.chain(network.parameters(), network.buffers()))
        if size > memory * share:
            raise TooLargeError(f"the network has {as_gib(size)} of weights")
    except (TooLargeError, RuntimeError, TypeError, OverflowError) as error:
        too_large = isinstance(error, TooLargeError)
        if too_large or "overflow" in str(error):  # torch, of sizes beyond int64
            reason = str(error) if too_large else "its weights overflow"
            each = f" for each of {share} processes" if share > 1 else ""
            option, cure = _largest_option(config, type(model.config))
            raise TooLargeError(
                f"{option} is too large: {reason}, and memory is {as_gib(memory)}{each}; {cure}"
            ) from error
        if re.search(r"\bmeta\b", str(error), re.IGNORECASE) is None:
            raise
        warnings.warn(
            f"{type(model).__name__} cannot be built on the meta device ({error}), so nothing "
            "checks that its weights fit into memory",
            stacklevel=2,
        )
        return 0
    return size


def check_batch(data: Any) -> None:
    """Checks that the token ids of one batch fit the memory of the host.

    Args:
        data: A data module.

    Raises:
        TooLargeError: If they do not; the message names the size to lower.
    """
    usual = {"batch_size": 16, "eval_batch_size": 16, "block_size": 256}
    sizes = {key: getattr(data, key, 0) for key in usual}
    rows = max(sizes["batch_size"], sizes["eval_batch_size"])
    size, memory = rows * sizes["block_size"] * torch.int64.itemsize, host_memory()
    if size > memory:
        raise TooLargeError(
            f"data.{largest(sizes, usual)} is too large: the token ids of a batch take "
            f"{as_gib(size)}, and memory is {as_gib(memory)}; lower it"
        )


def _largest_option(config: Mapping[str, Any], cls: Any) -> tuple[str, str]:
    """Returns the option that makes a network large, with its value, and the cure."""
    # a backbone from elsewhere decides the sizes; the config's fields of sizes are ignored then
    if config.get("architecture") is not None:
        return "model.config.architecture", "lower its sizes, or take a machine with more memory"
    if config.get("backbone") is not None:
        return f"model.config.backbone ({config['backbone']})", "name a smaller one"
    usual = {field.name: field.default for field in dataclasses.fields(cls)}
    usual["vocab_size"] = GPT2_VOCABULARY
    named = largest(config, usual)
    linked = {"vocab_size": "data.tokenizer, vocab_size", "block_size": "data.block_size"}
    key = named.partition(" ")[0]
    return named.replace(key, linked.get(key, f"model.config.{key}"), 1), "lower it"


def as_gib(size: float) -> str:
    """Formats a number of bytes in GiB, with one decimal."""
    return f"{size / 2**30:,.1f} GiB"
