"""The batch of a step: what `fit` says of it, and that devices share it without changing it."""

import csv
import re

import pytest
import torch

from callbacks import Validation
from tests.programs import ROOT, Program
from training import main

ROWS, LENGTH, BATCHES, EPOCHS = 2, 32, 5, 2
LINE = re.compile(r"^global batch .*$", re.MULTILINE)


def words(text, root, cache, *extra):
    return [
        "fit",
        "--data=datamodules.LocalText",
        f"--data.data_files={text}",
        f"--data.cache_dir={cache}",
        f"--data.block_size={LENGTH}",
        f"--data.batch_size={ROWS}",
        "--model.config.dim=16",
        "--model.config.num_layers=1",
        "--model.config.num_heads=2",
        "--trainer.accelerator=cpu",
        f"--trainer.max_epochs={EPOCHS}",
        f"--trainer.limit_train_batches={BATCHES}",
        "--trainer.limit_val_batches=0",
        "--samples.every_n_validations=0",
        f"--trainer.default_root_dir={root}",
        *extra,
    ]


def trained_tokens(root):
    """Tokens that a run has counted in its batches, on all ranks, and its steps."""
    (last,) = root.rglob("last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    return checkpoint["train/tokens"], checkpoint["global_step"]


@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_the_product_and_the_tokens_are_those_that_are_trained_on(
    text_file, data_cache, tmp_path, devices
):
    """Five micro-batches of an epoch, two accumulated: three steps, the last of one of them."""
    two = ("--trainer.devices=2", "--trainer.strategy=ddp")
    extra = two if devices == 2 else ("--trainer.devices=1",)
    argv = words(text_file, tmp_path, data_cache, "--trainer.accumulate_grad_batches=2", *extra)
    process = Program(str(ROOT / "train.py"), *argv, forks_ranks=True)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    tokens = ROWS * LENGTH * BATCHES * EPOCHS * devices
    assert trained_tokens(tmp_path) == (tokens, 3 * EPOCHS)
    batch = {1: "4 rows = 2 micro-batch x 2 accumulated x 1 device"}
    batch[2] = "8 rows = 2 micro-batch x 2 accumulated x 2 devices"
    assert LINE.findall(out) == [
        f"global batch {batch[devices]}, {2 * 2 * 32 * devices} tokens per step, 6 steps, "
        f"{tokens:,} tokens in all"
    ]
    assert out.index("global batch") < out.index("step 6")


def test_sentences_are_counted_in_lexical_tokens(text_file, data_cache, tmp_path, capsys):
    sentences = [
        "--data=datamodules.Sentences",
        "--data.corpus=datamodules.LocalText",
        f"--data.corpus.data_files={text_file}",
        f"--data.corpus.cache_dir={data_cache}",
        "--data.corpus.tokenizer=bytes",
        "--data.batch_tokens=700",
        "--model=lightning_models.ThoughtGestaltLM",
        "--model.config.num_layers=2",
        "--model.config.sentence_layer=1",
    ]
    common = [
        word
        for word in words(text_file, tmp_path, data_cache)[1:]
        if not word.startswith(("--data", "--trainer.limit_train", "--trainer.max_epochs"))
    ]
    steps = ["--trainer.max_steps=4", "--trainer.accumulate_grad_batches=3", "--trainer.devices=1"]
    assert main(["fit", *sentences, *common, *steps]) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert line.startswith(
        "global batch at most 2,100 lexical tokens = 700 micro-batch x 3 accumulated"
    )
    assert line.endswith(
        "x 1 device, at most 2,100 tokens per step, 4 steps, at most 8,400 tokens in all"
    )


def test_the_planner_prints_the_same_line(text_file, data_cache, tmp_path, capsys):
    argv = words(text_file, tmp_path, data_cache, "--trainer.devices=1")
    argv.append("--trainer.accumulate_grad_batches=2")
    assert main(argv) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert main(["plan", *argv[1:]]) == 0
    assert LINE.findall(capsys.readouterr().out) == [line]
    assert main(["plan", *argv[1:], "--trainer.max_steps=3", "--trainer.devices=4"]) == 0
    assert LINE.findall(capsys.readouterr().out) == [
        "global batch 16 rows = 2 micro-batch x 2 accumulated x 4 devices, 512 tokens per step, "
        "3 steps, 1,536 tokens in all"
    ]


@pytest.mark.parametrize(
    ("kind", "options", "step"),
    [
        ("windows", ("--trainer.max_epochs=2",), "8 rows = 2 micro-batch x 4"),
        ("windows", ("--trainer.max_epochs=3", "--trainer.limit_train_batches=0.5"), "8 rows = 2"),
        ("windows", ("--trainer.max_steps=3", "--trainer.overfit_batches=2"), "4 rows = 2 micro-"),
        ("reasoning", ("--trainer.max_epochs=2",), "8 rows = 2 micro-batch x 4"),
        ("sentences", ("--trainer.max_epochs=2",), "200 lexical tokens = at most 120 micro-batch"),
    ],
)
def test_the_planner_counts_the_steps_of_a_stated_batch(
    text_file, data_cache, tmp_path, capsys, kind, options, step
):
    """Neither counts the rows of an epoch that do not fill a step."""
    few = tmp_path / "few.jsonl"
    lines = text_file.read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:9]))  # ten steps of windows: half of them are whole steps, too
    data, _ = kinds(few, data_cache)[kind]
    size = "--data.batch_tokens=120" if kind == "sentences" else "--data.batch_size=2"
    argv = [*data, size, *SMALL, *COMMON, f"--trainer.default_root_dir={tmp_path}", *options]
    assert main(["fit", *argv, "--trainer.devices=1"]) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert step in line
    assert f"{state_of(tmp_path)['global_step']} steps" in line
    assert main(["plan", *argv, "--trainer.devices=1"]) == 0
    assert LINE.findall(capsys.readouterr().out) == [line]


