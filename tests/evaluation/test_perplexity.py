"""Perplexity is what a slow float64 loop over the text gives, however it is batched."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace

from datamodules import LocalText
from evaluation.arguments import data_recipe
from evaluation.cost import non_embedding_parameters
from evaluation.load import build_model
from evaluation.provenance import count_lexical, count_train_tokens
from lightning_models import Scores, TransformerConfig, TransformerLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.runtime import gradients_on, ordinary

KEYS = [
    "mode",
    "nats_per_token",
    "perplexity",
    "bits_per_byte",
    "tokens",
    "counted",
    "bytes",
    "likelihood",
    "causal",
    "flops_per_token",
    "executed_steps",
    "generation_flops_per_token",
    "flops_per_token_6nd",
    "seconds",
    "model",
    "parameters",
    "text_changes",
    "train_tokens",
    "checkpoint",
    "data",
    "settings",
]


@pytest.fixture
def score(reports):
    """Runs ``evaluate.py perplexity``; returns the JSON file's content."""
    return lambda checkpoint, *options: reports("perplexity", "--ckpt", checkpoint, *options)[0]


def slow_nats(checkpoint_path, data, split="val", stride=None):
    """The corpus' negative log-likelihood, one window at a time, all in float64.

    With a stride, windows begin that many tokens apart, and count what none has counted before.
    """
    model = build_model(read_checkpoint(checkpoint_path)).double()
    data.prepare_data()
    stream = data.stream(split)
    eos = torch.tensor([data.tokenizer.eos_id])
    text = torch.cat((eos, torch.tensor([int(t) for t in stream.gather(_numbers(len(stream)))])))
    nats, counted = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(stream), stride or data.block_size):
            window = text[start : start + data.block_size + 1]
            logits = model.network(window[None, :-1])[0] @ model.network.output_matrix.t()
            for position, target in enumerate(window[1:]):
                if start + position >= counted:
                    nats -= torch.log_softmax(logits[position], dim=0)[target].item()
            counted = max(counted, start + len(window) - 1)
    return nats, counted


def _numbers(count):
    import numpy as np

    return np.arange(count)


def test_json_equals_the_slow_loop(score, checkpoint_path, corpus):
    data = LocalText(**corpus)
    nats, tokens = slow_nats(checkpoint_path, data)
    result = score(checkpoint_path)
    size = data.counts("val").utf8_bytes
    assert list(result) == KEYS
    assert result["tokens"] == tokens
    assert result["bytes"] == size
    assert result["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-6)
    assert result["likelihood"] == "exact"
    assert result["causal"] is True
    assert result["checkpoint"] == str(checkpoint_path)
    assert result["data"]["split"] == "val"
    assert result["data"]["fingerprint"] == result["data"]["trained_on"] == data.fingerprint


def test_overlapping_windows_give_every_target_a_context(score, checkpoint_path, corpus):
    nats, tokens = slow_nats(checkpoint_path, LocalText(**corpus), stride=8)
    apart, result = score(checkpoint_path), score(checkpoint_path, "--data.eval_stride", "8")
    assert (result["tokens"], result["bytes"]) == (tokens, apart["bytes"])
    assert tokens == apart["tokens"]
    assert result["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)
    assert result["nats_per_token"] != apart["nats_per_token"]
    rows = 1 + -(-(tokens - 32) // 8)  # of 32 positions each
    ratio = result["flops_per_token"] / apart["flops_per_token"]
    assert ratio == pytest.approx(rows * 32 / tokens)
    few = ("--limit_batches", 1, "--batch_size", 1)
    first = score(checkpoint_path, "--data.eval_stride", "8", *few)
    assert (first["tokens"], first["flops_per_token"]) == (32, apart["flops_per_token"])


def test_flops_are_those_of_a_forward_pass_over_one_window(score, checkpoint_path):
    model = build_model(read_checkpoint(checkpoint_path))
    assert score(checkpoint_path)["flops_per_token"] == model.flops_per_token(32)
    shorter = score(checkpoint_path, "--data.block_size", "8")
    assert shorter["flops_per_token"] == model.flops_per_token(8)


def test_limit_scores_the_first_batches(score, checkpoint_path):
    result = score(checkpoint_path, "--limit_batches", "2", "--batch_size", "3")
    assert result["tokens"] == 2 * 3 * 32
    assert result["settings"]["batches"] == 2 < result["settings"]["of_batches"]


def test_kernels_are_chosen_by_options(score, checkpoint_path, monkeypatch, tmp_path):
    """A GPU would take them; they are asked for while the model runs, and only then."""
    seen, real = [], TransformerLM.score

    def spy(model, batch):
        products = torch.get_float32_matmul_precision()
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), products))
        return real(model, batch)

    monkeypatch.setattr(TransformerLM, "score", spy)
    torch.backends.cuda.enable_cudnn_sdp(True)
    few = ("--limit_batches", "1")
    own = shutil.copy(checkpoint_path, tmp_path / "own.ckpt")  # of which no scores are kept
    assert score(own, *few)["settings"]["precision"] == "32"
    result = score(own, *few, "--precision", "tf32", "--cudnn_attention", "true")
    assert result["settings"]["precision"] == "tf32"
    assert seen == [(False, "highest"), (True, "high")]
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_is_close_and_named(score, checkpoint_path):
    exact = score(checkpoint_path)["nats_per_token"]
    result = score(checkpoint_path, "--precision", "bf16")
    assert result["settings"]["precision"] == "bf16"
    assert result["nats_per_token"] != exact
    assert result["nats_per_token"] == pytest.approx(exact, rel=1e-2)


