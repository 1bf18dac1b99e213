"""Data modules under a trainer, their loaders, and prompts."""

import gzip
import json
import multiprocessing
import signal
import subprocess
import sys
import warnings
from itertools import chain
from types import SimpleNamespace

import lightning as L
import pandas as pd
import pytest
import torch
import zstandard
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI

import datamodules
from datamodules import LocalText, PythonDocs, TextDataModule, load_tokenizer, read_prompts
from datamodules.sources import BatchLoader, accumulation_group
from datamodules.text import PromptSource
from tests.quiet import quiet_trainer

KEYS = ("tokens", "targets", "mask", "sequence_id", "num_bytes")


def equal(a, b) -> bool:
    return all(torch.equal(a[key], b[key]) for key in KEYS)


def fake_trainer(rank=0, world_size=1, accumulate=1, limit=1.0, processed=0):
    progress = SimpleNamespace(total=SimpleNamespace(processed=processed))
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulate,
        limit_train_batches=limit,
        callbacks=[],
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_ids: list[list[int]] = []
        self.steps: list[tuple[int, float, int]] = []
        self.val_targets: list[int] = []

    def training_step(self, batch):
        self.train_ids.append(batch["sequence_id"].tolist())
        count = int((batch["targets"] >= 0).sum())
        self.steps.append((self.global_step, batch["step_normalisers"]["targets"], count))
        return self.weight * batch["tokens"].float().mean()

    def validation_step(self, batch):
        self.val_targets += batch["targets"][batch["targets"] >= 0].tolist()

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, tmp_path, ckpt_path=None, callbacks=(), **options) -> Recorder:
    model = Recorder()
    trainer = quiet_trainer(tmp_path, *callbacks, num_sanity_val_steps=0, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*(does not have many workers|Checkpoint directory|need to be provided).*"
        )
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=False)
    return model


def test_normalisers_of_the_trainer_add_up_over_every_step(corpus, tmp_path):
    model = fit(
        corpus(),
        tmp_path,
        max_epochs=2,
        accumulate_grad_batches=3,
        limit_train_batches=7,
        limit_val_batches=0,
    )
    counted: dict[int, int] = {}
    for step, _, count in model.steps:
        counted[step] = counted.get(step, 0) + count
    assert len(counted) == 6  # groups of 3, 3, 1 in each of two epochs
    assert all(total == counted[step] for step, total, _ in model.steps)
    assert list(chain(*model.train_ids)) == list(range(14 * 4))  # the second epoch goes on


