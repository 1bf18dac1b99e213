"""Tiny checkpoints, trained for two steps."""

import json
import shutil
from typing import get_type_hints

import lightning as L
import pytest
import torch

from datamodules import LocalText, StateTracking
from datamodules.tokenizers import load_tokenizer
from lightning_models import (
    CoconutLM,
    CoTLM,
    ICoTLM,
    LatentThoughtLM,
    NoCoTLM,
    OptimizerConfig,
    PonderLM,
    ThinkingStatesLM,
    TransformerLM,
)

SIZES = {"num_layers": 2, "dim": 32, "num_heads": 2}
LATENT = {"latents_per_layer": 2, "inner_steps": 2, "prior_layers": 1, "window": 16}
REASONERS = {
    "ts": (ThinkingStatesLM, 24, {"chunk_size": 4, "max_thought_tokens": 4}),
    "cot": (CoTLM, 2, {}),
    "no_cot": (NoCoTLM, 24, {}),
    "icot": (ICoTLM, 2, {}),
    "coconut": (CoconutLM, 2, {"first_stage": 1}),
}
"""Class, steps of training, and options; after 24 steps some answers are right."""


@pytest.fixture(scope="session")
def quiet_trainer():
    """Builds a trainer that writes and prints nothing."""

    def build(**options):
        silent = ("logger", "checkpointing", "progress_bar", "model_summary")
        flags = {name if name == "logger" else f"enable_{name}": False for name in silent}
        return L.Trainer(**{"accelerator": "cpu", "devices": 1, **flags, **options})

    return build


@pytest.fixture(scope="session")
def train_checkpoint(quiet_trainer):
    """Writes a checkpoint of two steps on some data."""

    def train(path, data, kind=TransformerLM, **changes):
        torch.manual_seed(0)
        sizes = {"vocab_size": data.vocab_size, "block_size": data.block_size, **SIZES, **changes}
        config = get_type_hints(kind.__init__)["config"](**sizes)
        model = kind(config, OptimizerConfig(lr=0.01, warmup=0))
        trainer = quiet_trainer(max_steps=2, limit_val_batches=0, default_root_dir=path.parent)
        trainer.fit(model, data)
        trainer.save_checkpoint(path)
        return path

    return train


@pytest.fixture(scope="session")
def corpus(text_file, tmp_path_factory):
    """Options of the corpus that the checkpoints are trained on."""
    return {
        "data_files": str(text_file),
        "val_fraction": 0.1,
        "block_size": 32,
        "batch_size": 4,
        "cache_dir": str(tmp_path_factory.mktemp("evaluation_cache")),
    }


@pytest.fixture(scope="session")
def checkpoint_path(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint of the plain transformer on bytes; not to be changed."""
    path = tmp_path_factory.mktemp("checkpoint") / "bytes.ckpt"
    return train_checkpoint(path, LocalText(**corpus))


@pytest.fixture(scope="session")
def latent_path(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint of a Latent-Thought model on bytes; not to be changed.

    What cross-attention writes is drawn again (it starts at 0), and weights are four times as large
    as they were trained, so that what it writes depends on its latent vectors.
    """
    path = tmp_path_factory.mktemp("latent") / "latent.ckpt"
    data = LocalText(**{**corpus, "block_size": 128, "batch_size": 2})
    train_checkpoint(path, data, LatentThoughtLM, **LATENT)
    content = torch.load(path, weights_only=True)
    for name, weight in content["state_dict"].items():
        if name.endswith("latent_attention.out.weight"):
            torch.nn.init.normal_(weight, std=0.2)
        weight.mul_(4 if weight.dim() > 1 else 1)
    torch.save(content, path)
    return path


@pytest.fixture(scope="session")
def ponder_path(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint of PonderLM-3 on bytes with at most two additional steps; not to be changed."""
    path = tmp_path_factory.mktemp("ponder") / "ponder.ckpt"
    return train_checkpoint(path, LocalText(**corpus), PonderLM, thinking_steps=2)


@pytest.fixture
def bpe_run(text_file, train_checkpoint, tmp_path):
    """A checkpoint whose tokenizer was trained on ``own.jsonl`` next to it."""
    own = tmp_path / "own.jsonl"
    shutil.copy(text_file, own)
    data = LocalText(
        data_files=str(own),
        tokenizer="bpe:280",
        val_fraction=0.2,
        block_size=16,
        batch_size=4,
        cache_dir=str(tmp_path / "cache"),
    )
    return train_checkpoint(tmp_path / "bpe.ckpt", data)


@pytest.fixture
def edited(checkpoint_path, tmp_path):
    """Writes a copy of the checkpoint whose content was changed in place by a function."""

    def write(edit):
        content = torch.load(checkpoint_path, weights_only=True)
        edit(content)
        path = tmp_path / "edited.ckpt"
        torch.save(content, path)
        return path

    return write


@pytest.fixture
def write_method(request, tmp_path):
    """Writes an untrained checkpoint of a method of the contract suite, with its small data."""
    from methods import METHODS

    def write(name, **changes):
        (method,) = [method for method in METHODS if method.name == name]
        model = method.build(**changes)
        data = request.getfixturevalue(method.format.fixture)()
        content = {
            "state_dict": model.state_dict(),
            "recipe": {"model": model.recipe(), "data": data.recipe()},
        }
        path = tmp_path / f"{name}.ckpt"
        torch.save(content, path)
        return path

    return write


@pytest.fixture
def fails(capsys):
    """Runs evaluate.py, which must end with exit code 2 and one line; returns that line."""
    from evaluation.cli import main

    def run(*argv):
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2
        captured = capsys.readouterr()
        last = captured.err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert "Traceback" not in captured.err
        return last

    return run


@pytest.fixture
def evaluates(capsys):
    """Runs evaluate.py, which must succeed; returns what it printed."""
    from evaluation.cli import main

    def run(*argv):
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


@pytest.fixture
def reports(evaluates, tmp_path):
    """Runs evaluate.py with ``--output``; returns the content of the JSON file and the print."""

    def run(*argv):
        target = tmp_path / "reported.json"
        printed = evaluates(*argv, "--output", target)
        return json.loads(target.read_text()), printed

    return run


@pytest.fixture(scope="session")
def save_gpt2(tmp_path_factory):
    """Saves a random GPT-2 with a small BPE; returns model, words' ids and folder."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from datamodules.tokenizers import train_bpe

    usual = train_bpe("bpe:288", ["the thought reads and writes latent memory state " * 20])

    def save(bos=False, positions=64, base=False, words=usual, spread=0.3):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("pretrained") / "gpt2"  # mauve's own loader asks for that
        inner = tokenizers.Tokenizer.from_str(words.json_text)
        eos = "<|endoftext|>"
        if bos:
            inner.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{eos} $A {eos}", special_tokens=[(eos, words.eos_id)]
            )
        sizes = {"n_positions": positions, "n_embd": 16, "n_layer": 2, "n_head": 2}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": spread}
        config = GPT2Config(vocab_size=words.vocab_size, tie_word_embeddings=not base, **sizes)
        model = GPT2LMHeadModel(config).eval()
        (model.transformer if base else model).save_pretrained(folder)
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=eos)
        fast.save_pretrained(folder)
        return model, words, folder

    return save


