"""Which facts a model knows: what it writes, and what counts as a name."""

import csv
import json

import pytest
import torch
from jsonargparse import ArgumentParser

from datamodules.journals import only_writer
from datamodules.reasoning.two_hop import Hop, read_known
from evaluation.pretrained import Pretrained
from evaluation.reason import known_facts
from evaluation.reason.known_facts import add_arguments, ask, names_one, run

CPU = torch.device("cpu")
QUESTIONS = ["the thought reads", "latent memory state", "the", "writes latent memory"]


def hop(question, name):
    return Hop(question, question, "the", name)


def continued(model, words, question, count):
    """Greedy tokens after a question, one forward pass each."""
    ids = words.encode(question)
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return words.decode(ids[-count:])


@pytest.mark.parametrize(
    ("text", "names", "right"),
    [
        ("Yoko Ono, the artist", ["Yoko Ono"], True),
        ("it is yoko ono", ["Y. Ono", "Yoko Ono"], True),
        ("Yoko Onoda", ["Yoko Ono"], False),
        ("Parish", ["Paris"], False),
        ("a b", ["a"], False),
        ("U.S. (mostly)", ["U.S."], True),
        ("", ["Paris"], False),
    ],
)
def test_names_in_texts(text, names, right):
    assert names_one(text, names) is right


HOPS = [hop(question, "x") for question in (*QUESTIONS, QUESTIONS[0])]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "known.jsonl"


def test_models_are_asked_greedily(tiny_gpt2, output):
    """Three at once, padded; here each alone."""
    model, words, folder = tiny_gpt2
    expected = [continued(model, words, question, 5) for question in QUESTIONS]
    expected = [text.partition("<|endoftext|>")[0].strip().split("\n")[0] for text in expected]
    asked = ask(Pretrained(str(folder), CPU), HOPS, output, max_new_tokens=5, batch_size=3)
    assert asked["question"].tolist() == QUESTIONS
    assert asked["written"].tolist() == expected
    with pytest.raises(ValueError, match="needs 6. tokens .* the model's context has 64"):
        ask(Pretrained(str(folder), CPU), HOPS, output, max_new_tokens=60)


# ---- interrupted


@pytest.fixture
def interrupted(tiny_gpt2, output, monkeypatch):
    """Asks in batches of one until the third, which is Ctrl-C; returns what asks on, and counts."""
    pretrained = Pretrained(str(tiny_gpt2[2]), CPU)
    calls, real = [], known_facts._continue

    def asking(pretrained, rows, max_new_tokens):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(pretrained, rows, max_new_tokens)

    def again(batch_size=1, **made_by):
        return ask(pretrained, HOPS, output, batch_size=batch_size, made_by=made_by)

    monkeypatch.setattr(known_facts, "_continue", asking)
    with pytest.raises(KeyboardInterrupt):
        again(hf="a")
    return again, calls


def test_an_interrupted_run_goes_on_to_the_same_file(interrupted, tiny_gpt2, output):
    again, calls = interrupted
    journal = output.with_name(".known.jsonl.journal")
    assert not output.exists()
    assert len(journal.read_text().splitlines()) == 1 + 2
    with journal.open("a") as file:
        file.write('{"written": ["half a li')  # killed while it was written
    again(hf="a")
    assert len(calls) == 3 + 2  # of four batches
    resumed = output.read_bytes()
    assert not journal.exists()
    again(hf="a")
    assert len(calls) == 5 + 4  # whole files are written again
    assert output.read_bytes() == resumed


def test_other_commands_do_not_go_on_with_it(interrupted, output):
    again, _ = interrupted
    with pytest.raises(ValueError, match=r"begun it with another hf \(a, now b\); run that one"):
        again(hf="b")
    with pytest.raises(ValueError, match=r"another batch_size \(1, now 2\)"):
        again(hf="a", batch_size=2)
    with only_writer(output), pytest.raises(ValueError, match="written by another process"):
        again(hf="a")
    output.with_name(".known.jsonl.journal").write_text("nonsense\n")
    with pytest.raises(ValueError, match="no journal of this command; remove it"):
        again(hf="a")
    assert not output.exists()


# ---- the command


def test_the_command_writes_what_the_data_module_reads(tiny_gpt2, tmp_path, capsys):
    model, words, folder = tiny_gpt2
    names = [continued(model, words, text, 4).strip().split("\n")[0] for text in QUESTIONS[:2]]
    keys = ["e1.value", "e2.value", "e3.value", "r1(e1).prompt", "r2(e2).prompt"]
    row = dict(zip(keys, ["the", names[0], "nobody at all", *QUESTIONS[:2]], strict=True))
    rows = [
        {**row, "r2(r1(e1)).prompt": "a"},
        {**row, "e3.value": names[1], "r2(r1(e1)).prompt": "b"},
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser, [])
    target = tmp_path / "known.jsonl"
    argv = [f"--hf={folder}", f"--files={tmp_path}/a.csv", f"--output={target}", "--device=cpu"]
    run(parser.parse_args([*argv, "--max_new_tokens=4"]))
    assert read_known(target) == {QUESTIONS[0]: True, QUESTIONS[1]: False}
    first = json.loads(target.read_text().splitlines()[0])
    assert (first["object"], first["written"]) == (names[0], names[0])
    printed = capsys.readouterr().out
    assert "known facts" in printed
    assert "1 (50.0 %)" in printed
    with pytest.raises(ValueError, match="are read from csv files"):
        run(parser.parse_args([argv[0], f"--files={target}", argv[2], "--device=cpu"]))
