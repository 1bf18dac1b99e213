"""What another language model makes of texts: their generative perplexity."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from evaluation.checkpoint.pretrained import Pretrained
from evaluation.scoring import Totals


@dataclass(frozen=True)
class JudgedTexts:
    """Negative log-likelihoods of texts under a judge."""

    nats: Tensor
    """Of each text, float64 (N,)."""
    tokens: Tensor
    """Tokens of each text that were scored, in the judge's tokenizer, int64 (N,)."""
    cut: int
    """Texts that were longer than the judge's context; only their beginning was scored."""

    @property
    def totals(self) -> Totals:
        """The sums over all texts."""
        return Totals(self.nats.sum().item(), int(self.tokens.sum()), None)

    @property
    def mean_of_perplexities(self) -> float:
        """Mean over the texts of each one's perplexity, as the code of SEDD averages; nan of none.

        At least as large as the perplexity of all texts together, where they are equally long.
        """
        scored = self.tokens > 0
        return (self.nats[scored] / self.tokens[scored]).exp().mean().item()


class Judge:
    """A causal language model that scores texts of others.

    It reads texts through its own tokenizer. A text's first token is context only, unless the
    tokenizer puts a BOS in front by itself; the end of a document within a text is the judge's EOS,
    and counts as a token.
    """

    def __init__(self, pretrained: Pretrained) -> None:
        """Takes a loaded causal model."""
        self.pretrained = pretrained

    def score(self, texts: Sequence[Sequence[str]], batch_size: int = 8) -> JudgedTexts:
        """Returns the likelihood of texts, each a list of documents in a row.

        Args:
            texts: those longer than the judge's context are cut there.
            batch_size: how many are read at once; changes nothing but rounding.
        """
        rows = [self.pretrained.encode_documents(documents) for documents in texts]
        context = self.pretrained.context
        kept = [row[:context] for row in rows]
        starts = range(0, len(rows), batch_size)
        bar = tqdm(starts, desc="judging", unit=" batches", disable=None)
        parts = [self._nats(kept[start : start + batch_size]) for start in bar]
        return JudgedTexts(
            nats=torch.cat(parts),
            tokens=torch.tensor([max(0, len(row) - 1) for row in kept]),
            cut=sum(len(row) > len(part) for row, part in zip(rows, kept, strict=True)),
        )

    def _nats(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the nats of all but the first token of each row, float64 (B,)."""
        model = self.pretrained.model
        width = max(1, *map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1  # a row without any true key would give nan
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[number, : len(row)] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits
            sums = [  # row by row: float32 copies of a whole batch's logits would not be small
                cross_entropy(
                    logits[n, : len(row) - 1].float(), ids[n, 1 : len(row)], reduction="none"
                )
                .double()
                .sum()
                if len(row) > 1
                else torch.zeros((), dtype=torch.float64, device=ids.device)
                for n, row in enumerate(rows)
            ]
        return torch.stack(sums).cpu()
