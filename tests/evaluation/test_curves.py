"""Training curves from nothing but run folders."""

import csv
import shutil

import pytest
import torch
from compared_runs import dress, place, read

from datamodules import LocalText, Sentences
from evaluation.run_metrics import LoggedPoint
from evaluation.runs import label_runs
from evaluation.views import curves_figure
from lightning_models import (
    OptimizerConfig,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from training.runtime import EventLog

VIEW = ("compare", "--view", "curves")
ROWS, TOKENS = 4, 32  # of the checkpoints' data: batch_size, block_size
LOSSES = {9: 4.5, 19: 4.0, 29: 3.75}


def flops(**changes):
    """Training FLOPs per token of the checkpoint's model."""
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 2, "vocab_size": 257, "block_size": TOKENS}
    model = TransformerLM(TransformerConfig(**{**sizes, **changes}))
    model.configure_model()
    return model.flops_per_token(TOKENS, training=True)


@pytest.fixture
def make_run(checkpoint_path, tmp_path):
    """Writes a run folder as train.py does, of a changed config, with curves of val/loss."""

    def make(name, losses=LOSSES, edit=lambda content: None, **config):
        logger = EventLog(tmp_path / "runs" / name, name="TransformerLM", default_hp_metric=False)
        for step, loss in losses.items():
            logger.log_metrics({"val/loss": loss, "val/ppl": 2**loss, "epoch": 0.0}, step)
        logger.finalize("success")
        content = torch.load(checkpoint_path, weights_only=True)
        content["recipe"]["model"]["init_args"]["config"].update(config)
        edit(content)
        path = tmp_path / "runs" / name / "TransformerLM" / "version_0" / "checkpoints"
        path.mkdir(parents=True)
        torch.save(content, path / "last.ckpt")
        return path.parent

    return make


@pytest.fixture
def draw(evaluates, tmp_path):
    """Draws the runs; returns what is printed, and the rows of the CSV file."""

    def run(*options, output="figure.svg"):
        printed = evaluates(*VIEW, tmp_path / "runs", "--output", tmp_path / output, *options)
        with (tmp_path / output).with_suffix(".csv").open(newline="") as file:
            return printed, list(csv.DictReader(file))

    return run


