"""From a checkpoint to a model with its data and tokenizer.

==============  ====================================================================================
file            what it holds
==============  ====================================================================================
``rebuild``     the model from a checkpoint's recipe and weights
``corpus``      data and tokenizer from a checkpoint's recipe
``device``      where and in which precision the model runs
``provenance``  what a result says about where it comes from
``pretrained``  models of ``transformers`` with their tokenizers
==============  ====================================================================================
"""
