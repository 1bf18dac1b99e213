"""Time of multiple-choice log-likelihoods, relative to lm-eval's ``hf``.

    OMP_NUM_THREADS=1 python -m benchmarks.scoring
    OMP_NUM_THREADS=1 python -m benchmarks.scoring --layers 6 --dim 256 --heads 4
    OMP_NUM_THREADS=1 python -m benchmarks.scoring --layers 6 --dim 256 --heads 4 \
        --model LatentThoughtLM --config inner_steps=16

Both contenders have the same GPT-2 weights, tokenizer, requests and batch size. Requests are random
words in sentences of ten tokens. Their mean numbers of tokens are those that GPT-2's tokenizer
gives for the harness' requests on the published validation sets (HellaSwag: 1,000 examples);
``long`` has contexts of 200 tokens. "Whole rows" is our model when it reads each context once per
continuation. ``--model`` instead compares a method with random weights with its whole rows.
"""

import itertools
import json
import math
import random
import string
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks import harness
from benchmarks.harness import Options, Rows, in_turn
from benchmarks.step import built, outline
from lightning_models import LanguageModel, TransformerLM


class Shape(NamedTuple):
    """Mean numbers of tokens and number of choices per question.

    Attributes:
        start: Length of the common prefix of a question's continuations, in tokens.
    """

    context: float
    choices: int
    continuation: float
    start: float


SHAPES = {
    "arc_easy": Shape(27.5, 4, 4.4, 0.3),
    "hellaswag": Shape(50.6, 4, 30.2, 0.2),
    "piqa": Shape(13.5, 2, 23.0, 8.6),
    "long": Shape(200, 4, 5, 0),
}
LONGEST = 2 * round(max(shape.context + shape.continuation for shape in SHAPES.values()))
END, SPACE = "<|endoftext|>", "\u0120"
MARKS = 3
"""Additional vocabulary entries for sentence marks."""


def tokenizer_json(vocab: int) -> str:
    """Returns a byte-level BPE as JSON in which short words with a leading space are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for letters in itertools.chain.from_iterable(map(_words_of, itertools.count(1))):
        if len(ids) == vocab - 1:
            break
        ids[SPACE + letters] = len(ids)
        merges.append((SPACE + letters[:-1], letters[-1]))
    inner = Tokenizer(models.BPE(vocab=ids, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    text: str = inner.to_str()
    return text


def _words_of(size: int) -> Iterator[str]:
    return map("".join, itertools.product(string.ascii_lowercase, repeat=size))


def requests_of(shape: Shape, lexicon: list[str], questions: int) -> list[Any]:
    """Returns the requests of random questions.

    Lengths vary by 50 %. The common prefix of a question's continuations ranges from
    nothing to nearly all of the shortest one.
    """
    from lm_eval.api.instance import Instance

    draw, requests = random.Random(0), []

    def text(mean: float) -> list[str]:
        count = max(1, round(draw.uniform(0.5, 1.5) * mean))
        return ["." if n % 10 == 9 else draw.choice(lexicon) for n in range(count)]

    for question in range(questions):
        context = "".join(text(shape.context))
        texts = [text(shape.continuation) for _ in range(shape.choices)]
        shortest = min(map(len, texts))
        # the mean of u^a is 1 / (a + 1)
        power = shortest / shape.start - 1 if shape.start else math.inf
        start = texts[0][: round(shortest * draw.random() ** power)]
        for choice, choice_text in enumerate(texts):
            pair, labels = (
                (context, "".join(start + choice_text[len(start) :])),
                ("task", question, 1),
            )
            requests.append(Instance("loglikelihood", {}, pair, choice, metadata=labels))
    return requests


def gpt2_pair(options: Options) -> tuple[Any, TransformerLM]:
    """Returns ``transformers``' GPT-2 and ours with the same weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from lightning_models.transformer.import_weights import import_transformers

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=options.vocab,
        n_positions=LONGEST,
        n_embd=options.dim,
        n_layer=options.layers,
        n_head=options.heads,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    baseline = GPT2LMHeadModel(config)
    return baseline, import_transformers(baseline)