def test_parameters_are_counted_without_embeddings(score, checkpoint_path):
    dim = 32
    attention, feed_forward, norms = 4 * dim * dim + 4 * dim, 8 * dim * dim + 5 * dim, 4 * dim
    expected = 2 * (attention + feed_forward + norms) + 2 * dim
    result = score(checkpoint_path)
    assert result["parameters"] == expected
    assert result["model"] == "TransformerLM"


@pytest.mark.parametrize("changes", [{"tie_head": False}, {"block_size": 64}, {"vocab_size": 900}])
def test_head_and_tables_are_no_parameters(changes):
    counts = []
    for options in ({}, changes):
        sizes = {"vocab_size": 257, "block_size": 16, "num_layers": 1, "dim": 16, "num_heads": 2}
        model = TransformerLM(TransformerConfig(**{**sizes, **options}))
        model.configure_model()
        counts.append(non_embedding_parameters(model))
    assert counts[0] == counts[1] > 0
    model.network.blocks.requires_grad_(False)
    assert non_embedding_parameters(model) == counts[0], "frozen weights count too"


def test_training_tokens_are_those_without_the_ends_of_documents(score, checkpoint_path, corpus):
    data = LocalText(**corpus)
    data.prepare_data()
    counts = data.counts("train")
    expected = counts.tokens - counts.documents
    assert score(checkpoint_path)["train_tokens"] == expected
    # of the training text, whatever is scored
    other = score(checkpoint_path, "--data.val_fraction", "0.4")
    assert other["data"]["fingerprint"] != other["data"]["trained_on"]
    assert other["train_tokens"] == expected


def test_training_tokens_are_not_guessed(score, checkpoint_path, edited, corpus, tmp_path):
    elsewhere = ("--data.val_fraction", "0.4", "--data.cache_dir", tmp_path / "elsewhere")
    assert score(checkpoint_path, *elsewhere)["train_tokens"] is None
    untrained = edited(lambda content: content.update(global_step=0))
    assert score(untrained)["train_tokens"] is None


def test_boundary_tokens_are_not_lexical(checkpoint_path, corpus, monkeypatch):
    data = LocalText(**corpus)
    data.prepare_data()
    stream = data.stream("train")
    space = ord(" ")
    words = [i for i in stream.gather(_numbers(len(stream))).tolist() if i not in (256, space)]
    assert 0 < len(words) < len(stream) - data.counts("train").documents
    for chunk in (7, len(stream), 10**6):
        assert count_lexical(stream, (256, space), chunk=chunk) == len(words)
    monkeypatch.setattr(type(data.tokenizer), "special_ids", (space, 256))
    assert count_train_tokens(read_checkpoint(checkpoint_path), data) == len(words)


# ---- other data than those of the training


def parsed(words, trained, split="val"):
    settings = Namespace(data=[str(word) for word in words], split=split, batch_size=None)
    return data_recipe(settings, SimpleNamespace(data_recipe=trained))


