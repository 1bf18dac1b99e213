"""Every data module the data contract runs on: one line adds one.

Options name files of `write_files` by their path in the folder that holds them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datamodules

PAGES = [f"Page {i} says. " + "A word of it. " * (i % 7 + 1) for i in range(60)]
TOPICS = ("ArXiv", "Wikipedia (en)", "Github")
ARTICLE = "\n = Title {i} = \n\n Text of {i} . \n"
SOLVED = "Twice {i} is <<{i}*2={n}>>{n}.\n#### {n}"


def write_files(folder: Path) -> None:
    """Writes pages (plain, with the names of collections, and as articles) and word problems."""

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines("pages.jsonl", [{"text": page} for page in PAGES])
    (folder / "pages").mkdir(exist_ok=True)
    lines("pages/train.jsonl", [{"text": page} for page in PAGES])
    metas = [{"pile_set_name": TOPICS[i % 3]} for i in range(len(PAGES))]
    lines("pile.jsonl", [{"text": t, "meta": m} for t, m in zip(PAGES, metas, strict=True)])
    (folder / "wiki.raw").write_text("".join(ARTICLE.format(i=i) for i in range(60)))
    solved = [SOLVED.format(i=i, n=2 * i) for i in range(60)]
    problems = [{"question": f"What is twice {i}?", "answer": a} for i, a in enumerate(solved)]
    lines("problems.jsonl", problems)


@dataclass(frozen=True)
class DataModuleCase:
    """A data module, small.

    Attributes:
        kind: Its name in `datamodules`.
        options: What it takes besides its cache.
        bad: Options out of their range, whose key the message names.
        trains: Whether it has a train split.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    bad: tuple[dict[str, Any], ...] = ()
    trains: bool = True

    def build(self, **options: Any) -> Any:
        defaults = {"cache_dir": "cache"} if "corpus" not in self.options else {}
        return getattr(datamodules, self.kind)(**{**defaults, **self.options, **options})


WINDOWS = {"block_size": 16, "batch_size": 4, "tokenizer": "bytes"}
PAGES_FILE = {**WINDOWS, "data_files": "pages.jsonl"}
INNER = {
    "class_path": "datamodules.LocalText",
    "init_args": {"data_files": "pages.jsonl", "cache_dir": "cache", "val_fraction": 0.2},
}
STREAMS = {
    "corpus": INNER,
    "batch_size": 4,
    "batch_tokens": 150,
    "max_sentences": 4,
    "curriculum_step": 3,
    "curriculum_epochs": 1,
}
STATES = {
    "train_examples": 40,
    "val_examples": 9,
    "test_examples": 7,
    "block_size": 1500,
    "batch_size": 4,
}
STORIES = {"train_stories": 40, "val_stories": 9, "test_stories": 12, "block_size": 640}
GENERATED = {"train_documents": 12, "val_documents": 4, "test_documents": 3, "length": 10}
BAD_GENERATED = (
    {"task": "sorting"},
    {"length": 1},
    {"held_out_length": 1},
    {"train_documents": 0},
    {"val_documents": -1},
    {"test_documents": -1},
    {"document_seed": -1},
)
WORLD = {"works": 6, "people": 8, "companies": 4, "cities": 4, "countries": 3, "batch_size": 4}
BAD_SENTENCES = (
    {"max_sentences": 0},
    {"curriculum_step": -1},
    {"curriculum_epochs": 0},
    {"curriculum_limit": 3},
    {"batch_tokens": 63},
    {"batch_size": 0},
    {"splitter": "dots"},
    {"splitter": "spans:65"},
    {"language": "English"},
)
BAD_STATES = (
    {"task": "coin"},
    {"operations": []},
    {"operations": (0, 5)},
    {"test_operations": (40, 11)},
    {"train_examples": 0},
    {"val_examples": -1},
    {"test_examples": -1},
    {"example_seed": -1},
    {"variables": 0},
    {"variables": 27},
    {"modulus": 1},
    {"answer_prefix": ""},
    {"step_separator": ""},
    {"max_length": 0},
    {"block_size": 0},
    {"batch_size": 0},
    {"seed": -1},
    {"train_windows": "shuffled"},
    {"tokenizer": "gpt5"},
)
BAD_STORIES = (
    {"hops": []},
    {"hops": [0]},
    {"test_hops": [2, 13]},
    {"train_stories": 0},
    {"val_stories": -1},
    {"distractors": 11},
    {"story_seed": -1},
    {"loss_on": "story"},
    {"eval_stride": 8},
)
BAD_WORLDS = (
    {"people": 1},
    {"knowledge_seed": -1},
    {"steps": "all"},
    {"question_first": True},
    {"known_file": "none.jsonl"},
    {"revision": "x"},
    {"dataset": "soheeyang/TwoHopFact", "data_files": "facts.csv"},
)
OUT_OF_RANGE = (
    {"block_size": 0},
    {"batch_size": -1},
    {"seed": -1},
    {"train_windows": "shuffled"},
    {"report": "none"},
    {"eval_stride": 0},
    {"tokenizer": "gpt5"},
    {"num_proc": 0},
    {"val_fraction": 0.6, "test_fraction": 0.4},
)

