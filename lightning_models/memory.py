"""Memory that networks and batches need, computed before it is allocated."""

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

MAX_TENSORS = 20_000
"""Maximum number of weight tensors of a network; one of 1,000 layers has about 10,000."""
USUAL = 1024
"""Default of sizes that have none."""

GPT2_VOCABULARY = 50_257


class TooLargeError(ValueError):
    """Raised for a network or batch that does not fit in memory, or takes too long to build."""


def host_memory() -> int:
    """Returns the memory of this host in bytes, or the limit of the process's cgroup if lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            root, file = Path("/sys/fs/cgroup"), "memory.max"
            if controllers:  # version 1
                root, file = root / "memory", "memory.limit_in_bytes"
            group = root / name.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # 'max', or a hidden folder
                    sizes.append(int((folder / file).read_text()))
    return min(sizes)


def largest(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Returns the name and value of the size that exceeds its default by the largest factor.

    Args:
        values: Values by name, of which only integers count.
        defaults: Defaults by name; sizes without one have ``USUAL``.
    """

    def ratio(key: str) -> float:
        default = defaults.get(key)
        return values[key] / (default if _is_size(default) and default else USUAL)

    sizes = (k for k, value in values.items() if _is_size(value) and not k.endswith("_multiple"))
    key = max(sizes, key=ratio)
    return f"{key} ({values[key]})"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_layers(values: Mapping[str, Any], prefix: str) -> None:
    """Checks numbers of layers that are so large that even listing the layers takes too long.

    Args:
        values: A network's config, which may be nested.
        prefix: Prefix of field names in messages.

    Raises:
        TooLargeError: If a number of layers is above ``MAX_TENSORS``.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_layers(value, f"{prefix}{key}.")
        elif _is_size(value) and "layer" in key and value > MAX_TENSORS:
            raise TooLargeError(f"{prefix}{key} ({value}) must be at most {MAX_TENSORS}; lower it")


@contextlib.contextmanager
def bounded_weights(max_bytes: float) -> Iterator[None]:
    """Stops the construction of modules that do not fit, best used on the meta device.

    Args:
        max_bytes: Maximum size in bytes. Construction stops at twice this size, because it may
            register tensors that it replaces later.

    Raises:
        TooLargeError: If modules register more tensors than ``MAX_TENSORS``, or more bytes.
    """
    tensors, size = 0, 0

    def count(module: Any, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal tensors, size
        if tensor is not None:
            tensors, size = tensors + 1, size + tensor.nbytes
        if tensors > MAX_TENSORS:
            raise TooLargeError(f"the network has more than {MAX_TENSORS} tensors of weights")
        if size > 2 * max_bytes:
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
    """Returns the size in bytes of a model's network, by building it on the meta device.

    A network that reads its tensors' values cannot be built there. It has size 0, with a warning.

    Args:
        model: A ``LanguageModel`` without a network, which is not changed.
        memory: Memory in bytes for the weights of one process.
        share: Number of processes that share one copy of the weights.

    Raises:
        TooLargeError: If the weights do not fit. The message names the option to change.
        Exception: Any error of building the real network.
    """
    config = dataclasses.asdict(model.config)
    check_layers(config, "model.config.")
    outline = copy.deepcopy(model)
    outline.compile_network = False
    try:
        with ExitStack() as stack:  # allocates nothing, and leaves the global generator alone
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
        if too_large or "overflow" in str(error):  # torch's error for sizes beyond int64
            reason = str(error) if too_large else "its weights overflow"
            suffix = f" for each of {share} processes" if share > 1 else ""
            option, cure = _largest_option(config, type(model.config))
            raise TooLargeError(
                f"{option} is too large: {reason}, and memory is {as_gib(memory)}{suffix}; {cure}"
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
    """Checks that the token ids of one batch fit in the host's memory.

    Args:
        data: A data module.

    Raises:
        TooLargeError: If they do not fit. The message names the size to lower.
    """
    defaults = {"batch_size": 16, "eval_batch_size": 16, "block_size": 256}
    sizes = {key: getattr(data, key, 0) for key in defaults}
    rows = max(sizes["batch_size"], sizes["eval_batch_size"])
    size, memory = rows * sizes["block_size"] * torch.int64.itemsize, host_memory()
    if size > memory:
        raise TooLargeError(
            f"data.{largest(sizes, defaults)} is too large: the token ids of a batch take "
            f"{as_gib(size)}, and memory is {as_gib(memory)}; lower it"
        )


def _largest_option(config: Mapping[str, Any], cls: Any) -> tuple[str, str]:
    """Returns the option that makes a network too large, with its value, and the cure."""
    # the sizes come from a published backbone, and the config's size fields are ignored
    if config.get("architecture") is not None:
        return "model.config.architecture", "lower its sizes, or use a machine with more memory"
    if config.get("backbone") is not None:
        return f"model.config.backbone ({config['backbone']})", "name a smaller one"
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    defaults["vocab_size"] = GPT2_VOCABULARY
    option = largest(config, defaults)
    linked = {"vocab_size": "data.tokenizer, vocab_size", "block_size": "data.block_size"}
    key = option.partition(" ")[0]
    return option.replace(key, linked.get(key, f"model.config.{key}"), 1), "lower it"


def as_gib(size: float) -> str:
    """Formats a number of bytes in GiB, with one decimal."""
    return f"{size / 2**30:,.1f} GiB"
