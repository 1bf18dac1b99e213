"""The real command: the package ``evaluate`` is found in spite of the script of that name."""

import os

from task_data import write_folder

from tests.programs import run

METRIC = '''
"""A metric that uses the package, as some of the harness' do."""

import evaluate


def results(doc, results):
    assert hasattr(evaluate, "load"), evaluate.__file__
    return {"acc": float("site-packages" in evaluate.__file__)}
'''
TASK = """
task: package
custom_dataset: !function evaluation.tasks.local_data.load
dataset_kwargs: {files: {test: "lambada/*.jsonl"}, row: {text: a}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{text}}"
doc_to_target: " a"
process_results: !function metric.results
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def test_metrics_of_the_package_are_found(checkpoint_path, tmp_path):
    (tmp_path / "metric.py").write_text(METRIC)
    (tmp_path / "package.yaml").write_text(TASK)
    data = write_folder(tmp_path / "data")
    words = ["tasks", "--ckpt", checkpoint_path, "--tasks", "package", "--include_path", tmp_path]
    done = run("evaluate.py", *words, env={**os.environ, "DATA": str(data)})
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[2].split("|")]
    assert (cells[1], cells[5], float(cells[7])) == ("package", "acc", 1)
