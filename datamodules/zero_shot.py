"""Corpora for the zero-shot evaluation of language models, as named sets.

Paper: Latent-Thought Language Models, section 3.1, Table 1 and A.3; sets, splits and detokenizers
    follow the diffusion language models it compares with (Lou et al., 2024; Sahoo et al., 2024).

| paper | here |
|---|---|
| A.3 "we adopt the detokenizers used by Sahoo et al." | `detokenizers` |
| A.3 "insert an [EOS] token in between sequences" | the text store: one EOS per document |
| 3.3 "non-overlapping blocks" | `text.EvaluationWindows` |

The paper says "the validation splits" of all seven, following the diffusion language models. Their
public scripts use the validation split if it exists, else the test split, as done here:

| set | repository on the hub | split | documents | detokenizer |
|---|---|---|---|---|
| ptb | ptb-text-only/ptb_text_only | validation | sentences | ptb |
| wikitext | Salesforce/wikitext, wikitext-103-raw-v1 | validation | lines with text | wikitext |
| lm1b | billion-word-benchmark/lm1b | test, the only held-out one | sentences | lm1b |
| lambada | EleutherAI/lambada_openai | test (GPT-2's copy) | passages | lambada |
| ag_news | fancyzhx/ag_news | test, the only held-out one | articles | none |
| pubmed | ccdv/pubmed-summarization | validation | papers | scientific papers |
| arxiv | ccdv/arxiv-summarization | validation | papers | scientific papers |

The repositories of ptb and lm1b are scripts, so their parquet conversion by the hub is read. PubMed
and arXiv form the dataset scientific_papers, whose original repository is a script too.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from datamodules import detokenizers
from datamodules.base import choice_problems, raise_problems
from datamodules.detokenizers import Detokenizer
from datamodules.files import expand, format_of
from datamodules.hub import CONVERSION, HubFiles, check_revision
from datamodules.local_corpora import identify
from datamodules.readers import read_documents, read_files
from datamodules.store import Split
from datamodules.text import TextDataModule

SetName = Literal["ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"]


@dataclass(frozen=True, kw_only=True)
class ZeroShotSet:
    """A corpus to score, and the conversion of its rows to documents.

    Attributes:
        repository: Repository on the hub, e.g. ``"fancyzhx/ag_news"``.
        files: Glob of the paths in the repository.
        revision: Commit, branch or tag. Defaults to the newest commit.
        split: Name of the split on the hub.
        detokenizer: Converts a row to text.
        text_field: Field (jsonl) or column (parquet) with the text.
        by_line: Whether each line of a txt file is a document, instead of the whole file.
        ending: Text at the end of every document, before the EOS.
    """

    repository: str
    files: str
    revision: str | None = None
    split: str
    detokenizer: Detokenizer
    text_field: str = "text"
    by_line: bool = True
    ending: str = ""

    def document(self, row: str) -> str:
        """Returns the document of a non-blank row."""
        return self.detokenizer(row.strip()) + self.ending

    @property
    def local_format(self) -> str:
        """Description of the formats of a local copy."""
        lines = "one document per line" if self.by_line else "one document per file"
        return f"jsonl or parquet with a field {self.text_field!r} or 'text', or txt, {lines}"


def _papers(repository: str) -> ZeroShotSet:
    return ZeroShotSet(
        repository=repository,
        # The configuration that keeps sentences separate, as in the field's papers.
        files="section/validation-*.parquet",
        split="validation",
        detokenizer=detokenizers.scientific_papers,
        text_field="article",
        by_line=False,
    )


ZERO_SHOT_SETS: dict[str, ZeroShotSet] = {
    "ptb": ZeroShotSet(
        repository="ptb-text-only/ptb_text_only",
        files="*/validation/*.parquet",
        revision=CONVERSION,
        split="validation",
        detokenizer=detokenizers.ptb,
        text_field="sentence",
    ),
    # NOTE(paper): a line is a document and keeps its line ending, like a row in the scripts. Blank
    # lines are omitted: each would only add one more EOS to predict.
    "wikitext": ZeroShotSet(
        repository="Salesforce/wikitext",
        files="wikitext-103-raw-v1/validation-*.parquet",
        split="validation",
        detokenizer=detokenizers.wikitext,
        ending="\n",
    ),
    "lm1b": ZeroShotSet(
        repository="billion-word-benchmark/lm1b",
        files="*/test/*.parquet",
        revision=CONVERSION,
        split="test",
        detokenizer=detokenizers.lm1b,
    ),
    "lambada": ZeroShotSet(
        repository="EleutherAI/lambada_openai",
        files="data/lambada_test.jsonl",
        split="test",
        detokenizer=detokenizers.lambada,
    ),
    # Published as running text; the scripts have no rules for it either.
    "ag_news": ZeroShotSet(
        repository="fancyzhx/ag_news",
        files="data/test-*.parquet",
        split="test",
        detokenizer=detokenizers.unchanged,
    ),
    "pubmed": _papers("ccdv/pubmed-summarization"),
    "arxiv": _papers("ccdv/arxiv-summarization"),
}
"""The sets by name, in the order of the table's columns."""


