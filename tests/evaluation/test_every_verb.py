"""What every command keeps: provenance, the same numbers again, refusals before the work."""

import importlib
import json
import math
import shutil
import sys

import pytest
import torch
from formats import BYTES
from methods import METHODS
from task_data import lines, write_folder
from verbs import VERBS

from datamodules import Kinship, LocalText, ReasoningDataModule
from datamodules.corpus import TextCorpus
from datamodules.tokenizers import train_bpe
from evaluation.cli import COMMANDS
from tests.programs import ROOT

NAMES = "The son of James is John. The father of Mark is Paul. "
ENTRIES = 288
PROBLEM = {"question": "Tim has 2 + 3 pears.", "answer": "<<2+3=5>>5\n#### 5"}
PASS_AT_2 = f"""
include: {ROOT}/configs/tasks/gsm8k_pass_at_k_local.yaml
task: pass_at_2
repeats: 2
generation_kwargs: {{until: [], do_sample: true, max_gen_toks: 3, streams: example}}
"""
REPORTS = [verb for verb in VERBS if verb.reports]
BATCHED = [verb for verb in VERBS if verb.batched]


@pytest.fixture
def verb_files(tmp_path, monkeypatch):
    """The files that the commands read, and the folder that they may write to."""
    monkeypatch.setenv("DATA", str(write_folder(tmp_path / "data")))
    text, tasks = tmp_path / "lm1b.txt", tmp_path / "tasks"
    text.write_text("the state reads n't the memory\na token 's thought , and forks .\n" * 6)
    lines(tmp_path / "data/gsm8k/test.jsonl", [PROBLEM] * 2)
    tasks.mkdir()
    (tasks / "pass_at_2.yaml").write_text(PASS_AT_2)
    return {"text": text, "tasks": tasks, "folder": tmp_path}


