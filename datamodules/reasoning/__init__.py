"""Questions with reasoning steps and answers, for models that think before they answer.

Thinking States (Sec. 3.4, App. A.3 and A.4) aligns the steps of a solution with the tokens of the
question behind which they can be inferred. Every method of latent reasoning, and chain of thought
itself, reads the same rows and lays them out for itself.

| file | what it holds |
|---|---|
| `examples` | `Example`: query with markers, steps, answer |
| `alignment` | from markers in a text to tokens |
| `encoding` | examples to tokens; which texts a tokenizer does not give back |
| `preparation` | writing the store, and counting what is kept |
| `reports` | what a preparation counts |
| `store` | the store of tokenised examples, as arrays |
| `batches` | which example is row n, and the keys of a batch |
| `module` | `ReasoningDataModule`: write `examples(split)` |
| `state_tracking` | `StateTracking`: Parity and Vars, generated |
| `gsm8k` | `ReasoningGSM8K`: word problems whose steps are equations; GSM8K-Aug |
| `solved`, `file_splits` | its problems, from the hub or files; splits that are files |
| `mentions`, `number_words`, `placement` | where a step can be taken: a rule on numbers |
| `teacher`, `teacher_prompt`, `chat_endpoint` | the same, by a language model |
| `align`, `aligned_file` | the command that places steps, and the files it writes |
| `two_hop` | `TwoHop`: questions over two facts, given or known by heart |
| `knowledge`, `hops`, `two_hop_files` | generated facts, their wording, files of the public set |

The path of an example: `examples(split)` -> `encoding.encode_examples` (tokens, `alignment.align`)
-> `preparation.prepare_examples` -> `store.Examples` -> `batches.RowOrder` ->
`batches.ReasoningSource.batch(n)` -> the model.
"""

from datamodules.reasoning.batches import reasoning_batch
from datamodules.reasoning.examples import MARKER, Example
from datamodules.reasoning.gsm8k import ReasoningGSM8K
from datamodules.reasoning.module import ReasoningDataModule, Wording
from datamodules.reasoning.state_tracking import StateTracking
from datamodules.reasoning.two_hop import TwoHop

__all__ = [
    "MARKER",
    "Example",
    "ReasoningDataModule",
    "ReasoningGSM8K",
    "StateTracking",
    "TwoHop",
    "Wording",
    "reasoning_batch",
]
