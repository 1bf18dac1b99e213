"""Models that checkpoints rebuild."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from lightning_models.checkpoint.content import refused
from lightning_models.checkpoint.finding import read_checkpoint
from lightning_models.memory import host_memory, weights_size
from lightning_models.recipe import complete_arguments, public_path, resolve_class


class RestoresItself:
    """Mixed into ``LanguageModel``: checkpoints hold enough to rebuild model and data."""

    config: Any
    optimizer_config: Any
    compile_network: bool
    _trainer: Any

    def recipe(self) -> dict[str, Any]:
        """Returns the public class path and plain init arguments that rebuild this model."""
        arguments = {
            "config": asdict(self.config),
            "optimizer": asdict(self.optimizer_config),
            "compile": self.compile_network,
        }
        return {"class_path": public_path(type(self)), "init_args": arguments}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds plain init arguments and the recipes of model and data, enough to rebuild both."""
        model = self.recipe()
        checkpoint["hyper_parameters"] = model["init_args"]
        recipe = getattr(getattr(self._trainer, "datamodule", None), "recipe", None)
        # a data module of another project has none
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
        """Returns the model of a checkpoint file, rebuilt from its recipe.

        Args:
            checkpoint_path: The checkpoint's file.
            map_location: Device of the model, by default the CPU.
            hparams_file: Not read, as a recipe is complete.
            strict: Whether the weights must fit the model, none missing and none more.
            weights_only: False has Lightning load the file, which runs any code that it brings
                along. Otherwise only tensors and plain values are unpickled.
            **kwargs: Init arguments that replace the saved ones.

        Raises:
            CheckpointError: If the file is missing, damaged, or wants to run code.
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
        """Returns a checkpoint's model, whatever its method: on the CPU, in eval mode, uncompiled.

        The global random state stays as it is.

        Raises:
            CheckpointError: If the file is missing, damaged, or of an unknown method.
        """
        checkpoint = read_checkpoint(path)
        kind = resolve_class(checkpoint.model_recipe["class_path"], RestoresItself)
        with torch.random.fork_rng(devices=[]):
            model: Any = kind.load_from_checkpoint(
                checkpoint.path, map_location="cpu", compile=False
            )
        return model.eval()
