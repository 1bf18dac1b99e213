"""Finds the facts of TwoHopFact that a base model knows, for ``--data.known_file``.

Each fact is asked for as the public sets ask, as a sentence to be continued, greedily, with ten new
tokens. It is known if a name of its object stands in their first line as whole words, in any case
(Biran et al., arXiv 2406.12775).
"""

import json
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules.reasoning.two_hop import read_chains

source, table, output = "Qwen/Qwen2.5-1.5B", "TwoHopFact.csv", "known.jsonl"
tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().to(device)

facts = {}  # by question; the first of several counts
for chain in read_chains(Path(table)):
    for fact in (chain.first, chain.second):
        facts.setdefault(fact.question, fact)
rows = []
order = sorted(facts, key=len)
for batch in (order[start : start + 32] for start in range(0, len(order), 32)):
    inputs = tokenizer(batch, return_tensors="pt", padding=True).to(device)
    written = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    new = written[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    for question, text in zip(batch, texts, strict=True):
        line = text.strip().split("\n")[0]
        names = [re.escape(name.strip()) for name in facts[question].names if len(name.strip()) > 1]
        known = any(re.search(rf"(?<!\w){name}(?!\w)", line, re.IGNORECASE) for name in names)
        fact = {"question": question, "object": facts[question].object}
        rows.append({**fact, "written": line, "known": known})
Path(output).write_text("".join(json.dumps(row) + "\n" for row in rows))
print(sum(row["known"] for row in rows), "of", len(rows), "facts are known")
