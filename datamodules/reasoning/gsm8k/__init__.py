"""Word problems whose steps are equations: GSM8K and GSM8K-Aug.

| file | what it holds |
|---|---|
| `module` | `ReasoningGSM8K`, the data module |
| `solved` | `Solved`: a problem with its equations and its answer, from the hub or from files |
| `placement` | where the steps go, by a rule on numbers |
| `mentions` | which numbers a text mentions, and where |
| `number_words` | the tables behind that |
| `marked_problems` | where the steps go, from a file that `align` wrote (option `aligned_file`) |
"""

from datamodules.reasoning.gsm8k.module import ReasoningGSM8K

__all__ = ["ReasoningGSM8K"]
