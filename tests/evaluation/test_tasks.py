"""``evaluate.py tasks``: scores of every method, what they are called, and bad input."""

import json
import math
import os
import re

import pytest
from methods import METHODS
from task_data import write_folder, write_task

from datamodules.tokenizers import train_bpe
from evaluation.load import build_tokenizer
from lightning_models.checkpoint import read_checkpoint
from tests.programs import ROOT, run

LIKELIHOODS = {
    "gpt2": "exact",
    "thoughtbubbles": "noncausal",
    "thought-gestalt": "exact",
    "gist": "exact",
    "latent-thought": "estimate",
    "ponderlm": "exact",
    "mixture-of-recursions-topk": "noncausal",
}
THINKING = ("thoughtbubbles", "latent-thought", "ponderlm", "mixture-of-recursions-topk")
LENGTHS = {
    method.name: {"block_size": 96, **method.few} for method in METHODS if method.reads_windows
}
"""Long enough for the texts."""
METRIC = '''
"""A metric of the package evaluate: the share of answers that are texts."""

import datasets
import evaluate


class Texts(evaluate.Metric):
    def _info(self):
        columns = dict.fromkeys(("predictions", "references"), datasets.Value("string"))
        return evaluate.MetricInfo("Texts", "", datasets.Features(columns))

    def _compute(self, predictions, references):
        pairs = zip(predictions, references, strict=True)
        return {"texts": sum(type(x) is type(y) is str for x, y in pairs) / len(references)}
'''


@pytest.fixture
def untrained(write_method):
    """Writes the checkpoint of a method."""
    return lambda name, **changes: write_method(name, **LENGTHS.get(name, {}), **changes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "data")
    monkeypatch.setenv("DATA", str(root))
    return root


@pytest.fixture
def score(evaluates, tmp_path, folder):
    """Scores tasks; returns the result, its examples and what was printed."""

    def run(checkpoint, tasks, *options):
        target, samples = tmp_path / "result.json", tmp_path / "samples.jsonl"
        files = ("--output", target, "--samples", samples)
        printed = evaluates("tasks", "--ckpt", checkpoint, "--tasks", tasks, *files, *options)
        rows = [json.loads(line) for line in samples.open()]
        return json.loads(target.read_text()), rows, printed

    return run


@pytest.fixture
def own_tasks(tmp_path):
    """Task files of the user's: a text to write, and a text to score from its start."""
    place = tmp_path / "own"
    place.mkdir()
    more = "generation_kwargs: {until: ['e'], max_gen_toks: 8}"
    write_task(place / "write.yaml", "generate_until", "exact_match", more=more)
    write_task(place / "long.yaml", "generate_until", "acc", more=more.replace("8}", "96}"))
    roll = {"text": "", "mean": "weighted_perplexity"}
    write_task(place / "roll.yaml", "loglikelihood_rolling", "byte_perplexity", **roll)
    return place


def test_nominal_costs_have_names_of_their_own(untrained, score, own_tasks):
    ask = (untrained("thoughtbubbles"), "piqa_local,write", "--include_path", own_tasks)
    window = ("--set.eval_allocation", "window_topk", "--set.kappa", "1.3L")
    result, *_ = score(*ask, *window)
    for one in result["tasks"].values():
        assert one["nominal_steps"] > 0
        assert one["executed_steps"] != pytest.approx(one["nominal_steps"], rel=1e-3)
        assert one["flops_per_token"] != pytest.approx(one["nominal_flops_per_token"], rel=1e-3)
    result, *_ = score(*ask)
    assert not any("nominal_steps" in one for one in result["tasks"].values())


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_method_scores(name, untrained, score, own_tasks):
    """All three kinds of requests; twice the same; whatever the batches."""
    ask = (untrained(name), "lambada_local,piqa_local,write,roll", "--include_path", own_tasks)
    result, rows, printed = score(*ask, "--batch_size", 3)
    numbers = result["tasks"]["piqa_local"]
    assert numbers["likelihood"] == LIKELIHOODS[name]
    assert numbers["causal"] is (LIKELIHOODS[name] != "noncausal")
    rolling = "lower_bound" if name == "latent-thought" else LIKELIHOODS[name]
    assert result["tasks"]["roll"]["likelihood"] == rolling
    assert result["tasks"]["write"]["likelihood"] is None
    key = "perplexity" if rolling == "exact" else f"ppl_{'bound' if 'low' in rolling else rolling}"
    assert f"byte_{key}" in result["tasks"]["roll"]["metrics"]
    steps = numbers["executed_steps"]
    assert (steps > 0) is (name in THINKING)
    assert numbers["flops_per_token"] > 0
    model = next(method for method in METHODS if method.name == name).build(**LENGTHS.get(name, {}))
    parameters = sum(weight.numel() for weight in model.parameters())
    assert numbers["flops_per_token_6nd"] == pytest.approx(6 * parameters * (1 + steps))
    assert numbers["seconds"] > 0
    assert printed.splitlines()[2].split("|")[1].strip() == "lambada_local"

    _, again, _ = score(*ask, "--batch_size", 1)
    for one, other in zip(rows, again, strict=True):
        if "texts" in one:
            assert one == other
        else:
            assert one["log_likelihoods"] == pytest.approx(other["log_likelihoods"], abs=2e-4)
            assert one["tokens"] == other["tokens"]


