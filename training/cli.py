"""``train.py``: LightningCLI with the defaults and checks of this project."""

import contextlib
import uuid
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from callbacks import (
    KeepOptimizerSettings,
    ModelOverview,
    PendingValidation,
    Progress,
    ResumeState,
    ScheduleChange,
    Validation,
)
from callbacks.checkpoint_io import AtomicCheckpointIO
from callbacks.run_record import log_folder_of
from datamodules import LanguageDataModule
from lightning_models import LanguageModel
from lightning_models.atomic_files import check_folder
from lightning_models.checkpoint import has_log
from lightning_models.recipe import as_started, build, split_names
from lightning_models.recipe_options import lay_over
from lightning_models.runtime import choose_kernels, note_busy_cores
from training.arguments import LINKED_KEYS, OPTIMIZER_PREFIX, as_table, check_linked
from training.errors import UserError, explain, was_restoring
from training.loggers import RunPlace, build_loggers, purge_step
from training.parsing import CALLBACKS, CheckpointParsing
from training.processes import settle_processes, slurm_tasks
from training.run_folder import hold, hold_checkpoints
from training.sizes import check_sizes

ACCUMULATE = "trainer.accumulate_grad_batches"

EVALUATION_CALLBACKS = {
    "validate": ["progress"],
    "test": ["progress"],
    "predict": ["progress", "predictions"],
}
FIT_CALLBACKS = [key for key in CALLBACKS if key not in ("predictions", "termination")]


