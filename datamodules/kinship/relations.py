"""Kinds of relation, the words for them, and which kind two of them make.

"B is A's mother" is kind ``parent`` from A to B; B's gender chooses the word. Families are those
that `family` makes: children have two married parents, nobody marries twice, relatives do not
marry. Uncles, aunts, nephews and nieces are relatives by blood; brothers- and sisters-in-law are
the siblings of one's spouse and the spouses of one's siblings.
"""

from typing import Literal, get_args

Gender = Literal["male", "female"]
Kind = Literal[
    "parent",
    "child",
    "sibling",
    "spouse",
    "grandparent",
    "grandchild",
    "pibling",  # uncle or aunt
    "nibling",  # nephew or niece
    "parent_in_law",
    "child_in_law",
    "sibling_in_law",
]
GENDERS: tuple[Gender, ...] = get_args(Gender)
KINDS: tuple[Kind, ...] = get_args(Kind)

WORDS: dict[Kind, dict[Gender, str]] = {
    "parent": {"male": "father", "female": "mother"},
    "child": {"male": "son", "female": "daughter"},
    "sibling": {"male": "brother", "female": "sister"},
    "spouse": {"male": "husband", "female": "wife"},
    "grandparent": {"male": "grandfather", "female": "grandmother"},
    "grandchild": {"male": "grandson", "female": "granddaughter"},
    "pibling": {"male": "uncle", "female": "aunt"},
    "nibling": {"male": "nephew", "female": "niece"},
    "parent_in_law": {"male": "father-in-law", "female": "mother-in-law"},
    "child_in_law": {"male": "son-in-law", "female": "daughter-in-law"},
    "sibling_in_law": {"male": "brother-in-law", "female": "sister-in-law"},
}
RELATIONS: tuple[str, ...] = tuple(word for words in WORDS.values() for word in words.values())

COMPOSITION: dict[tuple[Kind, Kind], Kind] = {
    ("parent", "parent"): "grandparent",
    ("parent", "child"): "sibling",
    ("parent", "sibling"): "pibling",
    ("parent", "spouse"): "parent",
    ("parent", "parent_in_law"): "grandparent",
    ("child", "parent"): "spouse",
    ("child", "child"): "grandchild",
    ("child", "sibling"): "child",
    ("child", "spouse"): "child_in_law",
    ("child", "nibling"): "grandchild",
    ("sibling", "parent"): "parent",
    ("sibling", "child"): "nibling",
    ("sibling", "sibling"): "sibling",
    ("sibling", "spouse"): "sibling_in_law",
    ("sibling", "grandparent"): "grandparent",
    ("sibling", "pibling"): "pibling",
    ("spouse", "parent"): "parent_in_law",
    ("spouse", "child"): "child",
    ("spouse", "sibling"): "sibling_in_law",
    ("spouse", "grandchild"): "grandchild",
    ("spouse", "parent_in_law"): "parent",
    ("spouse", "child_in_law"): "child_in_law",
    ("grandparent", "spouse"): "grandparent",
    ("grandchild", "sibling"): "grandchild",
    ("pibling", "parent"): "grandparent",
    ("nibling", "sibling"): "nibling",
    ("parent_in_law", "spouse"): "parent_in_law",
    ("child_in_law", "spouse"): "child",
    ("child_in_law", "child"): "grandchild",
    ("child_in_law", "parent_in_law"): "spouse",
}
"""(kind from A to B, kind from B to C) -> kind from A to C, for three different people.

It holds the pairs that have one answer in every family, and all of them: a parent's child is a
sibling, since it is not oneself, but a grandparent's child may be a parent or an uncle.
"""


def compose(kinds: tuple[Kind, ...]) -> frozenset[Kind]:
    """Returns the kinds that follow from a chain of kinds between different people.

    Steps are joined by `COMPOSITION` in every order: in "my father's father's son" the last two
    make a brother, so he is an uncle, where the first two alone would leave it open. Empty where
    nothing follows; never more than one kind, if the chain exists in a family.
    """
    table: dict[tuple[int, int], frozenset[Kind]] = {
        (i, i + 1): frozenset({kind}) for i, kind in enumerate(kinds)
    }
    for width in range(2, len(kinds) + 1):
        for start in range(len(kinds) - width + 1):
            end = start + width
            table[start, end] = frozenset(
                COMPOSITION[first, second]
                for middle in range(start + 1, end)
                for first in table[start, middle]
                for second in table[middle, end]
                if (first, second) in COMPOSITION
            )
    return table[0, len(kinds)]
