"""Every YAML parses, builds at its own size on the meta device, and its method takes a step.

One of each kind of model on each kind of data also trains by the command line.
"""

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from methods import METHODS
from omegaconf import OmegaConf
from training_parser import parse_training, training_parser

from datamodules.sentences.splitters import parse_splitter
from lightning_models.optim import OptimizerConfig, build_optimizer, schedule_factor
from training import main

ROOT = Path(__file__).parent.parent
OTHERS = {"data", "studies", "tasks", "trainer"}
"""Folders whose files are no trainings."""
CONFIGS = sorted(
    path for path in (ROOT / "configs").glob("*/*.yaml") if path.parent.name not in OTHERS
)
SMALL = {"num_layers": 1, "dim": 16, "num_heads": 2, "ffn_dim": 32}
OF_MODEL = {
    "ThinkingStatesLM": {"input_layer": 0, "output_layer": 1, "max_thought_tokens": 2},
    "ThoughtbubblesLM": {"fork_layers": [0]},
    "ThoughtGestaltLM": {"sentence_layer": 1},
}
"""What one layer needs next to SMALL."""
SHORT = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_steps=2",
    "--trainer.accumulate_grad_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.num_sanity_val_steps=0",
    "--samples.max_new_tokens=4",
]

WINDOWS = ["--data.block_size=16", "--data.batch_size=2"]
QUESTIONS = [
    "--data.tokenizer=bytes",
    "--data.block_size=400",
    "--data.batch_size=2",
]
OF_DATA = {
    "PythonDocs": ["--data.tokenizer=bytes", *WINDOWS],
    "SentenceWindows": ["--data.corpus.tokenizer=bytes", "--data.splitter=rules", *WINDOWS],
    "Sentences": ["--data.corpus.tokenizer=bytes", "--data.splitter=rules", "--data.batch_size=2"],
    "StateTracking": [
        "--data.operations=[1,2]",
        "--data.test_operations=[3]",
        *(f"--data.{split}_examples=4" for split in ("train", "val", "test")),
        *QUESTIONS,
    ],
    "ReasoningGSM8K": ["--data.val_fraction=0.2", "--data.test_fraction=0.2", *QUESTIONS],
    "TwoHop": [
        *(f"--data.{kind}=6" for kind in ("works", "people", "companies", "cities", "countries")),
        *QUESTIONS,
    ],
}
"""Small data of each kind."""


FORMATS = {method.model: method.format for method in METHODS}


def ids(path):
    return f"{path.parent.name}-{path.stem}"


def classes(path):
    packages, text = ("lightning_models", "datamodules"), path.read_text()
    return tuple(re.search(rf"class_path: {name}\.(\w+)", text)[1] for name in packages)


def representatives():
    """One config of each pair of classes, a tiny one where there is one."""
    tiny_last = sorted(CONFIGS, key=lambda path: "tiny" in path.stem)
    return list({classes(path): path for path in tiny_last}.values())


PUBLISHED = {
    "transformer/ltm_76m": 105e9,
    "latent_thought/ltm_small": 7e9,
    "latent_thought/ltm_medium": 5.2e9,
    "latent_thought/ltm_large": 3e9,
    "latent_thought/ltm_large_public": 3e9,
    "latent_thought/ltm_public": 60_000 * 512 * 1024,
    "thoughtbubbles/772m": 2.5e9,
    "thoughtbubbles/overfork_772m": 0.8e9,
    "ponderlm/70m": 15e9,
    "ponderlm/ponderlm1_70m": 15e9,
    "ponderlm/410m": 10e9,
    "ponderlm/ponderlm1_410m": 10e9,
}
"""Training tokens of the papers: LTM's Table 1 and section 3.3 (of its public code: 60,000 steps),
Thoughtbubbles' section 3 and Table 4, PonderLM-3's section 4."""


def test_ltms_public_schedule_ends_after_its_60_000_steps():
    """After 5,700 steps, 3 B tokens, its rate is 3.9e-4; a schedule of the run ends at 4e-5."""
    rates = {}
    for name in ("ltm_large", "ltm_large_public", "ltm_public"):
        config = OmegaConf.load(ROOT / "configs" / "latent_thought" / f"{name}.yaml")
        optimizer = OptimizerConfig(**config.model.init_args.optimizer)
        factor = schedule_factor(optimizer, config.trainer.max_steps)
        rates[name] = [optimizer.lr * factor(step) for step in (999, 5699, 59_999)]
    assert rates["ltm_large"] == pytest.approx([4e-4, 4e-5, 4e-5])
    assert rates["ltm_public"] == rates["ltm_large_public"]
    cosine = 4e-5 + 3.6e-4 * 0.5 * (1 + math.cos(math.pi * 4700 / 59_000))
    assert rates["ltm_public"] == pytest.approx([4e-4, cosine, 4e-5])
    assert cosine == pytest.approx(3.94e-4, rel=1e-3)


