"""Baselines of Thinking States, on the same backbone, data and evaluation.

=========================================  =====================================================
what                                       where
=========================================  =====================================================
No CoT, CoT                                ``text.NoCoTLM``, ``text.CoTLM``
iCoT, stepwise internalisation             ``curricula.ICoTLM``
Coconut, continuous thoughts               ``coconut.CoconutLM``, ``coconut.CoconutNetwork``
text of a row, and its targets             ``text.TextLayout``, ``coconut.CoconutLayout``
the answer's prefix in a text written      ``text.TextCache``
curricula (n and r by epoch), draws        ``curricula.StepStages``, ``curricula.TokenStages``,
                                           ``coconut.num_latents`` (m)
resets of the optimiser, stage of a        ``curricula.StagedLM``
checkpoint
a backbone from another checkpoint         ``curricula.load_backbone``
base of the four                           ``text.TextLM``
=========================================  =====================================================
"""