def own_arguments(recipe):
    """The arguments of a recipe that are not the defaults of its class."""
    corpus = recipe["init_args"].get("corpus")
    words = [f"--data={recipe['class_path']}"]
    words += [] if corpus is None else ["--data.corpus=datamodules.LocalText"]
    defaults = parsed(words, None)["init_args"] | {"corpus": None}
    own = {key: value for key, value in recipe["init_args"].items() if value != defaults[key]}
    return own if corpus is None else {**own, "corpus": own_arguments(corpus)}


LOCAL = {
    "class_path": "datamodules.LocalText",
    "init_args": {
        "data_files": "mine.txt",
        "val_fraction": 0.2,
        "tokenizer": "bpe:300",
        "block_size": 64,
        "batch_size": 3,
    },
}
SENTENCES = {
    "class_path": "datamodules.Sentences",
    "init_args": {"corpus": LOCAL, "splitter": "spans:9", "batch_size": 5},
}
SIZES = {"tokenizer": "bpe:300", "block_size": 64, "batch_size": 3}
PES2O = {"class_path": "datamodules.PeS2o", "init_args": {"data_files": "b"}}
FILES = ["--data.data_files", "b"]


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "datamodules.PeS2o", *FILES],
        ["--data=PeS2o", "--data.data_files=b"],
        ["--data.class_path", "datamodules.PeS2o", *FILES],
        ["--data", json.dumps(PES2O)],
    ],
    ids=["two words", "one word", "class path", "yaml"],
)
def test_another_corpus_takes_tokenizer_and_sizes_but_no_sources(words):
    recipe = parsed(words, LOCAL)
    assert recipe["class_path"] == "datamodules.PeS2o"
    assert own_arguments(recipe) == {**SIZES, "data_files": "b"}


def test_other_questions_take_the_separator_of_written_steps():
    """A model that was trained with it writes it; the questions' own prefixes stay theirs."""
    options = {"task": "parity", "answer_prefix": " = ", "step_separator": " ; "}
    trained = {"class_path": "datamodules.StateTracking", "init_args": options}
    assert own_arguments(parsed(["--data", "TwoHop"], trained)) == {"step_separator": " ; "}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--data", "datamodules.LocalText", *FILES],
        ["--data=LocalText", *FILES],
        FILES,
        ["--data", '{"init_args": {"data_files": "b"}}'],
    ],
    ids=["nothing", "path", "name", "option", "no class"],
)
def test_the_same_class_keeps_all_arguments(words):
    files = {"data_files": "b" if words else "mine.txt"}
    assert own_arguments(parsed(words, LOCAL)) == {**LOCAL["init_args"], **files}


@pytest.mark.parametrize("split", ["val", "test"])
def test_files_to_score_replace_those_of_the_training(split):
    words = [f"--data.{split}_files", "b"]
    sizes = {key: value for key, value in LOCAL["init_args"].items() if key != "data_files"}
    assert own_arguments(parsed(words, LOCAL, split)) == {**sizes, f"{split}_files": "b"}
    other = "test" if split == "val" else "val"
    kept = {**LOCAL["init_args"], f"{split}_files": "b"}
    assert own_arguments(parsed(words, LOCAL, other)) == kept
    assert own_arguments(parsed([*words, *FILES], LOCAL, split)) == {**kept, "data_files": "b"}
    nested = [f"--data.corpus.{split}_files", "b"]
    assert own_arguments(parsed(nested, SENTENCES, split))["corpus"] == {
        **sizes,
        f"{split}_files": "b",
    }


