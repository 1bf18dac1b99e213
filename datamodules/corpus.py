"""A corpus: documents by split, their tokenizer, and the text store of their tokens.

Nothing here depends on how batches are cut from the tokens, which subclasses of
`base.LanguageDataModule` do: windows in `text`, `sentences/`, questions in `reasoning/`.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import combinations, islice
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules.encoding import Continuation, most_workers
from datamodules.json_tokenizer import special_tokens_of
from datamodules.prepare import prepare_store
from datamodules.store import (
    SPLITS,
    Counts,
    Split,
    Store,
    StoreError,
    TokenStream,
    damaged,
    fingerprint,
    verify_store,
)
from datamodules.tokenizers import (
    JsonTokenizer,
    Tokenizer,
    check_vocab_size,
    file_at_hand,
    load_tokenizer,
    parse_tokenizer,
    refuse_other_special_tokens,
    train_bpe,
)
from lightning_models.recipe import argument_owners, public_path, yaml_values

_LOGGED: set[Path] = set()  # stores whose sizes this process has logged


class TextCorpus(L.LightningDataModule, ABC):
    """Documents, tokenised once.

    Args:
        tokenizer: 'bytes', a tiktoken encoding ('gpt2'), the path of a tokenizer.json, a hub name,
            or 'bpe:1024'.
        cache_dir: Folder of the tokenised corpora; it is created if missing.
        val_fraction: Share of the documents held out for validation, in [0, 1), if the corpus has
            no such split.
        test_fraction: Share of the documents held out for testing, in [0, 1), if the corpus has no
            such split.
        num_proc: Number of processes that tokenise; 1 tokenises in this process. Null uses one per
            usable core, at most 16. The stored data do not depend on it.

    Raises:
        ValueError: If an argument is out of range, or the tokenizer's name is unknown.
    """

    # Arguments that do not change the stored tokens (the tokenizer has a separate key in the
    # fingerprint). Any other argument of a corpus does, unless it overrides `source`.
    not_in_source: ClassVar[frozenset[str]] = frozenset({"tokenizer", "cache_dir", "num_proc"})
    # Arguments that are objects; a corpus that has some records their recipes in hparams.
    object_arguments: ClassVar[tuple[str, ...]] = ()
    # Noun for a document, in warnings about documents in several splits.
    document_noun: ClassVar[str] = "text"
    # Arguments that name the user's text files.
    path_arguments: ClassVar[frozenset[str]] = frozenset({"data_files", "val_files", "test_files"})

    def __init__(
        self,
        *,
        tokenizer: str = "bytes",
        cache_dir: str = "data_cache",
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        num_proc: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=self.object_arguments)
        self.cache_dir = Path(cache_dir).expanduser()
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                f"val_fraction={val_fraction} and test_fraction={test_fraction} must not be "
                "negative, and their sum must be below 1 to leave something for training."
            )
        if num_proc is not None and num_proc < 1:
            raise ValueError(f"num_proc={num_proc} must be at least 1, or null for one per core.")
        if num_proc is not None and num_proc > most_workers():
            raise ValueError(f"num_proc={num_proc} must be at most {most_workers()} here.")
        self.num_proc = num_proc
        self._spec = parse_tokenizer(tokenizer)
        self._noted = False
        self._repeats: Repeats | None = None  # of the documents that are being prepared
        self._name = type(self).__name__  # in messages

    # Implemented by corpora

    @abstractmethod
    def documents(self, split: Split) -> Iterable[str]:
        """Yields the documents of a split, in an order that never changes."""

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        """Yields (split, document) for all splits; override it where one pass can serve all."""
        for split in SPLITS:
            for text in self.documents(split):
                yield split, text

    def stored_documents(self, first: int = 0) -> Iterator[tuple[Split, str]]:
        """Yields the `labelled_documents` to store, from index `first` on."""
        documents = self.labelled_documents()
        if self.repeats_cure() is not None:
            self._repeats = Repeats()
            documents = self._repeats.watch(documents)
        return islice(documents, first, None)

    @property
    def train_tokens(self) -> int | None:
        """Maximum number of training tokens to store; None means no limit."""
        return None

    def tokenizer_text(self) -> Iterable[str]:
        """Returns the documents that a ``bpe:N`` is trained on."""
        return self.documents("train")

    def source(self) -> dict[str, Any]:
        """Returns the identity of the text, in plain values, for fingerprint and meta.json.

        By default, it is the class and every constructor argument that is not in `not_in_source`. A
        corpus with files adds hashes of their content.
        """
        arguments = {k: v for k, v in self._init_args().items() if k not in self.not_in_source}
        return {"corpus": type(self).__name__, **arguments}

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have documents; if it has none, that is an error."""
        fractions = {"train": 1.0, "val": self.val_fraction, "test": self.test_fraction}
        return fractions[split] > 0

    def shares(self) -> dict[str, float]:
        """Returns the held-out shares of the training documents, if any are held out.

        The keys are ``val_fraction`` and ``test_fraction``; 0 for a split with separate text.
        """
        return {}

    def smaller_splits(self) -> str:
        """Returns the remedy for large held-out splits besides smaller fractions, for messages."""
        return "more documents"

    def repeats_cure(self) -> str | None:
        """Returns the advice on documents in several splits, or None to skip that check."""
        return None

    def how_to_get(self, split: Split) -> str:
        """Returns the remedy for a split without documents, for messages."""
        return (
            f"Splits are by document, with val_fraction={self.val_fraction} and "
            f"test_fraction={self.test_fraction}: change the fractions (0 omits that split) or "
            f"use {self.smaller_splits()}."
        )

    def notes(self) -> list[str]:
        """Returns the differences from the papers' training text, one sentence each.

        They are logged at preparation and in every run, and stored in meta.json.
        """
        return []

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Pins sources that can change, e.g. to a commit, and returns the pins as JSON values.

        Args:
            stored: Pins of the interrupted preparation that continues, or None for a new one.
        """
        return {}

    # Names

    @property
    def vocab_size(self) -> int:
        """V; loads the tokenizer only for a tokenizer.json by path and uncommon hub names."""
        return self.tokenizer.vocab_size if self._spec.vocab_size is None else self._spec.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """Name of the text store: corpus, tokenizer, and a hash of what determines the tokens."""
        corpus = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()
        tokenizer = "json" if self._spec.family == "file" else re.sub(r"\W+", "_", self._spec.name)
        return fingerprint(self._description(), f"{corpus}-{tokenizer}")

    def _description(self) -> dict[str, Any]:
        return {"source": yaml_values(self.source()), "tokenizer": self._spec.identity}

    @property
    def store_dir(self) -> Path:
        """Folder of the tokenised corpus, which may not exist yet."""
        return self.cache_dir / self.fingerprint

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; a trained one (``bpe:N``) exists only after the data are prepared.

        Raises:
            ValueError: If it cannot be loaded, or its vocabulary size differs from the one in its
                name.
        """
        if self._spec.family in ("bytes", "tiktoken"):
            return load_tokenizer(self._spec.name)
        stored = self._stored_tokenizer() if self.store_dir.exists() else None
        if stored is not None:
            try:
                return check_vocab_size(stored, self._spec)
            except ValueError as error:
                raise damaged(self.store_dir, f"tokenizer.json: {error}") from error
        if self._spec.family == "bpe":
            raise StoreError(
                f"tokenizer={self._spec.name!r} is trained when the data are prepared: run "
                "prepare_data() first."
            )
        return load_tokenizer(self._spec.name)

    def _stored_tokenizer(self) -> JsonTokenizer | None:
        name = self._spec.name
        path = file_at_hand(name)
        return self._store.tokenizer(name, None if path is None else special_tokens_of(name, path))

    # Preparing

    def prepare_data(self) -> None:
        """Tokenises the corpus into `store_dir`, unless the store exists.

        After a kill, the next call completes the store. One process writes it, with `num_proc`
        workers; concurrent callers, even on other machines that share `cache_dir`, wait for it. The
        sizes of the splits are logged.

        Raises:
            ValueError: If an expected split has no documents, or the corpus or the tokenizer cannot
                be read.
        """
        if not self.store_dir.exists():
            _LOGGED.discard(self.store_dir.absolute())
            rank_zero_info(f"Preparing {self.store_dir}")
        prepare_store(
            self.store_dir,
            description=self._description(),
            documents=self.stored_documents,
            notes=self._log_notes,
            pin=self.pin,
            make_tokenizer=self._make_tokenizer,
            check=self._check_counts,
            train_tokens=self.train_tokens,
            num_proc=self.num_proc,
        )
        self._verify_for_training()
        self._warn_of_repeats()
        self._log_sizes()

    def _verify_for_training(self) -> None:
        """Verifies the store before training; see `verify`."""
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.verify()

    def verify(self) -> None:
        """Compares the whole store with its checksums, unless opening it did so.

        Raises:
            StoreError: If the store is damaged.
        """
        if not self._store.is_verified:
            verify_store(self._store)

    def _warn_of_repeats(self) -> None:
        """Warns about documents in several splits, if this process has read the documents."""
        repeats, self._repeats = self._repeats, None
        message = None if repeats is None else repeats.describe(self.document_noun)
        if message is not None:
            rank_zero_warn(
                f"{self._name}: {message}: scores on {self.document_noun}s seen in training say "
                f"nothing about new ones. {self.repeats_cure()}"
            )

    def _log_sizes(self) -> None:
        """Logs the sizes of the splits in one line, once per store and process."""
        path = self.store_dir.absolute()
        if path in _LOGGED:
            return
        _LOGGED.add(path)
        counts = {split: self.counts(split) for split in SPLITS}
        rank_zero_info(f"{self._name}: {format_counts(counts)}")
        self._log_commits()
        warning = too_much_held_out(counts, self.shares(), self.smaller_splits())
        if warning is not None:
            rank_zero_warn(f"{self._name}: {warning}")

    def _log_commits(self) -> None:
        """Logs the hub commits that were read, unless a full commit was requested."""
        is_own = "revision" in argument_owners(type(self))
        option = "--data.revision" if is_own else "--data.corpus.init_args.revision"
        revision = (self if is_own else getattr(self, "corpus", self)).hparams.get("revision")
        parts = [part for part in (self.origin, *self.origin.values()) if isinstance(part, dict)]
        commits = {(part.get("name", part.get("hub")), part.get("commit")) for part in parts}
        for name, commit in sorted((n, c) for n, c in commits if c not in (None, revision)):
            rank_zero_info(f"{self._name}: read {name} at {commit}; {option} {commit} repeats it.")

    def _log_notes(self, notes: list[str] | None = None) -> list[str]:
        """Logs the notes on the text in one line, and returns them."""
        notes = self.notes() if notes is None else notes
        if notes:
            rank_zero_info(f"{type(self).__name__}: {' '.join(notes)}")
        self._noted = True
        return notes

    def _make_tokenizer(self) -> Tokenizer:
        if self._spec.family == "bpe":
            return train_bpe(self._spec.name, self.tokenizer_text())
        tokenizer = load_tokenizer(self._spec.name)
        if isinstance(tokenizer, JsonTokenizer):
            rank_zero_info(f"{self._name}: {tokenizer.description}")
        return tokenizer

    def _check_counts(self, counts: Mapping[Split, Counts]) -> None:
        total = sum(c.documents for c in counts.values())
        for split in SPLITS:
            if self.expects(split) and not counts[split].documents:
                raise ValueError(
                    f"The {split} split has no documents (total {total}). {self.how_to_get(split)}"
                )

    def setup(self, stage: str | None = None) -> None:
        """Opens the text store.

        Raises:
            StoreError: If it is missing or damaged.
        """
        self._store.counts("train")
        if not self._noted:
            self._log_notes(self._store.meta.get("notes", []))

    @cached_property
    def _store(self) -> Store:
        return Store(self.store_dir)

    @property
    def origin(self) -> dict[str, Any]:
        """Source of the prepared corpus, e.g. a commit, in plain values."""
        return dict(self._store.meta.get("origin", {}))

    def counts(self, split: Split) -> Counts:
        """Returns the documents, tokens and UTF-8 bytes of a split of the prepared corpus."""
        return self._store.counts(split)

    def stream(self, split: Split) -> TokenStream:
        """Returns the tokens of a split of the prepared corpus."""
        self._store.check_tokenizer(self.tokenizer)
        return self._store.stream(split, self.tokenizer.token_bytes.numpy())

    # For checkpoints

    def _refuse_other_special_tokens(self, state_dict: Mapping[str, Any]) -> None:
        """Raises a ValueError if the special tokens differ from the checkpoint's."""
        corpus: TextCorpus = getattr(self, "corpus", self)  # the corpus that has the tokenizer.json
        saved = state_dict.get("corpus", state_dict).get("tokenizer") or {}
        option = "data.tokenizer" if corpus is self else "data.corpus.tokenizer"
        refuse_other_special_tokens(saved, corpus.tokenizer, corpus.cache_dir, option)

    def _init_args(self) -> dict[str, Any]:
        """Returns the constructor's arguments; under the CLI, hparams also hold the class path."""
        names = argument_owners(type(self))
        return {key: yaml_values(value) for key, value in self.hparams.items() if key in names}

    def recipe(self) -> dict[str, Any]:
        """Returns ``{"class_path": ..., "init_args": ...}``, which rebuilds this object.

        Paths of text files are absolute, so it can be rebuilt from any working folder.
        """
        arguments = self._init_args()
        for key in self.path_arguments & arguments.keys():
            arguments[key] = absolute(arguments[key])
        return {"class_path": public_path(type(self)), "init_args": arguments}


