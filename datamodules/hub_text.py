"""`HubText`: any dataset of the `datasets` library as a corpus of text windows."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from datamodules.corpora import SplitText
from datamodules.corpus import REMOVE_REPEATS
from datamodules.hub import CorpusUnavailableError, HubFiles
from datamodules.local_corpora import PASSAGES, identify, passages
from datamodules.readers import Reading, check_utf8, has_text, text_of
from datamodules.store import SPLITS, Split

_ON_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # names of datasets on the hub
_QUOTED = 300  # maximum number of characters to quote from an error
_SAVED = ("state.json", "dataset_dict.json")  # ``save_to_disk`` writes one of them

Rows = Iterable[Mapping[str, Any]]
if TYPE_CHECKING:
    Source = str | os.PathLike[str] | Rows | Mapping[str, Rows] | None
else:
    Source = str | None  # the only values from a parser or a checkpoint


class HubText(SplitText):
    """Any dataset of the `datasets` library; a row with text is a document.

    A YAML file or a command line names it: a dataset on the hub, a folder that ``save_to_disk``
    wrote, or a folder of parquet, jsonl or csv files. In Python it may also be the object: a
    `Dataset` (which is the split 'train'), an `IterableDataset`, or a dict of them by split.

    `datasets` reads the files by its rules: a line of a txt file is a row, "NA" in a csv file is
    null, and some damage that `LocalText` rejects goes unnoticed (a truncated .zst file).

    Rows of `train_split` are held out if no split is named for validation or testing. A train split
    with a single row, such as a book, is first cut into about 50 passages.

    The name of the store depends on the name and revision on the hub, the content of files, or the
    fingerprint of a dataset that was saved or made in Python. For the latter, a checkpoint keeps
    only the fingerprint: evaluation then reads the store, as long as `cache_dir` has it.

    Args:
        dataset: Name on the hub, such as roneneldan/TinyStories, or a local folder; in Python also
            the dataset itself. Null reads the store of the dataset with the given fingerprint.
        config: Configuration of the dataset. Null uses its only one.
        train_split: Split to train on, as the dataset names it; for files and on the hub, it may be
            a slice ('train[:10%]').
        val_split: Split to validate on. Null holds out val_fraction of the training rows.
        test_split: Split to test on. Null holds out test_fraction of the training rows.
        text_field: Column with the text.
        revision: Commit, branch or tag on the hub. Null uses the newest commit when preparation
            begins, which meta.json records (``origin``).
        fingerprint: Identity of a dataset made in Python, which must change with its text and its
            order. Null uses the fingerprint that `datasets` gives it (an `IterableDataset` has
            none, and must not be shuffled without a seed).
        **kwargs: See `SplitText` and `TextDataModule`. With train_tokens, a dataset of the hub or
            of files is streamed, and reading stops at the cap.

    Raises:
        ValueError: If an argument is invalid; when preparing, if the dataset has no such split or
            column, or a value is neither text nor null.
    """

    not_in_source: ClassVar[frozenset[str]] = SplitText.not_in_source | {
        "revision",  # part of the dataset's identity, if given
        "fingerprint",
        "val_fraction",
        "test_fraction",
    }
    object_arguments: ClassVar[tuple[str, ...]] = ("dataset",)
    split_options: ClassVar[Mapping[Split, str]] = {split: f"{split}_split" for split in SPLITS}

    def __init__(
        self,
        *,
        dataset: Source = None,
        config: str | None = None,
        train_split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        text_field: str = "text",
        revision: str | None = None,
        fingerprint: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config, self._revision, self._text_field = config, revision, text_field
        self._splits = {"train": train_split, "val": val_split, "test": test_split}
        self._commit: str | None = None  # of a dataset on the hub, once resolved
        self._location: str | None = None
        self._made: Mapping[str, Any] | None = None
        if isinstance(dataset, str | os.PathLike):
            self._location = _resolve_name(os.fspath(dataset))
        elif dataset is not None:
            self._made = _by_split(dataset)
        self._refuse_contradictions(fingerprint)
        self._fingerprint = fingerprint
        if self._made is not None and fingerprint is None:
            self._fingerprint = self._fingerprints()
        # An object could neither be loaded from a checkpoint nor written to YAML.
        self.hparams.update(dataset=self._location, fingerprint=self._fingerprint)

    def _refuse_contradictions(self, fingerprint: str | None) -> None:
        if self._location is None and self._made is None and fingerprint is None:
            raise ValueError(
                "dataset (null) names no text: set data.dataset to a dataset on the Hugging Face "
                "hub or to a folder; in Python, pass the dataset."
            )
        if self._location is not None and fingerprint is not None:
            raise ValueError(
                f"fingerprint={fingerprint!r} is for a dataset made in Python, but "
                f"dataset={self._location!r} names a stored one. Set data.fingerprint to null."
            )
        names = [name for name in self._splits.values() if name is not None]
        if len(set(names)) < len(names):
            raise ValueError(
                f"train_split, val_split and test_split ({', '.join(names)}) must differ: training "
                "text cannot be held out."
            )
        if self._revision is not None and not self._is_on_hub:
            raise ValueError(
                f"revision={self._revision!r} is for a dataset on the Hugging Face hub, but this "
                "one is not. Set data.revision to null."
            )
        if self._config is not None and (self._location is None or self._is_saved):
            raise ValueError(
                f"config={self._config!r} is for a dataset on the Hugging Face hub or of files, "
                "but this one is neither. Set data.config to null."
            )

    @property
    def _is_on_hub(self) -> bool:
        return self._location is not None and not os.path.isabs(self._location)

    @property
    def _is_saved(self) -> bool:
        """Whether the dataset is a folder that ``save_to_disk`` wrote."""
        return self._location is not None and any(
            (Path(self._location) / n).is_file() for n in _SAVED
        )

    # Identity

    def source(self) -> dict[str, Any]:
        cut = {"passages": PASSAGES} if any(self.shares().values()) else {}
        return {**super().source(), "dataset": self._identity(), **cut, **self.shares()}

    def _identity(self) -> dict[str, Any]:
        if self._location is None:
            return {"fingerprint": self._fingerprint}
        if self._is_on_hub:
            return {
                "name": self._location,
                **({} if self._revision is None else {"revision": self._revision}),
            }
        return {"fingerprint": self._fingerprints()} if self._is_saved else {"files": self._files()}

    def _fingerprints(self) -> str:
        """Returns the joined fingerprints that `datasets` gives to the splits in use.

        Raises:
            ValueError: If a split has none.
        """
        parts = [self._dataset(split) for split in SPLITS if self.is_separate(split)]
        fingerprints = [getattr(part, "_fingerprint", None) for part in parts]
        if None in fingerprints:
            raise ValueError(
                "dataset has no fingerprint, because it is an IterableDataset: pass "
                "fingerprint='...', a name that you change whenever the text changes."
            )
        return "-".join(map(str, fingerprints))

    def _files(self) -> dict[str, list[dict[str, Any]]]:
        """Returns name, size and hash of the files in the folder, by split."""
        import datasets

        with self._explained():
            builder = datasets.load_dataset_builder(str(self._location), self._config)
        files = builder.config.data_files or {}
        return {str(split): [identify(Path(path)) for path in files[split]] for split in files}

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Resolves the commit of a dataset on the hub; nothing for others."""
        if not self._is_on_hub:
            return {}
        files = HubFiles(
            str(self._location),
            "*",
            revision=self._revision,
            corpus=type(self).__name__,
            label="all splits",
            cure="Set data.dataset to a folder with a copy",
        )
        origin = files.pin(stored or None)
        self._commit = origin["commit"]
        return origin

    # Documents

    def is_separate(self, split: Split) -> bool:
        return self._splits[split] is not None

    def read(self, split: Split) -> Iterator[str]:
        texts = self._texts(split)
        if split == "train" and self._is_one_book:
            texts = (part for text in texts for part in passages(text) if has_text(part))
        return texts

    @cached_property
    def _is_one_book(self) -> bool:
        """Whether a single row must be cut into passages to populate several splits."""
        if not any(self.shares().values()):
            return False
        return len(list(islice(filter(has_text, self._values("train")), 2))) == 1

    def _texts(self, split: Split) -> Iterator[str]:
        """Yields the texts of a split, and logs the number of null or empty ones at the end."""
        reading = Reading()
        yield from reading.texts(self._label(split), self._values(split))
        reading.finish()

    def _values(self, split: Split) -> Iterator[str]:
        """Yields the text of every row of a split; null is an empty text.

        Raises:
            ValueError: If a row has no such column, or its value is not text.
        """
        label = self._label(split)
        for index, row in enumerate(self._rows(split), start=1):
            where = f"{label}, row {index}"
            text = text_of(row, self._text_field, where)
            check_utf8(text, where)
            yield text

    def _rows(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yields the rows of a split, with only the text column if the columns are known."""
        dataset = self._dataset(split)
        columns = getattr(dataset, "column_names", None) or ()
        is_transformed = (getattr(dataset, "format", None) or {}).get("type") == "custom"
        with self._explained():
            if hasattr(dataset, "with_format") and not is_transformed:
                dataset = dataset.with_format(None)
                if self._text_field in columns:
                    dataset = dataset.select_columns(self._text_field)
            yield from dataset

    def _dataset(self, split: Split) -> Any:
        """Returns a split of the dataset without loading the others.

        Raises:
            ValueError: If there is no such split, or it cannot be read.
        """
        import datasets

        name = str(self._splits[split])
        if self._location is not None and not self._is_saved:
            if self.train_tokens is not None and re.search(r"[\[+]", name):
                raise ValueError(
                    f"{split}_split={name!r} is not a whole split, but only whole splits can be "
                    "streamed. Set data.train_tokens to null, or name one."
                )
            with self._explained():
                return datasets.load_dataset(
                    self._location,
                    self._config,
                    split=name,
                    revision=self._commit,
                    streaming=self.train_tokens is not None,
                )
        if self._location is not None:
            with self._explained():
                parts = _by_split(datasets.load_from_disk(self._location))
        elif self._made is not None:
            parts = self._made
        else:
            raise ValueError(
                f"The dataset with the fingerprint {self._fingerprint} was made in Python, and "
                f"{self.cache_dir} has no store of it. Name other data with --data, or set "
                "data.cache_dir to the folder that has it."
            )
        if name not in parts:
            raise ValueError(
                f"{split}_split={name!r} is not a split of the dataset. Its splits: "
                f"{', '.join(map(repr, parts))}; slices are for files and the hub."
            )
        return parts[name]

    def _label(self, split: Split) -> str:
        return f"{self._location or 'dataset'}, split {self._splits[split]}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Converts any error of `datasets` into a one-line message."""
        import datasets.exceptions

        try:
            yield
        except Exception as error:
            generation = datasets.exceptions.DatasetGenerationError
            cause = error.__cause__ if isinstance(error, generation) else error
            quoted = " ".join(str(cause or error).split())[:_QUOTED]
            reason = f"{type(cause or error).__name__}: {quoted}"
            raise CorpusUnavailableError(
                f"{type(self).__name__}: {self._location or 'the dataset'} cannot be read "
                f"({reason.removesuffix('.')}). Check data.dataset, data.config and the names of "
                "the splits."
            ) from error

    # Messages

    def notes(self) -> list[str]:
        if not self._is_one_book:
            return []
        shares = " and ".join(f"{k}={share}" for k, share in self.shares().items() if share > 0)
        return [
            "The only row of the train split is cut into passages at ends of paragraphs, of which "
            f"{shares} are held out."
        ]

    def smaller_splits(self) -> str:
        return "more rows, splits of the dataset (data.val_split, data.test_split)"

    def repeats_cure(self) -> str | None:
        return REMOVE_REPEATS


def _resolve_name(dataset: str) -> str:
    """Returns the absolute path of a local folder, or the name of a dataset on the hub.

    Raises:
        ValueError: If it is neither.
    """
    path = os.path.abspath(os.path.expanduser(dataset))
    if dataset and os.path.isdir(path):
        return path
    if not _ON_HUB.fullmatch(dataset):
        raise ValueError(
            f"dataset={dataset!r} is neither a local folder nor a name on the Hugging Face hub, "
            "such as roneneldan/TinyStories. Set data.dataset to where the folder is now; "
            "LocalText reads single files."
        )
    return dataset


def _by_split(dataset: Any) -> Mapping[str, Any]:
    """Returns the splits of a dataset; a dataset without splits becomes the split 'train'.

    Raises:
        ValueError: If it cannot be read more than once, or has no rows.
    """
    parts: Mapping[str, Any] = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    for part in parts.values():
        if isinstance(part, Iterator) or not isinstance(part, Iterable):
            raise ValueError(
                f"dataset is of type {type(part).__name__}, which cannot be read repeatedly: pass "
                "a Dataset, an IterableDataset or a list of rows."
            )
    return parts
