"""Bad input: one clear line, exit code 2, and everything that was there is still there.

Every case goes through the real ``main()`` of train.py or evaluate.py in a folder that holds a
finished run, and compares that folder, byte by byte, with what it was.
"""

import gzip
import json
import random
import shutil

import pytest
import torch
import yaml

from benchmarks.harness import options_parser
from datamodules.check import main as check_main
from datamodules.reasoning.align import main as align_main
from evaluation.cli import main as evaluate_main
from lightning_models import memory
from studies.__main__ import main as studies_main
from studies.tune import main as tune_main
from training import main as train_main

FIT = (
    "fit",
    "--data=datamodules.LocalText",
    "--data.data_files=text.jsonl",
    "--data.block_size=32",
    "--data.batch_size=4",
    "--model.config.dim=16",
    "--model.config.num_layers=1",
    "--model.config.num_heads=2",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_model_summary=false",
    "--samples.every_n_validations=0",
)
GOOD = "runs/TransformerLM/version_0/checkpoints/last.ckpt"
FROM = f"--ckpt_path={GOOD}"

DATA = {
    "missing file": ("--data.data_files=none.txt", "none.txt: no such file"),
    "broken line": ("--data.data_files=broken.jsonl", "broken.jsonl, line 3 is not JSON"),
    "deeply nested line": (
        "--data.data_files=deep.jsonl",
        "deep.jsonl, line 2 is not JSON (nested too deeply)",
    ),
    "folder for a file": ("--data.data_files=folder", "folder is a folder. Name its files"),
    "glob without a match": ("--data.data_files=none*.txt", "none*.txt: no file matches"),
    "cut-off gz": ("--data.data_files=cut.txt.gz", "cut.txt.gz: the compressed data are damaged"),
    "train file is test file": (
        "--data.val_files=text.jsonl",
        "text.jsonl is in data_files and in",
    ),
    "unknown tokenizer": ("--data.tokenizer=nonsense", "tokenizer='nonsense' is unknown"),
    "missing tokenizer.json": ("--data.tokenizer=none.json", "none.json"),
    "binary tokenizer.json": ("--data.tokenizer=binary.json", "binary.json' is not UTF-8 text"),
    "window too long": ("--data.block_size=100000", "block_size=100000 is longer than the split"),
    "batch too large": (
        "--data.batch_size=5000",
        "takes 5000 windows, but the train split has only",
    ),
    "cache folder is a file": ("--data.cache_dir=text.jsonl", "text.jsonl"),
    "cache below a file": ("--data.cache_dir=text.jsonl/cache", "text.jsonl/cache"),
    "cache where nothing can be written": ("--data.cache_dir=/proc/cache", "/proc/cache"),
}
KEYS = {
    "typo in a model key": ("--model.config.dimm=8", "dimm"),
    "typo in a data key": ("--data.blok_size=8", "blok_size"),
    "typo in a trainer key": ("--trainer.max_stepss=8", "max_stepss"),
    "typo in a callback's key": ("--nonfinite.acton=skip", "nonfinite.acton"),
    "wrong type": ("--trainer.max_steps=many", "many"),
    "wrong choice": ("--nonfinite.action=ignore", "nonfinite.action"),
    "value a callback refuses": ("--samples.temperature=-1", "temperature (-1.0) must not be"),
    "value Lightning refuses": ("--checkpoint.save_top_k=-4", "save_top_k=-4"),
    "heads do not divide": ("--model.config.num_heads=7", "num_heads (7) must divide dim (16)"),
    "negative learning rate": ("--model.optimizer.lr=-1", "lr"),
    "unknown model": ("--model=lightning_models.Foo", "Foo"),
    "model that is none": (
        "--model=torch.nn.Linear",
        "not correspond to a subclass of LanguageModel",
    ),
    "unknown data": ("--data=datamodules.Foo", "Foo"),
    "unknown accelerator": ("--trainer.accelerator=abacus", "abacus"),
    "unknown precision": ("--trainer.precision=17", "trainer.precision"),
    "config is a folder": ("--config=folder", "folder"),
    "config is no YAML": ("--config=no.yaml", "no.yaml"),
    "config is binary": ("--config=binary.yaml", "binary.yaml"),
    "unknown reference in a config": ("--config=reference.yaml", "nowhere"),
}
RANGES = {
    "no micro-batch a step": ("--trainer.accumulate_grad_batches=0", "(0) must be at least 1"),
    "validation every 0 batches": ("--trainer.val_check_interval=0", "(0) must be above 0"),
    "negative devices": ("--trainer.devices=-3", "trainer.devices (-3) must be a number of"),
    "negative clipping": ("--trainer.gradient_clip_val=-1", "(-1) must be finite and at least 0"),
    "negative logging": ("--trainer.log_every_n_steps=-1", "(-1) must be at least 1, or 0"),
    "negative sanity check": ("--trainer.num_sanity_val_steps=-2", "(-2) must be at least 0"),
    "root folder without a name": ("--trainer.default_root_dir=", "default_root_dir () is empty"),
    "checkpoint folder without a name": ("--checkpoint.dirpath=", "checkpoint.dirpath () is empty"),
    "negative global seed": ("--seed_everything=-1", "seed_everything (-1) must be from 0 to"),
    "large global seed": ("--seed_everything=99999999999999", "must be from 0 to 4294967295"),
    "negative seed of samples": ("--samples.seed=-1", "seed (-1) must not be negative"),
    "large seed of the data": ("--data.seed=99999999999999999999", "must be below 2**63"),
    "root folder of nobody": ("--trainer.default_root_dir=~nobodyhere/x", "unknown user"),
    "data of nobody": ("--data.data_files=~nobodyhere/x.txt", "unknown user"),
    "wide model": ("--model.config.dim=1099511627776", "model.config.dim (1099511627776)"),
    "model wider than memory": ("--model.config.dim=1048576", "model.config.dim (1048576)"),
    "deep model": ("--model.config.num_layers=1000000000000", "config.num_layers (1000000000000)"),
    "window longer than memory": (
        "--data.block_size=1000000000000",
        "data.block_size (1000000000000)",
    ),
    "window longer than the text": ("--data.block_size=100000000", "block_size=100000000 is"),
    "rows beyond memory": ("--data.batch_size=1000000000000", "data.batch_size (1000000000000)"),
    "rows to score beyond memory": (
        "--data.eval_batch_size=1000000000000",
        "data.eval_batch_size (1000000000000)",
    ),
    "many processes": ("--trainer.devices=999", "trainer.devices (999)"),
    "many workers": ("--data.num_workers=100000", "num_workers=100000 must be at most"),
    "many processes to tokenise": ("--data.num_proc=100000", "num_proc=100000 must be at most"),
    "large vocabulary": ("--data.tokenizer=bpe:1000000000000", "vocab_size (1000000000000)"),
    "width of the weights nan": ("--model.config.init_std=.nan", "model.config.init_std (nan)"),
    "vocabulary of the data": (
        "--model.init_args.config.vocab_size=5",
        "model.config.vocab_size (5) is decided by the data, which have 257; leave it out and",
    ),
    "windows of the data": (
        "--model.config.block_size=16",
        "model.config.block_size (16) is decided by the data, which have 32; leave it out and set",
    ),
    "model config null": ("--model.config=null", "model.config (null) holds arguments; leave"),
    "optimiser null": ("--model.optimizer=null", "model.optimizer (null) holds arguments; leave"),
    "abbreviated option": ("--trainer.max_step=1", "--trainer.max_steps?"),
    "abbreviated checkpoint": ("--ckpt_pat=x", "--ckpt_path?"),
    "prefix of a model field": ("--model.config.num_layer=3", "config.num_layer "),
    "prefix of a data field": ("--data.block_siz=16", "data.block_siz "),
    "prefix of an optimiser's field": ("--model.optimizer.warmu=0", "optimizer.warmu "),
    "name on two lines": ("--name=a\nb", r"name ('a\nb')"),
    "half a step of warm-up": ("--model.optimizer.warmup=2.5", "warmup (2.5)"),
    "accelerator without its package": ("--trainer.accelerator=tpu", "trainer.accelerator (tpu)"),
    "option of a dataclass": ("--model.lr=1", "--model.optimizer.lr?"),
    "field with a typo": ("--model.config.dims=1", "--model.config.dim?"),
    "function as model": ("--model=lightning_models.os.system", "lightning_models.os.system"),
    "function of a module": (
        "--model=lightning_models.base.torch.load",
        "subclass of LanguageModel",
    ),
    "function as data": ("--data=datamodules.os.system", "datamodules.os.system"),
}
YAML = {
    "learning rate nan": ("model: {init_args: {optimizer: {lr: .nan}}}", "optimizer.lr (nan)"),
    "nan in a list": ("model: {init_args: {optimizer: {betas: [0.9, .nan]}}}", "betas.1 (nan)"),
    "trainer null": ("trainer: null", "trainer (null) holds arguments; leave trainer out"),
    "trainer that is a number": ("trainer: 3", "trainer (3) holds arguments; leave trainer out"),
    "callback null": ("samples: null", "samples (null) holds arguments; leave samples out"),
    "model null": ("model: null", "model"),
    "number": ("3", "bad.yaml holds 3 and not keys with values"),
    "nothing": ("", "bad.yaml holds null and not keys with values"),
    "deep list": ("[" * 3000 + "]" * 3000, "bad.yaml is nested too deep"),
    "deep keys": ("\n".join(" " * n + "a:" for n in range(3000)), "bad.yaml is nested too deep"),
    "function with arguments": (
        "model: {class_path: lightning_models.os.system, init_args: {command: id}}",
        "os.system",
    ),
}
PLACES = {
    "output folder is a file": ("--trainer.default_root_dir=text.jsonl", "text.jsonl"),
    "output folder below a file": (
        "--trainer.default_root_dir=text.jsonl/runs",
        "text.jsonl is a file; choose another folder",
    ),
    "checkpoint folder is a file": ("--checkpoint.dirpath=text.jsonl", "text.jsonl"),
}
CHECKPOINTS = {
    "missing": ("--ckpt_path=none.ckpt", "there is no checkpoint at none.ckpt"),
    "empty": ("--ckpt_path=empty.ckpt", "empty.ckpt (0 bytes) is truncated or not a checkpoint"),
    "truncated": ("--ckpt_path=cut.ckpt", "is truncated or not a checkpoint; copy it again"),
    "another file": ("--ckpt_path=text.jsonl", "is truncated or not a checkpoint; copy it again"),
    "another program's": ("--ckpt_path=foreign.ckpt", "foreign.ckpt has no recipe"),
    "folder without one": ("--ckpt_path=folder", "there is no complete checkpoint under folder"),
}


