"""Bad input ends in one line and exit code 2; defects keep their traceback."""

import pytest

from datamodules import BatchLoader, StoreError
from lightning_models import TransformerLM
from training import main
from training.errors import condense, explain

BAD_INPUT = {
    "typo in a model key": (["--model.config.dimm=8"], "dimm"),
    "typo in a trainer key": (["--trainer.max_stepss=8"], "max_stepss"),
    "wrong type": (["--trainer.max_steps=many"], "Expected a <class 'int'>. Got value: many"),
    "value a config refuses": (["--model.config.num_heads=7"], "num_heads (7) must divide dim"),
    "value the data refuse": (["--data.block_size=0"], "block_size=0"),
    "value a callback refuses": (["--samples.temperature=-1"], "temperature (-1.0) must not be"),
    "value Lightning refuses": (["--checkpoint.save_top_k=-4"], "save_top_k=-4"),
    "unknown model": (["--model=lightning_models.Foo"], "Foo"),
    "missing config file": (["--config=nowhere.yaml"], "nowhere.yaml"),
    "missing checkpoint": (["--ckpt_path=nowhere.ckpt"], "there is no checkpoint at nowhere.ckpt"),
    "missing argument": (["--data=datamodules.LocalText"], "data_files"),
    "missing data": (
        ["--data=datamodules.LocalText", "--data.data_files=nowhere.txt"],
        "nowhere.txt: there is no such file",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_ends_in_one_line(case, tmp_path, capsys):
    arguments, expected = BAD_INPUT[case]
    fixed = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
    assert main(["fit", *fixed, *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in errors[0]
    assert len(errors[0]) < 400


@pytest.mark.parametrize("content", ["a: [", "trainer: {max_stepss: 3}", "trainer: {max_steps: x}"])
def test_bad_config_files_end_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    assert main(["fit", f"--config={path}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")


def test_no_verb_names_the_verbs(capsys):
    assert main([]) == 2
    assert "fit,validate,test,predict" in capsys.readouterr().err


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
    assert condense(report) == (
        "Parser key \"model\": Problem with given class_path 'A': "
        "Group 'config' does not accept option 'dimm'"
    )
