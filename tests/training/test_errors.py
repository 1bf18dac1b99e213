"""Bad input ends in one line and exit code 2; defects keep their traceback."""

import pytest

from datamodules import BatchLoader, StoreError
from evaluation.cli import main as evaluate
from lightning_models import TransformerLM
from training import main
from training.errors import condense, explain

MISTAKES = {
    "--model.lr=1": "is --model.init_args.optimizer.lr meant?",
    "--learning_rate=1": "is --model.init_args.optimizer.lr meant?",
    "--epochs=3": "is --trainer.max_epochs meant?",
    "--trainer.gpus=1": "is --trainer.devices meant?",
    "--data.batchsize=3": "is --data.init_args.batch_size meant?",
    "--model.config.n_layers=2": "is --model.init_args.config.num_layers meant?",
    "--resume": "is --ckpt_path meant?",
    "--seed=3": "write --seed_everything in full",
    "--trainer.logger=wandb": "--loggers takes tensorboard, csv, wandb and mlflow",
    "--model=thoughtbubbles": "is ThoughtbubblesLM meant?",
    "--data=LocalTxt": "is LocalText meant?",
    "--config=configs/transformer/tyny.yaml": "is configs/transformer/tiny.yaml",
    "--data=LocalText --data.data_files a.txt b.txt c.txt": "--data.data_files '[a.txt, b.txt]'",
    "--data=LocalText --data.data_files=a.txt b.txt": "'[a.txt, b.txt]', or a pattern in quotes",
    "configs/transformer/tiny.yaml": "write --config configs/transformer/tiny.yaml",
}
IN_FILES = {
    "learning_rate: 1": "is --model.init_args.optimizer.lr meant?",
    "trainer: {epochs: 3}": "is --trainer.max_epochs meant?",
    "model: {class_path: TransformerLM, init_args: {config: {n_layers: 2}}}": "num_layers meant?",
}
VERBS = {
    ("perplexity", "--checkpoint=x"): "is --ckpt meant?",
    ("perplexity", "runs/x"): "write --ckpt runs/x",
    ("zero_shot", "--ckpt=x", "--files.ptb", "a.txt", "b.txt"): "--files.ptb '[a.txt, b.txt]'",
    ("perplexity",): "the option --ckpt is missing",
    ("perplexity", "--ckpt"): "--ckpt: expected at least one argument",
    ("compare",): "the argument runs is missing",
    ("scaling", "x", "--x=size"): "--x (size) must be one of tokens, parameters",
    ("generate", "--ckpt=x", "--promt=x"): "is --prompt meant?",
    ("tasks", "--ckpt=x", "--task=x"): "write --tasks in full",
}


def message_of(program, arguments, capsys):
    assert program(arguments) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("argument", MISTAKES)
def test_an_option_of_another_name_is_answered_by_ours(argument, capsys):
    assert MISTAKES[argument] in message_of(main, ["fit", *argument.split()], capsys)


@pytest.mark.parametrize("content", IN_FILES)
def test_a_key_of_another_name_is_answered_by_ours(content, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(content)
    assert IN_FILES[content] in message_of(main, ["fit", f"--config={path}"], capsys)


@pytest.mark.parametrize("arguments", VERBS)
def test_so_are_options_of_evaluations(arguments, capsys):
    assert VERBS[arguments] in message_of(evaluate, list(arguments), capsys)


FIRST_WORDS = {
    (): "needs a verb: fit, validate, test, predict, list",
    ("-c", "configs/transformer/tiny.yaml"): "needs a verb: fit, validate",
    ("--name", "a", "fit"): "the verb comes first: python train.py fit --name",
    ("fitt",): "is fit meant?",
    ("train",): "is fit meant?",
    ("Validate",): "is validate meant?",
    ("lists",): "example: python train.py list",
    ("frobnicate",): "the verbs are fit, validate",
    ("runs/a.yaml",): "write: python train.py fit -c runs/a.yaml",
}


@pytest.mark.parametrize("argv", FIRST_WORDS)
def test_a_command_line_without_a_verb_gets_one(argv, capsys):
    assert main(list(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert FIRST_WORDS[argv] in line
    assert "python train.py" in line


REFUSED = {
    "--model.config.dim=x": "--model.init_args.config.dim (x) must be a whole number",
    "--model.optimizer.schedule=cosinus": "wsd, constant; is cosine meant?",
    "--seed_everything=x": "--seed_everything (x) must be true or false or a whole number",
    "--trainer.precision=12": "--trainer.precision (12) must be one of 64, 32, 16",
    "--trainer.callbacks+=callbacks.ForkAnalysi": "is callbacks.ForkAnalysis meant?",
    "--trainer.callbacks=Foo": "--trainer.callbacks (Foo) must be a list or the path of a class",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_refused_value_is_reported_with_its_option(argument, capsys):
    message = message_of(main, ["fit", argument], capsys)
    assert message.startswith(f"error: {argument.partition('=')[0].split('.')[0]}")
    assert REFUSED[argument] in message
    assert "Parser key" not in message


def test_of_nested_classes_the_inner_one_is_named(capsys):
    callback = ["--trainer.callbacks+", "callbacks.ForkAnalysis"]
    message = message_of(main, ["fit", *callback, "--trainer.callbacks.shown_row=x"], capsys)
    assert message.startswith("error: --trainer.callbacks.init_args.shown_row is no option of")
    assert "--trainer.callbacks.init_args.shown_rows" in message


INNER = {
    "--data.cache_dir=x": "is --data.init_args.corpus.init_args.cache_dir meant?",
    "--data.corpus.cache_di=x": "write --data.init_args.corpus.init_args.cache_dir in full",
    "--data.corpus.init_args.tokeniser=x": "--data.init_args.corpus.init_args.tokenizer meant?",
}


@pytest.mark.parametrize("argument", INNER)
def test_an_option_of_a_corpus_is_named_from_the_data_module_on(argument, capsys):
    of_sentences = ["--data=Sentences", "--data.corpus=LocalText", "--model=ThoughtGestaltLM"]
    message = message_of(main, ["fit", *of_sentences, argument], capsys)
    assert message.rstrip().endswith(INNER[argument])
    assert " is no option of datamodules." in message


def test_of_an_argument_that_only_another_class_has_the_near_one_is_named(capsys):
    message = message_of(main, ["fit", "-c", "configs/data/wikitext103_sentences_12m.yaml"], capsys)
    assert "corpus.init_args.tokenizer is no option of datamodules.PythonDocs" in message
    assert message.rstrip().endswith("is --data.init_args.tokenizer meant?")


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
    assert condense(report) == "--model.init_args.config.dimm is no option of A"
