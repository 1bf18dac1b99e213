"""The same numbers as the harness' own ``hf`` model, on a GPT-2 with imported weights."""

import json
import os

import pytest
import torch
from task_data import request, write_folder

from datamodules import tokenizer_from_state
from evaluation.load import build_model
from lightning_models.checkpoint import read_checkpoint
from tests.evaluation.test_tasks_scores import harness_model

LOCAL = (
    "lambada",
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "winogrande",
    "sciq",
    "race",
    "blimp",
)
TASKS = [f"{name}_local" for name in LOCAL]


def side_by_side(theirs, fast, ours, tokenizer, batch_size, **options):
    """The harness' model, and ours with the same weights; batches of other sizes."""
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(pretrained=theirs, tokenizer=fast, batch_size=batch_size, device="cpu", **options)
    return hf, harness_model(ours, tokenizer, batch_size=batch_size + 3)


@pytest.fixture(scope="module")
def both(save_gpt2, tmp_path_factory):
    from transformers import AutoTokenizer

    from evaluation.cli import main

    theirs, _, folder = save_gpt2(positions=72)
    target = tmp_path_factory.mktemp("imported") / "gpt2.ckpt"
    assert main(["import", "--hf", str(folder), "--output", str(target)]) == 0
    checkpoint = read_checkpoint(target)
    tokenizer = tokenizer_from_state(checkpoint.data_state["tokenizer"])
    fast = AutoTokenizer.from_pretrained(folder)
    return side_by_side(theirs, fast, build_model(checkpoint), tokenizer, 4)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(write_folder(tmp_path / "data")))


def answers(lm, tasks, num_fewshot=None, limit=None):
    from evaluation.tasks.harness import load_tasks, score_tasks

    loaded = load_tasks(tasks, None, num_fewshot)
    results = score_tasks(lm, loaded, limit=limit, bootstrap_iters=0, silent=True)
    rows = {
        (name, example["doc_id"], number): tuple(reply[0])
        for name, examples in results["samples"].items()
        for example in examples
        for number, reply in enumerate(example["resps"])
    }
    return rows, results["results"]


@pytest.mark.parametrize("num_fewshot", [None, 1])
@pytest.mark.parametrize(("bos", "most"), [(False, 1e-4), (True, 1e-3)])
def test_log_likelihoods_of_all_local_tasks(both, both_bos, data, num_fewshot, bos, most):
    """Among them contexts that are too long and cut; and LAMBADA's white space and quotes."""
    names = TASKS if num_fewshot is None else TASKS[:3]
    (theirs, scores), (ours, own_scores) = (
        answers(lm, names, num_fewshot) for lm in (both_bos if bos else both)
    )
    assert list(ours) == list(theirs)
    assert len(ours) >= 3 + 5 + 4
    assert max(abs(ours[key][0] - theirs[key][0]) for key in theirs) < most
    if not bos:
        assert [ours[key][1] for key in ours] == [theirs[key][1] for key in theirs]
    for name, values in scores.items():
        for key in (key for key in values if "," in key and "stderr" not in key):
            value = values[key]
            assert own_scores[name][key] == pytest.approx(value, rel=1e-4), (name, key)