@pytest.fixture(scope="module")
def template(text_file, tmp_path_factory):
    """A folder with good and bad files, and a finished run."""
    folder = tmp_path_factory.mktemp("template")
    shutil.copy(text_file, folder / "text.jsonl")
    _write_bad_files(folder)
    root, cache = f"--trainer.default_root_dir={folder}/runs", f"--data.cache_dir={folder}/cache"
    typed = [word.replace("=text.jsonl", f"={folder}/text.jsonl") for word in FIT]
    assert train_main([*typed, root, cache]) == 0
    whole = (folder / GOOD).read_bytes()
    (folder / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    return folder


def _write_bad_files(folder):
    (folder / "empty.ckpt").touch()
    (folder / "folder").mkdir()
    (folder / "broken.jsonl").write_text(
        '{"text": "a"}\n{"text": "b"}\n{"text": "c\n{"text": "d"}\n'
    )
    (folder / "deep.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"some words " * 999)[:-9])
    (folder / "no.yaml").write_text("a: [\n")
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    (folder / "reference.yaml").write_text("trainer: {max_steps: '${nowhere}'}\n")
    (folder / "prompts.txt").write_text("The fork\n")
    (folder / "long.txt").write_text("word " * 99 + "\n")
    torch.save({"state_dict": {}, "epoch": 3}, folder / "foreign.ckpt")


RECIPES = {
    "config that is a text": ("config", "abc"),
    "optimiser that is a text": ("optimizer", "abc"),
    "key that is a number": (3, 4),
}


@pytest.mark.parametrize("case", RECIPES)
def test_checkpoints_with_a_broken_recipe(refused, place, case):
    key, value = RECIPES[case]
    content = torch.load(place / GOOD, weights_only=True)
    content["recipe"]["model"]["init_args"][key] = value
    torch.save(content, place / "broken.ckpt")
    for main, *argv in (
        (train_main, "test", "--ckpt_path=broken.ckpt", "--trainer.accelerator=cpu"),
        (evaluate_main, "perplexity", "--ckpt=broken.ckpt", "--device=cpu"),
    ):
        assert "broken.ckpt" in refused(main, *argv)


@pytest.mark.parametrize("key", ["global_step", "callbacks", "loops", "optimizer_states"])
def test_checkpoints_with_a_broken_part(refused, place, key):
    content = torch.load(place / GOOD, weights_only=True)
    torch.save({**content, key: "abc"}, place / "broken.ckpt")
    line = refused(train_main, *FIT, "--ckpt_path=broken.ckpt")
    assert f"broken.ckpt: {key} ('abc') is broken" in line


def _without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


RESTORED = {
    "another number of groups": ("fit", _without("optimizer_states", 0, "param_groups", 0)),
    "no state of the schedule": ("fit", _without("lr_schedulers")),
    "no place in the training": ("fit", _without("loops", "fit_loop")),
    "no loop of validate": ("validate", _without("loops", "validate_loop")),
    "no loop of test": ("test", _without("loops", "test_loop")),
    "no loop of predict": ("predict", _without("loops", "predict_loop")),
}


@pytest.mark.parametrize("case", RESTORED)
def test_checkpoints_that_cannot_be_restored(refused, place, case):
    verb, change = RESTORED[case]
    content = torch.load(place / GOOD, weights_only=True)
    change(content)
    torch.save(content, place / "broken.ckpt")
    options = ("--trainer.accelerator=cpu", "--data.predict_file=prompts.txt")
    options += ("--trainer.max_steps=3",) if verb == "fit" else ()
    assert "broken.ckpt" in refused(train_main, verb, "--ckpt_path=broken.ckpt", *options)


OFTEN = ("trainer.val_check_interval=1", "trainer.log_every_n_steps=1")
MONITORS = {
    "validated": ("nope/none", *OFTEN),
    "of a validation": ("val/nope", "trainer.val_check_interval=1"),
    "of training, validated": ("train/nope", *OFTEN),
    "never validated": ("nope/none", *OFTEN, "trainer.limit_val_batches=0"),
    "of a validation that never comes": ("val/ppl", "trainer.limit_val_batches=0"),
    "of training, never validated": ("train/nope", *OFTEN, "trainer.limit_val_batches=0"),
    "never validated, many steps": (
        "train/nope",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1",
        "trainer.max_steps=20",
    ),
}


@pytest.mark.parametrize("case", MONITORS)
def test_a_monitor_that_nothing_logs(case, refused):
    monitor, *options = MONITORS[case]
    options = (f"--checkpoint.monitor={monitor}", *(f"--{option}" for option in options))
    line = refused(train_main, *FIT, "--data.cache_dir=cache", *options)
    assert f"checkpoint.monitor ({monitor})" in line


@pytest.mark.parametrize(
    ("monitor", "validations"),
    [("val/los", 1), ("throughput/tokens_per_second", 0), ("train/nope", 0)],
)
def test_a_monitor_of_a_run_too_short_to_know_is_warned_of(monitor, validations, place):
    """Two steps without a logged one, or before the first validation: the run is kept."""
    options = (f"--checkpoint.monitor={monitor}", f"--trainer.limit_val_batches={validations}")
    options += ("--trainer.default_root_dir=again", "--data.cache_dir=cache")
    with pytest.warns(UserWarning, match="no best checkpoint was kept"):
        assert train_main([*FIT, *options]) == 0
    assert list((place / "again").rglob("last.ckpt"))


RANKED_BY = {
    "at each step": ("train/loss", "trainer.val_check_interval=1"),
    "after the first validation": (
        "train/loss",
        "trainer.val_check_interval=1",
        "trainer.accumulate_grad_batches=3",
    ),
    "without validations": ("train/loss", "trainer.limit_val_batches=0"),
    "throughput": (
        "throughput/tokens_per_second",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1",
    ),
}


@pytest.mark.parametrize("case", RANKED_BY)
def test_a_monitor_of_training_is_ranked_by(case, place):
    monitor, *options = RANKED_BY[case]
    options = (f"--checkpoint.monitor={monitor}", *(f"--{option}" for option in options))
    root = "--trainer.default_root_dir=again"
    assert train_main([*FIT, "--data.cache_dir=cache", *options, root]) == 0
    assert list((place / "again").rglob("best-*.ckpt"))


@pytest.fixture
def place(template, tmp_path, monkeypatch):
    """A copy of that folder, as the current one."""
    folder = tmp_path / "place"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(place, capfd):
    """Runs a main; returns its one line, having compared the folder."""

    def run(main, *argv):
        before = contents(place)
        capfd.readouterr()
        assert main([str(word) for word in argv]) == 2
        errors = capfd.readouterr().err
        assert "Traceback" not in errors
        lines = [line for line in errors.strip().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, errors
        assert errors.strip().splitlines()[-1] == lines[0]
        assert len(lines[0]) < 600
        after = contents(place)
        assert {path for path in before if after.get(path) != before[path]} == set()
        new = {str(path.relative_to(place)) for path in after.keys() - before.keys()}
        assert not any(_unfinished(name) for name in new), new
        return lines[0]

    return run


def _unfinished(name):
    """Whether a new file is a checkpoint, or half of anything."""
    return name.endswith((".ckpt", ".partial", ".tmp", ".part")) or ".tmp" in name


FITS = DATA | KEYS | RANGES | PLACES | CHECKPOINTS


@pytest.mark.parametrize("case", FITS)
def test_fit(refused, case):
    argument, expected = FITS[case]
    assert expected in refused(train_main, *FIT, "--data.cache_dir=cache", argument)


def test_fit_of_a_deep_model_of_thin_layers(refused, few_tensors):
    """Its layers are counted one by one."""
    argument = "--model.config.num_layers=999"
    line = refused(train_main, *FIT, "--data.cache_dir=cache", argument)
    assert "config.num_layers (999)" in line
    assert "more than 1000 tensors" in line


@pytest.fixture
def few_tensors(monkeypatch):
    """As if a network of more than a thousand tensors were too large."""
    monkeypatch.setattr(memory, "MAX_TENSORS", 1000)


@pytest.mark.parametrize("case", YAML)
def test_fit_with_a_config(refused, place, case):
    content, expected = YAML[case]
    (place / "bad.yaml").write_text(content)
    argv = (*FIT, "--data.cache_dir=cache", "--config=bad.yaml")
    assert expected in refused(train_main, *argv)


def test_a_config_in_place_may_be_no_number_either(refused):
    assert "the config 3 holds 3" in refused(train_main, "fit", "--config=3")


def test_what_a_run_wrote_is_no_bad_input(place):
    """Its config.yaml works as it is, and so does a typed value that is the one of the data."""
    config = place / GOOD.replace("checkpoints/last.ckpt", "config.yaml")
    again = ("--trainer.default_root_dir=again", "--model.config.vocab_size=257")
    assert train_main(["fit", f"--config={config}", *again]) == 0
    first, second = (
        yaml.safe_load(config.read_text()),
        yaml.safe_load((place / "again" / config.relative_to(place / "runs")).read_text()),
    )
    assert second["model"] == first["model"]


def test_warm_up_that_is_longer_than_the_run_is_said(place):
    with pytest.warns(
        UserWarning, match=r"optimizer.warmup \(1e\+09\) is not shorter than the run"
    ):
        assert train_main([*FIT, "--data.cache_dir=cache", "--model.optimizer.warmup=1e9"]) == 0


TRAIN = {
    "missing argument": (("fit", "--data=datamodules.LocalText"), "data_files"),
    "no verb": ((), "fit, validate, test, predict"),
    "wrong verb": (("fitt",), "fitt"),
    "last without a run": (
        ("fit", "--ckpt_path=last", "--trainer.default_root_dir=new"),
        "under new",
    ),
    "best without a best": (("validate", "--ckpt_path=best"), "ckpt_path=best: the run of"),
    "test, truncated checkpoint": (("test", "--ckpt_path=cut.ckpt"), "cut.ckpt"),
    "another vocabulary": (
        ("validate", FROM, "--data.tokenizer=bpe:300", "--on_conflict=typed"),
        "data.vocab_size (300) differs from the checkpoint's (257)",
    ),
    "predict without prompts": (("predict", FROM), "set data.predict_file"),
    "predict, missing prompts": (("predict", FROM, "--data.predict_file=none.txt"), "none.txt"),
    "predict, long prompt": (("predict", FROM, "--data.predict_file=long.txt"), "prompt"),
    "predict, output below a file": (
        ("predict", FROM, "--data.predict_file=prompts.txt", "--predictions.output=text.jsonl/out"),
        "text.jsonl is a file; choose another folder",
    ),
    "predict, output is a folder": (
        ("predict", FROM, "--data.predict_file=prompts.txt", "--predictions.output=folder"),
        "folder",
    ),
}


@pytest.mark.parametrize("case", TRAIN)
def test_other_verbs(refused, case):
    argv, expected = TRAIN[case]
    cpu = ("--trainer.accelerator=cpu",) if len(argv) > 1 else ()
    assert expected in refused(train_main, *argv, *cpu)


def _cut(store):
    (store / "train-00000.tokens").write_bytes((store / "train-00000.tokens").read_bytes()[:-2])


def _half_a_meta(store):
    (store / "meta.json").write_text((store / "meta.json").read_text()[:50])


def _one_bit(store):
    content = bytearray((store / "train-00000.tokens").read_bytes())
    content[100] ^= 1
    (store / "train-00000.tokens").write_bytes(content)


def _random(name):
    def damage(store):
        size = (store / name).stat().st_size
        (store / name).write_bytes(random.Random(0).randbytes(size))

    return damage


def _meta(content):
    return lambda store: (store / "meta.json").write_text(content)


STORES = {
    "cut": (_cut, "train-00000.tokens has"),
    "half a meta.json": (_half_a_meta, "meta.json cannot be read"),
    "one bit": (_one_bit, "of train-00000.tokens changed (CRC-32"),
    "random tokens": (_random("val-00000.tokens"), "of val-00000.tokens changed (CRC-32"),
    "nested deeply": (_meta("[" * 100_000), "nested too deeply"),
}


@pytest.mark.parametrize("case", STORES)
def test_a_damaged_store_is_named(refused, place, case):
    damage, expected = STORES[case]
    (store,) = (path.parent for path in (place / "cache").rglob("meta.json"))
    damage(store)
    line = refused(train_main, *FIT, "--data.cache_dir=cache")
    assert f"{store.name} is damaged" in line
    assert expected in line
    assert "Delete the folder; it is prepared again" in line


PREFIXES = {
    "studies": (studies_main, "transformer_gpt2", "--ste", "5"),
    "studies.tune": (tune_main, "transformer_gpt2", "--tri", "5"),
    "datamodules.check": (check_main, "folder", "--he"),
    "align": (align_main, "rule", "--limi", "5"),
    "train list": (train_main, "list", "--js"),
    "benchmarks": (lambda argv: options_parser("").parse_args(argv), "--round", "3"),
}


@pytest.mark.parametrize("program", PREFIXES)
def test_no_program_takes_a_prefix(place, program, capsys):
    main, *argv = PREFIXES[program]
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert "unrecognized arguments: --" in capsys.readouterr().err


CKPT = ("--ckpt", GOOD)
EVALUATE = {
    "no command": ((), "perplexity"),
    "unknown split": (("perplexity", *CKPT, "--split", "valid"), "split"),
    "unknown data": (("perplexity", *CKPT, "--data", "LostText"), "LostText"),
    "negative number of batches": (
        ("perplexity", *CKPT, "--limit_batches", "-1"),
        "--limit_batches: ",
    ),
    "wrong type": (("generate", *CKPT, "--prompt", "a", "--top_k", "many"), "top_k"),
    "temperature nan": (
        ("generate", *CKPT, "--prompt", "a", "--temperature", ".nan"),
        "temperature (nan) must be finite",
    ),
    "negative seed": (
        ("generate", *CKPT, "--prompt", "a", "--seed", "-1", "--max_new_tokens", "3"),
        "seed (-1) must be at least 0",
    ),
    "negative seed of pairs": (
        ("reversal", "--ckpt", GOOD, "--seed", "-1"),
        "--seed: ",
    ),
    "abbreviated option": (
        ("perplexity", *CKPT, "--limit_batch", "1"),
        "--limit_batches?",
    ),
    "rows beyond memory": (
        ("perplexity", *CKPT, "--batch_size", "1000000000000"),
        "batch_size (1000000000000)",
    ),
    "window beyond memory": (
        ("perplexity", *CKPT, "--data.block_size", "1000000000000"),
        "block_size (1000000000000)",
    ),
    "layers beyond anything": (
        ("perplexity", *CKPT, "--set.num_layers", "1000000000000"),
        "num_layers (1000000000000)",
    ),
    "prefix of a data field": (("perplexity", *CKPT, "--data.block_siz", "16"), "block_siz "),
    "model option nan": (("perplexity", *CKPT, "--set.init_std", ".nan"), "init_std (nan) must be"),
    "typed prompt not UTF-8": (
        ("generate", *CKPT, "--prompt", "caf\udce9"),
        "'caf\\udce9': the text contains",
    ),
    "scaling of nested JSON": (
        ("scaling", "--x", "tokens", "a=deep.json"),
        "(deep.json) is not JSON",
    ),
    "output refuses files": (("perplexity", *CKPT, "--output", "/proc/a.json"), "cannot write to"),
    "empty folder to import": (
        ("import", "--hf", "folder", "--tokenizer", "bytes", "--output", "a.ckpt"),
        "'folder': the model cannot be read",
    ),
}


NOWHERE = {
    "perplexity": ("--ckpt", ""),
    "zero_shot": ("--ckpt", ""),
    "tasks": ("--ckpt", "", "--tasks", "piqa"),
    "quality": ("--ckpt", ""),
    "generate": ("--ckpt", "", "--prompt", "a"),
    "reversal": ("--ckpt", ""),
    "reason": ("--ckpt=",),
    "sweep": ("--ckpts", "", "--output", "a.svg"),
    "compare": ("",),
    "train test": ("--ckpt_path", ""),
    "train fit": ("--ckpt_path=",),
}


@pytest.mark.parametrize("case", NOWHERE)
def test_an_empty_word_is_no_checkpoint(refused, case):
    """A shell variable that is not set: the newest checkpoint below the folder is not meant."""
    verb = case.partition(",")[0].removeprefix("train ")
    main = train_main if case.startswith("train ") else evaluate_main
    assert "') is empty; name a checkpoint" in refused(main, verb, *NOWHERE[case])


@pytest.mark.parametrize("case", EVALUATE)
def test_evaluate(refused, case):
    argv, expected = EVALUATE[case]
    assert expected in refused(evaluate_main, *argv)


WEIGHTS = {
    "config that is no JSON": ("config.json", "{"),
    "another architecture": ("config.json", json.dumps({"model_type": "bert", "hidden_size": 8})),
    "weights that are none": ("model.safetensors", "text"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_import_of_damaged_folders(refused, place, case):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("gpt2")
    name, content = WEIGHTS[case]
    (place / "gpt2" / name).write_text(content)
    options = ("--tokenizer", "bytes", "--output", "a.ckpt")
    assert "gpt2" in refused(evaluate_main, "import", "--hf", "gpt2", *options)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_layer", 10**9), ("n_layer", 999), ("n_embd", 10**9), ("vocab_size", 10**12)],
)
def test_import_of_endless_models(refused, few_tensors, place, key, value):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("gpt2")
    config = json.loads((place / "gpt2/config.json").read_text())
    (place / "gpt2/config.json").write_text(json.dumps({**config, key: value}))
    options = ("--tokenizer", "bytes", "--output", "a.ckpt")
    assert "'gpt2': config.json: " in refused(evaluate_main, "import", "--hf", "gpt2", *options)


def test_sizes_are_no_matter_of_printing_a_config(place, capsys):
    huge = ("--model.config.num_layers=1000000000000", "--data.batch_size=1000000000000")
    with pytest.raises(SystemExit) as end:
        train_main([*FIT, *huge, "--print_config"])
    assert end.value.code == 0
    assert "num_layers: 1000000000000" in capsys.readouterr().out
