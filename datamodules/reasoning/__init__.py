"""Questions with reasoning steps and answers, for models that think before they answer.

Thinking States (Sec. 3.4, App. A.3 and A.4) aligns the steps of a solution with the tokens of the
question after which they can be inferred. Every method of latent reasoning, and chain of thought
itself, reads the same rows and lays them out for itself.

What all tasks share:

| file | what it holds |
|---|---|
| `module` | `ReasoningDataModule`: a task writes `examples(split)` |
| `examples` | `Example`: query with markers, steps, answer |
| `token_places` | from markers in a text to tokens |
| `encoding` | examples to tokens; which texts a tokenizer does not give back |
| `preparation` | writing the store, and counting what is kept |
| `reports` | what a preparation counts |
| `store` | the store of tokenised examples, as arrays |
| `batches` | the keys of a batch, and what is counted in it |
| `file_splits` | rows of splits that are files, or shares of the training rows |

The tasks, and how their steps are placed:

| file or folder | what it holds |
|---|---|
| `state_tracking` | `StateTracking`: Parity and Vars, generated |
| `kinship` | `Kinship`: stories about relatives, generated; windows, without steps |
| `gsm8k/` | `ReasoningGSM8K`: word problems whose steps are equations; a rule that places them |
| `two_hop/` | `TwoHop`: questions over two facts, given or known by heart |
| `teacher/` | a language model that places the steps of GSM8K |
| `align` | the command that places them, by that rule or that teacher |

The path of an example: `examples(split)` -> `encoding.encode_examples` (tokens,
`token_places.align`) -> `preparation.prepare_examples` -> `store.Examples` ->
`order.RowOrder` -> `batches.ReasoningSource.batch(n)` -> the model.
"""

from datamodules.reasoning.batches import reasoning_batch
from datamodules.reasoning.examples import MARKER, Example
from datamodules.reasoning.gsm8k import ReasoningGSM8K
from datamodules.reasoning.kinship import Kinship
from datamodules.reasoning.module import ReasoningDataModule, Wording
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
