"""The content of a checkpoint, checked: recipes, weights, training state, and its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_models.recipe import MisfitError, complete

Recipe = dict[str, Any]
"""``{"class_path": "lightning_models.TransformerLM", "init_args": {...plain values...}}``."""

Which = Literal["last", "best"]
"""The checkpoint of a run with the highest step, or the one that the run recorded as its best."""

_LAYOUT: dict[str, type] = {
    "global_step": int,
    "callbacks": Mapping,
    "loops": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, rebuilt or written; the message names file and cure.

    Attributes:
        agreed: Whether all processes of the run raise it together.
    """

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint written by this project.

    Raises:
        CheckpointError: If the content has no recipe or weights, or an entry of the wrong type.
    """

    path: Path
    """The file or folder that it was read from."""
    content: Mapping[str, Any]
    """Everything that Lightning saved. Tensors are mapped from the file, and read when used."""
    which: Which | None = None
    """How it was chosen from its run, or None if its file was named."""
    status: tuple[int, ...] | None = None
    """Status of the file when it was read, see ``file_status``."""

    def __post_init__(self) -> None:
        """Checks recipes, weights and the types of other entries."""
        recipe = self.content.get("recipe")
        if not isinstance(recipe, Mapping) or not _is_recipe(recipe.get("model")):
            keys = ", ".join(sorted(map(str, self.content))) or "none"
            raise CheckpointError(
                f"{self.path} has no recipe, so it does not say which model it holds. Expected is "
                "a checkpoint of train.py or evaluate.py import, with the keys state_dict and "
                f"recipe (found: {keys})"
            )
        if not isinstance(self.content.get("state_dict"), Mapping):
            raise CheckpointError(f"{self.path} has no weights (key state_dict)")
        if recipe.get("data") is not None and not _is_recipe(recipe["data"]):
            raise CheckpointError(
                f"{self.path}: recipe.data is broken; expected class_path and init_args"
            )
        for key, cls in _LAYOUT.items():
            value = self.content.get(key)
            if value is not None and not isinstance(value, cls):
                raise CheckpointError(
                    f"{self.path}: {key} ({str(value)[:40]!r}) is broken; expected a "
                    f"{cls.__name__}, as train.py writes it. Take another checkpoint"
                )

    @property
    def step(self) -> int:
        """Number of optimiser steps done."""
        return int(self.content.get("global_step", 0))

    @property
    def run_id(self) -> str | None:
        """Id shared by all checkpoints of a run, resumed or not, or None in older ones."""
        return self._of_run("id")

    @property
    def run_name(self) -> str | None:
        """Name of the run from the command line, or None."""
        return self._of_run("name")

    @property
    def log_folder(self) -> Path | None:
        """Folder of the run's logs, relative to the run's root folder if inside it, or None."""
        folder = self._of_run("log_folder")
        return None if folder is None else Path(folder)

    def _of_run(self, key: str) -> str | None:
        run = self.content.get("run")
        value = run.get(key) if isinstance(run, Mapping) else None
        return value if isinstance(value, str) else None

    @property
    def model_recipe(self) -> Recipe:
        """Class path and init arguments of the model, checked (see ``lightning_models.recipe``).

        Raises:
            CheckpointError: If the recipe names a class that is not allowed, or has another
                version.
        """
        self.complete("model")
        return dict(self.content["recipe"]["model"])

    @property
    def data_recipe(self) -> Recipe | None:
        """Class path and init arguments of the data, or None if trained without a datamodule.

        Raises:
            CheckpointError: See ``model_recipe``.
        """
        return None if self.complete("data") is None else dict(self.content["recipe"]["data"])

    def complete(self, role: Literal["model", "data"]) -> Recipe | None:
        """Returns the recipe of model or data with all defaults, or None if there is none.

        Raises:
            CheckpointError: See ``model_recipe``.
        """
        recipe = self.content["recipe"].get(role)
        try:
            return None if recipe is None else complete(recipe, role)
        except ValueError as error:
            raise refused(self.path, error) from error

    @property
    def data_state(self) -> Mapping[str, Any]:
        """State of the datamodule (fingerprint, tokenizer), which may be empty.

        Raises:
            CheckpointError: If the tokenizer in it is broken.
        """
        recipe = self.content["recipe"].get("data")
        name = "" if recipe is None else recipe["class_path"].rpartition(".")[2]
        state = self.content.get(name)
        if not isinstance(state, Mapping):
            return {}
        for part in (state, state.get("corpus")):
            tokenizer = part.get("tokenizer") if isinstance(part, Mapping) else None
            if tokenizer is not None and not isinstance(tokenizer, Mapping):
                raise CheckpointError(
                    f"{self.path}: the tokenizer of {name} is broken; use another checkpoint"
                )
        return state


def refused(path: Path, error: ValueError) -> CheckpointError:
    """Returns the error to raise from the one that refused a checkpoint's recipe."""
    hint = "; was it written by another version?" if isinstance(error, MisfitError) else ""
    return CheckpointError(f"{path} is refused: {error}{hint}")


def _is_recipe(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("class_path"), str)
        and isinstance(value.get("init_args"), Mapping)
        and all(isinstance(key, str) for key in value["init_args"])
    )
