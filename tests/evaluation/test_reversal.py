"""The father-son probe: models whose answers are known, and direct computations."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from datamodules import LocalText
from datamodules.tokenizers import BytesTokenizer, train_bpe
from evaluation.load import build_model
from evaluation.pretrained import Pretrained
from evaluation.reversal import (
    NAMES,
    ask,
    draw_pairs,
    equal_lengths,
    measure_reversal,
    probe_model,
    probe_pretrained,
    single_tokens,
)
from lightning_models.checkpoint import read_checkpoint

KNOWN = ["James", "John", "Mark", "Paul"]
TEXT = "The son of James is John. The father of Mark is Paul. "
ENTRIES = 288
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    """A BPE in which the known names, and no others, are single tokens."""
    return train_bpe(f"bpe:{ENTRIES}", [TEXT * 50])


def nll(logits, row, token):
    """Negative log-likelihood in float64."""
    return -logits[row].double().log_softmax(dim=-1)[token].item()


# ---- models whose answers are known


class Reader:
    """Answers by a rule on the prompt's text; row r takes ``wait(r)`` steps more than one."""

    device = CPU

    def __init__(self, tokenizer, rule, wait=lambda row: 0):
        self.tokenizer, self.rule, self.wait = tokenizer, rule, wait

    def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
        assert streams == [(0, 0)] * len(prompts)  # whatever is drawn is the same for all
        assert lengths.tolist() == [prompts.shape[1]] * len(prompts)
        assert max_new_tokens == 1
        cache = SimpleNamespace(prompts=prompts, left=[self.wait(r) for r in range(len(prompts))])

        def select(rows):
            cache.prompts = cache.prompts[rows]
            cache.left = [cache.left[row] for row in rows.tolist()]

        cache.select = select
        return cache

    def decode_step(self, cache, tokens):
        assert torch.equal(tokens, cache.prompts[:, -1])
        ready = torch.tensor([left == 0 for left in cache.left])
        assert len(ready) == len(cache.prompts)
        cache.left = [left - 1 for left in cache.left]
        logits = torch.full((len(tokens), ENTRIES + 32), 99.0)  # what is not ready means nothing
        for row in ready.nonzero()[:, 0].tolist():
            text = self.tokenizer.decode(cache.prompts[row].tolist())
            logits[row] = 0.0
            for name, value in self.rule(text).items():
                logits[row, self.tokenizer.encode(f" {name}")[0]] = value
        return logits, ready


def parts(text):
    """Father, son and what is asked for of a prompt's text."""
    found = re.fullmatch(r"The son of (\w+) is (\w+)\. The (son|father) of (\w+) is", text)
    father, son, asked, about = found.groups()
    assert about == (father if asked == "son" else son)
    return father, son, asked


def understands(text):
    father, son, asked = parts(text)
    return {father: 3.0, son: 1.0} if asked == "father" else {father: 1.0, son: 3.0}


def copies(text):
    father, son, _ = parts(text)
    return {father: 1.0, son: 3.0}


def answers_of(tokenizer, rule, **options):
    ids = single_tokens(KNOWN, tokenizer.sentence_prompt_ids)
    model = probe_model(Reader(tokenizer, rule, **options), tokenizer)
    return ask(model, draw_pairs(KNOWN, 100, 0), ids)


def test_who_understands_the_relation_makes_no_errors(tokenizer):
    means = answers_of(tokenizer, understands).mean()
    total = math.log(math.exp(3) + math.exp(1) + ENTRIES + 32 - 2)  # padded rows are in the softmax
    for condition in ("normal", "reversed"):
        assert means[f"{condition}_target"] == pytest.approx(total - 3, rel=1e-6)
        assert means[f"{condition}_distractor"] == pytest.approx(total - 1, rel=1e-6)
        assert means[f"{condition}_margin"] == pytest.approx(2.0, rel=1e-6)
        assert means[f"{condition}_error_rate"] == 0


