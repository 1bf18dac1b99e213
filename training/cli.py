"""``train.py``: LightningCLI with this project's defaults, and without its traps."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from argparse import ArgumentError
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks import (
    GradientNorm,
    KeepOptimizerSettings,
    ModelOverview,
    NonFinite,
    NonFiniteError,
    PendingValidation,
    Predictions,
    Progress,
    ResumeState,
    Samples,
    SaveCheckpoints,
    ScheduleChange,
    Termination,
    Throughput,
    Validation,
)
from callbacks.checkpoint_io import AtomicCheckpointIO
from callbacks.hooks import AgreedEnd
from callbacks.run_record import SaveRunRecord, as_yaml, log_folder_of, loggers_of
from callbacks.save_checkpoints import check_folder
from datamodules import LanguageDataModule
from lightning_models import LanguageModel
from lightning_models.checkpoint import AUTO, Checkpoint, Recipe, find_checkpoint, has_log
from lightning_models.recipe import (
    PACKAGES_HELP,
    build,
    complete,
    import_packages,
    resolve_class,
    split_names,
    trust,
)
from lightning_models.recipe_options import (
    import_public_classes,
    lay_over,
    parse_over,
    prints_descriptions,
)
from lightning_models.runtime import (
    CUDNN_ATTENTION_HELP,
    MATMUL_PRECISION_HELP,
    MatmulPrecision,
    choose_kernels,
)
from training import listing
from training.arguments import (
    DATA_KEYS,
    DEFAULT_ROOT,
    LINKED_KEYS,
    OPTIMIZER_PREFIX,
    OWN_PACKAGES,
    SUBCOMMANDS,
    Conflict,
    as_namespace,
    as_table,
    check_linked,
    check_values,
    find_conflicts,
    look,
    report,
    with_own_configs,
    without,
)
from training.errors import (
    LOST_LINE,
    LOST_PROCESS,
    UserError,
    check_verb,
    condense,
    explain,
    lost_process,
    suggest,
    was_restoring,
    with_options,
)
from training.help import (
    DESCRIPTION,
    VERB_DESCRIPTION,
    VERBS,
    TrainingParser,
    public_classes,
)
from training.loggers import RunPlace, build_loggers, purge_step
from training.processes import (
    LostRankError,
    await_launched,
    code_without_report,
    is_later_rank,
    settle_processes,
    slurm_tasks,
)
from training.run_folder import WaitedError, hold, hold_checkpoints
from training.signals import (
    INTERRUPTED,
    interrupts_here_only,
    silence,
    was_interrupt,
)
from training.sizes import check_sizes

SEED = 1234
DEFAULT_MODEL = "lightning_models.TransformerLM"
DEFAULT_DATA = "datamodules.PythonDocs"
DEBUG_FLAG = "--debug"
PRINT_FLAG = "--print_config"
PUBLIC_PACKAGES = ("lightning_models", "datamodules", "callbacks")

TRAINER_DEFAULTS: dict[str, Any] = {
    "default_root_dir": DEFAULT_ROOT,
    "log_every_n_steps": 10,
    # Inference by gradient needs autograd in validate and test too; inference mode would refuse it.
    "inference_mode": False,
}

ACCUMULATE = "trainer.accumulate_grad_batches"
NOT_CHOSEN = (None, "auto")
"""Values of trainer options that leave the choice to Lightning."""

CALLBACKS: dict[str, type[L.Callback]] = {
    "validation": Validation,
    "checkpoint": SaveCheckpoints,
    "throughput": Throughput,
    "progress": Progress,  # after throughput, whose latest value it shows
    "samples": Samples,
    "grad_norm": GradientNorm,
    "nonfinite": NonFinite,  # after grad_norm, which shows what it finds
    "predictions": Predictions,
    "termination": Termination,  # after all that writes
}

HELP = {
    "ckpt_path": "Its path; or last: the newest whole one below trainer.default_root_dir or "
    "checkpoint.dirpath, of the newest run; or best: the best one of that run; or auto: last, and "
    "a new run where there is none yet, so that one command starts and restarts. fit continues "
    "training from it, the other verbs evaluate it. Arguments of model and data that are not given "
    "here come from the checkpoint.",
    "weights_only": "Whether checkpoints are read as plain values and tensors only; false runs any "
    "code that a file brings along.",
}

EVALUATION_CALLBACKS = {
    "validate": ["progress"],
    "test": ["progress"],
    "predict": ["progress", "predictions"],
}
FIT_CALLBACKS = [key for key in CALLBACKS if key not in ("predictions", "termination")]


class LatentCLI(LightningCLI):
    """``fit | validate | test | predict`` for any model with any data.

    - ``model`` and ``data`` have default classes; vocabulary and block size go from the data to
      the model's config.
    - ``--ckpt_path FILE | last | best``: arguments that are not typed come from the checkpoint;
      those that are typed and differ stop the program, or follow ``--on_conflict``.
    - The callbacks of ``CALLBACKS`` are always there, each configurable under its key; others may
      be added with ``trainer.callbacks``.
    - ``last`` continues in the log folder of that run; a path starts a new one.

    Args:
        args: The command line; None takes that of the process.
        run: Whether there is a verb to run; otherwise only ``model``, ``datamodule`` and
            ``trainer`` are built.
    """

    shown: ClassVar[dict[str, str]] = {}
    """Verbs of other names that help describes, by the verb that is parsed."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        argv = with_own_configs(sys.argv[1:] if args is None else args)
        set_parsing_settings(docstring_parse_attribute_docstrings=prints_descriptions(argv))
        # A parser with all its documentation takes a third of a second: build the one that is used.
        self._verbs = [argv[0]] if argv and argv[0] in SUBCOMMANDS else list(SUBCOMMANDS)
        self._argv, self._runs = list(argv), run
        self._given = look(argv)
        self._typed = Namespace()
        self._continues = False
        self._at_end = contextlib.ExitStack()
        self._saved_run: Checkpoint | None = None
        self._saved: dict[str, Recipe] = {}  # of the checkpoint, by role
        self._recipes: dict[str, Recipe] = {}  # with typed values laid over them
        self._conflicts: list[Conflict] = []
        settings = {"parser_mode": "omegaconf", "exit_on_error": False, "allow_abbrev": False}
        with self._at_end:
            super().__init__(
                LanguageModel,
                LanguageDataModule,
                save_config_callback=SaveRunRecord,
                parser_class=TrainingParser,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=SEED,
                parser_kwargs={
                    **settings,
                    "description": DESCRIPTION,
                    **{
                        verb: {
                            **settings,
                            "description": VERB_DESCRIPTION.format(
                                title=VERBS[self.shown.get(verb, verb)]
                            ),
                        }
                        for verb in self._verbs
                    },
                },
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=self._argv,
                run=run,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,  # LanguageModel writes its own recipe
            )

    # ---- arguments

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, kind in CALLBACKS.items():
            parser.add_lightning_class_args(kind, key)
        # defaults of one class would be carried over to another: begin with the one that is named
        for key, default in (("model", DEFAULT_MODEL), ("data", DEFAULT_DATA)):
            parser.set_defaults({key: {"class_path": self._given.own_class(key) or default}})
        for name in ("vocab_size", "block_size"):
            parser.link_arguments(
                f"data.{name}", f"model.init_args.config.{name}", apply_on="instantiate"
            )
        parser.add_argument(
            "--on_conflict",
            type=Literal["error", "typed", "checkpoint"],
            default="error",
            help="Where typed model arguments differ from those in ckpt_path: stop with a table, "
            "follow what was typed (a typed learning rate then has effect), or the checkpoint.",
        )
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="The run's name: its folder in trainer.default_root_dir, and its row in reports. "
            "null: the folder is MODEL/version_N.",
        )
        parser.add_argument(
            "--loggers",
            type=list[str] | str,
            default=["tensorboard"],
            help="Where fit logs: tensorboard, csv, wandb or mlflow, several separated by commas; "
            "ckpt_path=last keeps those of the run. trainer.logger takes any other of Lightning.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=MatmulPrecision,
            default="highest",
            help=MATMUL_PRECISION_HELP,
        )
        parser.add_argument(
            "--cudnn_attention", type=bool, default=False, help=CUDNN_ATTENTION_HELP
        )
        parser.add_argument("--packages", type=list[str] | str, default=[], help=PACKAGES_HELP)
        parser.add_argument(
            DEBUG_FLAG, action="store_true", help="Show the traceback of errors in the input, too."
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        skipped = LightningCLI.subcommands()
        return {verb: skipped[verb] for verb in self._verbs}

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser: Any = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults({"weights_only": True})
        for action in parser._actions:
            action.help = HELP.get(action.dest, action.help)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)  # as __init__ passes it
        import_packages(self._given.packages)
        trust(self._given.classes)
        if any(word == "-h" or word.partition("=")[0].endswith("help") for word in args):
            import_public_classes(*PUBLIC_PACKAGES)  # help lists the classes there are
        try:
            self._parse_names(parser, args)
        except (ArgumentError, ValueError) as error:
            if self._runs:
                _check_first_word(args)  # options before the verb are refused with other words
            self._explain_class()
            if isinstance(error, ArgumentError):
                message = with_options(condense(str(error)), parser, self._classes())
                raise UserError(message) from error
            raise
        verb = self.config.get("subcommand")
        self._typed = self.config[verb] if verb else self.config
        check_values(self._typed, ("trainer", *CALLBACKS))

    def _explain_class(self) -> None:
        """Raises a UserError for a short name that no class of model or data has."""
        for key, package in OWN_PACKAGES.items():
            values = self._given.values
            name = values.get(f"{key}.class_path") or values.get(key, "")
            names, short = public_classes(package), name.removeprefix(f"{package}.")
            if short.isidentifier() and short not in names and not self._given.packages:
                raise UserError(
                    f"{key} ({name}) is no class of {key}.{suggest(short, names)} The classes are "
                    f"{', '.join(names)}"
                )

    def _classes(self) -> dict[str, type]:
        """Returns the classes of model and data, where they are this project's."""
        names = {
            "model": self._given.own_class("model") or DEFAULT_MODEL,
            "data": self._given.own_class("data") or DEFAULT_DATA,
        }
        if self._saved_run is not None:
            names["model"] = self._saved_run.model_recipe["class_path"]
        return {key: resolve_class(name, object) for key, name in names.items()}

    def _parse_names(self, parser: LightningArgumentParser, argv: list[str]) -> None:
        """Parses; short names of classes are known only after their modules were imported."""
        try:
            self._parse(parser, argv)
        except ArgumentError:
            import_public_classes(*PUBLIC_PACKAGES)
            self._parse(parser, argv)

    def _parse(self, parser: LightningArgumentParser, argv: list[str]) -> None:
        """Parses; arguments that are not typed come from the checkpoint, if one is named."""
        given = self._given
        if given.subcommand is not None and given.ckpt_path is not None:
            self._continues = given.subcommand == "fit" and given.ckpt_path in ("last", AUTO)
            self._saved_run = find_checkpoint(
                given.ckpt_path,
                given.folders,
                given.subcommand,
                verifies=not is_later_rank(given.values.get("trainer.devices", "")),
            )
        if given.subcommand is None or self._saved_run is None:
            self.config = parser.parse_args(argv)
            if self._continues:  # auto begins a new run
                self.config.fit.ckpt_path = None
            return
        self._parse_typed(parser, given.subcommand, argv)

    def _parse_typed(self, parser: LightningArgumentParser, verb: str, argv: list[str]) -> None:
        """Parses what is typed, and lays it over the checkpoint's recipes, which no parser sees."""
        assert self._saved_run is not None
        standard: dict[Literal["model", "data"], dict[str, Any]]
        standard = {"model": {"class_path": DEFAULT_MODEL}, "data": {"class_path": DEFAULT_DATA}}
        for role, own in standard.items():
            recipe = self._saved_run.complete(role) or complete(own, role)
            for key in LINKED_KEYS:  # which the data decide
                recipe = without(recipe, key.removeprefix(f"{role}."))
            self._saved[role] = recipe
        words = [word for word in argv if word.partition("=")[0] != PRINT_FLAG]
        typed = parse_over(parser, self._saved, words, verb)[verb]
        self._subcommand_parsers[verb].set_defaults(**standard)
        others = {k: v for k, v in vars(typed).items() if k not in (*standard, "config")}
        self.config = parser.parse_object({"subcommand": verb, verb: others})
        for role in standard:
            recipe = complete(lay_over(self._saved[role], typed[role].items(), parser), role)
            self._recipes[role] = recipe
            self.config[verb][role] = as_namespace(recipe)
        if words != argv:
            config = self.config[verb]
            print(as_yaml(self._subcommand_parsers[verb], config, self._recipes), end="")
            raise SystemExit(0)

    def _parse_ckpt_path(self) -> None:
        """Compares what was typed with the checkpoint; LightningCLI calls it after parsing."""
        if self._saved_run is None:
            self._refuse_unseen_checkpoint()
            return
        config = self.config[self.config.subcommand]
        config.ckpt_path = str(self._saved_run.path)
        self.save_config_kwargs["step"] = self._saved_run.step
        if self._continues:
            self.save_config_kwargs["run_id"] = self._saved_run.run_id
            self.save_config_kwargs["run_name"] = self._saved_run.run_name
            if "loggers" not in self._given.values:
                root = Path(config.trainer.default_root_dir).expanduser().resolve()
                config.loggers = loggers_of(self._saved_run, root) or config.loggers
        self._conflicts = find_conflicts(self._recipes, self._saved)
        if self._conflicts and config.on_conflict == "error":
            raise UserError(report(self._conflicts, self._saved_run.path))
        if self._conflicts and config.on_conflict == "checkpoint":
            # what only one of two classes of data takes cannot be carried over
            of_data = [c for c in self._conflicts if c.key in DATA_KEYS and not c.one_sided]
            kept = [(c.key.removeprefix("data."), c.checkpoint) for c in of_data]
            self._recipes["model"] = self._saved["model"]
            self._recipes["data"] = lay_over(self._recipes["data"], kept, self.parser)
            for role, recipe in self._recipes.items():
                config[role] = as_namespace(recipe)
        self.save_config_kwargs["recipes"] = self._recipes

    def _refuse_unseen_checkpoint(self) -> None:
        """Stops if parsing found a ckpt_path that the first look did not."""
        subcommand = self.config.get("subcommand")
        if subcommand and self.config[subcommand].get("ckpt_path"):
            raise UserError(
                "ckpt_path is given in a way that is not understood; use --ckpt_path=PATH"
            )

    # ---- objects

    def instantiate_classes(self) -> None:
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
                f"data.vocab_size ({self.datamodule.vocab_size}) is not that of the checkpoint "
                f"({saved}); take the tokenizer it was trained with (data.tokenizer)"
            )

    def _instantiate_recipes(self) -> None:
        """Builds data and model of a checkpoint from their recipes, all else by the parser."""
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
        """Refuses sizes that this machine cannot hold."""
        trains = self.subcommand in (None, "fit")
        check_sizes(self.trainer, self.model, self.datamodule, trains=trains)

    def check_step(self) -> None:
        """Refuses a batch that devices cannot share, before the text is prepared."""
        if self.datamodule.order_of_steps is not None and any(
            word.partition("=")[0] == f"--{ACCUMULATE}" for word in self._argv
        ):
            raise UserError(
                f"{ACCUMULATE} follows from data.global_batch and the number of devices; leave it "
                "out, or set data.global_batch to null"
            )
        self.datamodule.step_batch(self.devices, self.trainer.accumulate_grad_batches)

    @property
    def devices(self) -> int:
        """Number of processes that train."""
        return self.trainer.world_size

    def announce(self) -> None:
        """Names the default that is trained where no config and no model was given."""
        rank_zero_info(
            f"no config and no model named: training the default, {type(self.model).__name__}, on "
            f"{type(self.datamodule).__name__}; choose with -c configs/transformer/tiny.yaml, "
            "python train.py list shows all configs"
        )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = {**self._get(self.config_init, "trainer"), **kwargs}
        config["default_root_dir"] = str(Path(config["default_root_dir"]).expanduser().resolve())
        if self.subcommand == "fit" and not config["fast_dev_run"]:
            self._check_places(Path(config["default_root_dir"]))
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
        except ImportError as error:  # of an optional package of Lightning
            keys = ("accelerator", "strategy", "precision", "profiler")
            chosen = [
                f"trainer.{key} ({config[key]})" for key in keys if config[key] not in NOT_CHOSEN
            ]
            names = ", ".join(chosen) or "trainer"
            raise UserError(f"{names}: {' '.join(str(error).split())}") from error
        settle_processes(trainer, config["devices"])
        if logs and self.subcommand in (None, "fit") and not config["barebones"]:
            trainer.loggers = self._loggers(Path(config["default_root_dir"]), trainer)
        if self.subcommand == "fit" and not config["fast_dev_run"] and trainer.is_global_zero:
            goes_on = self._saved_run is not None and self._continues
            hold_checkpoints(trainer, self._at_end, waits=goes_on)
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
                "take another checkpoint"
            ) from error

    def _check_places(self, root: Path) -> None:
        """Tries the folders of the run before the data are tokenised."""
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
                f"name ({name}): {root / name} holds a run already; go on with it by --ckpt_path "
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
                config["enable_model_summary"] = False  # Lightning's own
            callbacks += [ScheduleChange(), ResumeState(), PendingValidation()]
            callbacks.append(self._get(self.config_init, "termination"))
            if self._typed_optimizer():
                callbacks.append(KeepOptimizerSettings())
        return callbacks

    def _typed_optimizer(self) -> bool:
        """Whether typed optimiser settings are to win over the restored ones."""
        return self.subcommand == "fit" and (
            self._get(self.config, "on_conflict") == "typed"
            and any(conflict.key.startswith(OPTIMIZER_PREFIX) for conflict in self._conflicts)
        )

    def _identify_run(self) -> None:
        """Notes the id and the name of the run for its record."""
        saved = self._saved_run if self._continues else None
        run_id = (saved and saved.run_id) or uuid.uuid4().hex  # rank 0's is that of all
        self.save_config_kwargs["run_id"] = run_id
        name = self._get(self.config, "name")
        if name is not None and self._folder_of_saved() is None:
            self.save_config_kwargs["run_name"] = name

    def _folder_of_saved(self) -> Path | None:
        """Returns the log folder of the run that goes on; None where a new one begins."""
        if self._saved_run is None or not self._continues:
            return None
        root = Path(self._get(self.config, "trainer.default_root_dir")).expanduser().resolve()
        return log_folder_of(self._saved_run, root)

    def _loggers(self, root: Path, trainer: L.Trainer) -> list[Logger]:
        """Returns the loggers of a training, in the run's folder, which rank 0 holds."""
        names = self._get(self.config, "loggers")
        names = split_names(names) if isinstance(names, str) else names
        place = self._place(root)
        if self.subcommand == "fit" and trainer.is_global_zero:
            place = hold(place, self._at_end)
        return build_loggers(names, place)

    def _place(self, root: Path) -> RunPlace:
        """Returns where the run is logged: where it was before, in ``--name``, or in a new one."""
        run_id, run = self.save_config_kwargs["run_id"], self._folder_of_saved()
        name = self._get(self.config, "name")
        if self._saved_run is not None and run is not None:
            step, parent = purge_step(self._saved_run), run.parent
            return RunPlace(parent.parent, parent.name, run.name, run_id, step)
        if name is None:
            return RunPlace(root, type(self.model).__name__, None, run_id)
        # of a start that auto repeats, as it has ended before its first checkpoint
        again = self._continues and has_log(root / name)
        return RunPlace(root, "", name, run_id, 0 if again else None)


