"""Loading of published models of ``transformers``, from a folder or the hub."""

import json
import pickle
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_models.memory import TooLargeError, bounded_weights, check_layers, host_memory

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name the shards of a model's weights."""


def read_pretrained(
    cls: Any, source: str, part: str, label: str, *, other: str, **options: Any
) -> Any:
    """Reads a model, configuration or tokenizer, without running its author's code.

    Args:
        cls: Class of ``transformers`` with ``from_pretrained``.
        source: Hub name, or folder written by ``save_pretrained``.
        part: Noun for messages: 'model', 'tokenizer' or 'configuration'.
        label: The option and its value, for messages.
        other: Alternative to pass, for messages.
        **options: Further options of ``from_pretrained``.

    Raises:
        ValueError: If it is missing, damaged, or needs its author's code. The message is one line.
    """
    folder = Path(source).expanduser()
    path = str(folder) if folder.is_dir() else source
    try:
        _check_layers(folder)
        # Lightning builds networks inside a context of the training device, which transformers
        # would take for a device map, and that needs accelerate.
        with torch.device("cpu"), bounded_weights(host_memory()):
            return cls.from_pretrained(path, trust_remote_code=False, **options)
    except TooLargeError as error:
        joined = ", or" if str(error).endswith("lower it") else ";"
        raise ValueError(f"{label}: config.json: {error}{joined} pass {other}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{label} is refused: its pickled weights contain more than tensors, which could "
            "run any code while loading. Use a model with .safetensors weights"
        ) from error
    except OSError as error:
        raise ValueError(f"{label}: {_absence(folder, part)}pass {other}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{label}: the {part} cannot be read ({reason}); get it again, or pass {other}"
        ) from error


def _check_layers(folder: Path) -> None:
    """Raises a TooLargeError if the folder's config.json names more layers than can be built.

    transformers first lists the types of all layers.
    """
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports it
    if isinstance(content, dict):
        check_layers(content, "")


def _absence(folder: Path, part: str) -> str:
    """Returns the beginning of the message for a source that could not be opened."""
    if not folder.is_dir():
        return f"no {part} found (neither in a local folder of that name nor on the hub); "
    missing = _missing_shards(folder) if part == "model" else []
    if missing:
        return (
            f"{len(missing)} of the files that its index names are missing ({missing[0]}), so it "
            "is not whole; get it again, or "
        )
    return f"no {part} found in this folder; "


def _missing_shards(folder: Path) -> list[str]:
    """Returns the shards named by the folder's index that are missing."""
    index = next((folder / name for name in INDICES if (folder / name).is_file()), None)
    if index is None:
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return []  # a broken index
    return sorted(name for name in names if not (folder / name).is_file())


def load_pretrained(
    source: str,
    label: str,
    *,
    other: str,
    head: Literal["causal", "none"] = "causal",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Loads a model with all of its weights, on the CPU, in training mode like any new module.

    ``config.tie_word_embeddings`` of the result is set to whether the head is the embedding. The
    published value may be true although the head has other weights, which ``transformers`` loads
    untied, but would tie when the embedding is resized.

    Args:
        source: Hub name, or folder written by ``save_pretrained``.
        label: The option and its value, for messages.
        other: Alternative to pass, for messages.
        head: 'causal' predicts next tokens, 'none' returns hidden states only.
        dtype: Dtype of the loaded weights. The default, float32, represents float32, bfloat16 and
            float16 files exactly, which the dtype in config.json may not.
        **options: Further options of ``from_pretrained``.

    Raises:
        ValueError: If it cannot be read, or lacks weights.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    model, info = read_pretrained(
        AutoModelForCausalLM if head == "causal" else AutoModel,
        source,
        "model",
        label,
        other=other,
        dtype=dtype,
        weights_only=True,
        output_loading_info=True,
        **options,
    )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers only initialises them at random
        raise ValueError(
            f"{label}: {len(missing)} of the model's weights are not in it ({missing[0]}); get it "
            f"again, or pass {other}"
        )
    if head == "causal":
        model.config.tie_word_embeddings = has_tied_head(model)
    return model.train()  # from_pretrained returns eval mode, in which dropout has no effect


def has_tied_head(model: Any) -> bool:
    """Returns whether the head of a causal model of ``transformers`` is its embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight
