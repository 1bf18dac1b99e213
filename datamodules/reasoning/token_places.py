"""Which token of a query each reasoning step belongs to (Thinking States, Sec. 3.4, App. A.3).

A marker in the text says that what stands in front of it suffices to infer a step. The step goes to
the token in front of the marker, more exactly:

- to the first token after which all text in front of the marker has been read, where the marker
  falls inside a token;
- spaces between a marker and the text in front of it do not count: most tokenizers make them part
  of the next word's token, which would be one too late;
- to the EOS in front of the query, where nothing stands in front of the marker;
- each token takes one step. The steps of consecutive markers go to successive tokens, the first one
  to its own (App. A.3); where such a row reaches the token of a later marker, that one's step is
  moved on in turn. NOTE(paper): the last is ours, the paper does not say.
- steps that would lie after the query's end belong to its last token, all of them.

Steps of one chunk are joined by the model, with a separator token of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Alignment:
    """Where the R steps of an example belong.

    Attributes:
        places: Index of each step's token, the EOS in front of the query counted as 0; (R,) int64,
            non-decreasing; only the query's last token may occur more than once.
        shifts: Tokens from the one in front of the step's marker to that; (R,) int64, not negative,
            above 0 where another step had the marker's token already.
    """

    places: np.ndarray
    shifts: np.ndarray


def align(query: str, markers: Sequence[int], sizes: np.ndarray) -> Alignment:
    """Returns which token each step belongs to.

    Args:
        query: Text without markers.
        markers: Where each step's marker stands, in characters, non-decreasing.
        sizes: UTF-8 bytes of each token of the query, without EOS; they add up to the text's.
    """
    own = marker_tokens(query, markers, sizes)
    places = spread(own, last=len(sizes))
    return Alignment(places, places - own)


def marker_tokens(query: str, markers: Sequence[int], sizes: np.ndarray) -> np.ndarray:
    """Returns the token in front of each marker, (R,) int64; 0 is the EOS in front of the query.

    Args:
        query: Text without markers.
        markers: Where each marker stands, in characters.
        sizes: UTF-8 bytes of each token of the query.
    """
    read = [len(query[:marker].rstrip().encode("utf-8")) for marker in markers]
    behind = np.concatenate([[0], np.cumsum(sizes)])  # bytes read after EOS, and each token
    return np.searchsorted(behind, np.array(read, dtype=np.int64), side="left")


def spread(own: np.ndarray, last: int) -> np.ndarray:
    """Returns the tokens of steps, where each takes one step.

    place[r] = max(own[r], place[r - 1] + 1), or the last token.

    Args:
        own: Token in front of each step's marker, (R,) int64, non-decreasing.
        last: The query's last token.
    """
    steps = np.arange(len(own))
    return np.minimum(np.maximum.accumulate(own - steps) + steps, last)
