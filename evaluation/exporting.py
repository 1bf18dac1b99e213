"""``evaluate.py export``: writes a checkpoint as a folder for other programs, or as one file.

The plain transformer, and the backbone of Thinking States and its baselines, are written as a model
of ``transformers``; any method as a model folder of safetensors and JSON, which all verbs read; any
checkpoint as one file (``.ckpt``), from which ``train.py fit --ckpt_path`` continues.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from datamodules.special_tokens import EOS_TEXT, SPECIAL_TOKENS_FILE
from datamodules.tokenizers import (
    BytesTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    first_line,
)
from evaluation.arguments import add_which_argument, load_checkpoint
from evaluation.load import build_model, build_tokenizer
from evaluation.output import check_target, format_table, write_folder
from lightning_models import LanguageModel, TransformerLM
from lightning_models.atomic_files import write_whole
from lightning_models.checkpoint import Checkpoint, read_whole, write_file, write_model_folder
from lightning_models.recipe import PACKAGES_HELP, as_started
from lightning_models.transformer.families import family_of

Format = Literal["auto", "transformers", "folder"]

# ---- models of transformers


def write_transformers(model: LanguageModel, folder: Path, **options: Any) -> str:
    """Writes config.json, generation_config.json and model.safetensors, like ``save_pretrained``.

    Args:
        model: The plain transformer, or a model with a backbone, which alone is written.
        folder: An empty folder.
        **options: Fields of the configuration, for example ``eos_token_id``.

    Returns:
        The ``model_type`` of its architecture in ``transformers``.

    Raises:
        ValueError: If no architecture of ``transformers`` is equivalent.
    """
    from transformers import AutoConfig

    network: Any = model.network
    if hasattr(network, "backbone"):
        return _write_backbone(network.backbone, folder, options)
    if type(model) is not TransformerLM:
        raise ValueError(
            f"format (transformers): transformers has no {type(model).__name__}; use --format "
            "folder"
        )
    try:
        family = family_of(model.config)
    except ValueError as error:
        raise ValueError(f"format (transformers): {error}; use --format folder") from error
    fields = {
        "vocab_size": model.config.padded_vocab_size,
        "tie_word_embeddings": model.config.tie_head,
        **family.to_theirs(model.config),
        **options,
    }
    weights = network.state_dict()
    _save(
        folder,
        AutoConfig.for_model(family.model_type, **fields),
        lambda like: family.export_weights(weights, model.config, like),
    )
    return family.model_type


def _write_backbone(backbone: Any, folder: Path, options: dict[str, Any]) -> str:
    from transformers import AutoConfig

    fields = backbone.architecture() | options
    family: str = fields.pop("model_type")
    if backbone.window is not None:
        if "use_sliding_window" not in fields:
            raise ValueError(
                f"format (transformers): {family} has no attention window ({backbone.window}) "
                "there; use --format folder"
            )
        fields |= {"use_sliding_window": True, "sliding_window": backbone.window}
        fields |= {"max_window_layers": 0, "layer_types": None}
    if any("lora_" in name for name, _ in backbone.model.named_parameters()):
        raise ValueError(
            "format (transformers): models there have no LoRA matrices (lora_rank); use --format "
            "folder"
        )
    prefix = backbone.model.base_model_prefix
    weights = {f"{prefix}.{name}": tensor for name, tensor in backbone.model.state_dict().items()}
    if backbone.head is not None:
        weights["lm_head.weight"] = backbone.head.weight.detach()
    _save(folder, AutoConfig.for_model(family, **fields), lambda _: weights)
    return family


def _save(
    folder: Path, config: Any, weights_for: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Writes a causal language model without initialising its weights.

    ``weights_for`` maps its state dict on the meta device to its weights (tied ones once).
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = weights_for(model.state_dict())
    model.config.dtype = next(iter(weights.values())).dtype
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    model.save_pretrained(folder)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> bool:
    """Writes tokenizer.json and tokenizer_config.json; returns False if there is no equivalent.

    ``bytes``, tiktoken's encodings, and tokenizers of the ``tokenizers`` library, such as
    ``bpe:N``, have an equivalent with the same ids for any text, after BOS if texts begin with it;
    tokenizers of sentences with boundaries have none.
    """
    if isinstance(tokenizer, JsonTokenizer):
        text = tokenizer.json_text
    elif isinstance(tokenizer, BytesTokenizer):
        text = _bytes_json()
    elif isinstance(tokenizer, TiktokenTokenizer):
        text = _tiktoken_json(tokenizer)
    else:
        return False
    from tokenizers import Tokenizer as Fast

    inner = Fast.from_str(text)
    bos = tokenizer.text_bos_id
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else inner.id_to_token(bos),
        "eos_token": inner.id_to_token(tokenizer.eos_id),
        "add_bos_token": bos is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    write_whole(folder / "tokenizer.json", _begun_with_bos(text, inner, tokenizer))
    write_whole(folder / "tokenizer_config.json", f"{json.dumps(config, indent=2)}\n")
    return True


def _begun_with_bos(text: str, inner: Any, tokenizer: Tokenizer) -> str:
    """Returns tokenizer.json with a post-processor that adds BOS exactly if ours does."""
    from tokenizers.processors import TemplateProcessing

    bos, plain = tokenizer.text_bos_id, inner.encode("a", add_special_tokens=False).ids
    fitting = [[tokenizer.start_id, *plain], *([plain] if bos is None else [])]
    if inner.encode("a").ids in fitting:
        return text
    content = json.loads(text)
    content["post_processor"] = None
    if bos is not None:
        name = inner.id_to_token(bos)
        inner.post_processor = TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=[(name, bos)]
        )
        content["post_processor"] = json.loads(inner.to_str())["post_processor"]
    return json.dumps(content, ensure_ascii=False)


# Texts that tokenizers split differently, at digits, letters and spaces, or by normalisation.
_PROBES = ("In 1984 they'd paid $12,345:  don't\n\n\tPANIC!!", " a  b ", "foo_bar(x1) cafe\u0301")


def _read_differently(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Returns a note if AutoTokenizer reads an exported tokenizer with other ids than ours.

    For some models (Qwen2) it uses the pre-tokenizer and normaliser of the model's class instead of
    the ones in the folder.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
        ids = [loaded.encode(text, add_special_tokens=False) for text in _PROBES]
        difference = f"reads it as {type(loaded).__name__}, with other ids"
    except Exception as error:
        ids, difference = [], f"cannot read it ({first_line(error)})"
    if ids == [tokenizer.encode(text) for text in _PROBES]:
        return None
    return f"AutoTokenizer {difference}: use PreTrainedTokenizerFast.from_pretrained"


def _bytes_json() -> str:
    """Returns a BPE without merges whose ids are the bytes, followed by EOS."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    signs = bytes_to_unicode()
    inner = Fast(models.BPE({signs[byte]: byte for byte in range(256)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(EOS_TEXT, special=True)])
    return str(inner.to_str())


def _tiktoken_json(tokenizer: TiktokenTokenizer) -> str:
    """Returns an encoding as a byte-level BPE; special tokens keep their ids."""
    import tiktoken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    encoding: Any = tiktoken.get_encoding(tokenizer.name)
    special: dict[str, int] = encoding._special_tokens
    ids = encoding._mergeable_ranks | {text.encode(): idx for text, idx in special.items()}
    converter: Any = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda _: ids  # else it reads a file and leaves a copy
    return str(converter.converted().to_str())


# ---- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--ckpt", type=str, required=True, help="Checkpoint, model folder, or folder of a run."
    )
    add_which_argument(parser)
    parser.add_argument("--packages", type=list[str] | str, default=[], help=PACKAGES_HELP)
    parser.add_argument(
        "--format",
        type=Format,
        default="auto",
        help="Format of a folder: transformers (the plain transformer, the backbone of Thinking "
        "States), folder (any method: safetensors and JSON that every verb reads), or auto, which "
        "takes transformers if there is an equivalent.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="New folder, or FILE.ckpt for the whole checkpoint in one file.",
    )


