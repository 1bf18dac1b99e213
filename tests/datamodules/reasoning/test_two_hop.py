"""Two-hop questions: the generated world, files, splits without leaks, steps, and what is known."""

import csv
import hashlib
import json
from collections import Counter

import pytest

from datamodules import TwoHop
from datamodules.hub import RowsWarning
from datamodules.reasoning.two_hop import (
    RELATIONS,
    VERSION,
    Knowledge,
    end_of,
    read_chains,
    read_known,
)
from datamodules.store import SPLITS

SONGS = [  # subject, bridge, answer
    ("Song A", "Ann", "Mia"),
    ("Song B", "Bea", "Nia"),
    ("Song C", "Ann", "Mia"),
    ("Song D", "Dea", "Oda"),
    ("Song E", "Eve", "Pia"),
]


def prompts(songs):
    """Rows as TwoHopFact has them."""
    return [
        {
            "uid": number,
            "e1.value": song,
            "e2.value": singer,
            "e3.value": mother,
            "e2.aliases": f"((({singer!r}, 'A. {singer}')),)",
            "e3.aliases": f"(({mother!r},),)",
            "r1(e1).prompt": f"The singer of '{song}' is",
            "r2(e2).prompt": f"The mother of {singer} is",
            "r2(r1(e1)).prompt": f"The mother of the singer of '{song}' is",
        }
        for number, (song, singer, mother) in enumerate(songs)
    ]


def templates(songs, second="the mother of {}"):
    """Rows as the csv files of Hopping Too Late have them."""
    return [
        {
            "id": number,
            "e1_label": song,
            "e2_label": singer,
            "e3_label": mother,
            "e3_aliases": f"['{mother} X', 'M']",
            "r1_template": "the singer of {}",
            "r2_template": second,
            "source_prompt": second.format(f"the singer of {song}") + " is" * (second[-1] == "}"),
        }
        for number, (song, singer, mother) in enumerate(songs)
    ]


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


# ---- the generated world


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
        assert found.object in world.entities[relation.to]
        assert found.object != subject
    assert len(world.facts) == sum(KINDS[relation.of] for relation in RELATIONS)


def test_the_world_stays_as_it_is():
    questions = "\n".join(chain.question for chain in Knowledge(KINDS, 0).chains())
    digest = hashlib.sha256(questions.encode()).hexdigest()[:16]
    assert (VERSION, digest) == KNOWN_TEXT


def test_chains_go_over_two_facts():
    world = Knowledge(KINDS, 0)
    facts = {hop.question: hop for hop in world.facts.values()}
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


# ---- files


def test_chains_of_both_formats(tmp_path):
    path = tmp_path / "a.csv"
    write(path, prompts(SONGS))
    chain = next(read_chains(path))
    assert chain.question == "The mother of the singer of 'Song A' is"
    assert chain.first.statement == "The singer of 'Song A' is Ann"
    assert chain.first.names == ("Ann", "A. Ann")
    assert chain.second.names == ("Mia",)
    assert end_of(chain.first.subject, chain.question) == chain.question.index("' is")
    write(path, templates(SONGS))
    chain = next(read_chains(path))
    assert chain.first.question == "the singer of Song A is"
    assert chain.second.statement == "the mother of Ann is Mia"
    assert chain.second.names == ("Mia", "Mia X", "M")
    assert chain.first.names == ("Ann",)  # no such column
    write(path, templates(SONGS, second="{} was born to"))
    chain = next(read_chains(path))
    assert chain.question == "the singer of Song A was born to"
    assert chain.second.question == "Ann was born to"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"e1.value": None}, "the columns match neither format"),
        ({"e3.value": ""}, "line 2: the column 'e3.value' is empty"),
    ],
)
def test_files_that_hold_no_chains(tmp_path, change, expected):
    row = {key: value for key, value in {**prompts(SONGS)[0], **change}.items() if value != None}  # noqa: E711
    path = tmp_path / "a.csv"
    write(path, [row])
    with pytest.raises(ValueError, match=expected):
        list(read_chains(path))


