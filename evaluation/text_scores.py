"""Log-likelihoods of texts and logits of tokens, computed in batches for ``LoadedModel``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from callbacks.analysis.token_text import pieces
from datamodules import SentenceTokenizer, Tokenizer
from datamodules.text import IGNORE
from evaluation.devices import Precision
from evaluation.scoring import Totals, score_batch
from evaluation.tasks.readers import Reader, Segment, label, scored_of, stream_of
from evaluation.text_results import TextScore, TokenLogits
from lightning_models import LanguageModel
from lightning_models.layers import recording
from lightning_models.outputs import Likelihood

ROWS = 32
"""Number of rows in a batch."""


# ---- scores


@dataclass(frozen=True)
class _Request:
    """A text to score after its context, split into segments."""

    text: str
    context: str
    parts: list[Segment]
    whole: bool
    """Whether there is no context, see ``Reader.batch``."""

    @property
    def length(self) -> int:
        return sum(len(part.tokens) for part in self.parts)


def score_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    reader: Reader,
    *,
    from_prefixes: bool,
    precision: Precision,
) -> list[TextScore]:
    """Scores texts after their contexts.

    Args:
        model: The model in eval mode.
        tokenizer: The tokenizer that the model was trained with.
        texts: Pairs of a text and its context, which is empty if the text starts a document.
        reader: Reader of texts as documents, see ``Reader``.
        from_prefixes: Whether to score each token given its prefix only.
        precision: Precision of the matrix products.

    Raises:
        ValueError: If a text has no tokens.
    """
    requests = []
    for text, context in texts:
        parts = reader.segments(context, text)
        if not parts:
            raise ValueError(
                f"text ({text!a}) has no tokens in {tokenizer.name}; give at least one token"
            )
        if from_prefixes:
            parts = [prefix for part in parts for prefix in part.prefixes()]
        requests.append(_Request(text, context, parts, not context and not from_prefixes))
    scores = []
    for request, (nats, of_text, likelihood) in zip(
        requests, _nats(model, requests, reader, precision), strict=True
    ):
        likelihood, causal = label(
            likelihood, model.causal, from_prefixes=from_prefixes, has_context=bool(request.context)
        )
        scores.append(_text_score(tokenizer, request, nats, of_text, likelihood, causal))
    return scores


def _nats(
    model: LanguageModel, requests: Sequence[_Request], reader: Reader, precision: Precision
) -> list[tuple[Tensor, float, Likelihood]]:
    """Returns for each request float64 nats of its tokens (N,) and of its whole text, and the kind.

    Texts of similar length share batches; texts with and without a context do not.
    """
    order = sorted(range(len(requests)), key=lambda i: requests[i].length)
    rows = [(i, part) for i in order for part in requests[i].parts]
    parts = [[row for row in rows if requests[row[0]].whole is whole] for whole in (False, True)]
    groups = [part[i : i + ROWS] for part in parts for i in range(0, len(part), ROWS)]
    nats: list[list[Tensor]] = [[] for _ in requests]
    of_texts, kinds = [0.0] * len(requests), [model.likelihood] * len(requests)
    hidden = None if len(groups) > 1 else True  # None hides the bar unless stderr is a terminal
    for group in tqdm(groups, desc="scoring", disable=hidden):
        batch = reader.batch([part for _, part in group], whole=requests[group[0][0]].whole)
        scores = score_batch(model, batch, precision)
        nats_by_row = scored_of(-scores.log_prob.double().cpu(), batch["targets"])
        terms = scores.sequence_term.double().cpu().tolist()
        for (i, _), values, term in zip(group, nats_by_row, terms, strict=True):
            nats[i].append(values)
            of_texts[i] -= term
            kinds[i] = scores.kind
    return list(zip(map(torch.cat, nats), of_texts, kinds, strict=True))


def _text_score(
    tokenizer: Tokenizer,
    request: _Request,
    nats: Tensor,
    of_text: float,
    likelihood: Likelihood,
    causal: bool,
) -> TextScore:
    ids = [
        i
        for part in request.parts
        for i, is_scored in zip(part.tokens, part.scored, strict=True)
        if is_scored
    ]
    marked = isinstance(tokenizer, SentenceTokenizer)  # whose marks have nats that are unknown here
    totals = Totals(
        nats.sum().item() + of_text,
        len(ids),
        None if marked else len(request.text.encode()),
        all_nats=math.nan if marked else None,
        sequence_nats=of_text,
    )
    texts = pieces(tokenizer, ids, begins=not request.context)
    columns = {"place": range(len(ids)), "id": ids, "text": texts}
    tokens = pd.DataFrame({**columns, "nats": nats.numpy()})
    return TextScore(totals.nats_per_token, likelihood, causal, totals, tokens)


# ---- logits


def token_logits(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: Tensor,
    *,
    from_prefixes: bool,
    precision: Precision,
) -> TokenLogits:
    """Returns the logits (B, T, V) after each of ``tokens``, int64 (B, T).

    They are recorded from ``LanguageModel.score`` with a dummy target at each token.

    Args:
        model: A window model in eval mode.
        tokenizer: The tokenizer that the model was trained with.
        tokens: Token ids from ``checked_ids``.
        from_prefixes: Whether to read each prefix separately.
        precision: Precision of the matrix products.
    """
    rows, length = tokens.shape
    mask, targets = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    if from_prefixes:
        # (B T, T): row b T + t is the prefix of t + 1 tokens of text b, with a target at its end
        last = torch.arange(length).repeat(rows)[:, None]  # (B T, 1)
        position = torch.arange(length)
        mask = position <= last
        tokens = tokens.repeat_interleave(length, dim=0).where(mask, tokenizer.eos_id)
        targets = torch.full_like(tokens, IGNORE).masked_fill(position == last, 0)
    chunks: list[Tensor] = []
    likelihood = model.likelihood
    for start in range(0, len(tokens), ROWS):
        part = slice(start, start + ROWS)
        lengths = mask[part].sum(dim=1)
        prefixes = zip(tokens[part], lengths.tolist(), strict=True)
        batch = {
            "tokens": tokens[part],
            "targets": targets[part],
            "mask": mask[part],
            "context": lengths,  # a method infers latents from all tokens of a row
            "sequence_id": torch.tensor([stream_of(row[:n].tolist()) for row, n in prefixes]),
        }
        with recording(logits=lambda logits: chunks.append(logits.clone())):
            likelihood = score_batch(model, batch, precision).kind
    likelihood, causal = label(
        likelihood, model.causal, from_prefixes=from_prefixes, has_context=False
    )
    return TokenLogits(torch.cat(chunks).view(rows, length, -1), likelihood, causal)


def checked_ids(model: LanguageModel, ids: Any) -> Tensor:
    """Returns token ids (B, T) or (T,) as int64 (B, T) on the CPU.

    Raises:
        ValueError: If the ids are invalid, do not fit the model's vocabulary or positions, or the
            model reads sentences or questions.
    """
    if model.reads != "windows":
        raise ValueError(
            f"{type(model).__name__} reads {model.reads}, not rows of tokens, and has no logits at "
            "each token of a row; use score or generate"
        )
    try:
        tokens = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(0)
    tokens = tokens[None] if tokens.dim() == 1 else tokens
    numbers = tokens.dtype is not torch.bool and not torch.is_floating_point(tokens)
    if not numbers or tokens.dim() != 2 or not tokens.numel():
        raise ValueError(
            f"ids ({str(ids)[:40]!a}) must be whole numbers (B, T); lm.tokenizer.prompt_ids(text) "
            "makes a row of them, and lm.logits(text) takes the text"
        )
    tokens, vocab_size = tokens.to("cpu", torch.int64), model.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"ids (from {tokens.min()} to {tokens.max()}) must be at least 0 and below "
            f"{vocab_size}, the model's vocabulary; encode texts with lm.tokenizer"
        )
    model.check_context(tokens.shape[1])
    return tokens