# ---- a stated batch, shared by devices

COMMON = (
    "--model.optimizer.schedule=constant",
    "--model.optimizer.warmup=0",
    "--trainer.accelerator=cpu",
    "--trainer.precision=64-true",
    "--trainer.log_every_n_steps=1",
    "--trainer.limit_val_batches=0",
    "--samples.every_n_validations=0",
    "--loggers=csv",
)
SMALL = ("--model.config.dim=16", "--model.config.num_layers=2", "--model.config.num_heads=2")
DROPOUTS = ("attention", "token", "sentence")


def kinds(text, cache):
    """Options of each kind of data, and what a device takes at once: all of a step, or less."""
    file, folder = f"data_files={text}", f"cache_dir={cache}"
    windows = (f"--data.{file}", f"--data.{folder}", "--data.block_size=32")
    return {
        "windows": (
            ("--data=datamodules.LocalText", *windows, "--data.global_batch=8"),
            ("--data.batch_size=8", "--data.batch_size=3"),
        ),
        "reasoning": (
            (
                "--data=datamodules.StateTracking",
                f"--data.{folder}",
                "--data.task=vars",
                "--data.operations=[1,2]",
                "--data.test_operations=[3]",
                "--data.train_examples=20",
                "--data.val_examples=4",
                "--data.test_examples=4",
                "--data.block_size=96",
                "--data.global_batch=8",
                "--model=lightning_models.ICoTLM",
            ),
            ("--data.batch_size=8", "--data.batch_size=1"),
        ),
        "sentences": (
            (
                "--data=datamodules.Sentences",
                "--data.corpus=datamodules.LocalText",
                f"--data.corpus.{file}",
                f"--data.corpus.{folder}",
                "--data.corpus.tokenizer=bytes",
                "--data.splitter=spans:9",
                "--data.max_sentence_tokens=9",
                "--data.max_sentences=4",
                "--data.global_batch_tokens=200",
                "--model=lightning_models.ThoughtGestaltLM",
                "--model.config.sentence_layer=1",
                *(f"--model.config.{name}_dropout=0" for name in DROPOUTS),
            ),
            ("--data.batch_tokens=200", "--data.batch_tokens=120"),
        ),
    }


def state_of(root):
    (last,) = root.rglob("last.ckpt")
    return torch.load(last, weights_only=True)


@pytest.mark.parametrize(
    ("kind", "first", "then", "strategy"),
    [
        ("windows", 4, 1, "ddp"),
        ("windows", 1, 2, "ddp"),
        pytest.param("windows", 2, 1, "fsdp", marks=pytest.mark.slow),
        ("reasoning", 2, 1, "ddp"),
        ("sentences", 2, 1, "ddp"),
    ],
)
def test_a_run_has_the_same_losses_on_any_devices_also_where_it_changes_them(
    text_file, data_cache, tmp_path, kind, first, then, strategy
):
    """Two steps on some devices, and two more on others; and all on one, which stops, too.

    FSDP2 knows no float64.
    """
    exact = strategy != "fsdp"
    options, (all_at_once, less) = kinds(text_file, data_cache)[kind]

    def fit(name, devices, steps, *more):
        root = f"--trainer.default_root_dir={tmp_path / name}"
        argv = ["fit", *options, *SMALL, *COMMON, root, f"--trainer.max_steps={steps}", *more]
        argv += [f"--trainer.devices={devices}", f"--trainer.precision={64 if exact else 32}-true"]
        if devices == 1:
            assert main(argv) == 0
            return
        argv.insert(1, f"--config={ROOT}/configs/trainer/{strategy}.yaml")
        process = Program(str(ROOT / "train.py"), *argv, forks_ranks=True)
        _, error = process.communicate(timeout=500)
        assert process.returncode == 0, error

    fit("whole", 1, 2, all_at_once)
    fit("whole", 1, 4, all_at_once, "--ckpt_path=last")
    fit("changed", first, 2, all_at_once)
    fit("changed", then, 4, less, "--ckpt_path=last")
    whole, changed = (state_of(tmp_path / name) for name in ("whole", "changed"))
    assert whole["global_step"] == changed["global_step"] == 4
    assert whole["train/tokens"] == changed["train/tokens"]
    assert whole.get("sentence_steps") == changed.get("sentence_steps")
    # Adam's epsilon of 1e-8 makes 1e-11 of a rounding error of 1e-16 in a gradient near 0
    close = {"rtol": 1e-11, "atol": 1e-10} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for key, weight in whole["state_dict"].items():
        torch.testing.assert_close(changed["state_dict"][key], weight, **close)
    losses = [
        [float(row["train/loss"]) for row in csv.DictReader(file.open()) if row["train/loss"]]
        for name in ("whole", "changed")
        for file in (tmp_path / name).rglob("metrics.csv")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # the log has float32
    assert [len(each) for each in losses] == [4, 4]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--trainer.accumulate_grad_batches=2", "accumulate_grad_batches follows from"),
        ("--trainer.accumulate_grad_batches=1", "accumulate_grad_batches follows from"),
        ("--trainer.devices=3", "global_batch=8 cannot be divided among 3 devices"),
        ("--trainer.limit_train_batches=5", "Set it to 4"),
        ("--data.global_batch=0", "global_batch=0 must be at least 1"),
        ("--trainer.val_check_interval=7", "validation.every_n_train_steps (2)"),
    ],
)
def test_what_contradicts_a_stated_batch_is_refused(text_file, tmp_path, capsys, typed, message):
    options, _ = kinds(text_file, tmp_path / "cache")["windows"]
    argv = [*options, *SMALL, *COMMON, f"--trainer.default_root_dir={tmp_path}"]
    argv += ["--data.batch_size=2", "--trainer.max_steps=1", "--validation.every_n_train_steps=2"]
    assert main(["fit", *argv, "--trainer.devices=1", typed]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "3 devices" not in error or "Use 2 or 4 devices" in error
    late = "limit_train_batches" in typed  # the steps of an epoch are the text's
    assert (tmp_path / "cache").exists() == late


@pytest.mark.parametrize(
    ("data", "trainer", "message"),
    [
        (8, 1, None),  # what the saved config of a run says
        (8, 4, None),  # what follows
        (8, 2, "trainer.accumulate_grad_batches (2) follows from data.global_batch: it is 4"),
        (None, 2, "every_n_train_steps (2) needs epochs of whole steps: an epoch has 5"),
    ],
)
def test_accumulation_of_a_file_is_refused_where_it_contradicts(
    text_file, data_cache, tmp_path, capsys, data, trainer, message
):
    file = tmp_path / "more.yaml"
    batches = 4 if data else 5
    file.write_text(
        f"data: {{init_args: {{global_batch: {data or 'null'}}}}}\n"
        f"trainer: {{accumulate_grad_batches: {trainer}, limit_train_batches: {batches}}}\n"
    )
    options, _ = kinds(text_file, data_cache)["windows"]
    argv = [*options, *SMALL, *COMMON, f"--trainer.default_root_dir={tmp_path}", "-c", str(file)]
    argv += ["--data.batch_size=2", "--trainer.max_epochs=2", "--validation.every_n_train_steps=2"]
    assert main(["fit", *argv, "--trainer.devices=1"]) == (2 if message else 0)
    captured = capsys.readouterr()
    if message is None:
        assert "8 rows = 2 micro-batch x 4 accumulated" in captured.out
    else:
        assert message in captured.err
        assert len(captured.err.strip().splitlines()) == 1


def test_validations_are_counted_in_steps_and_rows(text_file, data_cache, tmp_path, capsys):
    options, _ = kinds(text_file, data_cache)["windows"]
    common = [word for word in COMMON if "limit_val" not in word]
    argv = [*options, *SMALL, *common, f"--trainer.default_root_dir={tmp_path}"]
    argv += ["--data.batch_size=2", "--trainer.max_steps=5", "--trainer.devices=1"]
    argv += ["--validation.every_n_train_steps=2", "--validation.rows=3"]
    assert main(["fit", *argv]) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert line.startswith("global batch 8 rows = 2 micro-batch x 4 accumulated x 1 device")
    (file,) = tmp_path.rglob("metrics.csv")
    steps = [int(row["step"]) for row in csv.DictReader(file.open()) if row["val/loss"]]
    assert steps == [1, 3]  # the second and the fourth
    assert main(["plan", *argv]) == 0
    planned = capsys.readouterr().out
    assert LINE.findall(planned) == [line]
    share = re.search(r"([\d.]+)% of all FLOPs are validation's", planned)
    scored, trained = 2 * 4 / 3, 5 * 8  # a third of training's FLOPs each; two batches of two rows
    assert float(share.group(1)) == pytest.approx(100 * scored / (scored + trained), abs=0.6)


def test_validation_options_follow_the_devices():
    asked = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "limit_val_batches": 1.0}
    validation = Validation(every_n_train_steps=5, rows=100)
    options = validation.trainer_options(asked, accumulate=4, rows_at_once=32)
    assert options == {
        "val_check_interval": 20,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 4,
    }
    off = validation.trainer_options(
        {**asked, "limit_val_batches": 0}, accumulate=1, rows_at_once=1
    )
    assert off["limit_val_batches"] == 0
    assert Validation().trainer_options(asked, accumulate=4, rows_at_once=32) == asked
