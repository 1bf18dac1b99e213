"""Fig. 5 of Thinking States: answers with the question first, by model.

``first`` is the share that is right with the question first, ``recovered`` its share of the
questions that were wrong before, ``intervention`` the share that is right if only these are asked
again.
"""

import pandas as pd

first, again = (
    pd.read_json(file, lines=True).set_index(["model", "number"])["right"]
    for file in ("before.jsonl", "after.jsonl")
)
both = pd.DataFrame({"before": first, "again": again}).dropna().astype(bool)
both["either"] = both["before"] | both["again"]
shares = both.groupby("model")[["again", "either"]].mean()
shares.columns = ["first", "intervention"]
shares["recovered"] = both[~both["before"]].groupby("model")["again"].mean()
print(shares)
