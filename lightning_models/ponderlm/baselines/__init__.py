"""Baselines of PonderLM-3 with K additional steps per token.

=========================================  =====================================================
baseline or component                      code
=========================================  =====================================================
looped decoder, Huginn, Ouro               ``recurrent_depth``
pause tokens                               ``simple.PauseLM``
PonderLM-1; expected embedding             ``simple.PonderLM1``, ``simple.expected_embedding``
Mixture-of-Recursions; expert choice       ``mixture_of_recursions.MoRLM``,
                                           ``mixture_of_recursions.choose``
repeated blocks; scores and FLOPs by step  ``shared.RepeatedNetwork``, ``shared.DepthLM``
=========================================  =====================================================

PonderLM-2, on which PonderLM-3 is built, is in ``ponderlm.module``. The plain decoder of the same
or greater depth is ``transformer.TransformerLM``.
"""
