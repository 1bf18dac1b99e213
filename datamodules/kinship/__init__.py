"""Kinship stories: who is related to whom, told one relation at a time.

A seeded generator in the manner of CLUTRR (Sinha et al. 2019, arXiv 1908.06177). The paper's text
is crowd-sourced; here templates tell it, so any number of stories can be made without a download.

| file | what it holds |
|---|---|
| `relations` | kinds of relation, their words, and `COMPOSITION`: the kin of my kin |
| `family` | `Family`: a random genealogy, and the relation between any two of its people |
| `wording` | names, sentences of each kind of relation, the question |
| `stories` | `tell`: story number i of a split, a pure function of (seed, split, i) |
| `module` | `Kinship`: the data module |

CLUTRR's pipeline to code: its rules are `COMPOSITION`, its kinship graph is `family.family`, and
"backward chaining", which replaces a fact by two that imply it, is `stories.chain`; noise facts are
`stories.distractions`.
"""

from datamodules.kinship.module import Kinship

__all__ = ["Kinship"]