def test_gsm8k_by_beam_search(both, tmp_path, monkeypatch):
    """The task asks the harness' own model, whose answer is the best of five beams."""
    from evaluation.tasks.harness import load_tasks, score_tasks

    monkeypatch.setenv("DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"So.\n#### {2 * n}"} for n in (2, 31)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines)
    hf = both[0]
    results = score_tasks(
        hf, load_tasks(["gsm8k_beam_local"], None, None), bootstrap_iters=0, silent=True
    )
    examples = results["samples"]["gsm8k_beam_local"]
    assert len(examples) >= 2
    for example in examples:
        prompt = f"Question: {example['doc']['question']}\nAnswer:"
        ids = hf.tok_encode(prompt)[-(72 - 50) :]
        inputs = torch.tensor([ids])
        beams = hf.model.generate(
            inputs, max_new_tokens=50, num_beams=5, do_sample=False, pad_token_id=hf.eot_token_id
        )
        assert example["resps"] == [[hf.tok_decode(beams[0, len(ids) :].tolist())]]
    assert "pass_at_1,none" in results["results"]["gsm8k_beam_local"]


def test_rolling_log_likelihoods(both):
    texts = ["the thought", "memory " * 90, "a latent state reads " * 30]
    requests = [request(text) for text in texts]
    theirs = both[0].loglikelihood_rolling(requests, disable_tqdm=True)
    ours = both[1].loglikelihood_rolling(requests)
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert ours[1].facts.scored == len(both[1].own_tokenizer.encode(texts[1])) > 72


def test_greedy_continuations_are_greedy(both):
    """Their own continuation is greedy by both; another one is not."""
    context, options = "the thought reads", {"until": [], "max_gen_toks": 3, "do_sample": False}
    (text,) = both[0].generate_until([request(context, dict(options))], disable_tqdm=True)
    for more in ({}, {"do_sample": True, "temperature": 0.0}, {"do_sample": True, "top_k": 1}):
        (own,) = both[1].generate_until([request(context, {**options, **more})])
        assert own == text
    ids = both[1].own_tokenizer.encode(context)
    if both[1].own_tokenizer.encode(context + text)[: len(ids)] == ids:
        pairs = [request(context, text), request(context, " zz")]
        assert [greedy for _, greedy in both[1].loglikelihood(pairs)] == [
            greedy for _, greedy in both[0].loglikelihood(pairs, disable_tqdm=True)
        ]


def test_continuations_end_in_front_of_stop_texts(both):
    contexts = ["the thought", "memory and", "a"]
    free = [request(text, {"until": [], "max_gen_toks": 12}) for text in contexts]
    texts = both[1].generate_until(free)
    stop = texts[0][4:6]
    cut = [request(text, {"until": [stop], "max_gen_toks": 12}) for text in contexts]
    assert both[1].generate_until(cut) == [text.split(stop)[0] for text in texts]
    theirs = both[0].generate_until(
        [request(text, {"until": [stop], "max_gen_toks": 12}) for text in contexts[:1]],
        disable_tqdm=True,
    )
    assert both[1].generate_until(cut)[:1] == theirs


# ---- a tokenizer that begins texts with BOS


@pytest.fixture(scope="module")
def both_bos(save_llama):
    from evaluation.importing import import_checkpoint

    theirs, fast, tokenizer, folder = save_llama
    ours = import_checkpoint(str(folder), folder / "tasks.ckpt").eval()
    return side_by_side(theirs, fast, ours, tokenizer, 3, softmax_dtype="float64")


PAIRS = [
    ("", "the cat ate"),
    (" ", "the cat"),
    ("He ate the", " cat"),
    ("He ate the ", "cat"),
    ("He ate the c", "at ate"),  # a token spans the join
    ("the cat " * 20, "ate"),  # cut on the left
]


def test_requests_with_bos(both_bos):
    theirs, ours = both_bos
    pairs = [request(*pair) for pair in PAIRS]
    expected = theirs.loglikelihood(pairs, disable_tqdm=True)
    with pytest.warns(UserWarning, match="1 of 6 requests"):
        found = ours.loglikelihood(pairs)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]
    texts = [request(text) for text in ("the cat ate", "He \u2603. ", "the cat ate it. " * 12)]
    rolling = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(rolling, abs=1e-3)
    until = {"until": [], "max_gen_toks": 6, "do_sample": False}
    asked = [request(text, dict(until)) for text in ("", "He ate the c", "the cat " * 20)]
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


# ---- all rows of a real folder, by hand: see docs/tasks.md


def pair_of(data, folder):
    """Both models with a BPE of LAMBADA's texts, so that rows have realistic lengths."""
    import json
    from pathlib import Path

    import tokenizers
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from datamodules.tokenizers import train_bpe
    from evaluation.importing import import_checkpoint

    (file,) = Path(data, "lambada").glob("*test*.jsonl")
    words = train_bpe("bpe:4096", (json.loads(line)["text"] for line in file.open()))
    torch.manual_seed(0)
    sizes = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": words.eos_id, "eos_token_id": words.eos_id}
    config = GPT2Config(vocab_size=4096, initializer_range=0.2, **sizes, **ids)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder)
    inner, eos = tokenizers.Tokenizer.from_str(words.json_text), "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=eos)
    fast.save_pretrained(folder)
    ours = import_checkpoint(str(folder), folder / "gpt2.ckpt").eval()
    return side_by_side(theirs, fast, ours, words, 32, softmax_dtype="float64")


@pytest.mark.slow
@pytest.mark.skipif("TASKS_DATA" not in os.environ, reason="TASKS_DATA names no folder of data")
def test_log_likelihoods_of_all_rows(tmp_path, monkeypatch, capsys):
    data = os.environ["TASKS_DATA"]
    monkeypatch.setenv("DATA", data)
    theirs, ours = pair_of(data, tmp_path)
    for name in TASKS:
        limit = 20 if name == "blimp_local" else None
        (expected, scores), (found, own) = (
            answers(lm, [name], limit=limit) for lm in (theirs, ours)
        )
        assert list(found) == list(expected)
        gap = max(abs(found[key][0] - expected[key][0]) for key in expected)
        least = min(log_prob for log_prob, _ in expected.values())
        with capsys.disabled():
            summary = f"{len(expected)} log-likelihoods down to {least:.0f}, difference {gap:.1e}"
            print(f"\n{name}: {summary}, acc {own[name]['acc,none']:.4f}", end="")
        assert gap < 1e-4
        assert [found[key][1] for key in found] == [expected[key][1] for key in expected]
        assert own[name]["acc,none"] == scores[name]["acc,none"]
