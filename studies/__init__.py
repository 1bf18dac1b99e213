"""Evidence that a method works: several runs on the same text, compared in a report.

    make study METHOD=thoughtbubbles
    python -m studies thoughtbubbles --steps 5   # does everything work?

A study trains its runs one after the other through ``train.py`` and scores them through
``evaluate.py``, so what is measured is what users run. What is finished is not done again: a study
that was stopped goes on where it stood.

| File | What it holds |
|---|---|
| ``study`` | what a study declares: ``Study``, ``Run``, ``Evaluation``, ``Analysis``, ``Column`` |
| ``thoughtbubbles`` | a study; each method has such a file |
| ``catalogue`` | the studies by name |
| ``commands`` | the command lines of ``train.py`` and ``evaluate.py`` |
| ``runner`` | runs what is not done yet |
| ``processes`` | one command after the other, with a log file each |
| ``console`` | a line for each run, with the time left |
| ``results`` | what finished runs left behind |
| ``curves`` | validation against tokens and FLOPs |
| ``tables`` | Markdown tables over runs and seeds |
| ``report`` | the Markdown file, of which only a marked section is generated |

A new study is a file with a ``STUDY`` and a line in ``catalogue``.
"""

from studies.study import (
    Analysis,
    CheckpointOf,
    Column,
    Evaluation,
    Run,
    Study,
    StudyError,
    Text,
)

__all__ = [
    "Analysis",
    "CheckpointOf",
    "Column",
    "Evaluation",
    "Run",
    "Study",
    "StudyError",
    "Text",
]