def test_a_file_may_name_the_class(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text(json.dumps(PES2O))
    assert own_arguments(parsed(["--data", path], LOCAL)) == {**SIZES, "data_files": "b"}
    path.write_text("class_path: datamodules.LocalText\n")
    assert own_arguments(parsed(["--data", path], LOCAL)) == LOCAL["init_args"]


def test_a_corpus_within_data_may_be_another():
    words = ["--data.corpus", "datamodules.PeS2o", "--data.corpus.data_files", "b"]
    recipe = parsed(words, SENTENCES)
    assert recipe["init_args"]["corpus"]["class_path"] == "datamodules.PeS2o"
    own = own_arguments(recipe)
    assert own == {
        "corpus": {**SIZES, "data_files": "b"},
        "splitter": "spans:9",
        "batch_size": 5,
    }
    own = own_arguments(parsed(["--data.corpus.data_files", "b"], SENTENCES))
    assert own == {**SENTENCES["init_args"], "corpus": {**LOCAL["init_args"], "data_files": "b"}}
    # windows of plain text after sentences: the tokenizer is that of the corpus within
    own = own_arguments(parsed(["--data", "LocalText"], SENTENCES))
    assert own == {**SIZES, "batch_size": 5}


def test_the_training_text_is_not_read_as_another_corpus(fails, score, checkpoint_path, tmp_path):
    other = ("--data", "datamodules.ZeroShotText", "--data.set_name", "lm1b")
    assert "data_files" in fails("perplexity", "--ckpt", checkpoint_path, *other)
    text = tmp_path / "lm1b.txt"
    text.write_text("a thought reads .\nthe memory writes .\n" * 20)
    result = score(checkpoint_path, *other, "--data.data_files", text)
    arguments = result["data"]["recipe"]["init_args"]
    assert (arguments["data_files"], arguments["block_size"]) == (str(text), 32)
    texts = ("a thought reads.", "the memory writes.")  # as the set undoes its spaces
    assert result["tokens"] == 20 * sum(len(text) + 1 for text in texts)


# ---- a number is named by the kind of likelihood it comes from


class BoundLM(TransformerLM):
    """A bound: every sequence costs half a nat more than its tokens."""

    likelihood = "lower_bound"

    def score(self, batch):
        scores = super().score(batch)
        term = torch.full_like(scores.sequence_term, -0.5)
        return Scores(scores.log_prob, term, scores.num_targets, self.likelihood)


class EstimateLM(BoundLM):
    likelihood = "estimate"


class NoncausalLM(BoundLM):
    likelihood = "noncausal"
    causal = False


class GradientLM(TransformerLM):
    """Scores with a backward pass, as inference by gradient does."""

    def score(self, batch):
        with gradients_on():
            shift = torch.zeros((), requires_grad=True)
            loss = ((self.network(ordinary(batch)["tokens"]) + shift) ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, shift)
        assert gradient.item() != 0
        return super().score(batch)


KINDS = {
    "ppl_bound": BoundLM,
    "ppl_estimate": EstimateLM,
    "ppl_noncausal": NoncausalLM,
}


@pytest.fixture
def score_kind(corpus, train_checkpoint, reports, tmp_path):
    def run(kind, *options):
        path = train_checkpoint(tmp_path / "kind.ckpt", LocalText(**corpus), kind)
        return reports("perplexity", "--ckpt", path, "--packages", __name__, *options)

    return run


@pytest.mark.parametrize("key", KINDS)
def test_only_an_exact_likelihood_is_called_perplexity(score_kind, key):
    result, table = score_kind(KINDS[key])
    assert result["likelihood"] == KINDS[key].likelihood
    assert result["causal"] is (KINDS[key] is not NoncausalLM)
    assert "perplexity" not in result
    assert "perplexity" not in table
    assert sum(name.startswith("ppl") for name in result) == 1
    assert result[key] == pytest.approx(math.exp(result["nats_per_token"]))
    assert key.replace("_", " ") in table


@pytest.mark.parametrize("key", ["ppl_bound", "ppl_estimate"])
def test_after_prefixes_bounds_and_estimates_stay_what_they_are(score_kind, key):
    result, table = score_kind(KINDS[key], "--mode", "autoregressive", "--positions", 40)
    assert (result["likelihood"], result["causal"]) == (KINDS[key].likelihood, True)
    assert result[key] == pytest.approx(math.exp(result["nats_per_token"]))
    assert "perplexity" not in result
    # half a nat of a window belongs to no target of it
    assert result["blockwise"] is result["difference"] is None
    assert table.count("none (a part belongs to whole windows)") == 2
    assert "difference             unknown" not in table


def test_sequence_terms_are_counted_once_a_window(score_kind):
    exact, _ = score_kind(TransformerLM)
    bound, _ = score_kind(BoundLM)
    windows = math.ceil(exact["tokens"] / 32)
    assert windows % bound["settings"]["batch_size"]  # rows without targets fill the last batch
    extra = (bound["nats_per_token"] - exact["nats_per_token"]) * exact["tokens"]
    assert extra == pytest.approx(0.5 * windows, rel=1e-6)


def test_a_method_may_run_backward_passes(score_kind):
    expected, _ = score_kind(TransformerLM)
    result, _ = score_kind(GradientLM)
    assert result["nats_per_token"] == expected["nats_per_token"]