class LatentCLI(CheckpointParsing):
    """``fit | validate | test | predict`` for any model with any data.

    - ``model`` and ``data`` have default classes; the model's config gets vocabulary and block size
      from the data.
    - ``--ckpt_path FILE | last | best``: arguments that are not typed come from the checkpoint;
      typed ones that differ stop the program, or follow ``--on_conflict``.
    - The callbacks of ``CALLBACKS`` are always added, each configurable under its key;
      ``trainer.callbacks`` adds others.
    - ``last`` continues in the log folder of that run; a path starts a new one.

    Args:
        args: The command line. Defaults to ``sys.argv[1:]``.
        run: Whether to run a verb; otherwise only ``model``, ``datamodule`` and ``trainer`` are
            built.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        self._at_end = contextlib.ExitStack()
        with self._at_end:
            super().__init__(args, run)

    def instantiate_classes(self) -> None:
        rank_zero_only(note_busy_cores)()
        choose_kernels(
            self._get(self.config, "matmul_precision"),
            cudnn_attention=self._get(self.config, "cudnn_attention"),
        )
        if self._saved_run is None:
            super().instantiate_classes()
        else:
            self._instantiate_recipes()
        if self._conflicts:
            chosen = self._get(self.config, "on_conflict")
            rank_zero_info(f"on_conflict={chosen}:\n{as_table(self._conflicts)}")
        check_linked(self._typed, self.datamodule)
        self.model.check_data(self.datamodule)
        self.check_sizes()
        if self.subcommand in (None, "fit"):
            self.check_step()
        if self._saved_run is None:
            if self.subcommand in EVALUATION_CALLBACKS:
                rank_zero_warn(f"{self.subcommand} without ckpt_path: the weights are untrained")
            elif self.subcommand == "fit" and not self._given.names_model:
                self.announce()
            return
        saved = self._saved_run.model_recipe["init_args"].get("config", {}).get("vocab_size")
        if saved is not None and saved != self.datamodule.vocab_size:
            raise UserError(
                f"data.vocab_size ({self.datamodule.vocab_size}) differs from the checkpoint's "
                f"({saved}); use the tokenizer it was trained with (data.tokenizer)"
            )

    def _instantiate_recipes(self) -> None:
        """Builds data and model of a checkpoint from their recipes, the rest with the parser."""
        verb = self.config.subcommand
        others = Namespace({**vars(self.config[verb]), **dict.fromkeys(self._recipes)})
        config = Namespace({"subcommand": verb, verb: others})
        self.config_init = self.parser.instantiate(config)
        self.datamodule = build(self._recipes["data"], LanguageDataModule)
        decided = [(key, getattr(self.datamodule, key.rpartition(".")[2])) for key in LINKED_KEYS]
        keys = [(key.removeprefix("model."), value) for key, value in decided]
        self.model = build(lay_over(self._recipes["model"], keys, self.parser), LanguageModel)
        self.trainer = self.instantiate_trainer()

    def check_sizes(self) -> None:
        """Checks that model and batch fit into the memory of this machine."""
        trains = self.subcommand in (None, "fit")
        check_sizes(self.trainer, self.model, self.datamodule, trains=trains)

    def check_step(self) -> None:
        """Checks the options of steps and validations before the text is prepared."""
        if self.datamodule.order_of_steps is not None and any(
            word.partition("=")[0] == f"--{ACCUMULATE}" for word in self._argv
        ):
            raise UserError(
                f"{ACCUMULATE} follows from data.global_batch and the number of devices; leave it "
                "out, or set data.global_batch to null"
            )
        if any(
            isinstance(callback, BatchSizeFinder) for callback in vars(self.trainer)["callbacks"]
        ):
            raise UserError(
                "trainer.callbacks (BatchSizeFinder): the batch belongs to the experiment, so no "
                "callback changes it; python train.py plan shows which batch_size fits, and "
                "data.global_batch keeps the batch of a step whatever fits"
            )
        self.datamodule.step_batch(self.devices, self.trainer.accumulate_grad_batches)
        for callback in vars(self.trainer)["callbacks"]:
            if isinstance(callback, Validation):
                callback.check_interval(vars(self.trainer)["val_check_interval"])

    @property
    def devices(self) -> int:
        """Number of processes that train."""
        return self.trainer.world_size

    def announce(self) -> None:
        """Reports the default model and data if no config and no model are given."""
        rank_zero_info(
            f"no config and no model named: training the default, {type(self.model).__name__}, on "
            f"{type(self.datamodule).__name__}; choose with -c configs/transformer/tiny.yaml, "
            + as_started("python train.py list shows all configs")
        )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = {**self._get(self.config_init, "trainer"), **kwargs}
        config["default_root_dir"] = str(Path(config["default_root_dir"]).expanduser().resolve())
        if self.subcommand == "fit" and not config["fast_dev_run"]:
            self._check_folders(Path(config["default_root_dir"]))
        logs = config["logger"] in (None, True) and not config["fast_dev_run"]
        if logs:
            config["logger"] = False
            self._identify_run()
        plugins = config["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, list) else [plugins]
        if _is_job_of_one(config):
            plugins.append(LightningEnvironment())
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        config["plugins"] = plugins
        try:
            trainer = self._instantiate_trainer(config, self._callbacks(config))
        except ImportError as error:  # an optional package of Lightning is missing
            keys = ("accelerator", "strategy", "precision", "profiler")
            chosen = [
                f"trainer.{key} ({config[key]})"
                for key in keys
                if config[key] not in (None, "auto")
            ]
            names = ", ".join(chosen) or "trainer"
            raise UserError(f"{names}: {' '.join(str(error).split())}") from error
        settle_processes(trainer, config["devices"])
        if logs and self.subcommand in (None, "fit") and not config["barebones"]:
            trainer.loggers = self._loggers(Path(config["default_root_dir"]), trainer)
        if self.subcommand == "fit" and not config["fast_dev_run"] and trainer.is_global_zero:
            continues = self._saved_run is not None and self._continues
            hold_checkpoints(trainer, self._at_end, waits=continues)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            if self._saved_run is None or not was_restoring(error) or explain(error) is not None:
                raise
            raise UserError(
                f"{self._saved_run.path} cannot be restored ({type(error).__name__}: "
                f"{' '.join(str(error).split())}): it is damaged, or of another model or version; "
                "use another checkpoint"
            ) from error

    def _check_folders(self, root: Path) -> None:
        """Checks that the run's folders can be written to, before the data are tokenised."""
        check_folder("trainer.default_root_dir", root)
        folder = self._get(self.config, "checkpoint.dirpath")
        if folder is not None:
            check_folder("checkpoint.dirpath", Path(folder).expanduser())
        name = self._get(self.config, "name")
        if name is None:
            return
        sound = name.isprintable() and Path(name).name == name and not name.startswith(".")
        if not name or not sound:
            raise UserError(
                f"name ({name!r}) must be the name of a folder, of printable characters, without "
                "slashes"
            )
        if not self._continues and any((root / name).glob("config*.yaml")):
            raise UserError(
                f"name ({name}): {root / name} holds a run already; resume it with --ckpt_path "
                "last, or choose another name"
            )

    def _callbacks(self, config: dict[str, Any]) -> list[L.Callback]:
        keys = EVALUATION_CALLBACKS.get(self.subcommand or "fit", FIT_CALLBACKS)
        if config["barebones"]:
            keys = []
        callbacks = [self._get(self.config_init, key) for key in keys]
        unwanted: list[type[L.Callback]] = []
        if config["enable_progress_bar"] is False:
            unwanted.append(Progress)
        if config["enable_checkpointing"] is False:
            unwanted.append(ModelCheckpoint)
        callbacks = [c for c in callbacks if not isinstance(c, tuple(unwanted))]
        if self.subcommand in (None, "fit") and not config["barebones"]:
            if config["enable_model_summary"] is not False:
                callbacks.append(ModelOverview())
                config["enable_model_summary"] = False  # Lightning's summary
            callbacks += [ScheduleChange(), ResumeState(), PendingValidation()]
            callbacks.append(self._get(self.config_init, "termination"))
            if self._typed_optimizer():
                callbacks.append(KeepOptimizerSettings())
        return callbacks

    def _typed_optimizer(self) -> bool:
        """Returns whether typed optimiser settings have precedence over the restored ones."""
        return self.subcommand == "fit" and (
            self._get(self.config, "on_conflict") == "typed"
            and any(conflict.key.startswith(OPTIMIZER_PREFIX) for conflict in self._conflicts)
        )

    def _identify_run(self) -> None:
        """Sets the id and the name of the run for its record."""
        saved = self._saved_run if self._continues else None
        run_id = (saved and saved.run_id) or uuid.uuid4().hex  # all ranks take rank 0's
        self.save_config_kwargs["run_id"] = run_id
        name = self._get(self.config, "name")
        if name is not None and self._folder_of_saved() is None:
            self.save_config_kwargs["run_name"] = name

    def _folder_of_saved(self) -> Path | None:
        """Returns the log folder of the continued run, or None for a new run."""
        if self._saved_run is None or not self._continues:
            return None
        root = Path(self._get(self.config, "trainer.default_root_dir")).expanduser().resolve()
        return log_folder_of(self._saved_run, root)

    def _loggers(self, root: Path, trainer: L.Trainer) -> list[Logger]:
        """Returns the loggers of a run; rank 0 holds a lock on the run's folder."""
        names = self._get(self.config, "loggers")
        names = split_names(names) if isinstance(names, str) else names
        location = self._location(root)
        if self.subcommand == "fit" and trainer.is_global_zero:
            location = hold(location, self._at_end)
        return build_loggers(names, location)

    def _location(self, root: Path) -> RunPlace:
        """Returns the location of the logs: the continued run's, ``--name``, or a new folder."""
        run_id, run = self.save_config_kwargs["run_id"], self._folder_of_saved()
        name = self._get(self.config, "name")
        if self._saved_run is not None and run is not None:
            step, parent = purge_step(self._saved_run), run.parent
            return RunPlace(parent.parent, parent.name, run.name, run_id, step)
        if name is None:
            return RunPlace(root, type(self.model).__name__, None, run_id)
        # auto starts a run again that has ended before its first checkpoint
        continues = self._continues and has_log(root / name)
        return RunPlace(root, "", name, run_id, 0 if continues else None)


def _is_job_of_one(config: dict[str, Any]) -> bool:
    """Returns whether a trainer of one process is one of several SLURM tasks, as in a sweep."""
    is_single = str(config["devices"]) == "1" and config["num_nodes"] == 1
    return is_single and config["strategy"] == "auto" and slurm_tasks() > 1
