"""Parses a command line, taking untyped values from the checkpoint that it names."""

import sys
from argparse import ArgumentError
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from callbacks import (
    GradientNorm,
    NonFinite,
    Predictions,
    Progress,
    Samples,
    SaveCheckpoints,
    Termination,
    Throughput,
    Validation,
)
from callbacks.run_record import SaveRunRecord, as_yaml, loggers_of
from datamodules import LanguageDataModule
from lightning_models import LanguageModel
from lightning_models.checkpoint import AUTO, Checkpoint, Recipe, find_checkpoint
from lightning_models.recipe import PACKAGES_HELP, complete, import_packages, resolve_class, trust
from lightning_models.recipe_options import (
    import_public_classes,
    lay_over,
    parse_over,
    prints_descriptions,
)
from lightning_models.runtime import CUDNN_ATTENTION_HELP, MATMUL_PRECISION_HELP, MatmulPrecision
from training.arguments import (
    DATA_KEYS,
    DEFAULT_ROOT,
    LINKED_KEYS,
    OWN_PACKAGES,
    SUBCOMMANDS,
    Conflict,
    as_namespace,
    check_values,
    find_conflicts,
    look,
    report,
    with_own_configs,
    without,
)
from training.errors import UserError, check_verb, condense, suggest, with_options
from training.help import (
    DESCRIPTION,
    EXAMPLE,
    VERB_DESCRIPTION,
    VERBS,
    TrainingParser,
    public_classes,
)
from training.processes import is_later_rank

DEFAULT_MODEL = "lightning_models.TransformerLM"
DEFAULT_DATA = "datamodules.PythonDocs"
DEBUG_FLAG = "--debug"
PRINT_FLAG = "--print_config"
PUBLIC_PACKAGES = ("lightning_models", "datamodules", "callbacks")

TRAINER_DEFAULTS: dict[str, Any] = {
    "default_root_dir": DEFAULT_ROOT,
    "log_every_n_steps": 10,
    # Inference by gradient needs autograd in validate and test too, which inference mode forbids.
    "inference_mode": False,
}

CALLBACKS: dict[str, type[L.Callback]] = {
    "validation": Validation,
    "checkpoint": SaveCheckpoints,
    "throughput": Throughput,
    "progress": Progress,  # after throughput, whose latest value it shows
    "samples": Samples,
    "grad_norm": GradientNorm,
    "nonfinite": NonFinite,  # after grad_norm, whose values it reports
    "predictions": Predictions,
    "termination": Termination,  # after all callbacks that write
}

HELP = {
    "ckpt_path": "Path of a checkpoint; or last: the newest complete one of the newest run below "
    "trainer.default_root_dir or checkpoint.dirpath; or best: the best one of that run; or auto: "
    "last, or a new run if there is none yet, so that one command starts and restarts. fit "
    "continues training from it, the other verbs evaluate it. Untyped arguments of model and data "
    "come from the checkpoint.",
    "weights_only": "Whether checkpoints are read as plain values and tensors only; false runs any "
    "code in the file.",
}