class ZeroShotText(TextDataModule):
    """A set in Table 1 of the Latent-Thought paper, for evaluation only.

    Its documents are detokenised, joined with one EOS each, and cut into windows without overlap
    (sections 3.1 and 3.3, A.3). They form the split ``val``, whatever their split on the hub.

    Args:
        set_name: Name of the set.
        data_files: Local copy of the split: one path or glob, or a list of them; jsonl (or .json
            with an object per line) and parquet with the set's text field, txt with a document per
            line (per file for PubMed and arXiv). Null fetches it from the hub.
        text_field: Field (jsonl) or column (parquet) with the text. Null uses the set's default
            (sentence for ptb, article for pubmed and arxiv), or ``text``.
        revision: Commit, branch or tag of the hub repository. Null uses the newest commit, which
            meta.json records (``origin``).
        **kwargs: See `TextDataModule`; val_fraction and test_fraction have no effect here.

    Raises:
        ValueError: If an argument is invalid, or the set is used for training.
    """

    def __init__(
        self,
        *,
        set_name: SetName,
        data_files: str | list[str] | None = None,
        text_field: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        raise_problems(choice_problems(tuple(ZERO_SHOT_SETS), set_name=set_name))
        self._set_name, self._set = set_name, ZERO_SHOT_SETS[set_name]
        self._name = f"{type(self).__name__} ({set_name})"
        self._data_files = data_files
        fields = [self._set.text_field, "text"] if text_field is None else [text_field]
        self._fields = list(dict.fromkeys(fields))
        self._revision = self._set.revision if revision is None else revision
        check_revision(revision, data_files)

    # The text

    @cached_property
    def files(self) -> list[Path]:
        """Local files, in reading order.

        Raises:
            ValueError: If one is missing or of unknown format, or there are none.
        """
        paths = [] if self._data_files is None else expand(self._data_files)
        for path in paths:
            format_of(path)
        if not paths:
            raise ValueError(f"{self._name}: data_files is empty. Name at least one file.")
        return paths

    @cached_property
    def _hub(self) -> HubFiles | None:
        if self._data_files is not None:
            return None
        return HubFiles(
            self._set.repository,
            self._set.files,
            revision=self._revision,
            corpus=self._name,
            label=self._set.files,
            cure=f"Pass your copy with --files.{self._set_name} to evaluate.py zero_shot or "
            f"data.data_files elsewhere ({self._set.local_format})",
        )

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Resolves the commit on the hub; nothing for local files."""
        if self._hub is None:
            return {}
        return {"repository": self._set.repository, "commit": self._hub.pin(stored)["commit"]}

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the detokenised documents in file order; only for ``val``."""
        if split != "val":
            return
        paths = self.files if self._hub is None else self._hub
        yield from map(self._set.document, read_files(paths, self._read_file))

    def _read_file(self, path: Path) -> Iterator[str]:
        separator = "\n" if self._set.by_line else None
        field = fitting_field(path, self._fields)
        return read_documents(path, text_field=field, separator=separator)

    def source(self) -> dict[str, Any]:
        if self._data_files is not None:
            origin: dict[str, Any] = {"files": [identify(path) for path in self.files]}
        else:
            location = {"repository": self._set.repository, "files": self._set.files}
            revision = {} if self._revision is None else {"revision": self._revision}
            origin = {"hub": {**location, **revision}}
        return {
            "corpus": type(self).__name__,
            "set": self._set_name,
            "fields": self._fields,
            "detokenizer": self._set.detokenizer.__name__,
            "detokenizer_version": detokenizers.VERSION,
            "ending": self._set.ending,
            **origin,
        }

    # A test set

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have documents; only ``val`` does."""
        return split == "val"

    def how_to_get(self, split: Split) -> str:
        return (
            f"{self._name} only has the {self._set.split} split of its corpus, as val: score that "
            "split."
        )

    def training_source(self) -> NoReturn:
        """Raises a ValueError: papers report results of models that never saw these texts."""
        self._refuse_training()

    def tokenizer_text(self) -> Iterable[str]:
        """Raises a ValueError: a tokenizer is trained on the model's training text."""
        self._refuse_training()

    def _refuse_training(self) -> NoReturn:
        raise ValueError(
            f"{self._name} is a test set: neither a model nor a tokenizer can be trained on it. "
            "Train on another corpus, e.g. datamodules.OpenWebText, and score this one with "
            "evaluate.py zero_shot."
        )


def fitting_field(path: Path, fields: Sequence[str]) -> str:
    """Returns the first field that has text in a jsonl or parquet file, or else the first.

    Args:
        path: File to inspect; txt files are not read.
        fields: At least one name.
    """
    if format_of(path) != "text":
        for field in fields:
            with contextlib.suppress(ValueError):  # the later reading reports the problem
                next(read_documents(path, text_field=field), None)
                return field
    return fields[0]
