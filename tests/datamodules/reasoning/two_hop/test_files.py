"""Files of two-hop questions, in both public formats."""

import pytest

from datamodules import TwoHop
from datamodules.reasoning.two_hop import end_of, read_chains
from tests.datamodules.reasoning.two_hop.songs import SONGS, prompts, templates, write


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
        ({"e1.value": None}, "the columns are those of neither format"),
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
    with pytest.raises(ValueError, match="line 2: the template 'the singer' has no {}"):
        list(read_chains(path))
    rows = [{**prompts(SONGS)[0], "e2.aliases": "(" * 500}]
    write(path, rows)
    assert next(read_chains(path)).first.names == ("Ann",)
    with pytest.raises(ValueError, match="are read from csv files"):
        TwoHop(data_files=write(tmp_path / "a.tsv", rows)).fingerprint  # noqa: B018
