"""Questions with reasoning steps and answers, for models that think before they answer.

Thinking States (Sec. 3.4, App. A.3 and A.4) aligns the steps of a solution with the tokens of the
question after which they can be inferred. Every method of latent reasoning, and chain of thought
itself, reads the same rows and lays them out for itself.

What all tasks share:

| file | what it holds |
|---|---|
| `module` | `ReasoningDataModule`: a task writes `examples(split)`; rows of splits that are files |
| `examples` | `Example`: query with markers, steps, answer; its tokens and where its steps belong |
| `preparation` | the store of tokenised examples, as arrays, and what is counted on the way there |
| `batches` | the keys of a batch, and what is counted in it |

The tasks, and how their steps are placed:

| file | what it holds |
|---|---|
| `state_tracking` | `StateTracking`: Parity and Vars, generated |
| `kinship` | `Kinship`: stories about relatives, generated; windows, without steps |
| `gsm8k` | `ReasoningGSM8K`: word problems whose steps are equations |
| `two_hop` | `TwoHop`: questions over two facts, given or known by heart |
| `placement` | a rule on numbers that places the steps of GSM8K |
| `teacher` | a language model that places them |
| `align` | the command that does, by that rule or that teacher |

The path of an example: `examples(split)` -> `examples.encode_examples` (tokens, `examples.align`)
-> `preparation.prepare_examples` -> `preparation.Examples` -> `order.RowOrder` ->
`batches.ReasoningSource.batch(n)` -> the model.

To add a task: a class below `ReasoningDataModule` that writes ``examples(split)``, as
`state_tracking` does, its name here and in ``datamodules/__init__.py``, and a line in
``tests/data_modules.py``.
"""

from datamodules.reasoning.batches import reasoning_batch
from datamodules.reasoning.examples import MARKER, Example, Wording
from datamodules.reasoning.gsm8k import ReasoningGSM8K
from datamodules.reasoning.kinship import Kinship
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.reasoning.state_tracking import StateTracking
from datamodules.reasoning.two_hop import TwoHop

__all__ = [
    "MARKER",
    "Example",
    "Kinship",
    "ReasoningDataModule",
    "ReasoningGSM8K",
    "StateTracking",
    "TwoHop",
    "Wording",
    "reasoning_batch",
]
