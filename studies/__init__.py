"""Studies: runs on the same text, trained, evaluated and reported.

    make study METHOD=thoughtbubbles
    python -m studies thoughtbubbles --steps 5   # a trial

A study is a YAML file of ``configs/studies``. Its runs are trained through ``train.py`` and scored
through ``evaluate.py``; what is finished is not done again, so a stopped study resumes.

| File | What it holds |
|---|---|
| ``study`` | declarations: ``Study``, ``Run``, ``AnalysisSettings``, ``Search``, read from YAML |
| ``runner`` | commands of the runs, executed where the records do not have them |
| ``tune`` | hyperparameter search of the runs: ``python -m studies.tune`` |
| ``results_page`` | results, tables, figure, and the marked section of the Markdown file |
| ``__main__`` | the command line |
"""
