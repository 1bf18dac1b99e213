"""Studies: training, evaluation and a report of several runs on the same text.

    make study METHOD=thoughtbubbles
    python -m studies thoughtbubbles --steps 5   # a trial

A study is a YAML file of ``configs/studies``. Its runs are trained through ``train.py`` and scored
through ``evaluate.py``. Finished steps are skipped, so a stopped study resumes.

| File | Content |
|---|---|
| ``study`` | declarations: ``Study``, ``Run``, ``AnalysisSettings``, ``Search``, read from YAML |
| ``runner`` | commands of the runs, skipping recorded steps |
| ``tune`` | hyperparameter search for the runs: ``python -m studies.tune`` |
| ``results_page`` | results, tables, and the marked section of the Markdown file |
| ``figures`` | figures of a page |
| ``__main__`` | the command line |
"""
