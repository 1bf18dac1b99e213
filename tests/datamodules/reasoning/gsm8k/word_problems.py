"""Small files of word problems, and of where their steps go."""

import json

NUMBERS = range(2, 32)

ROWS = [
    {
        "question": f"Ann has {n} cats. Bob has twice as many. How many in all?",
        "answer": f"Bob: {n}*2=<<{n}*2={2 * n}>>{2 * n}.\n"
        f"Sum: <<{n}+{2 * n}={3 * n}>>{3 * n},000\n#### {3 * n},000",
    }
    for n in NUMBERS
]

MARKED = "Ann has {n} cats. Bob has twice as many.<T> How many in all?<T>"


def equations(n):
    return [f"<<{n}*2={2 * n}>>", f"<<{n}+{2 * n}={3 * n}>>"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
