"""``evaluate.py reversal``: the father-son probe of the reversal curse.

"The son of X is Y." is followed by "The son of X is" (normal) or "The father of Y is" (reversed).
The likelihood of the answer is compared with the likelihood of the other name (section 3.4 and
Fig. 5 of the Thought Gestalt paper; an error in reverse is the in-context reversal curse).
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from tqdm import tqdm

from datamodules import Tokenizer
from evaluation.arguments import add_file_arguments, add_model_arguments, load_with_tokenizer
from evaluation.cost import GeneratedSteps, cost_cells, non_embedding_parameters, price
from evaluation.devices import Precision, autocast, float32_products, pick_device
from evaluation.figures import make_panels, write_picture
from evaluation.load import build_data
from evaluation.output import check_targets, format_table, report_result
from evaluation.pretrained import Pretrained
from evaluation.provenance import count_train_tokens, describe_result
from evaluation.tables import as_aligned
from lightning_models import LanguageModel
from lightning_models.layers import recording

# ---- names

_TEXT = """
Aaron Adam Adrian Alan Albert Alex Alexander Alfred Allen Andrew Andy Anthony Arnold Arthur
Barry Ben Benjamin Bernard Bill Bob Brad Bradley Brandon Brendan Brent Brett Brian Bruce Bryan
Calvin Cameron Carl Charles Chris Christopher Clarence Clifford Colin Connor Craig Curtis Dan
Daniel Darren Dave David Dennis Derek Donald Doug Douglas Dylan Edgar Edward Edwin Elliott Eric
Ernest Ethan Eugene Evan Francis Frank Fred Frederick Gary Gavin Geoffrey George Gerald Gilbert
Glenn Gordon Graham Greg Gregory Harold Harry Harvey Henry Herbert Herman Howard Hugh Ian Isaac
Jack Jacob Jake James Jason Jeff Jeffrey Jeremy Jesse Jim Joe Joel John Jonathan Joseph Josh
Joshua Justin Karl Keith Ken Kenneth Kevin Kyle Larry Lawrence Leo Leon Leonard Lloyd Louis
Lucas Luke Malcolm Marcus Mark Martin Marvin Matthew Maurice Michael Mitchell Nathan Neil
Nicholas Noah Norman Oliver Oscar Owen Patrick Paul Peter Phil Philip Ralph Raymond Richard Rick
Robert Roger Roland Ron Ronald Roy Russell Ryan Sam Samuel Scott Sean Seth Shawn Simon Spencer
Stanley Stephen Steve Steven Stewart Stuart Ted Theodore Thomas Tim Timothy Todd Tom Tony Travis
Trevor Victor Vincent Walter Warren Wayne Wesley William
"""
NAMES = tuple(_TEXT.split())
"""Common English first names of men."""

Pair = tuple[str, str]
"""Names of father and son."""


def single_tokens(
    names: Iterable[str], prompt: Callable[[Sequence[str]], list[int]]
) -> dict[str, int]:
    """Returns the ids of the names that are a single token after a space.

    Names are encoded at the end of a query, because tokenizers may treat the start of a text
    specially. If names share an id, the first one is kept.
    """
    stem = "The son of the man is"
    before = prompt([stem])
    by_id: dict[int, str] = {}
    for name in names:
        ids = prompt([f"{stem} {name}"])
        if len(ids) == len(before) + 1 and ids[:-1] == before:
            by_id.setdefault(ids[-1], name)
    return {name: i for i, name in by_id.items()}


def draw_pairs(names: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Draws distinct ordered pairs of at least two names uniformly; all if there are fewer."""
    others = len(names) - 1
    total = len(names) * others
    drawn = random.Random(seed).sample(range(total), min(count, total))
    pairs = (divmod(idx, others) for idx in drawn)
    return [(names[i], names[j + (j >= i)]) for i, j in pairs]


# ---- models: our checkpoints, and models of ``transformers``


