"""Bad input ends in one line and exit code 2; defects keep their traceback."""

import pytest

from datamodules import BatchLoader, StoreError
from evaluation.cli import main as evaluate
from lightning_models import TransformerLM
from training import main
from training.errors import condense, explain

MEANT = {
    "--model.lr=1": "--model.optimizer.lr",
    "--trainer.max_epoch=3": "--trainer.max_epochs",
    "--data.batchsize=3": "--data.batch_size",
    "--model.config.n_layers=2": "--model.config.num_layers",
    "--ckpt_pat=3": "--ckpt_path",
    "--nonfinite.acton=skip": "--nonfinite.action",
    "--model=TransformrLM": "TransformerLM",
    "--data=LocalTxt": "LocalText",
    "--config=configs/transformer/tyny.yaml": "configs/transformer/tiny.yaml",
}
IN_FILES = {
    "max_epochs: 1": "--trainer.max_epochs",
    "trainer: {max_epoch: 3}": "--trainer.max_epochs",
    "model: {class_path: TransformerLM, init_args: {config: {n_layers: 2}}}": "num_layers",
}
VERBS = {
    ("perplexity", "--ckpts=x"): "--ckpt",
    ("generate", "--ckpt=x", "--promt=x"): "--prompt",
    ("tasks", "--ckpt=x", "--task=x"): "--tasks",
    ("generat",): "generate",
}
REFUSED = {
    "--model.config.dim=x": "--model.config.dim",
    "--model.optimizer.schedule=cosinus": "--model.optimizer.schedule",
    "--seed_everything=x": "--seed_everything",
    "--trainer.precision=12": "--trainer.precision",
    "--trainer.callbacks+=callbacks.ForkAnalysi": "--trainer.callbacks",
    "--trainer.callbacks=Foo": "--trainer.callbacks",
    "--learning_rate=1": "--learning_rate",
}
FIRST_WORDS = [
    (),
    ("-c", "configs/transformer/tiny.yaml"),
    ("-c", "configs/transformer/tiny.yaml", "fit"),
    ("--name", "a", "fit"),
    ("frobnicate",),
]


def message_of(program, arguments, capsys):
    assert program(arguments) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


@pytest.mark.parametrize("argument", MEANT)
def test_a_misspelt_option_or_class_is_answered_by_the_nearest(argument, capsys):
    message = message_of(main, ["fit", argument], capsys)
    assert f"Did you mean {MEANT[argument]}?" in message
    option, _, value = argument.partition("=")
    assert option in message or value in message


@pytest.mark.parametrize("content", IN_FILES)
def test_so_is_a_key_of_a_config(content, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(content)
    message = message_of(main, ["fit", f"--config={path}"], capsys)
    assert message.endswith(f"{IN_FILES[content]}?")


@pytest.mark.parametrize("arguments", VERBS)
def test_so_are_options_of_evaluations(arguments, capsys):
    assert f"Did you mean {VERBS[arguments]}?" in message_of(evaluate, list(arguments), capsys)


@pytest.mark.parametrize("argument", REFUSED)
def test_a_refused_value_is_reported_with_its_option(argument, capsys):
    message = message_of(main, ["fit", argument], capsys)
    assert message.startswith(f"error: {REFUSED[argument]}")
    assert "Parser key" not in message


@pytest.mark.parametrize("argv", FIRST_WORDS)
def test_a_command_line_without_a_verb_gets_the_verbs_and_an_example(argv, capsys):
    message = message_of(main, list(argv), capsys)
    assert "fit, validate, test, predict, list, plan" in message
    assert "python train.py fit -c configs/transformer/tiny.yaml" in message


def test_of_nested_classes_the_inner_one_is_named(capsys):
    callback = ["--trainer.callbacks+", "callbacks.ForkAnalysis"]
    message = message_of(main, ["fit", *callback, "--trainer.callbacks.shown_row=x"], capsys)
    assert message.startswith(
        "error: --trainer.callbacks.shown_row is not an option of callbacks.Fork"
    )


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="num_heads"):
        main(["fit", "--debug", "--model.config.num_heads=7"])


def test_a_defect_keeps_its_traceback(fit, tmp_path, monkeypatch):
    def broken(self, batch):
        return batch["no such key"]

    monkeypatch.setattr(TransformerLM, "loss", broken)
    with pytest.raises(KeyError, match="no such key"):
        fit(tmp_path, "--trainer.max_steps=1")


def test_a_value_error_of_another_library_is_a_defect():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert explain(caught.value) is None


def test_an_error_in_a_loading_process_is_one_line():
    class Source:
        def __len__(self):
            return 2

        def batch(self, n):
            raise StoreError("The text store a is damaged: all of it.")

    with pytest.raises(StoreError, match="Caught StoreError in DataLoader worker") as caught:
        next(iter(BatchLoader(Source(), num_workers=1)))
    assert explain(caught.value) == "The text store a is damaged: all of it."


def test_condensed_reports_keep_what_was_wrong():
    report = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [A, B]\n  Errors:\n    - Problem with given class_path 'A':\n"
        "        Group 'config' does not accept option 'dimm'\n"
        "    - Expected a <class 'NoneType'>\n  Given value type: <class 'dict'>"
    )
    assert condense(report) == "--model.config.dimm is not an option of A"