def test_numbers_follow_from_the_examples(untrained, score):
    result, rows, _ = score(untrained("gpt2"), "lambada_local,hellaswag_local")
    nats = [row["log_likelihoods"][0] for row in rows if row["task"] == "lambada_local"]
    values = result["tasks"]["lambada_local"]["metrics"]
    assert values["perplexity"] == pytest.approx(math.exp(-sum(nats) / 3))
    assert result["lambada_local_perplexity"] == values["perplexity"]
    choices = [row for row in rows if row["task"] == "hellaswag_local"]
    right = [
        row["log_likelihoods"].index(max(row["log_likelihoods"])) == row["target"]
        for row in choices
    ]
    assert values["acc"] == 0.0
    assert result["hellaswag_local_acc"] == sum(right) / 2
    numbers = result["tasks"]["hellaswag_local"]
    assert (numbers["examples"], numbers["of_examples"], numbers["num_fewshot"]) == (2, 2, 0)
    assert numbers["scored_tokens"] == sum(sum(row["tokens"]) for row in choices)


def test_prefixes_are_causal_and_differ_where_the_model_is_not(untrained, score):
    path = untrained("thoughtbubbles")
    result, rows, _ = score(path, "piqa_local", "--mode", "autoregressive")
    numbers = result["tasks"]["piqa_local"]
    assert (numbers["likelihood"], numbers["causal"]) == ("exact", True)
    blockwise, others, printed = score(path, "piqa_local")
    assert blockwise["settings"]["budget"] == "dynamic"  # trained under fixed
    assert "budget      dynamic" in printed
    assert numbers["read_tokens"] > blockwise["tasks"]["piqa_local"]["read_tokens"]
    assert numbers["scored_tokens"] == blockwise["tasks"]["piqa_local"]["scored_tokens"]
    assert rows[0]["log_likelihoods"] != pytest.approx(others[0]["log_likelihoods"], abs=1e-4)
    fixed, most, _ = score(path, "piqa_local", "--budget", "fixed")
    assert fixed["settings"]["budget"] == "fixed"
    assert most[0]["log_likelihoods"] != pytest.approx(others[0]["log_likelihoods"], abs=1e-4)
    causal = untrained("gpt2")
    own = [
        score(causal, "piqa_local", "--mode", mode)[1] for mode in ("blockwise", "autoregressive")
    ]
    assert own[0] == own[1]


def test_the_papers_own_rules(untrained, score):
    """Lowest perplexity of a token over the whole text; greedy match of the last word."""
    names = [f"{name}_thoughtbubbles_local" for name in ("lambada", "hellaswag", "piqa")]
    result, rows, _ = score(untrained("gpt2"), ",".join([*names, "lambada_local"]))
    for row in rows:
        if row["task"] in names[1:]:
            pairs = zip(row["log_likelihoods"], row["tokens"], strict=True)
            nats = [-nats / tokens for nats, tokens in pairs]
            assert row["metrics"]["acc"] == float(nats.index(min(nats)) == row["target"])
    first = next(row for row in rows if row["task"] == names[1])
    endings = ("reads.", "a", "b c")
    assert first["tokens"] == [len(f"Reading: The memory {ending}") for ending in endings]
    assert result[f"{names[0]}_acc"] == result["lambada_local_acc"]


def test_groups_have_one_row(untrained, score):
    result, rows, printed = score(untrained("gpt2"), "blimp_local", "--limit", 1)
    assert len(rows) == 67
    numbers = result["tasks"]["blimp_local"]
    accuracies = [row["metrics"]["acc"] for row in rows]
    assert numbers["metrics"]["acc"] == pytest.approx(sum(accuracies) / 67)
    assert (numbers["examples"], numbers["of_examples"], len(numbers["tasks"])) == (67, 134, 67)
    assert printed.count("blimp_local") == 1
    assert "67 of 134" in printed


def test_examples_in_front_of_questions(untrained, score):
    result, _, _ = score(untrained("gpt2"), "lambada_local,arc_easy_local", "--num_fewshot", 1)
    assert result["tasks"]["arc_easy_local"]["num_fewshot"] == 1
    assert result["tasks"]["arc_easy_local"]["read_tokens"] > 100