@pytest.mark.parametrize("when", ["mid_epoch", "epoch_end"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_goes_on_with_the_next_batch(corpus, tmp_path, when, workers):
    whole = fit(corpus(), tmp_path, max_epochs=3, limit_val_batches=0)
    per_epoch = len(whole.train_ids) // 3
    steps = per_epoch + 3 if when == "mid_epoch" else 2 * per_epoch
    saving = ModelCheckpoint(
        dirpath=tmp_path,
        save_top_k=-1,
        every_n_train_steps=steps if when == "mid_epoch" else None,
        every_n_epochs=2 if when == "epoch_end" else None,
        filename=when,
    )
    fit(corpus(), tmp_path, max_steps=steps, callbacks=[saving], limit_val_batches=0)
    options = {"max_epochs": 3, "limit_val_batches": 0, "ckpt_path": tmp_path / f"{when}.ckpt"}
    rest = fit(corpus(num_workers=workers), tmp_path, **options)
    assert rest.train_ids == whole.train_ids[steps:]


def test_overfitting_repeats_the_same_batches(corpus, tmp_path):
    model = fit(corpus(), tmp_path, max_epochs=3, overfit_batches=2, limit_val_batches=0)
    assert model.train_ids == model.train_ids[:2] * 3


def test_scheduled_accumulation_is_refused(corpus, tmp_path):
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler.*accumulate_grad_batches"):
        fit(corpus(), tmp_path, max_epochs=1, callbacks=[schedule])


def test_setup_before_prepare_says_so(lines, tmp_path):
    with pytest.raises(ValueError, match="prepare_data"):
        LocalText(data_files=str(lines), cache_dir=str(tmp_path)).setup()


def test_vocab_size_is_known_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("datamodules.corpus.load_tokenizer", None)
    names = ["bytes", "gpt2", "bpe:1024", "EleutherAI/gpt-neox-20b"]
    assert [PythonDocs(tokenizer=n).vocab_size for n in names] == [257, 50257, 1024, 50277]


def test_trained_tokenizer_lives_in_the_store(corpus, lines, tmp_path):
    unprepared = LocalText(
        data_files=str(lines), cache_dir=str(tmp_path / "no"), tokenizer="bpe:270"
    )
    assert unprepared.vocab_size == 270
    with pytest.raises(ValueError, match=r"bpe:270.*prepare_data"):
        unprepared.tokenizer.encode("x")
    data = corpus(tokenizer="bpe:270")
    assert data.tokenizer.vocab_size == 270 == len(data.tokenizer.token_bytes)
    assert "bpe_270" in data.fingerprint
    again = datamodules.tokenizer_from_state(data.state_dict()["tokenizer"])
    assert again.decode(again.encode("Document 3")) == "Document 3"


def test_trained_tokenizer_has_not_seen_the_held_out_documents(corpus, tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["aaaa bbbb", "zqzqzq " * 50, "aaaa cccc", *["aaaa bbbb cccc"] * 5]  # 1 is in val
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    options = {"data_files": str(path), "block_size": 2, "batch_size": 1, "tokenizer": "bpe:262"}
    data = corpus(**options, val_fraction=0.01, test_fraction=0.0)
    assert list(data.documents("val")) == [texts[1]]
    assert len(data.tokenizer.encode("zq")) == 2
    assert len(data.tokenizer.encode("aaaa")) < 4


def test_recipe_holds_only_what_the_class_takes():
    class Fixed(PythonDocs):
        """Chooses an argument of its base class."""

        def __init__(self, *, note: str = "n", seed: int = 3) -> None:
            super().__init__(block_size=64, seed=seed)

    recipe = Fixed(note="m").recipe()
    assert recipe["init_args"] == {"note": "m", "seed": 3}
    assert recipe["class_path"].endswith("Fixed")
    assert Fixed(note="x").fingerprint != Fixed(note="y").fingerprint


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """LightningCLI warns where it is given arguments while the process has some."""
    monkeypatch.setattr("sys.argv", ["test"])


def run_cli(*arguments: str) -> LightningCLI:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between lightning and jsonargparse
        return _cli(arguments)


def _cli(arguments: tuple[str, ...]) -> LightningCLI:
    return LightningCLI(
        Recorder,
        TextDataModule,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        args=["--trainer.logger=false", *arguments],
        seed_everything_default=0,
    )


def test_command_line_shows_every_argument_with_its_line(capsys):
    with pytest.raises(SystemExit):
        run_cli("--data=datamodules.PythonDocs", "--print_config=comments")
    text = capsys.readouterr().out
    for name in ("block_size", "train_windows", "tokenizer", "val_fraction", "min_docstring"):
        line = next(x for x in text.splitlines() if x.strip().startswith(f"{name}:"))
        comment = text[: text.index(line)].splitlines()[-1]
        assert comment.strip().startswith("#"), name
        assert len(comment) > 20, name


def test_a_checkpoint_of_another_world_size_warns(corpus):
    data = corpus()
    state = data.state_dict()
    data.trainer = fake_trainer(world_size=2)
    with pytest.warns(UserWarning, match="world_size was 1, is 2"):
        data.load_state_dict(state)


def test_a_corpus_needs_only_documents(tmp_path):
    class Tiny(TextDataModule):
        """Ten documents a split, and an argument of its own."""

        def __init__(self, *, word: str, **kwargs) -> None:
            super().__init__(**kwargs)
            self.word = word

        def documents(self, split):
            return [f"{split} {self.word} {i}" for i in range(10)]

    data = Tiny(word="a", cache_dir=str(tmp_path), block_size=8, batch_size=2)
    data.prepare_data()
    data.setup()
    assert next(iter(data.train_dataloader()))["tokens"].shape == (2, 8)
    assert data.counts("test").documents == 10
    assert Tiny(word="b").fingerprint != Tiny(word="a").fingerprint == data.fingerprint
    assert data.fingerprint.startswith("tiny-bytes-")


class Numbers:
    """Batch n is its number; three batches an epoch."""

    def __len__(self):
        return 3

    def batch(self, n):
        return {"n": torch.tensor(n)}

    def counts(self, n):
        return {"targets": 10.0 + n, "other": 1.0}


def drawn(loader) -> list[int]:
    return [int(batch["n"]) for batch in loader]


def test_epochs_count_on():
    loader = BatchLoader(Numbers())
    assert [drawn(loader) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(loader) == 3


def test_start_is_the_only_authority_where_given():
    loader = BatchLoader(Numbers(), start=lambda: 4)
    loader.load_state_dict({"next_batch": 1})
    assert drawn(loader) == [4, 5]
    assert loader.state_dict() == {"next_batch": 4}


def test_a_limit_shortens_epochs_and_skips_nothing():
    loader = BatchLoader(Numbers(), epoch_batches=2)
    assert [drawn(loader) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_iterating_does_not_touch_the_global_generator():
    before = torch.random.get_rng_state()
    drawn(BatchLoader(Numbers()))
    drawn(BatchLoader(Numbers(), num_workers=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_accumulation_groups_end_with_the_epoch():
    groups = [list(accumulation_group(n, 5, 2)) for n in range(10)]
    assert groups == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4]] + [[5, 6]] * 2 + [[7, 8]] * 2 + [[9]]


@pytest.mark.skipif(sys.platform != "linux", reason="who sent a signal is known there only")
def test_workers_take_no_end_but_their_parents():
    """Signals to the whole group reach workers that training still needs for its checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = BatchLoader(Numbers(), epoch_batches=200, num_workers=2)
    epoch = iter(loader)
    next(epoch)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for name in ("TERM", "INT"):
        subprocess.run(["sh", "-c", f"kill -{name} " + " ".join(str(w.pid) for w in workers)])
    assert [int(batch["n"]) for batch in epoch] == list(range(1, 200))
    epoch = iter(loader)
    next(epoch)
    (worker, *_) = multiprocessing.active_children()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for any ended worker
    try:
        worker.terminate()
        worker.join(timeout=30)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert worker.exitcode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


PROMPTS = ["one", "twenty-two", "three", "4", "fifth prompt"]


def source(**options):
    return PromptSource(PROMPTS, load_tokenizer("bytes"), **{"block_size": 16, **options})


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("P.JSONL", bytes),
        ("p.ndjson", bytes),
        ("p.jsonl.gz", gzip.compress),
        ("p.JSONL.zst", zstandard.ZstdCompressor().compress),
    ],
)
def test_prompts_are_read_by_the_kind_of_their_file(tmp_path, name, pack):
    rows = "".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS)
    (tmp_path / name).write_bytes(pack(rows.encode()))
    assert read_prompts(tmp_path / name) == PROMPTS
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": p} for p in PROMPTS]))
    assert read_prompts(tmp_path / "p.json") == PROMPTS
    pd.DataFrame({"prompt": PROMPTS}).to_parquet(tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet") == PROMPTS
    (tmp_path / "p.1.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    assert read_prompts(tmp_path / "p.1.gz") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n\n", "is empty"),
        ("p.txt", b"a\xff\xfe", r"not UTF-8 \(byte 1: ff\)"),
        ("p.jsonl", b'{"prompt": null}\n', "line 1: expected"),
        ("p.jsonl", b'{"prompt": "a"}\n{oops\n', "line 2 is not JSON"),
        ("p.jsonl", b'{"text": "a"}\n', "line 1: expected"),
        ("p.jsonl", b"[" * 100_000, "item 1 is not JSON .*nested too deeply"),
        ("p.jsonl", b'{"prompt": "a\\udc00"}\n', "line 1: .*\\\\ud...', half a surrogate pair"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)
    with pytest.raises(ValueError, match="the prompts file .* does not exist"):
        read_prompts(tmp_path / "absent.txt")


def test_every_prompt_token_is_a_target_after_an_eos():
    tokenizer = load_tokenizer("bytes")
    batch = source(batch_size=2).batch(0)
    assert batch["prompt"] == PROMPTS[:2]
    assert batch["tokens"][:, 0].tolist() == [tokenizer.eos_id] * 2
    for row, prompt in enumerate(PROMPTS[:2]):
        ids = tokenizer.encode(prompt)
        targets = batch["targets"][row]
        assert targets[targets >= 0].tolist() == ids
        assert batch["tokens"][row, 1 : len(ids)].tolist() == ids[:-1]
    assert batch["num_bytes"].tolist() == [3, 10]
    assert batch["sequence_id"].tolist() == [0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_have_every_prompt_and_equally_many_batches(world_size):
    seen = []
    for rank in range(world_size):
        ranked = source(batch_size=2, rank=rank, world_size=world_size)
        assert len(ranked) == -(-5 // (2 * world_size))
        for n in range(len(ranked)):
            seen += ranked.batch(n)["sequence_id"].tolist()
    assert set(seen) == set(range(5))


def test_an_empty_prompt_has_no_target():
    alone = PromptSource([""], load_tokenizer("bytes"), block_size=4, batch_size=1).batch(0)
    assert torch.equal(alone["targets"], torch.tensor([[-100]]))


def test_too_long_a_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 2 has 10 tokens"):
        source(batch_size=2, block_size=9)
