"""The plain transformer decoder, in GPT-2 and LLaMA style: the control of every comparison.

=============================================  =================================================
component                                      code
=============================================  =================================================
pre-norm decoder (GPT-2; LLaMA 2302.13971)     ``network.TransformerNetwork``
training, scoring, cached decoding             ``module.TransformerLM``
published models, read with all their weights  ``pretrained.load_pretrained``
weights from ``transformers`` models           ``import_weights.import_transformers``
=============================================  =================================================
"""

from lightning_models.transformer.module import TransformerLM
from lightning_models.transformer.network import TransformerConfig, TransformerNetwork

__all__ = ["TransformerConfig", "TransformerLM", "TransformerNetwork"]