def test_the_points_are_what_was_logged(make_run, draw, tmp_path):
    make_run("deep", {9: 4.25, 19: 3.5}, num_layers=6)
    make_run("flat", LOSSES)
    printed, rows = draw()
    assert [row["label"] for row in rows] == 2 * ["num_layers 6"] + 3 * ["num_layers 2"]
    assert [row["run"] for row in rows] == 2 * ["deep"] + 3 * ["flat"]
    assert [int(row["steps"]) for row in rows] == [10, 20, 10, 20, 30]
    assert [float(row["val/loss"]) for row in rows] == [4.25, 3.5, *LOSSES.values()]
    assert [float(row["tokens"]) for row in rows] == [
        steps * ROWS * TOKENS for steps in (10, 20, 10, 20, 30)
    ]
    assert float(rows[1]["flops"]) == 20 * ROWS * TOKENS * flops(num_layers=6)
    assert float(rows[4]["flops"]) == 30 * ROWS * TOKENS * flops()
    _, first, second = printed.splitlines()  # in the order of their layers
    assert first.split()[:6] == ["num_layers", "2", "flat", "3", "3,840", f"{flops():.4g}"]
    assert second.split()[-1] == "3.5"
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_same_runs_make_the_same_files(make_run, draw, tmp_path):
    make_run("one")
    for name in ("a.svg", "b.svg"):
        draw(output=name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_other_scalars_labels_and_formats(make_run, draw, tmp_path):
    make_run("a", dropout=0.1, num_layers=3, ffn_dim=8)
    make_run("b", dropout=0.2, num_layers=4, ffn_dim=9)
    printed, rows = draw("--scalar", "val/ppl", "--label", "dropout", output="figure.png")
    assert [float(row["val/ppl"]) for row in rows[:3]] == pytest.approx(
        [2**loss for loss in LOSSES.values()], rel=1e-6
    )
    assert rows[0]["label"] == "dropout 0.1"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    printed, rows = draw()
    assert rows[0]["label"] == "a"
    assert "note: the models differ in num_layers, ffn_dim, dropout" in printed


def test_ranks_and_accumulated_batches_count(make_run, draw):
    def edit(content):
        content["LocalText"]["order"]["world_size"] = 3
        total = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        total["processed"] = 2 * content["global_step"]

    make_run("run", {0: 1.0}, edit)
    _, (row,) = draw()
    assert float(row["tokens"]) == 2 * 3 * ROWS * TOKENS


def test_a_real_run(quiet_trainer, corpus, evaluates, tmp_path):
    data = LocalText(**corpus)
    sizes = {"vocab_size": data.vocab_size, "block_size": TOKENS, "num_layers": 1, "dim": 16}
    model = TransformerLM(TransformerConfig(**sizes, num_heads=2), OptimizerConfig(warmup=0))
    log = EventLog(tmp_path, name="TransformerLM", default_hp_metric=False)
    steps = {"max_steps": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    checks = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(**steps, **checks, logger=log, default_root_dir=tmp_path)
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{log.log_dir}/checkpoints/last.ckpt")
    evaluates(*VIEW, log.log_dir, "--output", tmp_path / "figure.svg")
    with (tmp_path / "figure.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["steps"]) for row in rows] == [1, 2]
    assert [float(row["tokens"]) for row in rows] == [2 * ROWS * TOKENS, 4 * ROWS * TOKENS]
    assert float(rows[1]["val/loss"]) == trainer.callback_metrics["val/loss"].item()
    assert float(rows[1]["flops"]) == 4 * ROWS * TOKENS * flops(num_layers=1, dim=16)


def test_runs_of_sentences_are_drawn_as_the_report_draws_them(
    corpus, train_checkpoint, draw, evaluates, tmp_path
):
    path = place(tmp_path / "runs", "gestalt", "ThoughtGestaltLM")
    plain = {key: v for key, v in corpus.items() if key not in ("batch_size", "block_size")}
    options = {"splitter": "spans:29", "max_sentence_tokens": 29, "max_sentences": 5}
    data = Sentences(corpus=LocalText(**plain), batch_size=4, batch_tokens=300, **options)
    sizes = {"num_layers": 4, "sentence_layer": 3, "memory_size": 3}
    train_checkpoint(path, data, ThoughtGestaltLM, **sizes)
    dress(path, seed=1, **{"throughput/flops_per_token": 3.0})
    _, rows = draw("--scalar", "val/bpb")
    evaluates("compare", tmp_path / "runs", "--output", tmp_path / "report")
    drawn = read(tmp_path / "report" / "curves.csv")
    assert len(rows) == len(drawn) == 2
    for key, other in (("tokens", "tokens"), ("flops", "training_flops"), ("val/bpb", "val/bpb")):
        assert [float(row[key]) for row in rows] == [float(row[other]) for row in drawn]


def test_of_questions_nothing_is_drawn(write_method, fails, tmp_path):
    path = place(tmp_path / "runs", "states", "ThinkingStatesLM")
    shutil.copy(write_method("thinking-states"), path)
    dress(path, seed=1)
    line = fails(*VIEW, tmp_path / "runs", "--output", tmp_path / "figure.svg")
    assert f"runs ({path.parents[1]}): its training tokens or FLOPs are not known" in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--output", "figure.pdf"], "must end in .svg or .png"),
        (["--output", "none/figure.svg"], "the folder none does not exist"),
        (["--scalar", "val/lost"], "scalar (val/lost) was not logged by"),
        (["--scalar", "val/lost"], "it has val/loss, val/ppl"),
        (["--label", "width"], "label (width) is no key of the models' config"),
        (["--packages", "[not_there]"], "cannot import 'not_there'"),
    ],
)
def test_wrong_options_end_in_one_line(make_run, fails, tmp_path, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    options = [*options, *([] if "--output" in options else ["--output", "figure.svg"])]
    assert expected in fails(*VIEW, make_run("run"), *options)
    assert not list(tmp_path.glob("figure*"))


@pytest.mark.filterwarnings("ignore:skipping a damaged checkpoint")
def test_wrong_runs_end_in_one_line(make_run, fails, tmp_path):
    folder, output = make_run("run"), ("--output", tmp_path / "figure.svg")
    assert "there is no such file or folder" in fails(*VIEW, tmp_path / "none", *output)
    assert "was not logged by" in fails(*VIEW, folder, *output, "--scalar", "val/none")
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"half")
    assert "there is no whole checkpoint below" in fails(*VIEW, folder, *output)
    shutil.rmtree(folder / "checkpoints")
    assert "there is no whole checkpoint below" in fails(*VIEW, folder, *output)


def test_rows_that_are_named_keep_their_names(make_run, evaluates, tmp_path):
    folders = [make_run(name) for name in ("one", "two")]
    words = [f"{name}={folder}" for name, folder in zip("ab", folders, strict=True)]
    evaluates(*VIEW, *words, "--output", tmp_path / "figure.svg")
    assert {row["label"] for row in read(tmp_path / "figure.csv")} == {"a", "b"}


LATENT = {"inner_steps": 2, "positions": "rope", "norm": "rms", "activation": "swiglu"}


@pytest.mark.parametrize(
    ("scalar", "mark"),
    [("val/loss", " (bound)"), ("val/ppl", " (bound)"), ("train/loss", " (estimate)"), ("x/y", "")],
)
def test_bounds_are_marked(make_run, draw, scalar, mark):
    def to_latent(content):
        content["recipe"]["model"]["class_path"] = "lightning_models.LatentThoughtLM"

    paths = [make_run("exact"), make_run("latent", edit=to_latent, **LATENT)]
    for path in paths:
        log = EventLog(path.parents[1], name="TransformerLM", version="version_0")
        log.log_metrics({"train/loss": 5.0, "x/y": 1.0}, 3)
        log.finalize("success")
    printed, rows = draw("--scalar", scalar, "--label", "model")
    assert {row["label"] for row in rows} == {"TransformerLM", f"LatentThoughtLM{mark}"}
    assert f"LatentThoughtLM{mark}  " in printed
    _, rows = draw("--scalar", scalar)  # the runs' names
    (label,) = {row["label"] for row in rows if row["label"].startswith("latent")}
    assert label.endswith(mark)


def drawn(values, keys):
    """The figure of one run a value of the keys, all of one curve."""
    recipes = [
        {"class_path": "X", "init_args": {"config": dict(zip(keys, value, strict=True))}}
        for value in values
    ]
    labels = label_runs(recipes, [str(value) for value in values], ",".join(keys))
    curve = [LoggedPoint(1, 10, 20.0, 3.0), LoggedPoint(2, 2000, 4000.0, 2.5)]
    return curves_figure([curve] * len(values), labels, "val/ppl")


def test_the_figure_has_tokens_and_flops_on_logarithmic_axes():
    tokens, flops_panel = drawn([(1,)], ["steps"]).axes
    assert [axes.get_xscale() for axes in (tokens, flops_panel)] == ["log", "log"]
    assert tokens.get_yscale() == "log"  # of a perplexity
    assert list(tokens.lines[0].get_xdata()) == [10, 2000]
    assert list(flops_panel.lines[0].get_xdata()) == [20.0, 4000.0]
    assert list(flops_panel.lines[0].get_ydata()) == [3.0, 2.5]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.5e9, 1.8e10), (1.2e9, 1.9e9), (1e6, 1e6), (2e7, 9e7), (1.1e3, 9.9e4), (3, 4e9), (91, 92)],
)
def test_sizes_are_labelled_at_least_twice(low, high):
    points = [LoggedPoint(1, low, 3 * low, 3.0), LoggedPoint(2, high, 3 * high, 2.5)]
    labels = label_runs([{"class_path": "X", "init_args": {}}], ["run"])
    figure = curves_figure([points], labels, "val/loss")
    figure.canvas.draw()
    for axes in figure.axes:
        left, right = axes.get_xlim()
        ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        shown = [text.get_text() for tick, text in ticks if left <= tick <= right]
        assert 2 <= len(shown) <= 12
        assert all(shown)
        assert len(set(shown)) == len(shown)


def test_the_first_key_is_a_colour_and_the_second_a_dash():
    values = [(16, 3), (16, 6), (64, 3), (32, 3), (16, 3)]
    figure = drawn(values, ["steps", "layers"])
    lines = figure.axes[0].lines  # steps 16 twice with 3 layers, 16 with 6, 32, 64
    looks = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert looks[0] == looks[1]
    assert looks[0][0] == looks[2][0]
    assert looks[0][1] == looks[3][1] == looks[4][1] != looks[2][1]
    assert len({colour for colour, _ in looks}) == 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "steps 16, layers 3",
        "steps 16, layers 6",
        "steps 32, layers 3",
        "steps 64, layers 3",
    ]
