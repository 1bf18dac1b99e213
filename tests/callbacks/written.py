"""What an analysis has written."""

import csv

import pandas as pd


def _path(folder, name, step):
    return folder / (name if name.endswith(".csv") else f"val-step={step}-{name}.csv")


def table(folder, name, step=0):
    """The lines of a table of a validation, or of the file of that name."""
    with _path(folder, name, step).open(newline="") as file:
        return list(csv.DictReader(file))


def read_csv(folder, name, step=0):
    """A table of a validation as it was recorded; texts may be empty."""
    return pd.read_csv(_path(folder, name, step), converters={"text": str})


def columns(folder, name, step=0):
    """The names of a table's columns."""
    with _path(folder, name, step).open(newline="") as file:
        return next(csv.reader(file))


def column(folder, name, key, step=0):
    """A column of a table as numbers; nan where it is empty."""
    return [float(line[key] or "nan") for line in table(folder, name, step)]


def scalars(folder, step=0):
    """The numbers of a validation by name."""
    return {line["name"]: float(line["value"]) for line in table(folder, "scalars", step)}


def names(folder, step=0):
    """What the files of a validation are called."""
    prefix = f"val-step={step}-"
    return {path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