@pytest.fixture(scope="module")
def named_path(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint of the plain transformer whose tokenizer has names of men as tokens."""
    folder = tmp_path_factory.mktemp("named")
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": NAMES * 5}) for _ in range(30)))
    options = {"data_files": str(text), "tokenizer": f"bpe:{ENTRIES}", "block_size": 96}
    return train_checkpoint(folder / "named.ckpt", LocalText(**{**corpus, **options}))


@pytest.fixture
def result_of(evaluates, verb_files, tmp_path):
    """Runs a command on a checkpoint; returns its result."""

    def run(verb, checkpoint, *options):
        target = tmp_path / f"result{verb.ending}"
        printed = evaluates(*verb.command(checkpoint, verb_files, "--output", target, *options))
        assert printed
        return json.loads(target.read_text()) if verb.reports else target.read_text()

    return run


def numbers(content, *without):
    """A result without what takes another time each time, and without some keys."""
    if isinstance(content, dict):
        kept = {k: v for k, v in content.items() if k not in without}
        kept = {k: v for k, v in kept.items() if not k.endswith(("seconds", "per_second"))}
        return {key: numbers(value, *without) for key, value in kept.items()}
    return [numbers(each, *without) for each in content] if isinstance(content, list) else content


def assert_close(one, other, key=""):
    """Checks that two results agree up to rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), key
        for name in one:
            assert_close(one[name], other[name], f"{key}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), key
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_close(*pair, f"{key}[{number}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6), key
    else:
        assert one == other, key


# ---- results


@pytest.mark.parametrize("verb", REPORTS, ids=str)
def test_results_have_their_provenance_and_come_again(
    verb, result_of, evaluates, named_path, tmp_path
):
    result_of(verb, named_path)  # what is imported late is imported now
    torch.manual_seed(5)
    state = torch.get_rng_state()
    result = result_of(verb, named_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert result["checkpoint"] == str(named_path)
    own = next(iter(result["sets"].values()))["settings"] if "sets" in result else None
    settings = own or result["settings"]
    assert (settings["device"], settings["precision"]) == ("cpu", "32")
    assert (settings["set"], settings["which"]) == ({}, None)
    assert result.get("model", "TransformerLM") == "TransformerLM"
    again = result_of(verb, named_path, "--set.attention_backend", "math")
    settings = next(iter(again["sets"].values()))["settings"] if own else again["settings"]
    assert settings["set"] == {"attention_backend": "math"}
    assert_close(numbers(again, "set"), numbers(result, "set"))


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_start_that_failed_is_skipped_with_a_word(
    verb, evaluates, fails, named_path, verb_files, tmp_path
):
    runs = tmp_path / "runs"
    saved, failed = (runs / f"version_{number}" for number in (0, 1))
    (saved / "checkpoints").mkdir(parents=True)
    shutil.copy(named_path, saved / "checkpoints" / "last.ckpt")
    failed.mkdir()
    for folder in (saved, failed):
        (folder / "metrics.csv").write_text("step,val/loss\n0,5.5\n")
    ask = fails if verb.name == "reason" else evaluates  # it finds nothing to ask in a text
    with pytest.warns(UserWarning, match=rf"skipping {failed}: no checkpoint is in there"):
        said = ask(*verb.command(runs, verb_files))
    assert verb.name != "reason" or "has no questions with one correct answer" in said


@pytest.mark.parametrize("verb", BATCHED, ids=str)
def test_the_size_of_batches_changes_nothing(verb, result_of, named_path):
    few = ("--limit_batches", 1000) if "--limit_batches" in verb.words else ()
    found = [result_of(verb, named_path, "--batch_size", size, *few) for size in (1, 7)]
    of_batches = ("batch_size", "eval_batch_size", "batches", "of_batches")
    one, other = (numbers(result, *of_batches) for result in found)
    assert_close(one, other)


# ---- refusals


@pytest.fixture
def no_work(monkeypatch):
    """Fails where a command builds a model or prepares data, whatever module it does so in."""

    def begin(*args, **kwargs):
        raise RuntimeError("the work has begun")

    for command, _ in COMMANDS.values():
        importlib.import_module(f"evaluation.{command}")
    for name, module in list(sys.modules.items()):
        if name.startswith("evaluation.") and hasattr(module, "build_model"):
            monkeypatch.setattr(module, "build_model", begin)
    for kind in (TextCorpus, ReasoningDataModule):
        monkeypatch.setattr(kind, "prepare_data", begin)


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_what_is_no_checkpoint_is_named(verb, fails, named_path, verb_files, tmp_path):
    damaged, empty = tmp_path / "cut.ckpt", tmp_path / "empty"
    damaged.write_bytes(named_path.read_bytes()[:-200])
    empty.mkdir()
    assert "none.ckpt" in fails(*verb.command("none.ckpt", verb_files))
    assert f"{damaged} " in fails(*verb.command(damaged, verb_files))
    assert "there is no complete checkpoint under" in fails(*verb.command(empty, verb_files))


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_best_that_there_is_not_is_refused(verb, fails, named_path, verb_files, tmp_path):
    run = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    run.parent.mkdir(parents=True)
    shutil.copy(named_path, run)
    best = ("--which", "best")
    line = fails(*verb.command(tmp_path / "run", verb_files, *best))
    assert "which=best: the run of" in line
    assert "has kept no best checkpoint" in line
    line = fails(*verb.command(run, verb_files, *best))
    assert f"{run} is one file; give the folder of the run" in line


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.name != "compare"], ids=str)
def test_what_cannot_be_written_is_named_before_the_work(
    verb, fails, named_path, verb_files, tmp_path, no_work
):
    name = f"result{verb.ending}"
    for target, expected in (
        (tmp_path / "nowhere" / name, "nowhere does not exist; create it"),
        (tmp_path, "is a folder; name a file in it"),
    ):
        line = fails(*verb.command(named_path, verb_files, "--output", target))
        assert line.startswith(f"error: output ({target})")
        assert expected in line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("result.json/report", "result.json is a file; choose another folder"),
        ("result.json", "is a file; name a folder"),
    ],
)
def test_what_a_comparison_cannot_write_is_named_before_the_work(
    name, expected, fails, named_path, tmp_path, no_work
):
    (tmp_path / "result.json").write_text("{}")
    line = fails("compare", named_path, "--output", tmp_path / name)
    assert line.startswith(f"error: output ({tmp_path / name})")
    assert expected in line


