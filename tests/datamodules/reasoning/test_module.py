"""The data module of all tasks: names, wording, splits without examples, bad arguments."""

import pytest

from datamodules.store import StoreError
from tests.datamodules.reasoning.reasoning_tasks import FewQuestions, task


def test_the_fingerprint_changes_with_what_is_stored_and_with_nothing_else(monkeypatch):
    base = FewQuestions()
    other = [{"tokenizer": "gpt2"}, {"repeats": 2}, {"max_length": 9}, {"answer_prefix": "A:"}]
    other += [{"step_separator": ";"}, {"question_first": True}]
    assert len({FewQuestions(**options).fingerprint for options in ({}, *other)}) == 7
    same = [{"block_size": 9}, {"batch_size": 3}, {"seed": 4}, {"train_windows": "random"}]
    same += [{"val_fraction": 0.3}, {"num_workers": 1}, {"cache_dir": "x"}]
    assert {FewQuestions(**options).fingerprint for options in same} == {base.fingerprint}
    monkeypatch.setattr("datamodules.reasoning.module.VERSION", 99)
    assert FewQuestions().fingerprint != base.fingerprint
    assert base.fingerprint.startswith("few_questions-bytes-")


def test_a_trained_tokenizer_has_seen_queries_steps_wording_and_answers(make):
    own = [("qqqq<T>qqqq", ["ssss"], "aaaa"), ("qqqq", [], "aaaa")] * 4
    data = make(task(train=own), tokenizer="bpe:268", answer_prefix="pppp", step_separator="rrrr")
    assert [len(data.tokenizer.encode(c * 4)) for c in "qsapr"] == [1] * 5
    wording = data.wording()
    assert len(wording.answer_prefix) == len(wording.step_separator) == 1
    again = type(data)(**data._init_args())  # reads what is prepared
    assert again.wording() == wording
    assert data.state_dict()["tokenizer"]["json"] == data.tokenizer.json_text


def test_wording_before_the_data_are_prepared(tmp_path):
    with pytest.raises(ValueError, match=r"bpe:270.*prepare_data"):
        FewQuestions(cache_dir=str(tmp_path), tokenizer="bpe:270").wording()
    wording = FewQuestions(cache_dir=str(tmp_path), answer_prefix="ab").wording()
    assert (wording.answer_prefix, wording.step_separator) == ((97, 98), (10,))
    with pytest.raises(StoreError, match="prepare_data"):
        FewQuestions(cache_dir=str(tmp_path)).setup()


def test_a_split_without_examples(make, tmp_path):
    with pytest.raises(ValueError, match="The val split has no examples. FewQuestions has no ex"):
        make(task(val=[]))
    assert not list((tmp_path / "cache").glob("few_questions*"))
    kind = task(val=[])
    kind.expects = lambda self, split: split != "val"
    data = make(kind)
    assert data.val_dataloader() == []
    assert len(data.stored("val")) == 0
    with pytest.raises(ValueError, match="val split"):
        data.evaluation_source("val")


def test_predict_says_what_to_do_instead(prepared, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Two and two prepared?\n")
    with pytest.raises(ValueError, match=r"whose answers alone are scored. .*evaluate.py reason"):
        prepared(predict_file=str(prompts)).predict_dataloader()
