"""Section 4.5 of Thinking States: questions that the row's model solves and the column's fails.

Shares are of the questions that the row's model solves.
"""

import pandas as pd

answers = pd.read_json("answers.jsonl", lines=True)
solves = answers.pivot(index="number", columns="model", values="right").astype(int)
fails = 1 - solves
share = (solves.T @ fails).div(solves.sum(), axis=0)
print(share)
