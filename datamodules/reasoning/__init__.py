"""Questions with reasoning steps and answers, for models that think before they answer.

Thinking States (Sec. 3.4, App. A.3 and A.4) aligns the steps of a solution with the tokens of the
question after which they can be inferred. All methods of latent reasoning, and chain of thought,
read the same rows and build their inputs from them.

Shared by all tasks:

| file | content |
|---|---|
| `module` | `ReasoningDataModule`: a task implements `examples(split)`; splits in files |
| `examples` | `Example`: query with markers, steps, answer; tokens and positions of steps |
| `preparation` | the store of tokenised examples, as arrays, and counts of its preparation |
| `batches` | the keys of a batch, and its normalisers |

Tasks, and placement of their steps:

| file | content |
|---|---|
| `state_tracking` | `StateTracking`: Parity and Vars, generated |
| `kinship` | `Kinship`: stories about relatives, generated; windows, without steps |
| `gsm8k` | `ReasoningGSM8K`: word problems whose steps are equations |
| `two_hop` | `TwoHop`: questions over two facts, trained on or known to the base model |
| `placement` | a rule on numbers that places the steps of GSM8K |
| `teacher` | a language model that places them |
| `align` | the command that places them, by rule or by teacher |

The path of an example: `examples(split)` -> `examples.encode_examples` (tokens, `examples.align`)
-> `preparation.prepare_examples` -> `preparation.Examples` -> `order.RowOrder` ->
`batches.ReasoningSource.batch(n)` -> the model.

To add a task: subclass `ReasoningDataModule` and implement ``examples(split)``, as `state_tracking`
does, and add its name here and in ``datamodules/__init__.py``, and a line in
``tests/data_modules.py``.
"""

from datamodules.reasoning.batches import reasoning_batch
from datamodules.reasoning.examples import MARKER, Example, FixedTokens
from datamodules.reasoning.gsm8k import ReasoningGSM8K
from datamodules.reasoning.kinship import Kinship
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.reasoning.state_tracking import StateTracking
from datamodules.reasoning.two_hop import TwoHop

__all__ = [
    "MARKER",
    "Example",
    "FixedTokens",
    "Kinship",
    "ReasoningDataModule",
    "ReasoningGSM8K",
    "StateTracking",
    "TwoHop",
    "reasoning_batch",
]