def test_broken_files(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("uid\n")
    with pytest.raises(ValueError, match="neither format"):
        list(read_chains(path))
    path.write_text(",".join(prompts(SONGS)[0]) + "\n")
    with pytest.raises(ValueError, match="has no questions"):
        list(read_chains(path))
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        list(read_chains(path))
    write(path, [{**templates(SONGS)[0], "r1_template": "the singer"}])
    with pytest.raises(ValueError, match="line 2: .*'the singer'"):
        list(read_chains(path))
    rows = [{**prompts(SONGS)[0], "e2.aliases": "(" * 500}]
    write(path, rows)
    assert next(read_chains(path)).first.names == ("Ann",)
    with pytest.raises(ValueError, match="are read from csv files"):
        TwoHop(data_files=write(tmp_path / "a.tsv", rows)).fingerprint  # noqa: B018


# ---- the data module


SIZES = {"works": 6, "people": 8, "companies": 4, "cities": 4, "countries": 3}


@pytest.fixture
def make(tmp_path):
    def build(**options):
        defaults = {**SIZES, "cache_dir": str(tmp_path / "cache"), "num_proc": 1, "batch_size": 4}
        data = TwoHop(**{**defaults, **options})
        data.prepare_data()
        data.setup()
        return data

    return build


# ---- full knowledge


def test_training_has_all_facts_and_none_of_the_tests_compositions(make):
    data = make(val_fraction=0.2, test_fraction=0.2)
    asked = {split: list(data.examples(split)) for split in SPLITS}
    single = {e.query: e.answer for e in asked["train"] if e.group == 1}
    double = {split: {e.query for e in asked[split] if e.group == 2} for split in SPLITS}
    assert {e.group for e in asked["test"]} == {2}
    assert not double["train"] & double["test"]
    assert not double["train"] & double["val"]
    assert not double["val"] & double["test"]
    shares = {split: len(double[split]) / sum(map(len, double.values())) for split in SPLITS}
    assert shares == pytest.approx({"train": 0.6, "val": 0.2, "test": 0.2}, abs=0.02)
    for chain in data.chains("test"):
        for hop in (chain.first, chain.second):
            assert single[hop.question] == f" {hop.object}"
    report = data.report()["train"]
    assert report["questions of one hop"] == len(single)
    assert report["questions of two hops"] == len(double["train"])


def test_steps_are_the_bridge_or_the_facts(make):
    data = make(test_fraction=0.2)
    chain, example = next(data.chains("test")), next(data.examples("test"))
    assert example.steps == (chain.first.object,)
    assert example.marked() == chain.question.replace("?", "<T>?")
    fact = next(data.examples("train"))
    assert fact.steps == (fact.answer.strip(),)
    assert fact.marked().endswith("<T>?")
    data = make(test_fraction=0.2, steps="facts")
    assert data.fingerprint != make(test_fraction=0.2).fingerprint
    example = next(data.examples("test"))
    assert example.steps == (chain.first.statement, chain.second.statement)
    assert example.marked() == chain.question.replace("?", "<T>?<T>")
    assert example.steps[1].endswith(f" is{example.answer}")


def test_without_facts_training_is_compositions_alone(make):
    data = make(one_hop=False)
    assert {example.group for example in data.examples("train")} == {2}


def test_answers_are_names():
    data = TwoHop(**SIZES)
    assert data.is_right(" ann Bly.", " Ann Bly")
    assert not data.is_right(" Ann", " Ann Bly")


# ---- files


def test_files_with_full_knowledge(make, tmp_path):
    train = write(tmp_path / "train.csv", prompts([*SONGS[:3], SONGS[0]]))
    test = write(tmp_path / "test.csv", prompts(SONGS[2:]))
    data = make(data_files=train, test_files=test, val_fraction=0.0)
    found = {split: [e.query for e in data.examples(split) if e.group == 2] for split in SPLITS}
    assert len(found["train"]) == 2  # Song A twice, and C is the test's
    assert len(found["test"]) == 3
    assert data.report()["train"]["questions of two hops left out, asked before"] == 2
    facts = [e for e in data.examples("train") if e.group == 1]
    assert len(facts) == len({e.query for e in facts}) == 5 + 4
    assert facts[0].marked() == "The singer of 'Song A<T>' is"
    assert data.recipe()["init_args"]["test_files"] == test


def test_of_facts_with_the_same_question_the_first_counts(make, tmp_path):
    twice = [("Song A", "Ann", "Mia"), ("Song A", "Bea", "Nia")]
    file = write(tmp_path / "all.csv", prompts(twice))
    data = make(data_files=file, val_fraction=0.0, test_fraction=0.0)
    facts = {e.query: e.answer for e in data.examples("train") if e.group == 1}
    assert facts["The singer of 'Song A' is"] == " Ann"


def test_parametric_knowledge_keeps_questions_whose_facts_are_known(make, tmp_path):
    files = write(tmp_path / "all.csv", prompts(SONGS))
    known = {f"The singer of '{song}' is": song != "Song B" for song, _, _ in SONGS}
    known |= {f"The mother of {singer} is": singer != "Dea" for _, singer, _ in SONGS}
    del known["The mother of Eve is"]
    path = tmp_path / "known.jsonl"
    lines = [json.dumps({"question": q, "known": k}) + "\n" for q, k in known.items()]
    path.write_text("".join(lines))
    options = {"data_files": files, "val_fraction": 0.0, "test_fraction": 0.0}
    data = make(**options, known_file=str(path), one_hop=False)
    assert [e.answer for e in data.examples("train")] == [" Mia", " Mia"]
    report = data.report()["train"]
    assert report["questions of two hops left out, a fact is not known"] == 2
    assert report["questions of two hops left out, known_file does not have a fact"] == 1
    assert data.recipe()["init_args"]["known_file"] == str(path)
    facts = make(**options, known_file=str(path))
    assert sum(e.group == 1 for e in facts.examples("train")) == 3
    with pytest.raises(ValueError, match="known_file"):
        TwoHop(known_file=str(path))
    path.write_text('{"question": "a", "known": 1}\n')
    with pytest.raises(ValueError, match="line 1: expected an object with a string 'question'"):
        read_known(path)
    path.write_text('{"question": "a", "known": true}\n')
    with pytest.raises(ValueError, match=r"Check that data\.known_file covers them"):
        make(**options, known_file=str(path))


@pytest.mark.filterwarnings("ignore:soheeyang/TwoHopFact .* were published")
def test_questions_by_name_are_those_of_the_file(tmp_path, hub, caplog):
    folder = hub.repository("soheeyang/TwoHopFact", commit=6)
    file = write(folder / "TwoHopFact.csv", prompts(SONGS))
    shares = {"val_fraction": 0.2, "test_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    with caplog.at_level("INFO"):
        data = TwoHop(dataset="soheeyang/TwoHopFact", **shares)
        data.prepare_data()
        data.setup()
    assert f"--data.revision {6:040x} repeats it." in caplog.text
    assert data.origin == {"name": "soheeyang/TwoHopFact", "commit": f"{6:040x}"}
    local = TwoHop(data_files=file, **shares)
    for split in ("train", "val", "test"):
        assert list(data.examples(split)) == list(local.examples(split)) != []
    others = [local, TwoHop(**shares), TwoHop(dataset="a/b", **shares)]
    others.append(TwoHop(dataset="soheeyang/TwoHopFact", revision=f"{6:040x}", **shares))
    assert data.fingerprint not in {other.fingerprint for other in others}
    with pytest.warns(
        RowsWarning, match=r"TwoHopFact at 0+6 has 5 rows, but 45,595 were published"
    ):
        list(TwoHop(dataset="soheeyang/TwoHopFact", **shares).chains("test"))