def test_who_copies_the_last_name_errs_in_reverse(tokenizer):
    answers = answers_of(tokenizer, copies)
    means = answers.mean()
    assert means["normal_margin"] == pytest.approx(2.0, rel=1e-6)
    assert means["reversed_margin"] == pytest.approx(-2.0, rel=1e-6)
    assert (means["normal_error_rate"], means["reversed_error_rate"]) == (0, 1)
    assert len(answers) == 12


def test_rows_that_think_longer_are_waited_for(tokenizer):
    expected = answers_of(tokenizer, understands)
    for wait in (lambda row: 2, lambda row: row % 3, lambda row: (7 - row) % 5):
        assert answers_of(tokenizer, understands, wait=wait).equals(expected)


def test_errors_of_means_are_those_of_a_sample(tokenizer):
    def moody(text):
        father, son, _ = parts(text)
        return {father: float(len(father)), son: 0.3 * len(son) if son == "Paul" else 5.0}

    model = probe_model(Reader(tokenizer, moody), tokenizer)._replace(model=None)  # has no FLOPs
    answers, result = measure_reversal(model, KNOWN)
    for condition in ("normal", "reversed"):
        target, distractor, margin = (
            answers[f"{condition}_{key}"] for key in ("target", "distractor", "margin")
        )
        assert margin.tolist() == (distractor - target).tolist()
        spread = math.sqrt(((margin - margin.mean()) ** 2).sum() / 11)
        assert spread > 0
        error = result["standard_errors"][f"{condition}_margin"]
        assert error == pytest.approx(spread / math.sqrt(12))
        wrong = sum(value < 0 for value in margin)
        assert 0 < wrong < 12
        assert result[f"{condition}_error_rate"] == pytest.approx(wrong / 12)


def test_sentence_models_read_two_sentences(tokenizer):
    seen = []

    class Marking(BytesTokenizer):
        def sentence_prompt_ids(self, sentences):
            seen.append(list(sentences))
            return tokenizer.encode("".join(sentences))

    model = probe_model(Reader(tokenizer, understands), Marking())
    ask(model, [("James", "Paul")], single_tokens(KNOWN, tokenizer.sentence_prompt_ids))
    assert seen == [
        ["The son of James is Paul.", " The son of James is"],
        ["The son of James is Paul.", " The father of Paul is"],
    ]


# ---- names and pairs


def test_names_of_several_tokens_are_left_out_and_counted(tokenizer):
    model = probe_model(Reader(tokenizer, understands), tokenizer)._replace(model=None)
    names = ["Zachary", "John", "Bartholomew", "Mark", "James"]
    _, result = measure_reversal(model, names, pairs=5)
    assert result["names"] == {"used": 3, "left_out": 2}
    assert result["pairs"] == 5


def test_of_names_that_share_a_token_one_stays():
    ids = {"ann": 7, "bob": 8}
    prompt = lambda texts: [ids.get(word.lower(), 0) for word in texts[0].split()]  # noqa: E731
    assert single_tokens(["Ann", "ANN", "Bob"], prompt) == {"Ann": 7, "Bob": 8}


def test_pairs_are_drawn_without_replacement():
    names = [str(i) for i in range(12)]
    pairs = draw_pairs(names, 100, seed=3)
    assert len(set(pairs)) == len(pairs) == 100
    assert all(father != son for father, son in pairs)
    assert pairs == draw_pairs(names, 100, seed=3) != draw_pairs(names, 100, seed=4)
    everything = draw_pairs(names, 1000, seed=0)
    assert len(set(everything)) == len(everything) == 12 * 11


def test_batches_have_one_length_and_every_prompt_once():
    prompts = [[0] * length for length in (3, 5, 3, 3, 5, 4)]
    assert equal_lengths(prompts, max_rows=2) == [[0, 2], [3], [1, 4], [5]]


# ---- checkpoints