class Probed(NamedTuple):
    """A model to probe."""

    tokenizer: str
    """Name of the tokenizer, for messages."""
    prompt: Callable[[Sequence[str]], list[int]]
    """Encodes sentences, the last one incomplete."""
    log_probs: Callable[[Tensor], Tensor]
    """Returns float32 (B, V) log-probabilities after prompts of equal length, int64 (B, P)."""
    model: LanguageModel | None = None
    """Model to count FLOPs of, or None for models of ``transformers``."""


def probe_model(model: LanguageModel, tokenizer: Tokenizer, precision: Precision = "32") -> Probed:
    """Returns a model of this project, in eval mode, with its tokenizer."""
    log_probs = partial(_decoded_log_probs, model, precision)
    return Probed(tokenizer.name, tokenizer.sentence_prompt_ids, log_probs, model)


def _decoded_log_probs(model: LanguageModel, precision: Precision, prompts: Tensor) -> Tensor:
    """Decodes each row until it is ready, and then removes it from the batch."""
    prompts = prompts.to(model.device)
    lengths = torch.full_like(prompts[:, 0], prompts.shape[1])
    tokens, rows = prompts[:, -1], torch.arange(len(prompts), device=prompts.device)
    answers: dict[int, Tensor] = {}
    with autocast(model.device, precision):
        # All rows share a random stream, so that normal and reversed questions are compared under
        # equal draws, independent of the batch size.
        cache = model.init_cache(prompts, lengths, 1, [(0, 0)] * len(prompts))
        while len(rows):
            logits, ready = model.decode_step(cache, tokens)  # (b, V) and (b,)
            result = logits[ready].float().log_softmax(dim=-1)
            answers.update(zip(rows[ready].tolist(), result, strict=True))
            waiting = (~ready).nonzero()[:, 0]
            if 0 < len(waiting) < len(rows):
                cache.select(waiting)
            tokens, rows = tokens[waiting], rows[waiting]
    return torch.stack([answers[row] for row in range(len(prompts))])


def probe_pretrained(pretrained: Pretrained) -> Probed:
    """Returns a causal language model of ``transformers``, which reads the joined sentences."""

    def prompt(sentences: Sequence[str]) -> list[int]:
        return pretrained.encode_documents(["".join(sentences)])

    return Probed(pretrained.source, prompt, partial(_pretrained_log_probs, pretrained))


def _pretrained_log_probs(pretrained: Pretrained, prompts: Tensor) -> Tensor:
    length, context = prompts.shape[1], pretrained.context
    if context is not None and length > context:
        raise ValueError(
            f"hf: a prompt has {length} tokens, more than the model's context of {context}; use a "
            "model with a longer context"
        )
    with float32_products(pretrained.precision):
        logits: Tensor = pretrained.model(prompts.to(pretrained.model.device)).logits[:, -1]
    return logits.float().log_softmax(dim=-1)


# ---- the probe


CONDITIONS = ("normal", "reversed")
STATEMENT = "The son of {father} is {son}."
QUERIES = {"normal": " The son of {father} is", "reversed": " The father of {son} is"}

BATCH = 32
"""Number of prompts in a batch."""


@torch.inference_mode()
def ask(probed: Probed, pairs: Sequence[Pair], ids: Mapping[str, int]) -> pd.DataFrame:
    """Asks a model about each pair of names; returns a row for each, float64.

    The columns are, for both conditions, ``<condition>_target`` and ``_distractor`` (negative
    log-likelihoods of the right and the other name in nats), ``_margin`` (the second minus the
    first) and ``_error_rate`` (1 if the margin is negative, so that the other name is likelier).
    """
    prompts = [one_prompt(probed, pair, condition) for condition in CONDITIONS for pair in pairs]
    fathers, sons = ([ids[name] for name in names] for names in zip(*pairs, strict=True))
    # target and distractor of each prompt, (2 N, 2)
    candidates = torch.tensor([[*sons, *fathers], [*fathers, *sons]]).t()
    nll = torch.empty(len(prompts), 2, dtype=torch.float64)
    for rows in tqdm(equal_lengths(prompts), desc="asking", unit=" batches", disable=None):
        log_probs = probed.log_probs(torch.tensor([prompts[row] for row in rows])).cpu()
        nll[rows] = -log_probs.gather(1, candidates[rows]).double()
    answers = pd.DataFrame()
    for condition, part in zip(CONDITIONS, nll.split(len(pairs)), strict=True):
        target, distractor = part.numpy().T
        answers[f"{condition}_target"], answers[f"{condition}_distractor"] = target, distractor
        answers[f"{condition}_margin"] = distractor - target
        answers[f"{condition}_error_rate"] = (distractor < target).astype(float)
    return answers


