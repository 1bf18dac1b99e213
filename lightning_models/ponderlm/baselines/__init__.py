"""Baselines of PonderLM-3: other ways to spend K more steps on a token.

=========================================  =====================================================
what                                       where
=========================================  =====================================================
looped decoder, Huginn, Ouro               ``recurrent_depth``
pause tokens                               ``simple.PauseLM``
PonderLM-1; expected embedding             ``simple.PonderLM1``, ``simple.expected_embedding``
Mixture-of-Recursions; expert choice       ``mixture_of_recursions.MoRLM``,
                                           ``mixture_of_recursions.choose``
repeated blocks; scores and FLOPs by step  ``shared.RepeatedNetwork``, ``shared.DepthLM``
=========================================  =====================================================

PonderLM-2 is in ``ponderlm.module``: PonderLM-3 is built on it. The plain decoder, as deep or
deeper, is ``transformer.TransformerLM``.
"""
