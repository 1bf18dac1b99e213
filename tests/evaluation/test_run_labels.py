"""Runs are called by what their models differ in."""

from dataclasses import replace

import pytest

from evaluation.runs import label_runs


def recipe(name="LatentLM", **config):
    return {"class_path": f"lightning_models.{name}", "init_args": {"config": config}}


def texts(recipes, keys=None):
    names = [f"run {number}" for number in range(len(recipes))]
    return label_runs(recipes, names, keys).texts()


def test_one_differing_key_is_the_label():
    runs = [recipe(dim=8, inner_steps=steps) for steps in (16, 64)]
    assert texts(runs) == ["inner_steps 16", "inner_steps 64"]


def test_marks_stand_behind_labels():
    labels = label_runs([recipe(dim=n) for n in (8, 16)], ["a", "b"])
    assert replace(labels, marks=("", "(bound)")).texts() == ["dim 8", "dim 16 (bound)"]


def test_two_differing_keys_are_the_label():
    runs = [recipe(inner_steps=1, rate=0.30), recipe(inner_steps=1, rate=None), recipe(rate=1)]
    assert texts(runs[:2]) == ["rate 0.3", "rate -"]
    runs = [recipe(inner_steps=n, layers=m) for n, m in ((1, 2), (1, 3), (4, 2))]
    assert texts(runs)[2] == "inner_steps 4, layers 2"


def test_the_class_counts_as_a_key_and_stands_alone():
    runs = [recipe(inner_steps=4), recipe("TransformerLM")]
    assert texts(runs) == ["LatentLM", "TransformerLM"]
    assert texts(runs, "model,inner_steps") == ["LatentLM, inner_steps 4", "TransformerLM"]
    assert texts([recipe(), recipe()], "model") == ["LatentLM", "LatentLM"]
    assert texts([recipe()]) == ["LatentLM"]


def test_names_do_where_nothing_or_too_much_differs():
    assert texts([recipe(dim=8), recipe(dim=8)]) == ["run 0", "run 1"]
    runs = [recipe(a=n, b=n, c=n, d=0) for n in (1, 2)]
    labels = label_runs(runs, ["x", "y"])
    assert labels.texts() == ["x", "y"]
    assert labels.note == "the models differ in a, b, c; --label KEY,... chooses"
    assert texts(runs, "b") == ["b 1", "b 2"]


def test_numbers_are_ordered_by_size_and_lists_are_compared():
    runs = [recipe(steps=steps) for steps in (64, None, 8, 16.5)]
    assert label_runs(runs, list("abcd")).order() == [2, 3, 0, 1]
    assert texts([recipe(layers=[1]), recipe(layers=[1, 2])]) == ["layers [1]", "layers [1, 2]"]


def test_an_unknown_key_is_refused_with_those_that_differ():
    with pytest.raises(ValueError, match=r"label \(steps\) is no key .* they differ in inner"):
        texts([recipe(inner=1), recipe(inner=2)], "steps")
