from itertools import chain

import pytest

from datamodules import PythonDocs
from datamodules.local_corpora import module_document, topics
from datamodules.store import SPLITS


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PythonDocs:
    docs = PythonDocs(cache_dir=str(tmp_path_factory.mktemp("cache")))
    docs.prepare_data()
    docs.setup()
    return docs


def test_size_and_splits(data):
    counts = [data.counts(split) for split in SPLITS]
    assert 1_200_000 < sum(c.utf8_bytes for c in counts) < 4_000_000
    assert sum(c.documents for c in counts) > 300
    assert counts[0].documents > 10 * counts[1].documents > 0
    assert all(c.tokens == c.utf8_bytes + c.documents for c in counts)


def test_documents_are_english_about_python(data):
    texts = {split: list(data.documents(split)) for split in SPLITS}
    everything = list(chain(*texts.values()))
    assert len(set(everything)) == len(everything)
    assert any("assert" in t.splitlines()[0] for t in everything)
    textwrap = next(t for t in everything if t.startswith("textwrap."))
    assert "wrapping" in textwrap
    assert not any(t.startswith(("test.", "site-packages")) for t in everything)


def test_topics_come_from_pydoc():
    from pydoc_data.topics import topics as texts

    found = topics()
    assert len(texts) - 3 <= len(found) == len(set(found)) <= len(texts)
    assert all(text.strip() + "\n" in found for text in texts.values())


def test_module_document_takes_long_docstrings_of_all_definitions(tmp_path):
    path = tmp_path / "module.py"
    long = ("A docstring long enough to be taken, " * 2).strip()
    path.write_text(
        f'"""Short."""\nclass A:\n    """{long}"""\n    if True:\n        async def f(self):\n'
        f'            """  First.\n\n            {long}\n            """\n            return 1\n'
    )
    text = module_document(path, "package.module", 50)
    assert text.startswith(f"package.module.A\n\n{long}\n")
    assert f"package.module.A.f\n\nFirst.\n\n{long}\n" in text
    assert "Short" not in text
    assert module_document(path, "m", 6).startswith("m\n\nShort.\n\nm.A\n")


def test_unreadable_modules_are_left_out(tmp_path):
    path = tmp_path / "old.py"
    path.write_bytes(b"print 'python 2'")
    assert module_document(path, "old", 0) == ""
    path.write_bytes(b'"""\xff"""')
    assert module_document(path, "old", 0) == ""


def test_fingerprint_changes_with_the_interpreter_and_options(data, monkeypatch):
    names = {data.fingerprint, PythonDocs(min_docstring=100).fingerprint}
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    names.add(PythonDocs().fingerprint)
    assert len(names) == 3
    assert data.fingerprint.startswith("python_docs-bytes-")


def test_negative_length_is_refused():
    with pytest.raises(ValueError, match="min_docstring=-1"):
        PythonDocs(min_docstring=-1)
