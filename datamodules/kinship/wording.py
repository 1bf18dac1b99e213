"""Names and sentences.

In a sentence ``{a}`` is whose relative it is, ``{b}`` the relative, ``{r}`` the relation's word,
``{his}`` the possessive of ``{a}``. Every sentence says what b is to a, and b's gender by the word.
"""

from datamodules.kinship.relations import Gender, Kind

_MALE = """
Aaron Adam Alan Albert Andrew Anthony Arthur Benjamin Bernard Brian Bruce Calvin Carl Charles
Chester Clarence Clifford Curtis Daniel David Dennis Derek Donald Douglas Duncan Edgar Edward Eric
Ernest Eugene Felix Francis Frank Fred Gary George Gilbert Glenn Gordon Gregory Harold Harry Henry
Herbert Howard Hugh Isaac Jack Jacob Jason Jeremy Jerome Joe John Jonathan Joseph Keith Kenneth
Kevin Larry Lawrence Leonard Lloyd Louis Marcus Mark Martin Matthew Michael Nicholas Norman Oliver
Oscar Owen Patrick Paul Peter Philip Quentin Ralph Raymond Richard Robert Roger Ronald Russell
Samuel Scott Simon Stanley Stephen Steven Terry Theodore Thomas Timothy Victor Vincent Walter
Warren Wesley
"""
_FEMALE = """
Agnes Alice Amanda Amy Andrea Angela Anna Audrey Barbara Betty Beverly Bonnie Brenda Camille Carol
Caroline Catherine Charlotte Christine Claire Clara Crystal Cynthia Daisy Debra Denise Diana Donna
Doris Dorothy Edith Eleanor Elizabeth Emily Esther Eva Evelyn Fiona Florence Gloria Grace Hannah
Harriet Heather Helen Ida Irene Isabel Jane Janet Jean Jennifer Jessica Joan Josephine Joyce
Judith Julia Karen Katherine Kathleen Kelly Laura Lillian Linda Lisa Lois Louise Lucy Margaret
Maria Marjorie Martha Mary Megan Melissa Michelle Mildred Monica Nancy Natalie Nicole Nora Olivia
Paula Phyllis Rachel Rebecca Rita Rose Ruth Sandra Sarah Sharon Sheila Sophia Susan Sylvia Teresa
Victoria Virginia Wendy Yvonne
"""
NAMES: dict[Gender, tuple[str, ...]] = {
    "male": tuple(_MALE.split()),
    "female": tuple(_FEMALE.split()),
}

POSSESSIVE: dict[Gender, str] = {"male": "his", "female": "her"}

_PLAIN = (
    "{b} is {a}'s {r}.",
    "{a}'s {r} is {b}.",
    "{b} is the {r} of {a}.",
    "The {r} of {a} is called {b}.",
)
_TOLD: dict[Kind, tuple[str, ...]] = {
    "parent": (
        "{a} called {his} {r} {b} on Sunday.",
        "On Monday {a} met {his} {r} {b} at the airport.",
        "{a} asked {his} {r}, {b}, for advice.",
    ),
    "child": (
        "{a} taught {his} {r} {b} to swim.",
        "Every evening {a} practises the piano with {his} {r} {b}.",
        "{a} bought a present for {his} {r}, {b}.",
    ),
    "sibling": (
        "{a} and {his} {r} {b} went to the park.",
        "{a} quarrelled with {his} {r} {b} about football.",
        "{a} lent a bicycle to {his} {r}, {b}.",
    ),
    "spouse": (
        "{a} and {his} {r} {b} painted the house.",
        "{a} danced with {his} {r} {b} until midnight.",
        "{a} cooked dinner for {his} {r}, {b}.",
    ),
    "grandparent": (
        "{a} spent the summer with {his} {r} {b}.",
        "In winter {a} visits {his} {r} {b} by train.",
        "{a} loves the stories of {his} {r}, {b}.",
    ),
    "grandchild": (
        "{a} read a book to {his} {r} {b}.",
        "{a} showed old photographs to {his} {r} {b}.",
        "{a} baked a cake for {his} {r}, {b}.",
    ),
    "pibling": (
        "{a} went fishing with {his} {r} {b}.",
        "After school {a} works in the bakery of {his} {r} {b}.",
        "{a} got a letter from {his} {r}, {b}.",
    ),
    "nibling": (
        "{a} took {his} {r} {b} to the zoo.",
        "{a} knitted a sweater for {his} {r} {b}.",
        "{a} wrote a card to {his} {r}, {b}.",
    ),
    "parent_in_law": (
        "{a} helped {his} {r} {b} in the garden.",
        "At the wedding {a} sat beside {his} {r} {b}.",
        "{a} had lunch with {his} {r}, {b}.",
    ),
    "child_in_law": (
        "{a} drove {his} {r} {b} to the station.",
        "{a} repaired the computer of {his} {r} {b}.",
        "{a} played cards with {his} {r}, {b}.",
    ),
    "sibling_in_law": (
        "{a} watched a film with {his} {r} {b}.",
        "Last spring {a} opened a restaurant with {his} {r} {b}.",
        "{a} borrowed a ladder from {his} {r}, {b}.",
    ),
}
SENTENCES: dict[Kind, tuple[str, ...]] = {kind: (*_PLAIN, *told) for kind, told in _TOLD.items()}

QUESTION = "Question: How is {b} related to {a}?\nAnswer:"
"""Ends where the answer begins; the answer is a space and the relation's word."""
