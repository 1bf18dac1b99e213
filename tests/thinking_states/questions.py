"""Random questions with steps and answers, tiny models that read them, and data that deals them."""

from typing import Any, get_type_hints

import lightning as L
import torch
from torch.utils.data import DataLoader

from callbacks import ResumeState
from datamodules.reasoning import FixedTokens
from datamodules.sources import BatchLoader, TrainingSource
from lightning_models import OptimizerConfig
from lightning_models.thinking_states import CoconutLM, CodiLM, CoTLM, ICoTLM, NoCoTLM
from tests.quiet import quiet_trainer
from tests.reference.thinking_states import Row
from tests.thinking_states.literal import batch_of

V = 16
EOS, PREFIX, SEPARATOR = 0, (3, 4), (5,)
WORDS = range(6, V)
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "vocab_multiple": 1,
    "block_size": 40,
    "num_layers": 2,
    "dim": 16,
    "num_heads": 2,
    "ffn_dim": 24,
    "init_std": 0.25,
    "answer_prefix": PREFIX,
    "step_separator": SEPARATOR,
}
MODELS = {
    "no_cot": NoCoTLM,
    "cot": CoTLM,
    "icot": ICoTLM,
    "coconut": CoconutLM,
    "codi": CodiLM,
}
SHAPES = [(6, [2, 3, 1], 1), (3, [], 2), (9, [1], 1), (4, [2, 2, 2, 2], 3)]
"""Tokens of query (EOS in front counted), of each step, and of the answer (EOS not counted)."""


def build(name, *, seed=0, double=True, optimizer=None, **changes):
    """A model with random weights that are lively enough to tell things apart."""
    kind = MODELS[name]
    config = get_type_hints(kind.__init__)["config"](**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = kind(config, optimizer or OptimizerConfig(lr=1e-2, warmup=0, schedule="constant"))
    model.configure_model()
    with torch.no_grad():  # biases begin at zero, norms at one
        for parameter in model.network.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.double() if double else model


def questions(shapes=SHAPES, seed=0, first=0, epochs=None):
    """A batch of random words.

    Args:
        shapes: see SHAPES, one a row.
        seed: of the words.
        first: number of the first row.
        epochs: after the batch; None: a batch of an evaluation.
    """
    generator = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(WORDS.start, WORDS.stop, (count,), generator=generator).tolist()

    queries = [[EOS, *words(n - 1)] for n, _, _ in shapes]
    steps = [[words(n) for n in lengths] for _, lengths, _ in shapes]
    answers = [[*words(n), EOS] for _, _, n in shapes]
    places = [[1] * len(row) for row in steps]
    batch = {
        **batch_of([Row(*row) for row in zip(queries, steps, places, answers, strict=True)]),
        "sequence_id": torch.arange(len(shapes)) + first,
        "group": torch.tensor([len(row) for row in steps]),
        "num_bytes": torch.tensor([len(row) for row in answers]),
    }
    return batch if epochs is None else {**batch, "epochs": epochs}


def row_of(batch, row):
    """One row on its own: query, steps and answer as lists, without padding."""
    query = batch["query"][row, : batch["query_lengths"][row]].tolist()
    steps = [
        step[:length].tolist()
        for step, length in zip(batch["steps"][row], batch["step_lengths"][row], strict=True)
        if length
    ]
    return query, steps, [token for token in batch["targets"][row].tolist() if token != -100]


def rows(batch, chosen):
    return {k: v[chosen] if torch.is_tensor(v) else v for k, v in batch.items()}


def with_filling(batch):
    """The batch with a row that only fills up, and wider padding everywhere."""
    filled = questions([(1, [], 0)], first=len(batch["query"]))
    filled["targets"][:] = -100
    out = {}
    for key, value in batch.items():
        pad = {"targets": -100, "step_places": -1}.get(key, EOS)
        shape = [*value.shape]
        wide = torch.full([shape[0] + 1, *(n + 2 for n in shape[1:])], pad)
        wide[tuple(slice(n) for n in shape)] = value
        wide[(-1, *(slice(n) for n in filled[key].shape[1:]))] = filled[key][0]
        out[key] = wide
    return out


class Asked:
    """Source of batches of two questions: batch n is a function of n."""

    def __init__(self, counter, batches=4, rows=2, ranks=1):
        self.counter, self.batches, self.rows, self.ranks = counter, batches, rows, ranks

    def __len__(self):
        return self.batches

    def batch(self, n):
        shapes = [SHAPES[(n + row) % len(SHAPES)] for row in range(self.rows)]
        seed = n % self.batches
        return questions(shapes, seed, first=n * self.rows, epochs=n / self.batches)

    def counts(self, n):
        return self.counter(self.batch(n))


class Questions(L.LightningDataModule):
    rows = "reasoning"

    def wording(self):
        return FixedTokens(PREFIX, SEPARATOR)

    def train_dataloader(self):
        source = Asked(self.trainer.lightning_module.counter)
        accumulate = self.trainer.accumulate_grad_batches
        training = TrainingSource(source, epoch_batches=len(source), accumulate=accumulate)
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return BatchLoader(training, start=lambda: progress.total.processed)

    def val_dataloader(self):
        batches = [questions(seed=100), with_filling(questions(seed=101))]
        return DataLoader(batches, batch_size=None)

    def recipe(self):
        return {"class_path": "tests.Questions", "init_args": {}}


def resumable_trainer(folder, *callbacks, **options):
    saves = {"enable_checkpointing": bool(callbacks), **options}
    return quiet_trainer(folder, ResumeState(), *callbacks, **saves)
