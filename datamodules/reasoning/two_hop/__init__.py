"""Questions over two facts, given in training or known by heart.

| file | what it holds |
|---|---|
| `module` | `TwoHop`, the data module |
| `hops` | `Hop` and `Chain`: a fact, and two of them as a question |
| `knowledge` | a generated world: its entities, facts and questions |
| `files` | questions about the real world, from csv files of the public sets |
"""

from datamodules.reasoning.two_hop.module import TwoHop

__all__ = ["TwoHop"]