@pytest.mark.parametrize("verb", REPORTS, ids=str)
def test_wrong_options_are_named(verb, fails, named_path, verb_files, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for options, expected in (
        (("--device", "cuda"), "device (cuda) is not available here"),
        (("--set.dimm", "3"), "no setting dimm"),
        (("--packages", "[nowhere_to_be_found]"), "cannot import 'nowhere_to_be_found'"),
        (("--ouput", "a.json"), "--ouput"),
        (("--batch_size", "0"), "batch_size"),
    ):
        assert expected in fails(*verb.command(named_path, verb_files, *options)), options


# ---- methods

FIRST = list({method.model: method for method in reversed(METHODS)}.values())[::-1]
"""The first method of every class."""
TAKEN = {
    "every": FIRST,
    "texts": [method for method in FIRST if method.model.reads != "reasoning"],
    "prompts": [method for method in FIRST if method.continues],
    "none": [],
}
PAIRS = [(verb, method.name) for verb in VERBS for method in TAKEN[verb.methods]]


@pytest.fixture
def write_with_names(write_method, tmp_path):
    """Writes an untrained checkpoint of a method whose tokenizer has names of men as tokens."""

    def write(name):
        (method,) = [method for method in METHODS if method.name == name]
        marks = method.format.sizes["vocab_size"] - BYTES  # that the data put after the entries
        known = tmp_path / "tokenizer.json"
        known.write_text(train_bpe(f"bpe:{ENTRIES}", [NAMES * 50]).json_text)
        path = write_method(name, vocab_size=ENTRIES + marks)
        content = torch.load(path, weights_only=False)
        data = content["recipe"]["data"]["init_args"]
        corpus = data["corpus"]["init_args"] if "corpus" in data else data
        corpus["tokenizer"] = str(known)
        torch.save(content, path)
        return path

    return write


TWICE = ("perplexity", "quality")
"""Commands that are run again on every method: one that scores, and one that draws texts."""


@pytest.mark.parametrize(("verb", "name"), PAIRS, ids=str)
def test_every_method_has_numbers_and_the_same_twice(verb, name, result_of, request):
    write = "write_with_names" if verb.name == "reversal" else "write_method"
    path = request.getfixturevalue(write)(name)
    few = ("--limit_batches", 1) if "--limit_batches" in verb.words else ()
    one = result_of(verb, path, *few)
    assert one
    if verb.name in TWICE:
        assert numbers(one) == numbers(result_of(verb, path, *few))
    if verb.reports:
        # planned ones where compute depends on the text and text was only written
        cost = next(iter(one["tasks"].values())) if "tasks" in one else one
        flops = cost.get("flops_per_token") or cost["nominal_flops_per_token"]
        assert math.isfinite(flops)
        assert flops > 0
        assert cost["flops_per_token_6nd"] > 0


@pytest.mark.parametrize("name", [m.name for m in FIRST if m.model.reads == "reasoning"])
def test_models_of_questions_score_no_texts(name, fails, write_method, verb_files):
    (verb,) = [verb for verb in VERBS if verb.methods == "texts"]
    assert "reads reasoning" in fails(*verb.command(write_method(name), verb_files))


UNMARKED = [m.name for m in TAKEN["prompts"] if m.format.sizes["vocab_size"] == BYTES]


@pytest.mark.parametrize("name", UNMARKED)
def test_questions_with_one_answer(name, write_method, evaluates, data_cache, tmp_path):
    stories = {"train_stories": 4, "val_stories": 2, "test_stories": 2, "test_hops": [2]}
    data = Kinship(**stories, block_size=320, batch_size=2, cache_dir=str(data_cache))
    (method,) = (m for m in FIRST if m.name == name)
    path, found = write_method(name, block_size=320, **method.few), []
    content = torch.load(path, weights_only=False)
    content["recipe"]["data"] = data.recipe()
    torch.save(content, path)
    for number in range(2):
        output = tmp_path / f"{number}.json"
        evaluates("reason", "--ckpt", path, "--rounds", "null", "--output", output)
        found.append(numbers(json.loads(output.read_text())["results"][0]))
    assert found[0] == found[1]
    assert found[0]["questions"] == 2
    assert found[0]["likelihood"] in ("exact", "estimate", "noncausal")
