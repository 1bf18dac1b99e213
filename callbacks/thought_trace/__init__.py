"""What a model thinks along queries, next to what the data's steps would have it think.

The paper is *Latent Reasoning with Supervised Thinking States*.

=============================================  =====================================================
paper                                          where
=============================================  =====================================================
Fig. 4, thoughts within the query              ``page``, ``findings.ShownRow.told``
Sec. 3.3, rounds and trivial states            ``measures.rounds``, ``measures.summary``
Sec. 4.5, where reasoning goes wrong           ``measures.chunks``, ``measures.thoughts``
=============================================  =====================================================
"""

from callbacks.thought_trace.callback import ThoughtTrace

__all__ = ["ThoughtTrace"]
