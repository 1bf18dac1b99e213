"""Compares the logits of imported models with the classes of transformers, for docs/hub.md.

    python docs/results/hub/logits.py

Each family has a randomly initialised model of four layers of width 256, with weights far from
their initial zeros and ones. ``logits.csv`` has the largest difference over 4 x 128 tokens, in
float32 and float64 (in transformers RMSNorm stays float32), and the logits' standard deviation.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_models.transformer.import_weights import import_transformers

VOCAB, LENGTH = 1000, 128
WIDTHS = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
SHARED_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": LENGTH,
    },
    "LLaMA": {"model_type": "llama", **WIDTHS, **SHARED_HEADS},
    "Qwen2.5": {"model_type": "qwen2", **WIDTHS, **SHARED_HEADS},
    "Qwen3": {"model_type": "qwen3", **WIDTHS, **SHARED_HEADS, "head_dim": 64},
    "GPT-NeoX": {"model_type": "gpt_neox", **WIDTHS, "num_attention_heads": 8},
}


def compare(options: dict[str, Any], dtype: torch.dtype) -> tuple[float, float]:
    """Returns the largest difference of logits, and their standard deviation.

    Args:
        options: Arguments of the model's config in transformers.
        dtype: Precision of both models.
    """
    torch.manual_seed(0)
    ids = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(**options, **ids)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        ours = import_transformers(theirs).to(dtype).eval()
        theirs = theirs.to(dtype)
        tokens = torch.randint(VOCAB, (4, LENGTH))
        logits = theirs(tokens).logits  # (B, T, V)
        mine = ours.network(tokens) @ ours.network.output_matrix.t()
    return (mine - logits).abs().max().item(), logits.std().item()


def main() -> None:
    """Writes the table."""
    rows = []
    for family, options in FAMILIES.items():
        (single, spread), (double, _) = (
            compare(options, dtype) for dtype in (torch.float32, torch.float64)
        )
        rows.append(
            {
                "family": family,
                "largest difference, float32": f"{single:.2g}",
                "largest difference, float64": f"{double:.2g}",
                "standard deviation of logits": f"{spread:.3g}",
            }
        )
    pd.DataFrame(rows).to_csv(Path(__file__).with_suffix(".csv"), index=False)


if __name__ == "__main__":
    main()