@pytest.fixture(scope="module")
def own_run(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint whose tokenizer has the known names."""
    folder = tmp_path_factory.mktemp("reversal")
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": TEXT * 5}) for _ in range(30)))
    data = LocalText(**{**corpus, "data_files": str(text), "tokenizer": f"bpe:{ENTRIES}"})
    return train_checkpoint(folder / "own.ckpt", data)


def test_a_checkpoint_gives_what_its_network_says(own_run, reports, tokenizer, tmp_path):
    picture = tmp_path / "result.png"
    options = ("--pairs", "7", "--seed", "2", "--plot", picture)
    result, printed = reports("reversal", "--ckpt", own_run, *options)
    assert f"4 ({len(NAMES) - 4} left out, not a single token)" in printed
    network = build_model(read_checkpoint(own_run)).network
    expected = dict.fromkeys(("normal_target", "reversed_target", "reversed_distractor"), 0.0)
    pairs = draw_pairs(KNOWN, 7, 2)
    with torch.no_grad():
        for father, son in pairs:
            statement = f"The son of {father} is {son}."
            texts = (f"{statement} The son of {father} is", f"{statement} The father of {son} is")
            for text, name in zip(texts, ("normal", "reversed"), strict=True):
                ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(text)]])
                logits = network(ids)[:, -1] @ network.output_matrix.t()
                (first,), (second,) = tokenizer.encode(f" {father}"), tokenizer.encode(f" {son}")
                expected[f"{name}_target"] += nll(logits, 0, second if name == "normal" else first)
                if name == "reversed":
                    expected["reversed_distractor"] += nll(logits, 0, second)
    for key, total in expected.items():
        assert result[key] == pytest.approx(total / 7, rel=1e-5)
        assert f"{total / 7:.4f} +- " in printed
    assert (result["pairs"], result["settings"]["seed"]) == (7, 2)
    assert result["names"] == {"used": 4, "left_out": len(NAMES) - 4}
    assert (result["model"], result["checkpoint"]) == ("TransformerLM", str(own_run))
    assert result["settings"]["tokenizer"] == f"bpe:{ENTRIES}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    size = sum(parameter.numel() for parameter in network.parameters())
    assert (result["flops_per_token_6nd"], result["executed_steps"]) == (6 * size, 0)
    length = len(tokenizer.encode(texts[0])) + 1  # names are single tokens
    assert result["flops_per_token"] == build_model(read_checkpoint(own_run)).flops_per_token(
        length
    )
    assert result["seconds"] > 0


def test_bf16_products(own_run, reports):
    exact, rounded = (
        reports("reversal", "--ckpt", own_run, "--precision", precision)[0]
        for precision in ("32", "bf16")
    )
    assert exact["pairs"] == 12
    assert rounded["settings"]["precision"] == "bf16"
    assert rounded["normal_target"] != exact["normal_target"]
    assert rounded["normal_target"] == pytest.approx(exact["normal_target"], rel=2e-2)


def test_results_say_the_sizes_that_curves_are_fitted_over(own_run, reports, evaluates, tmp_path):
    scored, _ = reports("perplexity", "--ckpt", own_run, "--limit_batches", "1")
    probe, _ = reports("reversal", "--ckpt", own_run, "--pairs", "4")
    for key in ("train_tokens", "parameters"):
        assert probe[key] == scored[key] > 0
    larger = tmp_path / "larger.json"
    larger.write_text(json.dumps({**probe, "train_tokens": 4 * probe["train_tokens"]}))
    options = ("--x", "tokens", "--y", "reversed_margin", "--law", "log")
    assert "slope" in evaluates("scaling", tmp_path / "reported.json", larger, *options)


def test_the_probe_needs_no_training_text(own_run, reports, tmp_path):
    text = own_run.parent / "text.jsonl"
    gone = text.rename(tmp_path / "gone.jsonl")
    try:
        result, _ = reports("reversal", "--ckpt", own_run, "--pairs", "4")
    finally:
        gone.rename(text)
    assert result["train_tokens"] is None


def test_bytes_are_refused(checkpoint_path, fails):
    line = fails("reversal", "--ckpt", checkpoint_path)
    assert f"0 of {len(NAMES)} are single tokens of the tokenizer (bytes)" in line
    assert "use a model whose tokenizer has whole words" in line


# ---- the command line and the picture


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "give one model: --ckpt CHECKPOINT or --hf"),
        (["--ckpt", "a.ckpt", "--hf", "b"], "give one model: --ckpt CHECKPOINT or --hf"),
        (["--ckpt", "none.ckpt"], "there is no checkpoint at none.ckpt"),
        (["--hf", "b", "--pairs", "0"], "--pairs: "),
        (["--hf", "b", "--set.dim", "8"], "leave them out with --hf"),
        (["--hf", "b", "--which", "best"], "leave them out with --hf"),
        (["--hf", "b", "--plot", "nowhere/a.png"], "the folder nowhere does not exist"),
    ],
)
def test_wrong_options_end_in_one_line(fails, options, expected):
    assert expected in fails("reversal", *options)


# ---- models of ``transformers``


@pytest.fixture
def gpt2(save_gpt2, tokenizer):
    """Saves a random GPT-2 with the tokenizer; ``bos`` makes that one put a BOS first."""

    def save(bos=False, positions=32):
        model, _, folder = save_gpt2(bos, positions, words=tokenizer, spread=0.1)
        return model, folder

    return save


@pytest.mark.parametrize("bos", [False, True])
def test_transformers_models_give_what_they_say_themselves(gpt2, reports, tokenizer, bos):
    model, folder = gpt2(bos)
    result, _ = reports("reversal", "--hf", folder)
    margins = []
    start = [tokenizer.eos_id] if bos else []  # never the EOS that this one puts after
    for father, son in draw_pairs(KNOWN, 1000, 0):
        text = f"The son of {father} is {son}. The father of {son} is"
        with torch.no_grad():
            logits = model(torch.tensor([start + tokenizer.encode(text)])).logits[:, -1]
        (right,), (wrong,) = tokenizer.encode(f" {father}"), tokenizer.encode(f" {son}")
        margins.append(nll(logits, 0, wrong) - nll(logits, 0, right))
    assert len(margins) == result["pairs"] == 12
    assert "flops_per_token" not in result
    assert result["reversed_margin"] == pytest.approx(sum(margins) / 12, abs=1e-5)
    assert result["reversed_error_rate"] == sum(margin < 0 for margin in margins) / 12
    assert (result["hf"], result["checkpoint"]) == (str(folder), None)
    assert result["model"] == "GPT2LMHeadModel"


def test_a_tokenizer_that_begins_every_text_with_a_space_has_its_names():
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(["?", "▁", "▁is", "▁John", "▁Mark"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    assert len(inner.encode(" John").ids) == 2
    found = single_tokens(["John", "Mark"], lambda texts: inner.encode(texts[0]).ids)
    assert found == {"John": 3, "Mark": 4}


def test_bf16_weights(gpt2):
    _, folder = gpt2()
    exact, rounded = (
        probe_pretrained(Pretrained(str(folder), CPU, precision)) for precision in ("32", "bf16")
    )
    text = ["The son of James is Paul.", " The son of James is"]
    prompts = torch.tensor([exact.prompt(text)])
    with torch.no_grad():
        first, second = exact.log_probs(prompts), rounded.log_probs(prompts)
    assert second.dtype == torch.float32
    assert second.exp().sum().item() == pytest.approx(1.0, rel=1e-5)
    assert 0 < (second - first).abs().max() < 0.2


def test_what_is_not_there_or_broken_is_one_line(gpt2, fails, tmp_path):
    assert "no tokenizer found" in fails("reversal", "--hf", tmp_path / "none")
    _, folder = gpt2(positions=8)
    assert "more than the model's context of 8; use a model with" in fails(
        "reversal", "--hf", folder
    )
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "the model cannot be read" in fails("reversal", "--hf", folder)
    (folder / "model.safetensors").unlink()
    assert "no model found" in fails("reversal", "--hf", folder)