@pytest.fixture(scope="session")
def tiny_gpt2(save_gpt2):
    """The plain one of them."""
    return save_gpt2()


@pytest.fixture(scope="session")
def save_llama(tmp_path_factory):
    """A random LLaMA whose tokenizer begins texts with <s>: it, both tokenizers, its folder."""
    from tokenizer_files import begun, byte_level
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    inner = begun(byte_level("<s>", "</s>", words=("the", "cat", "he", "ate")), "<s>")
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
    ids = {"bos_token_id": tokenizer.text_bos_id, "eos_token_id": tokenizer.eos_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes, **ids)).eval()
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return model, fast, tokenizer, folder


# ---- questions with reasoning


@pytest.fixture
def reasoned(reports, tmp_path):
    """Runs ``evaluate.py reason``; returns the JSON file, the answers and what was printed."""

    def run(ckpts, *words):
        answers = tmp_path / "answers.jsonl"
        result, printed = reports("reason", "--ckpt", *ckpts, "--answers_file", answers, *words)
        return result, [json.loads(line) for line in answers.open()], printed

    return run


@pytest.fixture(scope="session")
def reason_options(tmp_path_factory):
    """Options of questions about coins that are flipped once, and when tested twice, too."""
    return {
        "operations": [1],
        "test_operations": [1, 2],
        "train_examples": 32,
        "val_examples": 5,
        "test_examples": 9,
        "tokenizer": "bpe:300",
        "block_size": 96,
        "batch_size": 8,
        "eval_batch_size": 4,
        "cache_dir": str(tmp_path_factory.mktemp("reason_cache")),
    }


@pytest.fixture(scope="session")
def train_reasoner(quiet_trainer):
    """Writes a checkpoint of that many steps on questions."""

    def train(path, data, kind, steps, **changes):
        torch.manual_seed(0)
        sizes = {**SIZES, "num_layers": 3, **changes}
        sizes |= {"vocab_size": data.vocab_size, "block_size": data.block_size}
        config = get_type_hints(kind.__init__)["config"](**sizes)
        model = kind(config, OptimizerConfig(lr=0.01, warmup=0, schedule="constant"))
        trainer = quiet_trainer(max_steps=steps, limit_val_batches=0, default_root_dir=path.parent)
        trainer.fit(model, data)
        trainer.save_checkpoint(path)
        return path

    return train


@pytest.fixture(scope="session")
def reasoners(reason_options, train_reasoner, tmp_path_factory):
    """A checkpoint of every method, by name; not to be changed."""
    folder = tmp_path_factory.mktemp("reason")
    return {
        name: train_reasoner(
            folder / f"{name}.ckpt", StateTracking(**reason_options), kind, steps, **changes
        )
        for name, (kind, steps, changes) in REASONERS.items()
    }
