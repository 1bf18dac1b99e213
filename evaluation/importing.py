"""``evaluate.py import``: writes a checkpoint with the weights of a ``transformers`` model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules import PythonDocs
from datamodules.tokenizers import JsonTokenizer, SpecialTokens, Tokenizer, parse_tokenizer
from evaluation.output import check_target, format_table
from lightning_models import LanguageModel, LoopedLM, PauseLM, PonderLM1, PonderLM2
from lightning_models.atomic_files import write_whole
from lightning_models.checkpoint import write_file
from lightning_models.layers.blocks import embedding_scale
from lightning_models.ponderlm import LoopedConfig, PauseConfig, PonderLM1Config, PonderLM2Config
from lightning_models.transformer.import_weights import (
    describe,
    import_transformers,
    load_causal_lm,
)

Method = Literal["transformer", "ponderlm2", "ponderlm1", "looped", "pause"]

# ---- the PonderLM family: LLaMA and GPT-NeoX weights that the authors' code runs several times

PONDER: dict[str, tuple[type[Any], type[Any], tuple[str, ...]]] = {
    "ponderlm2": (PonderLM2, PonderLM2Config, ("llama", "gpt_neox")),
    "ponderlm1": (PonderLM1, PonderLM1Config, ("llama",)),
    "looped": (LoopedLM, LoopedConfig, ("llama",)),
    "pause": (PauseLM, PauseConfig, ("llama",)),
}
"""Class, configuration, and the families whose public code is equivalent to the class. (For
PonderLM-1 on GPT-NeoX the code of PonderLM-2's authors adds hidden states, not embeddings.)"""
PAUSE_ID = 50288
"""Row of the vocabulary that the public code uses for the pause if config.json names none."""


def import_ponder(source: Any, method: Method, **changes: Any) -> LanguageModel:
    """Builds a model of the PonderLM family with published weights.

    The public code (LUMIA-Group/PonderLM-2, and PonderingLM for PonderLM-1 on GPT-NeoX) patches
    LLaMA and GPT-NeoX: tensors keep their names, and config.json has the number of steps, but not
    the method. Its factor on embeddings differs between methods; ours is the same for all, and the
    embedding is rescaled to compensate.

    Args:
        source: A ``transformers`` model, or the hub name or folder of one.
        method: Method that the weights were trained with.
        **changes: Fields of the method's config, for example ``thinking_steps``.

    Raises:
        ValueError: If the method does not support the architecture or one of its options.
    """
    source_model = load_causal_lm(source) if isinstance(source, str) else source
    source_fields = source_model.config.to_dict()
    family, options = describe(source_model)
    cls, config_cls, families = PONDER[method]
    if method == "ponderlm1" and source_fields.get("ponderinglm"):  # the authors' earlier code
        families = ("gpt_neox",)
        source_fields |= {
            "num_latent_thoughts": source_fields.get("pondering_steps"),
            "residual_interpolated_embeds": True,
        }
    if family.model_type not in families:
        raise ValueError(
            f"method ({method}): model_type ({family.model_type}) cannot be imported; it must be "
            f"{' or '.join(families)}"
        )
    steps = changes.get("thinking_steps", source_fields.get("num_latent_thoughts"))
    if steps is None:
        raise ValueError(
            f"method ({method}): config.json has no num_latent_thoughts; give the number of "
            "steps, with --set.thinking_steps"
        )
    _refuse_ponder(method, source_fields, options)
    fields = {
        "init": "ponderlm",
        "thinking_steps": steps,
        **_ponder_options(method, source_fields),
    }
    model: LanguageModel = cls(config_cls(**{**options, **fields, **changes}))
    model.configure_model()
    network: Any = model.network
    weights = family.import_weights(source_model.state_dict(), model.config)
    with torch.no_grad():
        factor = _embedding_factor(method, source_fields, model.config.dim) / embedding_scale(
            model.config
        )
        table = weights["embedding.weight"]  # often in half precision
        table = table.to(torch.promote_types(table.dtype, torch.float32)) * factor
        weights["embedding.weight"] = table
        if getattr(network, "pause", None) is not None:
            row = int(source_fields.get("pause_token_id", PAUSE_ID))
            if not 0 <= row < len(table):
                raise ValueError(
                    f"method (pause): the vocabulary has {len(table)} rows, none for "
                    f"pause_token_id ({row})"
                )
            weights["pause.weight"] = table[row : row + 1]
        network.load_state_dict(weights)
    return model


def _refuse_ponder(method: Method, fields: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    refused = {
        "recurrent_model=false": fields.get("recurrent_model", True) is False,
        "tie_word_embeddings": options["tie_head"],
        "interpolation=true": method == "ponderlm2" and bool(fields.get("interpolation")),
        "interpolation_use_topk": method == "ponderlm2"
        and bool(fields.get("interpolation_use_topk")),
        "hidden_layer_num": method == "ponderlm1" and fields.get("hidden_layer_num") is not None,
    }
    present = [name for name, is_set in refused.items() if is_set]
    if present:
        raise ValueError(
            f"method ({method}) does not support {', '.join(present)} of config.json; choose "
            "another --method"
        )


def _ponder_options(method: Method, fields: Mapping[str, Any]) -> dict[str, Any]:
    if method == "ponderlm2":
        return {"eval_iterations": fields.get("num_jacobi_iterations", 3)}
    if method == "ponderlm1":
        multiply = bool(fields.get("mutiply_pondering_steps", False))  # sic
        sums = bool(fields.get("residual_interpolated_embeds", False))
        return {"accumulate": sums, "multiply_embedding": multiply}
    return {}


def _embedding_factor(method: Method, fields: Mapping[str, Any], dim: int) -> float:
    """Returns the factor on embeddings in the public code."""
    if method == "looped":
        return math.sqrt(2.5 * dim)
    if method == "pause":
        return math.sqrt(dim)
    if not fields.get("scale_embeds", False):
        return 1.0
    return math.sqrt(2.5 * dim if method == "ponderlm2" else dim)


# ---- checkpoints


def import_checkpoint(
    source: str,
    target: Path,
    tokenizer: str | None = None,
    method: Method = "transformer",
    changes: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Imports a model, writes it as a checkpoint of this project, and returns it.

    Its data recipe is PythonDocs with the model's tokenizer and block size, so that ``train.py
    validate --ckpt_path`` and ``evaluate.py`` can use it directly. If the tokenizer has added
    entries without a row in the embedding, a copy without them is written next to the checkpoint,
    as the folder NAME.tokenizer, with a warning.

    Args:
        source: Hub name or folder of a GPT-2, LLaMA, Qwen2, Qwen3 or GPT-NeoX model.
        target: Path of the checkpoint, which is replaced if it exists.
        tokenizer: Name as in the data's option ``tokenizer``. Defaults to the model's tokenizer.
        method: Method that the weights were trained with.
        changes: Fields of the method's config to set.

    Raises:
        ValueError: If no class here is equivalent to the model, or the tokenizer does not fit it.
    """
    options, source_model = dict(changes or {}), load_causal_lm(source)

    def build(**vocabulary: Any) -> LanguageModel:
        """Builds the model with given sizes of its vocabulary."""
        fields = {**options, **vocabulary}
        try:
            if method == "transformer":
                return import_transformers(source_model, **fields)
            return import_ponder(source_model, method, **fields)
        except TypeError as error:
            raise ValueError(f"set ({', '.join(options) or 'nothing'}): {error}") from error

    model = build()
    name = own_tokenizer(source) if tokenizer is None else tokenizer
    data = PythonDocs(tokenizer=name, block_size=model.config.block_size, batch_size=1)
    rows = model.config.vocab_size
    if data.vocab_size > rows:
        folder = target.with_name(f"{target.name.removesuffix('.ckpt')}.tokenizer").resolve()
        write_without_added(data.tokenizer, rows, folder)
        name = str(folder)
        data = PythonDocs(tokenizer=name, block_size=model.config.block_size, batch_size=1)
    if data.vocab_size < rows:
        # Rows without a token stay as padding: part of the softmax, but never sampled.
        model = build(vocab_size=data.vocab_size, vocab_multiple=rows)
    if isinstance(data.tokenizer, JsonTokenizer):
        rank_zero_info(data.tokenizer.description)
    content = checkpoint_content(model, data)
    write_file(target, content)
    return model


def own_tokenizer(source: str) -> str:
    """Returns the name of the tokenizer that belongs to a model.

    Raises:
        ValueError: If a folder has no tokenizer.json.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; name the tokenizer with --tokenizer")
    return str(folder.resolve() / path.name)  # not resolve(path): the file may be a link


def write_without_added(tokenizer: Tokenizer, rows: int, folder: Path) -> None:
    """Writes a tokenizer as a folder, without added entries beyond the rows of the embedding.

    Such an entry (often padding) was added to the tokenizer after training, and the model
    cannot read it. Text that spells it is tokenised as ordinary text; other text keeps its ids.

    Raises:
        ValueError: If the tokenizer needs these entries, so that it belongs to another model.
    """
    content = json.loads(tokenizer.json_text) if isinstance(tokenizer, JsonTokenizer) else {}
    added = {t["content"]: t["id"] for t in content.get("added_tokens", []) if t["id"] >= rows}
    reason = _need_for(added, content, tokenizer, rows)
    if reason or not isinstance(tokenizer, JsonTokenizer):
        raise ValueError(
            f"tokenizer ({tokenizer.name}) has {tokenizer.vocab_size} entries, the model's "
            f"vocabulary {rows} rows, and {reason}; name the tokenizer it was trained with"
        )
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i < rows}
    else:  # Unigram: a list, whose indices are the ids
        del vocabulary[rows:]
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < rows]
    content["padding"] = None  # it may name a dropped entry, and no text is padded here
    stops = zip(tokenizer.special.eos, tokenizer.stop_ids, strict=True)
    special = SpecialTokens(tokenizer.special.bos, tuple(text for text, i in stops if i < rows))
    smaller = JsonTokenizer(tokenizer.name, json.dumps(content, ensure_ascii=False), special)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in smaller.files().items():
        write_whole(folder / name, text)
    names = ", ".join(f"{text!r} (id {i})" for text, i in list(added.items())[:3])
    rest = f" and {len(added) - 3} more" if len(added) > 3 else ""
    rank_zero_warn(
        f"tokenizer ({tokenizer.name}): the model's embedding has {rows} rows, none for "
        f"{names}{rest}; a tokenizer without them is written to {folder}"
    )


def _need_for(
    added: Mapping[str, int], content: Mapping[str, Any], tokenizer: Tokenizer, rows: int
) -> str | None:
    """Returns why a tokenizer needs its entries beyond the rows of the embedding, or None."""
    if not added:
        return "none of them was added to it"
    model = content["model"]
    pieces = model["vocab"]  # ids by piece, or for Unigram [piece, score] in the order of ids
    ids = pieces if isinstance(pieces, dict) else {piece[0]: i for i, piece in enumerate(pieces)}
    merges = model.get("merges") or []  # 'a b', or ['a', 'b'] in newer files
    merged = {pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in merges}
    for text, i in ids.items():
        if i >= rows and (text not in added or text in merged):
            return f"{text!r} (id {i}) was not added to it"
    if tokenizer.eos_id >= rows:
        return f"its end-of-text token (id {tokenizer.eos_id}) is one without a row"
    template = json.dumps(content.get("post_processor"))
    used = [text for text in added if json.dumps(text) in template]
    return f"it puts {used[0]!r} around texts" if used else None


def checkpoint_content(model: LanguageModel, data: PythonDocs) -> dict[str, Any]:
    """Returns the content of a Lightning checkpoint at step 0, without an optimiser."""
    content: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": L.__version__,
        "state_dict": model.state_dict(),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    model.on_save_checkpoint(content)
    content["recipe"]["data"] = data.recipe()
    content[type(data).__qualname__] = data.state_dict()
    return content


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--hf",
        type=str,
        required=True,
        help="Hub name or folder of a model of transformers: GPT-2, LLaMA, Qwen2, Qwen3 or "
        "GPT-NeoX.",
    )
    parser.add_argument(
        "--method",
        type=Method,
        default="transformer",
        help="Method of the weights, which files of the public PonderLM code do not name.",
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the method's config to set, e.g. --set.thinking_steps 3.",
    )
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Tokenizer name as in the data's options. Null means the model's tokenizer.",
    )
    parser.add_argument("--output", type=str, required=True, help="Checkpoint to write (.ckpt).")


def run(settings: Namespace) -> None:
    """Writes the checkpoint and prints its properties."""
    target = check_target(settings.output)
    if settings.tokenizer is not None:
        parse_tokenizer(settings.tokenizer)  # before the weights are read
    model = import_checkpoint(
        settings.hf, target, settings.tokenizer, settings.method, settings["set"]
    )
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "checkpoint": str(target),
        "model": type(model).__name__,
        "parameters": f"{parameters:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "block size": f"{config.block_size:,}",
    }
    print(format_table(rows))