def run(settings: Namespace) -> None:
    """Writes the folder or file, and prints its contents."""
    is_file = settings.output.endswith(".ckpt")
    target = check_target(settings.output) if is_file else _check_folder(settings.output)
    checkpoint = load_checkpoint(settings)
    if is_file:
        rows = _write_file(checkpoint, target)
    else:
        rows = write_folder(target, lambda folder: _export(checkpoint, folder, settings.format))
    print(format_table({"written": str(target), **rows}))


def _write_file(checkpoint: Checkpoint, target: Path) -> dict[str, str]:
    content = read_whole(checkpoint.path)
    write_file(target, content)
    resumes = bool(content.get("optimizer_states"))
    rest = "with optimiser and data order" if resumes else "weights, without an optimiser"
    return {"format": "one checkpoint file", "step": f"{checkpoint.step:,}", "holds": rest}


def _export(checkpoint: Checkpoint, folder: Path, format: Format) -> dict[str, str]:
    if format == "folder":
        return _write_model_folder(checkpoint, folder)
    model = build_model(checkpoint)
    try:
        return _write_transformers(checkpoint, model, folder)
    except ValueError as error:
        if format == "transformers" or any(folder.iterdir()):
            raise
        return _write_model_folder(checkpoint, folder) | {"because": str(error).partition("; ")[0]}