DATA_MODULES = [
    DataModuleCase(
        "PythonDocs",
        {**WINDOWS, "block_size": 256, "batch_size": 32},
        (*OUT_OF_RANGE, {"min_docstring": -1}),
    ),
    DataModuleCase("LocalText", {**PAGES_FILE, "tokenizer": "bpe:270"}, ({"separator": "("},)),
    DataModuleCase("LocalText", {**PAGES_FILE, "train_windows": "random"}),
    DataModuleCase(
        "OpenWebText",
        {**PAGES_FILE, "val_documents": 9},
        (
            {"val_documents": -1},
            {"revision": "x"},
            {"split": "first"},
            {"split": "nanogpt", "train_tokens": 100},
            {"split": "nanogpt", "test_fraction": 0.1},
            {"split": "nanogpt", "val_documents": 3},
        ),
    ),
    DataModuleCase("OpenWebText", {**PAGES_FILE, "split": "nanogpt"}),
    DataModuleCase(
        "PeS2o", {**PAGES_FILE, "val_fraction": 0.1}, ({"train_tokens": 0}, {"version": "v1"})
    ),
    DataModuleCase(
        "Pile", {**WINDOWS, "data_files": "pile.jsonl", "pile_sets": ["ArXiv"], "val_fraction": 0.1}
    ),
    DataModuleCase(
        "Pile", {**PAGES_FILE, "val_fraction": 0.1}, ({"pile_sets": ["Wiki"]}, {"copy": "x"})
    ),
    DataModuleCase(
        "WikiText103",
        {**WINDOWS, "data_files": "wiki.raw", "shuffle_seed": 3},
        ({"level": "char"}, {"shuffle_seed": -1}),
    ),
    DataModuleCase(
        "HubText", {**WINDOWS, "dataset": "pages"}, ({"dataset": "./none"}, {"train_tokens": 0})
    ),
    DataModuleCase(
        "ZeroShotText",
        {**PAGES_FILE, "set_name": "lm1b"},
        ({"set_name": "ptbb"}, {"revision": "x"}),
        trains=False,
    ),
    DataModuleCase("SyntheticText", {**WINDOWS, **GENERATED}, BAD_GENERATED),
    DataModuleCase("Sentences", STREAMS, BAD_SENTENCES),
    DataModuleCase("Sentences", {**STREAMS, "splitter": "spans:9", "max_sentence_tokens": 9}),
    DataModuleCase(
        "SentenceWindows",
        {"corpus": INNER, "block_size": 48, "batch_size": 4},
        ({"block_size": 0},),
    ),
    DataModuleCase("StateTracking", {**STATES, "operations": [20, 21]}, BAD_STATES),
    DataModuleCase(
        "StateTracking",
        {**STATES, "task": "vars", "tokenizer": "bpe:270", "operations": [5, 6]},
    ),
    DataModuleCase("Kinship", {**STORIES, "batch_size": 4}, BAD_STORIES),
    DataModuleCase("TwoHop", {**WORLD, "val_fraction": 0.2, "test_fraction": 0.1}, BAD_WORLDS),
    DataModuleCase(
        "ReasoningGSM8K",
        {
            "data_files": "problems.jsonl",
            "val_fraction": 0.2,
            "test_fraction": 0.1,
            "batch_size": 4,
        },
        ({"batch_size": 0}, {"dataset": "gsm8k"}, {"revision": "x"}),
    ),
]
