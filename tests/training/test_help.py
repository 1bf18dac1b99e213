"""``--help`` names the verbs, the options of a verb and the classes there are."""

from tests.programs import ROOT, run
from training import LatentCLI
from training.help import VERBS, public_classes


def help_of(*words):
    done = run(ROOT / "train.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_of_a_verb_names_every_option_and_class():
    text = help_of("fit", "-h")
    parser = LatentCLI(["--trainer.accelerator=cpu"], run=False).parser
    options = {max(action.option_strings, key=len) for action in parser._actions}
    options = {o for o in options if not o.endswith(("+", "help", "print_shtab"))}
    names = {*public_classes("lightning_models"), *public_classes("datamodules")}
    assert {name for name in names | options if name not in text} == set()


def test_help_names_every_verb():
    assert {f"{verb}:" for verb in VERBS} <= set(help_of("--help").split())