def _write_model_folder(checkpoint: Checkpoint, folder: Path) -> dict[str, str]:
    write_model_folder(folder, checkpoint.content)
    rows = {"format": as_started("model folder, for the verbs of evaluate.py and --ckpt_path")}
    try:
        tokenizer = build_tokenizer(checkpoint)
    except ValueError:  # unknown, or not available here; recipe.json has its name
        return rows
    write_tokenizer(tokenizer, folder)
    if isinstance(tokenizer, JsonTokenizer) and SPECIAL_TOKENS_FILE in tokenizer.files():
        write_whole(folder / SPECIAL_TOKENS_FILE, tokenizer.files()[SPECIAL_TOKENS_FILE])
    return rows


def _write_transformers(
    checkpoint: Checkpoint, model: LanguageModel, folder: Path
) -> dict[str, str]:
    try:
        tokenizer = build_tokenizer(checkpoint)
    except ValueError as error:
        tokenizer, name = None, f"none ({error})"
    bos, eos = None, None
    if tokenizer is not None:
        first, *rest = tokenizer.stop_ids
        bos, eos = tokenizer.text_bos_id, [first, *rest] if rest else first
    family = write_transformers(model, folder, bos_token_id=bos, eos_token_id=eos)
    if tokenizer is not None:
        if write_tokenizer(tokenizer, folder):
            note = _read_differently(tokenizer, folder)
            name = tokenizer.name if note is None else f"{tokenizer.name}; {note}"
        else:
            name = f"none ({tokenizer.name} has no equivalent)"
    num_values = sum(tensor.numel() for tensor in model.state_dict().values())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = {"format": f"transformers, {config['architectures'][0]} ({family})", "tokenizer": name}
    backbone = getattr(model.network, "backbone", None)
    if backbone is None:
        return rows
    left = num_values - sum(tensor.numel() for tensor in backbone.state_dict().values())
    return rows | {
        "left out": f"{left:,} parameters outside the backbone; --format folder keeps them"
    }


# ---- the new folder


def _check_folder(target: str) -> Path:
    path = Path(target)
    if path.is_dir() and not any(path.iterdir()):
        check_target(path / "config.json")
        return path
    if path.exists():
        raise ValueError(f"output ({path}) exists already; name a new folder or a FILE.ckpt")
    return check_target(path)
