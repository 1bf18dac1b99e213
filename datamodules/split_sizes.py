"""How much text each split got, in words, and whether held-out splits got more than was asked."""

from collections.abc import Mapping

from datamodules.store import Counts, Split

# More is told: this many times what was asked, and so much of all tokens above it.
_TIMES, _ABOVE = 2.0, 0.05


def in_words(counts: Mapping[Split, Counts]) -> str:
    """Returns documents and tokens of the splits that have any; units stand at the first."""
    sizes = [(split, c.documents, c.tokens) for split, c in counts.items() if c.documents]
    if not sizes:
        return "no documents"
    (split, documents, tokens), *rest = sizes
    noun = "document" if documents == 1 else "documents"
    first = f"{split} {documents:,} {noun}, {tokens:,} tokens"
    return "; ".join([first, *(f"{split} {d:,}, {t:,}" for split, d, t in rest)])


def too_much_held_out(
    counts: Mapping[Split, Counts], shares: Mapping[str, float], cures: str
) -> str | None:
    """Returns that far more tokens were held out than asked, and the cure; None if they were not.

    Args:
        counts: Sizes of all splits.
        shares: Shares that were asked for, ``val_fraction`` and ``test_fraction``. A split without
            a share is not counted: it has text of its own.
        cures: What gives smaller splits, besides smaller fractions.
    """
    asked = {key: share for key, share in shares.items() if share > 0}
    held: dict[Split, Counts] = {
        split: c for split, c in counts.items() if f"{split}_fraction" in asked
    }
    tokens = sum(c.tokens for c in held.values())
    whole = tokens + counts["train"].tokens
    share = sum(asked.values())
    if tokens <= _TIMES * share * whole or tokens <= (share + _ABOVE) * whole:
        return None
    documents = counts["train"].documents + sum(c.documents for c in held.values())
    return (
        f"Held out for {' and '.join(held)} are {100 * tokens / whole:.3g}% of the tokens, where "
        f"{' + '.join(asked)} asked for {100 * share:.3g}%: whole documents are held out, and "
        f"there are {documents:,}. What helps: {cures}, or smaller fractions (0: no such split)."
    )
