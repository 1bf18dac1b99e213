"""The plain transformer and ``transformers``' GPT-2 with the same weights."""

from typing import Any

import torch

from lightning_models import TransformerLM
from lightning_models.transformer.import_weights import import_transformers


def gpt2_pair(
    vocab: int, context: int, layers: int, dim: int, heads: int
) -> tuple[Any, TransformerLM]:
    """Returns theirs and ours, without dropout; ours holds a copy of the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=context,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = GPT2LMHeadModel(config)
    return theirs, import_transformers(theirs)
