"""The generated world."""

import hashlib
from collections import Counter

from datamodules.reasoning.two_hop import RELATIONS, VERSION, Knowledge

KINDS = {
    **dict.fromkeys(("book", "film", "song"), 6),
    "person": 8,
    "company": 4,
    "city": 4,
    "country": 3,
    "currency": 3,
}


KNOWN_TEXT = (1, "b35ff7f88878b037")  # VERSION and digest: change both or neither


def test_the_world_is_a_function_of_sizes_and_seed():
    world, again, other = Knowledge(KINDS, 1), Knowledge(KINDS, 1), Knowledge(KINDS, 2)
    assert world.facts == again.facts
    assert world.facts != other.facts
    names = [name for kind in world.entities.values() for name in kind]
    assert len(names) == len(set(names)) == sum(KINDS.values())
    for (relation, subject), found in world.facts.items():
        assert subject in world.entities[relation.of]
        assert found in world.entities[relation.to]
        assert found != subject
    assert len(world.facts) == sum(KINDS[relation.of] for relation in RELATIONS)


def test_the_world_stays_as_it_is():
    questions = "\n".join(chain.question for chain in Knowledge(KINDS, 0).chains())
    digest = hashlib.sha256(questions.encode()).hexdigest()[:16]
    assert (VERSION, digest) == KNOWN_TEXT


def test_chains_go_over_two_facts():
    world = Knowledge(KINDS, 0)
    facts = {hop.question: hop for hop in world.hops()}
    chains = list(world.chains())
    assert len({chain.question for chain in chains}) == len(chains) > 100
    for chain in chains:
        assert facts[chain.first.question] == chain.first
        assert facts[chain.second.question] == chain.second
        assert chain.second.subject == chain.first.object
        assert chain.second.object not in (chain.first.subject, chain.first.object)
        assert chain.first.object not in chain.question
        assert chain.question.endswith(f"{chain.first.subject}?")
    seen = Counter(chain.question.split(" the ")[0] for chain in chains)
    assert set(seen) == {"Who is", "What is"}
