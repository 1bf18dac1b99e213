"""A Latent-Thought checkpoint through every command that scores or writes."""

import json
import math

import pytest
import torch

from datamodules import load_tokenizer
from evaluation.load import build_model
from evaluation.reversal import probe_model
from lightning_models.checkpoint import read_checkpoint
from tests.programs import ROOT

FROM_THE_PRIOR = ("--set.inner_steps", 0)
"""Two steps leave posteriors too narrow for draws to decide what a model this small writes."""


@pytest.fixture
def ask(reports, latent_path):
    """Runs a command; returns its result and what it printed."""
    return lambda command, *options: reports(command, "--ckpt", latent_path, *options)


def test_perplexity_is_a_bound_with_its_parts(ask):
    result, printed = ask("perplexity", "--limit_batches", 2)
    assert (result["likelihood"], result["causal"]) == ("lower_bound", False)
    assert result["ppl_bound"] == pytest.approx(math.exp(-result["elbo_per_token"]))
    assert result["kl_per_token"] > 0
    assert -result["elbo_per_token"] == pytest.approx(
        result["nll_per_token"] + result["kl_per_token"]
    )
    assert "perplexity" not in result
    for name in ("ppl bound", "elbo per token", "nll per token", "kl per token"):
        assert name in printed


def test_a_part_of_a_window_has_no_bound(fails, latent_path):
    message = fails("perplexity", "--ckpt", latent_path, "--data.eval_stride", 8)
    assert "eval_stride (8): LatentThoughtLM scores whole windows" in message


def test_prefixes_give_estimates_that_no_window_is_compared_with(ask):
    options = ("--mode", "autoregressive", "--positions", 5, "--limit_batches", 1)
    result, printed = ask("perplexity", *options)
    assert (result["likelihood"], result["causal"]) == ("estimate", True)
    assert result["ppl_estimate"] == pytest.approx(math.exp(result["nats_per_token"]))
    assert result["difference"] is None
    assert printed.count("none (a part belongs to whole windows)") == 2


def test_zero_shot_names_bounds(ask, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("the state reads n't the memory\n" * 20)
    result, printed = ask("zero_shot", "--sets", "ptb", "--files.ptb", path)
    own = result["sets"]["ptb"]
    assert result["ptb_ppl_bound"] == own["ppl_bound"]
    assert own["nats_per_token"] == pytest.approx(own["nll_per_token"] + own["kl_per_token"])
    assert "ppl bound" in printed.splitlines()[0]


# ---- what is written


def test_greedy_samples_differ_and_batches_change_nothing(ask, tmp_path):
    texts, results = [], []
    for batch_size in (1, 7):
        target = tmp_path / f"{batch_size}.jsonl"
        few = ("--samples", 7, "--sample_tokens", 16, "--batch_size", batch_size)
        options = ("--mode", "unconditional", "--judge", "null", *few, "--texts", target)
        results.append(ask("quality", *options)[0])
        texts.append(target.read_text())
    assert texts[0] == texts[1]
    greedy = results[0]["unconditional"]["greedy"]  # draws from the prior alone
    assert greedy["distinct_texts"] > 1
    assert "greedy_generative_perplexity" not in results[0]


GREEDY_TRIES = """
include: {root}/configs/tasks/gsm8k_pass_at_k_local.yaml
task: greedy_tries
repeats: 3
generation_kwargs:
  {{until: [], do_sample: false, max_gen_toks: 8, document_start: true, streams: example}}
"""


def test_tries_at_gsm8k_are_inferred_one_by_one(ask, tmp_path, monkeypatch):
    """The latent vectors of each try are drawn anew, so that greedy texts differ."""
    (tmp_path / "gsm8k").mkdir()
    problems = [{"question": f"What is {n} x 5?", "answer": f"#### {5 * n}"} for n in range(3)]
    rows = "".join(json.dumps(problem) + "\n" for problem in problems)
    (tmp_path / "gsm8k" / "test.jsonl").write_text(rows)
    (tmp_path / "greedy_tries.yaml").write_text(GREEDY_TRIES.format(root=ROOT))
    monkeypatch.setenv("DATA", str(tmp_path))
    texts = []
    for batch_size in (1, 4):
        target = tmp_path / f"{batch_size}.jsonl"
        task = ("--tasks", "greedy_tries", "--include_path", tmp_path, "--samples", target)
        ask("tasks", *task, "--batch_size", batch_size, *FROM_THE_PRIOR)
        texts.append([json.loads(line)["texts"] for line in target.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert [len(tries) for tries in texts[0]] == [3, 3, 3]
    assert any(len(set(tries)) > 1 for tries in texts[0])


@pytest.fixture
def questions(tmp_path):
    """The options that name a few questions."""
    sizes = {"train_stories": 4, "val_stories": 4, "test_stories": 5, "test_hops": "[2]"}
    data = {**sizes, "block_size": 640, "cache_dir": tmp_path / "cache", "tokenizer": "bytes"}
    words = [word for key, value in data.items() for word in (f"--data.{key}", value)]
    return ["--data", "datamodules.Kinship", *words]


def test_ranked_answers_are_estimates(ask, questions):
    few = ("--rounds", "null", "--limit_batches", 1, "--batch_size", 2)
    result, printed = ask("reason", *questions, *few)
    (numbers,) = result["results"]
    assert (numbers["likelihood"], numbers["causal"]) == ("estimate", True)
    assert "estimate" in printed


def test_written_answers_do_not_depend_on_the_batch(ask, questions, tmp_path):
    """Of a question, the same answer in any batch; wrong ones as well."""
    found, answers = [], tmp_path / "answers.jsonl"
    words = ("--mode", "generate", "--max_new_tokens", 4, "--rounds", "null", *FROM_THE_PRIOR)
    for batch_size in (1, 5):
        ask("reason", *questions, *words, "--batch_size", batch_size, "--answers_file", answers)
        found.append([json.loads(line)["written"] for line in answers.read_text().splitlines()])
    assert len(set(found[0])) > 1
    assert found[0] == found[1]


def test_the_reversal_probe_draws_alike_for_every_prompt(latent_path):
    model = build_model(read_checkpoint(latent_path))
    probed = probe_model(model, load_tokenizer("bytes"))
    prompts = torch.tensor([probed.prompt(["The son of X"]), probed.prompt(["The son of Y"])])
    with torch.inference_mode():
        both, second = probed.log_probs(prompts[[0, 1, 0]]), probed.log_probs(prompts[1:])
    assert torch.allclose(both[0], both[2], atol=1e-5)
    assert not torch.allclose(both[0], both[1], atol=1e-3)
    assert torch.allclose(second, both[1:2], atol=1e-5)