def stated_parameters(path):
    """The number in the file's heading, in millions, and whether it leaves embeddings out."""
    heading = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    found = re.search(r"([\d.]+) M (non-embedding )?parameters", heading)
    assert found, f"{path.name} does not say how many parameters it has"
    return found[1], bool(found[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_trains_on_as_many_tokens_as_the_paper(name):
    config = OmegaConf.load(ROOT / "configs" / f"{name}.yaml")
    tokens = config.trainer.max_steps * tokens_per_step(config)
    assert tokens == pytest.approx(PUBLISHED[name], rel=0.03)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/thought_gestalt").glob("*.yaml")), ids=ids)
def test_thought_gestalt_splits_sentences_as_the_paper_does(path):
    """At paper scale by SaT, but for the spans of App. E.3; small files run without a network."""
    data = OmegaConf.load(path).data.init_args
    expected = "rules" if path.stem in ("tiny", "small") else "sat"
    assert data.splitter == (f"spans:{path.stem[5:7]}" if "spans" in path.stem else expected)
    assert parse_splitter("sat").name == "sat:sat-3l-sm"


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("ponderlm/ponderlm1_*", {"accumulate": False, "multiply_embedding": None}),
        ("thinking_states/icot_qwen*", {"removal": "steps", "reset": "epoch"}),
        (
            "latent_thought/*_public",
            {"init_mean_std": 0.01, "latent_positions": "public", "noise": "fixed"},
        ),
    ],
)
def test_a_baseline_is_the_one_that_the_paper_compares_with(pattern, changes):
    paths = list((ROOT / "configs").glob(f"{pattern}.yaml"))
    assert paths
    for path in paths:
        config = OmegaConf.load(path).model.init_args.config
        assert {key: config.get(key) for key in changes} == changes, path.name


@pytest.mark.parametrize("path", sorted(CONFIGS, key=classes), ids=ids)
def test_its_own_size_has_the_stated_parameters_and_a_small_one_learns(path, monkeypatch, tmp_path):
    if "lora_rank" in path.read_text():
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model = training_parser().instantiate_classes(parse_training([f"--config={path}"])).model
    with torch.device("meta"):
        model.configure_model()
    stated, without_embeddings = stated_parameters(path)
    count = sum(parameter.numel() for parameter in model.network.parameters())
    if without_embeddings:
        embeddings = (model.network.embedding, model.network.position)
        count -= sum(table.weight.numel() for table in embeddings)
    decimals = len(stated.partition(".")[2])
    assert round(count / 1e6, decimals) == float(stated)
    assert model.config.vocab_size > 0
    assert model.flops_per_token(model.config.block_size) > 2 * count * 0.5
    assert_learns(shrunk(model), FORMATS[type(model)].batch())


def tokens_per_step(config):
    data = config.data.init_args
    return data.global_batch * data.block_size


def shrunk(model):
    """The same method with the same options at one layer, on the suite's batches of bytes."""
    form = FORMATS[type(model)]
    small = {**SMALL, **OF_MODEL.get(type(model).__name__, {}), **form.sizes, "backbone": None}
    small |= getattr(form, "wording", {})
    known = {field.name for field in fields(model.config)}
    config = replace(model.config, **{key: small[key] for key in small.keys() & known})
    torch.manual_seed(0)
    other = type(model)(config, model.optimizer_config)
    other.configure_model()
    return other.train()


def assert_learns(model, batch):
    """A step of the config's optimiser on its objective changes weights, and nothing overflows."""
    no_decay = model.no_decay_parameters()
    optimizer = build_optimizer(model.network, model.optimizer_config, no_decay=no_decay)
    before = [parameter.detach().clone() for parameter in model.network.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        terms = model.loss(batch).terms.values()  # of which one may be over nothing, as in a stage
        loss = sum(term.sum / max(float(term.normaliser), 1.0) for term in terms)
        loss.backward()
        optimizer.step()
    after = list(model.network.parameters())
    assert loss.isfinite()
    assert all(parameter.isfinite().all() for parameter in after)
    changed = [not torch.equal(a, b) for a, b in zip(after, before, strict=True) if a.requires_grad]
    assert sum(changed) > 0.5 * len(changed)


@pytest.mark.usefixtures("little_documentation")
@pytest.mark.parametrize("path", representatives(), ids=ids)
def test_it_trains_two_steps_when_tiny(path, data_cache, tmp_path):
    text = path.read_text()
    model, data = classes(path)
    cache = "data.corpus.cache_dir" if "corpus:" in text else "data.cache_dir"
    folders = [f"--trainer.default_root_dir={tmp_path}", f"--{cache}={data_cache}/little"]
    sizes = {**SMALL, **OF_MODEL.get(model, {})}
    small = [*(f"--model.config.{key}={value}" for key, value in sizes.items()), *SHORT]
    small += OF_DATA[data]
    if "global_batch:" in text:  # accumulation follows from it
        small = [word for word in small if "accumulate_grad_batches" not in word]
        small.append("--data.global_batch=2")
    absent = [key for key in ("backbone", "lora_rank") if f" {key}: " in text]
    if absent:  # no files of weights, and perhaps no peft; null is understood in files only
        random, nulls = tmp_path / "random.yaml", ", ".join(f"{key}: null" for key in absent)
        random.write_text(f"model: {{init_args: {{config: {{{nulls}}}}}}}\n")
        small.insert(0, f"--config={random}")
    if data == "ReasoningGSM8K":
        problems = tmp_path / "problems.txt"
        problems.write_text("Anna has 2 + 3 pears. How many?||<<2+3=5>> #### 5\n" * 12)
        small.append(f"--data.data_files={problems}")
    assert main(["fit", f"--config={path}", *small, *folders]) == 0
    (last,) = tmp_path.rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