@pytest.mark.parametrize(
    ("tasks", "options", "named"),
    [
        ("lambda_local", {}, ("tasks (lambda_local)", "lambada_local")),
        (",", {}, ("tasks (,)",)),
        ("piqa_local", {"limit": 0}, ("--limit: ",)),
        ("piqa_local", {"batch_size": 0}, ("--batch_size: ",)),
        ("piqa_local", {"include_path": "nowhere"}, ("include_path (nowhere)",)),
        ("piqa_local", {"budget": "fixed"}, ("TransformerLM", "budget")),
        ("piqa_local", {"tokenizer": "gpt2"}, ("tokenizer",)),
        ("piqa_local", {"output": "nowhere/x.json"}, ("output", "nowhere")),
        ("lambada_local", {"num_fewshot": 3}, ("num_fewshot (3)", "lambada_local")),
        ("long", {}, ("max_gen_toks (96)",)),
        ("piqa_local", {"ckpt": "no-cot"}, ("NoCoTLM", "evaluate.py reason")),
        ("lambada_local", {"DATA": "."}, ("DATA (.)", "lambada/*test*.jsonl", "docs/tasks.md")),
        ("blimp_local", {"DATA": "nowhere"}, ("DATA (nowhere)",)),
        ("blimp_local", {"DATA": ""}, ("environment variable DATA",)),
        ("piqa_thoughtbubbles", {}, ("tasks (piqa_thoughtbubbles)", "DATA=folder")),  # no network
    ],
)
def test_bad_input_is_one_line(
    untrained, fails, folder, own_tasks, tasks, options, named, monkeypatch, tmp_path
):
    from evaluation.tasks import harness

    monkeypatch.setattr(harness, "TaskManager", OwnOnly)
    monkeypatch.chdir(tmp_path)
    words = {"include_path": own_tasks, **options}
    monkeypatch.setenv("DATA", words.pop("DATA", str(folder)))
    words["ckpt"] = untrained(words.get("ckpt", "gpt2"))
    given = [word for key, value in words.items() for word in (f"--{key}", value)]
    line = fails("tasks", "--tasks", tasks, *given)
    assert [part for part in named if part not in line] == []


def test_no_network_is_one_line(untrained, fails):
    """The tests run without one; this task is the harness' own."""
    line = fails("tasks", "--ckpt", untrained("gpt2"), "--tasks", "lambada_openai")
    assert "tasks (lambada_openai)" in line
    assert "DATA=folder" in line


@pytest.mark.parametrize(
    "words",
    [
        ("tasks", "--tasks", "piqa_local"),
        ("generate", "--prompt", "a"),
        ("quality", "--mode", "unconditional"),
    ],
)
def test_another_tokenizer_of_the_same_size_is_refused(checkpoint_path, fails, tmp_path, words):
    size = build_tokenizer(read_checkpoint(checkpoint_path)).vocab_size
    other = tmp_path / "other.json"
    other.write_text(train_bpe(f"bpe:{size}", ["a thought of another text " * 9]).json_text)
    line = fails(*words, "--ckpt", checkpoint_path, "--tokenizer", other)
    assert "the same ids mean different text" in line


class OwnOnly:
    """Knows the project's tasks alone; to read the harness' own thousands takes a minute."""

    def __new__(cls, include_path=None, **_):
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=include_path, include_defaults=False)


LIBRARY = """
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

tasks = TaskManager(include_path=sys.argv[-1], include_defaults=False)
print(simple_evaluate("dummy", tasks=["package"], task_manager=tasks)["results"]["package"])
"""


@pytest.mark.parametrize("program", ["verb", "library"])
def test_metrics_of_the_package_are_found(program, checkpoint_path, folder, own_tasks, tmp_path):
    """The project's folder is first on the path, where evaluate.py has the package's name."""
    script = tmp_path / "texts" / "texts.py"
    script.parent.mkdir()
    script.write_text(METRIC)
    task, more = own_tasks / "package.yaml", "generation_kwargs: {until: [a], max_gen_toks: 8}"
    write_task(task, "generate_until", script, target=" a", more=more)
    task.write_text(task.read_text().replace("aggregation", "hf_evaluate: true, aggregation"))
    words = ("-c", f"import sys; assert sys.path[0] == {str(ROOT)!r}{LIBRARY}", own_tasks)
    if program == "verb":
        words = ("evaluate.py", "tasks", "--ckpt", checkpoint_path, "--tasks", "package")
        words += ("--include_path", own_tasks)
    cache = {"HF_MODULES_CACHE": str(tmp_path), "HF_METRICS_CACHE": str(tmp_path)}
    done = run(*words, env={**os.environ, **cache, "HF_HUB_OFFLINE": "1", "DATA": str(folder)})
    assert done.returncode == 0, done.stderr
    assert re.search(r"\|texts .*\| +1\||'texts,none': 1\.0", done.stdout), done.stdout


def test_a_metric_that_cannot_be_loaded_is_one_line(checkpoint_path, folder, own_tasks):
    more = "generation_kwargs: {until: [a], max_gen_toks: 8}"
    write_task(own_tasks / "odd.yaml", "generate_until", "of_the_hub", more=more)
    words = ("--ckpt", checkpoint_path, "--tasks", "odd", "--include_path", own_tasks)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DATA": str(folder)}
    done = run("evaluate.py", "tasks", *words, env=env)
    assert done.returncode == 2
    assert "error: tasks (odd): metrics (of_the_hub): the harness does not" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_package_an_import_says_what_to_install():
    done = run("-c", "import sys; sys.path[:] = sys.path[:1]; import evaluate")
    assert done.stderr.splitlines()[-1].endswith("pip install evaluate")
    assert done.returncode == 1
