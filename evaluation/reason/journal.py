"""What a model has written so far to questions, on the disk, so that a killed command can go on.

A header that names the command, then a line for each batch of questions. Whole batches only: in
another batch the same question has other padding, and with it other rounding.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.journals import append_durably
from datamodules.readers import parse_json


class Journal:
    """Answers by batch, in a hidden file beside the output until that is whole.

    Args:
        output: The file that is to be written.
        made_by: All that decides what is written, in plain values of JSON.

    Attributes:
        batches: What was written before, a list of texts a batch.

    Raises:
        ValueError: There is a journal of another command, or it is none.
    """

    def __init__(self, output: Path, made_by: Mapping[str, Any]) -> None:
        self._path = output.with_name(f".{output.name}.journal")
        self._output, self._made_by = output, dict(made_by)
        self.batches: list[list[str]] = []
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        """Reads what is whole and cuts off the line that a killed process was writing."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        try:
            header, *batches = [parse_json(line) for line in whole] or [self._made_by]
            found, self.batches = dict(header), [list(batch["written"]) for batch in batches]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"output ({self._output}): {self._path} is in the way and no journal of this "
                "command; remove it"
            ) from error
        self._check(found)
        os.truncate(self._path, sum(map(len, whole)))

    def _check(self, header: Mapping[str, Any]) -> None:
        for key, value in self._made_by.items():
            if header.get(key) != value:
                raise ValueError(
                    f"output ({self._output}): an interrupted command has begun it with another "
                    f"{key} ({header.get(key)}, now {value}); run that one again, name another "
                    f"file, or remove {self._path}"
                )

    def append(self, written: list[str]) -> None:
        """Adds a batch, which is on the disk when this returns."""
        new = not self._path.exists() or not self._path.stat().st_size
        lines = [*([self._made_by] if new else []), {"written": written}]
        append_durably(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.batches.append(written)

    def finish(self) -> None:
        """Removes the file: the output is whole."""
        self._path.unlink(missing_ok=True)
