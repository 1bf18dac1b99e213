"""A folder of local data sets in their real formats, and requests of the harness."""

import json

TASK = """
task: {name}
custom_dataset: !function evaluation.tasks.local_data.load
dataset_kwargs: {{files: {{test: "lambada/*.jsonl"}}, row: {{text: a}}}}
output_type: {kind}
test_split: test
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
metric_list: [{{metric: {metric}, aggregation: {mean}, higher_is_better: true}}]
"""


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def arc(question, texts, answer, labels="ABCD"):
    choices = {"text": texts, "label": list(labels[: len(texts)])}
    return {"id": "x", "question": question, "choices": choices, "answerKey": answer}


def pair(good, bad, number=0):
    return {"sentence_good": good, "sentence_bad": bad, "field": "syntax", "pairID": str(number)}


def write_task(path, kind, metric, text="{{text}}", target="{{text}}", mean="mean", more=""):
    """Writes a task file of the user's on the texts of LAMBADA; ``more`` is further YAML."""
    fields = {"kind": kind, "metric": metric, "text": text, "target": target, "mean": mean}
    path.write_text(TASK.format(name=path.stem, more=more, **fields))


def request(*args):
    from lm_eval.api.instance import Instance

    return Instance(request_type="x", doc={}, arguments=args, idx=0, metadata=("task", 0, 1))


def write_folder(root):
    """Writes the layout of docs/tasks.md below ``root``; returns it."""
    from pathlib import Path

    names = Path(__file__).resolve().parents[1] / "configs/tasks/_blimp_paradigms"
    paradigms = [
        line.split("- task: ")[1].strip() for line in names.open() if line.startswith("  - task: ")
    ]
    lines(
        root / "lambada/lambada_test.jsonl",
        [
            {"text": "the thought reads the memory and\n\nwrites the latent state"},
            {"text": '"a state," she said \u2014 and the memory reads a thought'},
            {"text": "memory of the thought writes the latent thought state memory"},
        ],
    )
    lines(
        root / "hellaswag/validation_1000.jsonl",
        [
            {
                "ind": 1,
                "query": "Reading: The memory",
                "choices": ["reads.", "a", "b c"],
                "gold": 0,
            },
            {"ind": 2, "query": "A thought", "choices": ["of state", "writes", "x."], "gold": 2},
        ],
    )
    lines(
        root / "piqa/validation_labeled.jsonl",
        [
            {"goal": "read a thought", "sol1": "use memory ", "sol2": "use  state", "label": 1},
            {"goal": "write", "sol1": "the latent", "sol2": "caf\u00e9 state", "label": 0},
        ],
    )
    for name in ("arc_easy", "arc_challenge"):
        rows = [
            arc("Which state reads?", ["the memory", "a thought", "latent", "none"], "B"),
            arc("What writes?", ["state", "memory of it", "thought"], "3", labels="123"),
        ]
        lines(root / name / "test.jsonl", rows)
        lines(root / name / "validation.jsonl", rows[::-1])
    lines(
        root / "winogrande/validation.jsonl",
        [
            {
                "sentence": "The thought reads the memory, for _ writes.",
                "option1": "the thought",
                "option2": "the memory",
                "answer": str(answer),
            }
            for answer in (1, 2)
        ],
    )
    question = {
        "support": " A memory holds thoughts.",
        "question": "What holds thoughts?",
        "correct_answer": "memory",
        **{f"distractor{n}": text for n, text in enumerate(("state", "token", "fork"), 1)},
    }
    lines(root / "sciq/test.jsonl", [question, {**question, "support": ""}])
    lines(root / "sciq/validation.jsonl", [question])
    problems = [
        {"question": "What is read?", "answer": "B", "options": ["a", "b", "c", "d"]},
        {"question": "It is  _  .", "answer": "C", "options": ["w", "x", "y", "z"]},
    ]
    lines(
        root / "race/test.jsonl",
        [
            {"article": "A thought reads.", "problems": str(problems)},
            {"article": "A memory.", "problems": str(problems[::-1])},
        ],
    )
    for name in paradigms:
        rows = [
            pair("The memory reads.", "The memory read.", 0),
            pair("A thought.", "Thought a.", 1),
        ]
        lines(root / "blimp/first200" / f"{name}.jsonl", rows)
    return root