def one_prompt(probed: Probed, pair: Pair, condition: str) -> list[int]:
    """Returns the ids of the statement about a pair, followed by the query of a condition."""
    father, son = pair
    parts = (STATEMENT, QUERIES[condition])
    return probed.prompt([part.format(father=father, son=son) for part in parts])


def equal_lengths(prompts: Sequence[Sequence[int]], max_rows: int = BATCH) -> list[list[int]]:
    """Groups prompts of equal length, at most ``max_rows`` per group, so none needs padding."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    return [
        rows[start : start + max_rows]
        for rows in by_length.values()
        for start in range(0, len(rows), max_rows)
    ]


def measure_reversal(
    probed: Probed, names: Sequence[str] = NAMES, *, pairs: int = 1000, seed: int = 0
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Probes a model; returns the answers, see ``ask``, and their summary for the JSON file.

    The summary has means, their standard errors for independent pairs (nan for one pair), and, for
    a model of this project, costs. Names that are not a single token are left out.

    Raises:
        ValueError: If fewer than two names are left.
    """
    ids = single_tokens(names, probed.prompt)
    if len(ids) < 2:
        raise ValueError(
            f"names: {len(ids)} of {len(names)} are single tokens of the tokenizer "
            f"({probed.tokenizer}), and the probe needs 2; use a model whose tokenizer has whole "
            "words (gpt2)"
        )
    drawn = draw_pairs(list(ids), pairs, seed)
    steps, start = GeneratedSteps(), time.perf_counter()
    with recording(generated_steps=steps.count):
        answers = ask(probed, drawn, ids)
    seconds, cost = time.perf_counter() - start, {}
    if probed.model is not None:
        length = len(one_prompt(probed, drawn[0], "normal"))  # all equal: names are single tokens
        cost = price(probed.model, length, steps.mean, seconds)
    return answers, {
        **answers.mean().to_dict(),
        "pairs": len(answers),
        "names": {"used": len(ids), "left_out": len(names) - len(ids)},
        "standard_errors": answers.sem().to_dict(),
        **cost,
    }


# ---- table and figure


LABELS = {
    "target": "NLL of the target (nats)",
    "distractor": "NLL of the distractor (nats)",
    "margin": "margin (nats)",
    "error_rate": "error rate",
}
SOURCE = ("model", "parameters", "train_tokens", "checkpoint", "hf")
"""Keys of a result that identify the model."""


def reversal_table(result: Mapping[str, Any]) -> str:
    """Formats the result of the command as a table."""
    errors, names = result["standard_errors"], result["names"]
    cells = {
        condition: [
            f"{result[f'{condition}_{key}']:.4f} +- {errors[f'{condition}_{key}']:.4f}"
            for key in LABELS
        ]
        for condition in CONDITIONS
    }
    facts = {
        "pairs": f"{result['pairs']:,}",
        "names": f"{names['used']} ({names['left_out']} left out, not a single token)",
        "tokenizer": str(result["settings"]["tokenizer"]),
        **cost_cells(result),
        **{key: str(result[key]) for key in SOURCE if result.get(key) is not None},
    }
    table = as_aligned(pd.DataFrame(cells, index=list(LABELS.values())))
    return f"{table}\n\n{format_table(facts)}"


COLOURS = {"target": "#3f9c6b", "distractor": "#c0443c"}
MAX_POINTS = 500
WIDTH = 0.5
"""Width of the cloud of points."""


