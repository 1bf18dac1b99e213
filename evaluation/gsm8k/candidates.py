"""Several answers to each question, each sampled with a random stream of its own."""

from collections.abc import Sequence

from tqdm import tqdm

from datamodules import Tokenizer
from evaluation.checkpoint.device import Precision, autocast
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate


def sample_candidates(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    candidates: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    batch_size: int = 32,
    precision: Precision = "32",
) -> list[list[str]]:
    """Returns the candidates of each prompt.

    Candidate c of prompt q is row q * candidates + c of the decoding, and all that is drawn for it
    comes from the stream of (seed, row): what it is depends on prompt, row and seed, not on
    `batch_size` (up to rounding). A model that infers latent vectors infers them anew for each row.

    Args:
        model: on its device, in eval mode.
        tokenizer: the one it was trained with.
        prompts: token ids, at least one each.
        candidates: per prompt.
        max_new_tokens: upper bound on each candidate.
        sampling: how tokens are chosen.
        batch_size: rows decoded at once.
        precision: of the matrix products.
    """
    texts: list[str] = []
    rows = range(len(prompts) * candidates)
    starts = rows[::batch_size]
    for start in tqdm(starts, desc="answering", unit=" batches", disable=None):
        with autocast(model.device, precision):
            written = generate(
                model,
                [prompts[row // candidates] for row in rows[start : start + batch_size]],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                eos_id=tokenizer.stop_id,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                first_row=start,
            )
        texts += [tokenizer.decode([i for i in ids if i != tokenizer.stop_id]) for ids in written]
    return [texts[first : first + candidates] for first in rows[::candidates]]