class CheckpointParsing(LightningCLI):
    """Parses ``fit | validate | test | predict``; see ``LatentCLI``, which builds and runs.

    Args:
        args: The command line. Defaults to the arguments of the process.
        run: Whether there is a verb to run.
    """

    shown: ClassVar[dict[str, str]] = {}
    """Displayed verb in help, by parsed verb."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        argv = with_own_configs(sys.argv[1:] if args is None else args)
        set_parsing_settings(docstring_parse_attribute_docstrings=prints_descriptions(argv))
        # A parser with all its documentation takes a third of a second, so only one is built.
        self._verbs = [argv[0]] if argv and argv[0] in SUBCOMMANDS else list(SUBCOMMANDS)
        self._argv, self._runs = list(argv), run
        self._given = look(argv)
        self._typed = Namespace()
        self._continues = False
        self._saved_run: Checkpoint | None = None
        self._saved: dict[str, Recipe] = {}  # of the checkpoint, by role
        self._recipes: dict[str, Recipe] = {}  # overridden by typed values
        self._conflicts: list[Conflict] = []
        settings = {"parser_mode": "omegaconf", "exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            LanguageModel,
            LanguageDataModule,
            save_config_callback=SaveRunRecord,
            parser_class=TrainingParser,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=1234,
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

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, cls in CALLBACKS.items():
            parser.add_lightning_class_args(cls, key)
        # start from the named class; defaults of another class would be carried over
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
            help="If typed model arguments differ from the checkpoint's: stop with a table, "
            "follow the typed values (including the learning rate), or the checkpoint.",
        )
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Name of the run: its folder in trainer.default_root_dir, and its row in reports. "
            "With null, the folder is MODEL/version_N.",
        )
        parser.add_argument(
            "--loggers",
            type=list[str] | str,
            default=["tensorboard"],
            help="Loggers of fit: tensorboard, csv, wandb or mlflow, separated by commas; "
            "ckpt_path=last keeps the run's loggers. trainer.logger takes any other of "
            "Lightning's.",
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
            DEBUG_FLAG, action="store_true", help="Show the traceback of input errors too."
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
        assert isinstance(args, list)  # passed by __init__
        import_packages(self._given.packages)
        trust(self._given.classes)
        if any(word == "-h" or word.partition("=")[0].endswith("help") for word in args):
            import_public_classes(*PUBLIC_PACKAGES)  # help lists the available classes
        try:
            self._parse_names(parser, args)
        except (ArgumentError, ValueError) as error:
            if self._runs:
                check_verb(args, VERBS, EXAMPLE)  # reports a missing verb
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
                    f"{key} ({name}) is not a class for {key}.{suggest(short, names)} The "
                    f"classes are {', '.join(names)}"
                )

    def _classes(self) -> dict[str, type]:
        """Returns the classes of model and data if this project defines them."""
        names = {
            "model": self._given.own_class("model") or DEFAULT_MODEL,
            "data": self._given.own_class("data") or DEFAULT_DATA,
        }
        if self._saved_run is not None:
            names["model"] = self._saved_run.model_recipe["class_path"]
        return {key: resolve_class(name, object) for key, name in names.items()}

    def _parse_names(self, parser: LightningArgumentParser, argv: list[str]) -> None:
        """Parses, retrying after the import of all modules that define short class names."""
        try:
            self._parse(parser, argv)
        except ArgumentError:
            import_public_classes(*PUBLIC_PACKAGES)
            self._parse(parser, argv)

    def _parse(self, parser: LightningArgumentParser, argv: list[str]) -> None:
        """Parses, taking untyped arguments from the checkpoint if one is named."""
        early = self._given
        if early.subcommand is not None and early.ckpt_path is not None:
            self._continues = early.subcommand == "fit" and early.ckpt_path in ("last", AUTO)
            self._saved_run = find_checkpoint(
                early.ckpt_path,
                early.folders,
                early.subcommand,
                verifies=not is_later_rank(early.values.get("trainer.devices", "")),
            )
        if early.subcommand is None or self._saved_run is None:
            self.config = parser.parse_args(argv)
            if self._continues:  # auto starts a new run
                self.config.fit.ckpt_path = None
            return
        self._parse_typed(parser, early.subcommand, argv)

    def _parse_typed(self, parser: LightningArgumentParser, verb: str, argv: list[str]) -> None:
        """Parses the typed arguments, and overrides the checkpoint's recipes with them."""
        assert self._saved_run is not None
        standard: dict[Literal["model", "data"], dict[str, Any]]
        standard = {"model": {"class_path": DEFAULT_MODEL}, "data": {"class_path": DEFAULT_DATA}}
        for role, default in standard.items():
            recipe = self._saved_run.complete(role) or complete(default, role)
            for key in LINKED_KEYS:  # determined by the data
                recipe = without(recipe, key.removeprefix(f"{role}."))
            self._saved[role] = recipe
        arguments = [word for word in argv if word.partition("=")[0] != PRINT_FLAG]
        typed = parse_over(parser, self._saved, arguments, verb)[verb]
        self._subcommand_parsers[verb].set_defaults(**standard)
        others = {k: v for k, v in vars(typed).items() if k not in (*standard, "config")}
        self.config = parser.parse_object({"subcommand": verb, verb: others})
        for role in standard:
            recipe = complete(lay_over(self._saved[role], typed[role].items(), parser), role)
            self._recipes[role] = recipe
            self.config[verb][role] = as_namespace(recipe)
        if arguments != argv:
            config = self.config[verb]
            print(as_yaml(self._subcommand_parsers[verb], config, self._recipes), end="")
            raise SystemExit(0)

    def _parse_ckpt_path(self) -> None:
        """Compares typed arguments with the checkpoint; LightningCLI calls it after parsing."""
        verb = self.config.get("subcommand")
        config: Any = self.config[verb] if verb else self.config
        if self._saved_run is None:
            if config.get("ckpt_path"):  # missed by the pre-parser
                raise UserError(
                    "ckpt_path is given in a way that is not understood; use --ckpt_path=PATH"
                )
            return
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
            # arguments of only one of the two data classes cannot be carried over
            of_data = [c for c in self._conflicts if c.key in DATA_KEYS and not c.one_sided]
            kept = [(c.key.removeprefix("data."), c.checkpoint) for c in of_data]
            self._recipes["model"] = self._saved["model"]
            self._recipes["data"] = lay_over(self._recipes["data"], kept, self.parser)
            for role, recipe in self._recipes.items():
                config[role] = as_namespace(recipe)
        self.save_config_kwargs["recipes"] = self._recipes
