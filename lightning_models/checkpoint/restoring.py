"""Models that are rebuilt from their checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from lightning_models.checkpoint.content import refused
from lightning_models.checkpoint.finding import read_checkpoint
from lightning_models.memory import host_memory, weights_size
from lightning_models.recipe import complete_arguments, public_path, resolve_class


class RestoresItself:
    """Mixin of ``LanguageModel`` whose checkpoints hold the recipes of model and data."""

    config: Any
    optimizer_config: Any
    compile_network: bool
    _trainer: Any

    def recipe(self) -> dict[str, Any]:
        """Returns the public class path and the plain init arguments that rebuild this model."""
        arguments = {
            "config": asdict(self.config),
            "optimizer": asdict(self.optimizer_config),
            "compile": self.compile_network,
        }
        return {"class_path": public_path(type(self)), "init_args": arguments}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        model = self.recipe()
        checkpoint["hyper_parameters"] = model["init_args"]
        # a data module of another project has no recipe
        recipe = getattr(getattr(self._trainer, "datamodule", None), "recipe", None)
        checkpoint["recipe"] = {"model": model, "data": None if recipe is None else recipe()}

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Rebuilds a model from the recipe and weights of a checkpoint file.

        Args:
            checkpoint_path: Path of the checkpoint.
            map_location: Device of the model. Defaults to the CPU.
            hparams_file: Ignored, because a recipe is complete.
            strict: Whether to raise if weights are missing or unexpected. Defaults to True.
            weights_only: If False, Lightning loads the file, which can run any code in it.
                Otherwise only tensors and plain values are unpickled.
            **kwargs: Init arguments that replace the saved ones.

        Raises:
            CheckpointError: If the file is missing, damaged, or would run code.
        """
        if weights_only is False:
            load: Any = super().load_from_checkpoint  # type: ignore[misc]  # Lightning's
            return load(checkpoint_path, map_location, strict=strict, weights_only=False, **kwargs)
        checkpoint = read_checkpoint(checkpoint_path)
        arguments = checkpoint.content["recipe"]["model"]["init_args"]
        try:
            complete_arguments(arguments, cls, "model.init_args")
        except ValueError as error:
            raise refused(checkpoint.path, error) from error
        build: Any = cls
        model = build(**{**arguments, **kwargs})
        weights_size(model, host_memory())
        model.configure_model()
        model.on_load_checkpoint(checkpoint.content)
        model.load_state_dict(checkpoint.content["state_dict"], strict=strict is not False)
        return model.to("cpu" if map_location is None else map_location)

    @staticmethod
    def from_checkpoint(path: str | Path) -> "RestoresItself":
        """Rebuilds a checkpoint's model of any method, on the CPU, in eval mode and uncompiled.

        The global random state is unchanged.

        Raises:
            CheckpointError: If the file is missing, damaged, or of an unknown method.
        """
        checkpoint = read_checkpoint(path)
        cls = resolve_class(checkpoint.model_recipe["class_path"], RestoresItself)
        with torch.random.fork_rng(devices=[]):
            model: Any = cls.load_from_checkpoint(
                checkpoint.path, map_location="cpu", compile=False
            )
        return model.eval()