def absolute(paths: Any) -> Any:
    """Makes a path or glob, or a list of them, independent of the working folder."""
    if isinstance(paths, list):
        return [absolute(path) for path in paths]
    return None if paths is None else os.path.abspath(os.path.expanduser(paths))


# Splits of a corpus without published ones

_GOLDEN = 0.6180339887498949  # its multiples mod 1 spread evenly without a period


def split_of(index: int, *, val_fraction: float, test_fraction: float) -> Split:
    """Returns the split of the document at `index` in the corpus.

    Multiples of the golden ratio mod 1 fall evenly on [0, 1), so the shares are met closely in a
    small corpus too, no period of the corpus (every tenth document a licence) is mirrored in a
    split, and no pass over the corpus is needed. Documents 1 and 2 fall on the first points of the
    val and test intervals, so three documents populate all three splits, however small the
    fractions.
    """
    point = (index - 1) * _GOLDEN % 1.0
    if point < val_fraction:
        return "val"
    roomy = val_fraction <= _GOLDEN and test_fraction <= 1.0 - _GOLDEN
    test_start = _GOLDEN if roomy else val_fraction
    return "test" if test_start <= point < test_start + test_fraction else "train"


def split_documents(
    documents: Iterable[str], *, val_fraction: float, test_fraction: float
) -> Iterator[tuple[Split, str]]:
    """Yields each document with its split, in the given order."""
    for index, text in enumerate(documents):
        yield split_of(index, val_fraction=val_fraction, test_fraction=test_fraction), text


