"""Tables and pictures of analyses, as files that are whole or not there."""

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DPI = 120


def write_files(
    folder: Path, prefix: str, texts: Mapping[str, str], pictures: Mapping[str, Any]
) -> None:
    """Writes texts and pictures (as PNG) as ``<folder>/<prefix><name>``, each whole or not at all.

    Raises:
        OSError: if a file cannot be written.
    """
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"{name}.png": as_png(figure) for name, figure in pictures.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / f"{prefix}{name}"
        part = path.with_name(path.name + ".part")
        part.write_bytes(content)
        os.replace(part, path)


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with one line a record; numbers of 6 digits, nan as an empty field."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(records[0] if records else ())
    for record in records:
        writer.writerow(map(_field, record.values()))
    return file.getvalue()


def as_png(figure: Any) -> bytes:
    """Returns a matplotlib figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def as_pixels(figure: Any) -> np.ndarray:
    """Returns a matplotlib figure as uint8 (height, width, 3)."""
    figure.set_dpi(DPI)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _field(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:.6g}" if math.isfinite(value) else ""
