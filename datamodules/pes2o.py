"""peS2o: 39 million open-access papers and abstracts (42 billion words)."""

from typing import Any

from datamodules.hub_corpus import HubCorpus
from datamodules.hub_revision import HubSplit
from datamodules.store import Split


class PeS2o(HubCorpus):
    """peS2o, version 2, with its own train and validation splits.

    Hub: allenai/peS2o, data/v2. Files: its ``*.json.gz``, or jsonl (also .gz, .zst) or parquet,
    with the field ``text``; without val_files, val_fraction of the documents are held out.

    Args:
        test_fraction: Share of the training documents held out for the test; peS2o has no test
            split.
        **kwargs: See `HubCorpus`.
    """

    local_format = "train-*.json.gz as published, or other jsonl or parquet with a field 'text'"

    def __init__(self, *, test_fraction: float = 0.0, **kwargs: Any) -> None:
        super().__init__(test_fraction=test_fraction, **kwargs)

    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns the files of a split: the repository's own loader is a script."""
        if split == "test":
            return None
        name, files = {"train": ("train", "train*"), "val": ("validation", "valid*")}[split]
        return HubSplit(name="allenai/peS2o", split=name, files=f"data/v2/{files}.json.gz")
