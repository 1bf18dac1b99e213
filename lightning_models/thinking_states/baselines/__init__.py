"""Baselines of Thinking States, on the same backbone, data and evaluation.

=========================================  =====================================================
what                                       where
=========================================  =====================================================
No CoT, CoT                                ``text.NoCoTLM``, ``text.CoTLM``
iCoT, stepwise internalisation             ``curricula.ICoTLM``
Coconut, continuous thoughts               ``coconut.CoconutLM``
CODI: z = f(h), L = alpha L_student +      ``codi.CodiLM``, ``codi.CodiNetwork``, ``codi.distil``
beta L_KD + gamma L_teacher
PCCoT, Jacobi passes                       ``codi.CodiNetwork.think``
SIM-CoT, the decoder of steps              ``latents.LatentTextLM.losses``, ``latents.step_texts``
latents fed back, with gradient            ``latents.LatentNetwork``
text of a row, and its targets             ``text.TextLayout``, ``latents.LatentLayout``
answer prefix in generated text            ``text.TextCache``
curricula (n and r by epoch), draws        ``curricula.StepStages``, ``curricula.TokenStages``,
                                           ``coconut.num_latents`` (m)
optimiser resets, stage of a checkpoint    ``curricula.StagedLM``
backbone from another checkpoint           ``starting.load_backbone``
base of all, base of methods with latents  ``text.TextLM``, ``latents.LatentTextLM``
=========================================  =====================================================
"""
