"""Every command that scores or asks checkpoints, for the contract in `test_every_verb.py`.

One line adds a command.
"""

from dataclasses import dataclass

__all__ = ["VERBS", "Verb"]


@dataclass(frozen=True)
class Verb:
    """A command, with the options that make it quick."""

    name: str
    words: str = ""
    """Options; ``{name}`` stands for a file of the fixture ``verb_files``."""
    reports: bool = True
    """Whether ``--output`` is a JSON file of numbers with their provenance."""
    batched: bool = True
    """Whether ``--batch_size`` decides how many rows are computed at once, and nothing else."""
    methods: str = "none"
    """Methods that it takes: 'every' one, those of 'texts', those that continue 'prompts', or
    'none' that are not its own subject."""
    ending: str = ".json"
    """Of the file that ``--output`` names."""
    checkpoint: str = "--ckpt"
    """Option that names checkpoints; none: they stand alone."""

    def __str__(self) -> str:
        modes = [word for word in ("autoregressive", "pass_at_2") if word in self.words]
        return "-".join([self.name, *modes])

    def command(self, checkpoint, files, *options):
        words = self.words.format(**files).split()
        return [self.name, *words, *self.checkpoint.split(), checkpoint, *options]


VERBS = [
    Verb("perplexity", "--limit_batches 4 --split train", methods="every"),
    Verb("perplexity", "--mode autoregressive --positions 9 --limit_batches 4"),
    Verb("zero_shot", "--sets lm1b --files.lm1b {text} --limit_batches 4", methods="texts"),
    Verb("tasks", "--tasks piqa_local"),
    Verb("tasks", "--tasks pass_at_2 --include_path {tasks}", methods="prompts"),
    Verb(
        "quality",
        "--mode unconditional --samples 3 --sample_tokens 6 --judge null",
        methods="prompts",
    ),
    Verb("reversal", "--pairs 3", batched=False, methods="prompts"),
    Verb(
        "generate",
        "--prompt thought --max_new_tokens 4",
        reports=False,
        batched=False,
        methods="prompts",
    ),
    Verb("reason", reports=False, batched=False),
    Verb("think", "--text thought", False, False, methods="every", ending=".html"),
    Verb(
        "sweep",
        "--output {folder}/sweep.svg",
        False,
        False,
        ending=".svg",
        checkpoint="--ckpts",
    ),
    Verb("compare", "", False, False, checkpoint=""),
]