# Texts in several splits

REMOVE_REPEATS = "Remove the repeats from all splits but one."


def published_repeats(noun: str) -> str:
    """Returns the advice for data of the hub with a document in several splits."""
    return (
        f"The data are published with these {noun}s; for scores on new ones only, pass a copy "
        "without them with data.data_files."
    )


_MAX_HASHES = 2**19  # some 50 MB


class Repeats:
    """Finds documents that occur in several splits, ignoring surrounding whitespace.

    Continuations are skipped: answers recur, and only their questions show whether they leak.

    Memory is bounded: beyond 2**19 distinct documents, it keeps only hashes that are multiples of
    2, 4, 8 and so on. Equal documents have equal hashes, so the same share of the repeats is kept,
    and their count is estimated from it.
    """

    def __init__(self) -> None:
        self._splits: dict[int, int] = {}  # bit mask of splits by 64-bit hash
        self._every = 1

    def watch(self, documents: Iterable[tuple[Split, str]]) -> Iterator[tuple[Split, str]]:
        """Yields the documents with their splits, unchanged."""
        for split, text in documents:
            if not isinstance(text, Continuation):
                self.add(split, text)
            yield split, text

    def add(self, split: Split, text: str) -> None:
        """Records that a split has a document."""
        key = hash(text.strip())
        if key % self._every:
            return
        self._splits[key] = self._splits.get(key, 0) | 1 << SPLITS.index(split)
        if len(self._splits) > _MAX_HASHES:
            self._every *= 2
            kept = self._splits.items()
            self._splits = {k: bits for k, bits in kept if k % self._every == 0}

    def describe(self, noun: str) -> str | None:
        """Returns the number of documents shared by each pair of splits, or None if there are none.

        Args:
            noun: Noun for a document in the message, such as "text".
        """
        parts = []
        for split, other in combinations(SPLITS, 2):
            both = 1 << SPLITS.index(split) | 1 << SPLITS.index(other)
            count = self._every * sum(bits & both == both for bits in self._splits.values())
            if count:
                approximately = "about " if self._every > 1 else ""
                verb = " is" if count == 1 else "s are"
                parts.append(f"{approximately}{count:,} {noun}{verb} in {split} and in {other}")
        return "; ".join(parts) or None