def _is_job_of_one(config: dict[str, Any]) -> bool:
    """Whether a trainer of one process is one of several SLURM tasks, as in a sweep."""
    one = str(config["devices"]) == "1" and config["num_nodes"] == 1
    return one and config["strategy"] == "auto" and slurm_tasks() > 1


def main(args: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    0: done; 2: bad input, in one line; 3: a loss or gradient that is not a number, in one line;
    4: another process of the run has ended, in one line; 129, 130 or 143: ended by SIGHUP, Ctrl-C
    or SIGTERM, after a checkpoint if it was training; 138: by SIGUSR1, and requeued by SLURM.

    Args:
        args: The command line; None takes that of the process.
    """
    argv = sys.argv[1:] if args is None else args
    silence()
    try:
        with interrupts_here_only():
            if argv[:1] == ["list"]:
                return listing.main(argv[1:])
            if argv[:1] == ["plan"]:
                from training.plan import Planner

                Planner(argv[1:])
                return 0
            if argv and not argv[0].startswith("-"):
                _check_first_word(argv)
            _execute(argv)
    except AgreedEnd as stop:
        return _end_on_all_ranks(stop, DEBUG_FLAG in argv)
    except SIGTERMException:  # before the first step
        return 128 + signal.SIGTERM
    except (KeyboardInterrupt, SystemExit) as end:
        if not was_interrupt(end) or DEBUG_FLAG in argv:
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        message = explain(error)
        if lost_process(error) and DEBUG_FLAG not in argv:
            print(f"error: {LOST_LINE}: {' '.join(str(error).split())}", file=sys.stderr)
            return LOST_PROCESS
        if message is None or DEBUG_FLAG in argv:
            raise
        if (code := code_without_report(error)) is not None:
            return code
        print(f"error: {message}", file=sys.stderr)
        return LOST_PROCESS if isinstance(error, LostRankError) else 2
    return 0


def _execute(argv: list[str]) -> None:
    """Runs a verb; where it had to wait for a run, once more from the start."""
    try:
        await_launched(LatentCLI(argv).trainer)
    except WaitedError:  # the checkpoint that was found may have been replaced meanwhile
        _execute(argv)


def _check_first_word(argv: list[str]) -> None:
    check_verb(argv, VERBS, "python train.py fit -c configs/transformer/tiny.yaml")


def _end_on_all_ranks(stop: AgreedEnd, debug: bool) -> int:
    """Returns the exit code of an end that all ranks have agreed on; rank 0 reports it.

    The others end with 0: a launcher that sees one of them fail would kill rank 0 while it speaks.
    """
    if getattr(rank_zero_only, "rank", 0):
        return 0
    if isinstance(stop, NonFiniteError):
        if debug:
            raise stop
        print(f"error: {stop}", file=sys.stderr)
    else:
        print(stop, file=sys.stderr)
        if stop.exit_code == 128 + signal.SIGUSR1:
            _requeue()
    return int(stop.exit_code)


def _requeue() -> None:
    """Has SLURM start the job again: SIGUSR1 is what ``--signal=USR1@SECONDS`` warns it with."""
    job, command = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if job is not None and command is not None:
        subprocess.run([command, "requeue", job], check=False)