def reversal_figure(answers: pd.DataFrame, title: str) -> Any:
    """Draws the NLL of targets (green) and distractors (red) for each condition (Fig. 5, bottom).

    Each pair is a point, with means and their standard errors on top; the axis is inverted, so that
    higher is likelier.
    """
    figure, panels = make_panels((6.4, 4.2), 2, sharey=True)
    sample = answers[:: -(-len(answers) // MAX_POINTS)]  # an evenly spaced part of the pairs
    # jitter by a low-discrepancy sequence, which needs no random numbers
    spread = WIDTH * (pd.RangeIndex(len(sample)).to_numpy() * 0.618034 % 1 - 0.5)
    style = {"fmt": "D", "markersize": 7, "capsize": 4, "markeredgecolor": "white"}
    for ax, condition in zip(panels, CONDITIONS, strict=True):
        for x, (candidate, color) in enumerate(COLOURS.items()):
            key = f"{condition}_{candidate}"
            ax.scatter(x + spread, sample[key], s=8, alpha=0.35, color=color, linewidths=0)
            ax.errorbar(x, answers[key].mean(), answers[key].sem(), color=color, **style)
        ax.set_xticks(range(2), COLOURS)
        ax.set_xlim(-0.6, 1.6)
        ax.set_title(condition, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
    panels[0].set_ylabel("NLL of the first answer token (nats, inverted)")
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


# ---- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser, required=False)
    parser.add_argument(
        "--hf",
        type=str | None,
        default=None,
        help="Hub name or folder of a causal language model of transformers, instead of --ckpt; "
        "--precision bf16 rounds all of its weights.",
    )
    parser.add_argument(
        "--pairs", type=PositiveInt, default=1000, help="Number of pairs of names to ask about."
    )
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Seed of the draw of pairs.")
    add_file_arguments(parser, output="JSON file to write.", plot="PNG or SVG file to write.")


def run(settings: Namespace) -> None:
    """Asks the model, prints a table, and writes the requested files."""
    _check(settings)
    target, picture = check_targets(output=settings.output, plot=settings.plot)
    options = {key: settings[key] for key in ("pairs", "seed", "precision")}
    probed, provenance = (_load_own if settings.hf is None else _load_hub)(settings, options)
    answers, summary = measure_reversal(probed, pairs=settings.pairs, seed=settings.seed)
    result = {**summary, **provenance}
    report_result(reversal_table(result), result, target)
    if picture is not None:
        write_picture(reversal_figure(answers, str(settings.hf or settings.ckpt)), picture)


def _check(settings: Namespace) -> None:
    if (settings.ckpt is None) == (settings.hf is None):
        raise ValueError("give one model: --ckpt CHECKPOINT or --hf NAME_OR_FOLDER")
    if settings.hf is not None and (settings["set"] or settings.which == "best"):
        raise ValueError("set and which are options of checkpoints; leave them out with --hf")


def _load_own(settings: Namespace, options: Mapping[str, Any]) -> tuple[Probed, dict[str, Any]]:
    checkpoint, model, tokenizer = load_with_tokenizer(settings)
    try:
        train_tokens = count_train_tokens(checkpoint, build_data(checkpoint))
    except ValueError:  # the training text is not prepared here, and the probe does not need it
        train_tokens = None
    provenance = {
        "parameters": non_embedding_parameters(model),
        "train_tokens": train_tokens,
        "hf": None,
        **describe_result(checkpoint, model, tokenizer, settings.precision, options),
    }
    return probe_model(model, tokenizer, settings.precision), provenance


def _load_hub(settings: Namespace, options: Mapping[str, Any]) -> tuple[Probed, dict[str, Any]]:
    pretrained = Pretrained(settings.hf, pick_device(settings.device), settings.precision)
    options = {"tokenizer": settings.hf, **options, "device": str(pretrained.model.device)}
    source = {"model": type(pretrained.model).__name__, "checkpoint": None, "hf": settings.hf}
    return probe_pretrained(pretrained), {**source, "settings": options}