# Sizes of the splits

# Held-out text is reported above this multiple of the requested share, and this much above it.
_TIMES, _ABOVE = 2.0, 0.05


def format_counts(counts: Mapping[Split, Counts]) -> str:
    """Formats documents and tokens of the non-empty splits; units follow the first."""
    sizes = [(split, c.documents, c.tokens) for split, c in counts.items() if c.documents]
    if not sizes:
        return "no documents"
    (split, documents, tokens), *rest = sizes
    noun = "document" if documents == 1 else "documents"
    first = f"{split} {documents:,} {noun}, {tokens:,} tokens"
    return "; ".join([first, *(f"{split} {d:,}, {t:,}" for split, d, t in rest)])


def too_much_held_out(
    counts: Mapping[Split, Counts], shares: Mapping[str, float], cures: str
) -> str | None:
    """Returns a warning if far more tokens were held out than requested, or None.

    Args:
        counts: Sizes of all splits.
        shares: Requested shares, ``val_fraction`` and ``test_fraction``. A split without a share
            has separate text and is not counted.
        cures: Remedies besides smaller fractions.
    """
    requested = {key: share for key, share in shares.items() if share > 0}
    held_out: dict[Split, Counts] = {
        split: c for split, c in counts.items() if f"{split}_fraction" in requested
    }
    tokens = sum(c.tokens for c in held_out.values())
    whole = tokens + counts["train"].tokens
    share = sum(requested.values())
    if tokens <= _TIMES * share * whole or tokens <= (share + _ABOVE) * whole:
        return None
    documents = counts["train"].documents + sum(c.documents for c in held_out.values())
    return (
        f"{100 * tokens / whole:.3g}% of the tokens are held out for {' and '.join(held_out)}, and "
        f"{' + '.join(requested)} asked for {100 * share:.3g}%: whole documents are held out, and "
        f"there are {documents:,}. Use {cures}, or smaller fractions (0 omits the split)."
    )