def method(options: Options) -> LanguageModel:
    """Returns a method of ``--model`` with random weights."""
    sizes = {"num_layers": options.layers, "dim": options.dim, "num_heads": options.heads}
    sizes |= {"vocab_size": options.vocab + MARKS, "block_size": LONGEST}
    fields = [f"{key}={value}" for key, value in sizes.items()]
    plain = Options(**vars(options), length=LONGEST, compile=False)
    return built(outline(options.model, [*fields, *options.config], plain), plain)


def sides(options: Options) -> tuple[Any, Any, list[str]]:
    """Returns lm-eval's model, ours with the same weights, and the single-token words.

    lm-eval's model is None for a method of ``--model``.
    """
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    from datamodules import SentenceTokenizer, Tokenizer
    from datamodules.json_tokenizer import JsonTokenizer
    from datamodules.sentences.splitters import parse_splitter
    from evaluation.tasks.adapter import HarnessModel

    baseline, contender = (None, method(options)) if options.model else gpt2_pair(options)
    tokenizer_text, size = tokenizer_json(options.vocab), options.batch
    tokenizer: Tokenizer = JsonTokenizer("words", tokenizer_text)
    if contender.reads == "sentences":
        tokenizer = SentenceTokenizer(tokenizer, parse_splitter("rules"), max_sentence_tokens=64)
    if baseline is not None:
        ends = {"eos_token": END, "bos_token": END}
        fast = PreTrainedTokenizerFast(tokenizer_object=Inner.from_str(tokenizer_text), **ends)
        device = options.device
        baseline = HFLM(pretrained=baseline.eval(), tokenizer=fast, batch_size=size, device=device)
    vocabulary = json.loads(tokenizer_text)["model"]["vocab"]
    lexicon = [" " + word[1:] for word in vocabulary if word[0] == SPACE and len(word) > 1]
    model = contender.to(options.device).eval()
    alike: dict[str, Any] = {"context": nullcontext, "progress": False}
    return baseline, HarnessModel(model, tokenizer, batch_size=size, **alike), lexicon


def rows(options: Options) -> Rows:
    """Yields one row per task."""
    baseline, contender, lexicon = sides(options)
    for name in options.tasks:
        requests = requests_of(SHAPES[name], lexicon, options.questions)

        def shared(requests: list[Any] = requests) -> list[Any]:
            return list(contender.loglikelihood(requests))

        def whole(requests: list[Any] = requests) -> list[Any]:
            with patch.object(type(contender.model), "shares_prefixes", False):
                return list(contender.loglikelihood(requests))

        def hf(requests: list[Any] = requests) -> list[Any]:
            return list(baseline.loglikelihood(requests, disable_tqdm=True))

        runs = (shared, whole) if baseline is None else (shared, whole, hf)
        times = in_turn(runs, options.rounds, cpu_time=options.cpu_time)
        seconds = torch.tensor(times)  # (runs, rounds)
        row = {"task": name, "requests": len(requests), "ours s": seconds[0].median().item()}
        row["to whole rows"] = (seconds[0] / seconds[1]).median().item()
        if baseline is not None:
            row["to hf"] = (seconds[0] / seconds[2]).median().item()
            row["whole rows to hf"] = (seconds[1] / seconds[2]).median().item()
        pairs = list(zip(shared(), runs[-1](), strict=True))
        row["largest difference, nats"] = max(abs(a[0] - b[0]) for a, b in pairs)
        yield {**row, "same greedy flags": all(a[1] == b[1] for a, b in pairs)}


def main() -> None:
    """Parses the command line and prints the table."""
    sizes = {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "batch": 16, "questions": 8}
    parser = harness.options_parser(__doc__, rounds=3)
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    clock = "Measure processor time instead of wall time, for one thread on a shared machine."
    parser.add_argument("--cpu_time", action="store_true", help=clock)
    parser.add_argument("--tasks", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--model", default=None, help="Method to time instead of GPT-2 and hf.")
    parser.add_argument(
        "--config", nargs="+", default=[], metavar="KEY=VALUE", help="Fields of its config."
    )
    harness.run(parser, rows)


if __name__ == "__main__":
    main()
