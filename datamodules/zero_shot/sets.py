"""The seven sets of Table 1 of the Latent-Thought paper, and how each becomes documents.

The paper says "the validation splits" of all seven, after the diffusion language models. Their
public scripts take the validation split where there is one, else the test split; so is it here:

| set | repository on the hub | split | documents | detokenizer |
|---|---|---|---|---|
| ptb | ptb-text-only/ptb_text_only | validation | sentences | ptb |
| wikitext | Salesforce/wikitext, wikitext-103-raw-v1 | validation | lines with text | wikitext |
| lm1b | billion-word-benchmark/lm1b | test, the only held-out one | sentences | lm1b |
| lambada | EleutherAI/lambada_openai | test (GPT-2's copy) | passages | lambada |
| ag_news | fancyzhx/ag_news | test, the only held-out one | articles | none |
| pubmed | ccdv/pubmed-summarization | validation | papers | scientific papers |
| arxiv | ccdv/arxiv-summarization | validation | papers | scientific papers |

Those of ptb and lm1b are scripts, so the hub's own conversion of them to parquet is read. PubMed
and arXiv are the papers known as scientific_papers, whose own repository is a script too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from datamodules.hub_revision import CONVERSION
from datamodules.zero_shot import detokenizers
from datamodules.zero_shot.detokenizers import Detokenizer
from datamodules.zero_shot.hub_files import HubPlace

SetName = Literal["ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"]


@dataclass(frozen=True, kw_only=True)
class ZeroShotSet:
    """A corpus to score, and how its rows become documents.

    Attributes:
        place: Its files on the hub.
        split: The split they are, in the hub's words.
        detokenizer: Makes text of a row.
        text_field: Field (jsonl) or column (parquet) with the text.
        by_line: Whether each line of a txt file is a document; else the file is one.
        ending: What every document ends in, besides the EOS.
    """

    place: HubPlace
    split: str
    detokenizer: Detokenizer
    text_field: str = "text"
    by_line: bool = True
    ending: str = ""

    def document(self, row: str) -> str:
        """Returns the document that a row is, which is not blank."""
        return self.detokenizer(row.strip()) + self.ending

    @property
    def local_format(self) -> str:
        """What your copy may be, in words."""
        lines = "one document a line" if self.by_line else "one document a file"
        return f"jsonl or parquet with a field {self.text_field!r} or 'text', or txt, {lines}"

    @property
    def identity(self) -> dict[str, str | int]:
        """What decides besides the rows which text is stored, for the fingerprint."""
        return {
            "detokenizer": self.detokenizer.__name__,
            "detokenizer_version": detokenizers.VERSION,
            "ending": self.ending,
        }


def _papers(repository: str) -> ZeroShotSet:
    # Of its two configurations, 'section' keeps sentences apart, as papers of the field have them.
    place = HubPlace(repository=repository, files="section/validation-*.parquet")
    return ZeroShotSet(
        place=place,
        split="validation",
        detokenizer=detokenizers.scientific_papers,
        text_field="article",
        by_line=False,
    )


ZERO_SHOT_SETS: dict[SetName, ZeroShotSet] = {
    "ptb": ZeroShotSet(
        place=HubPlace(
            repository="ptb-text-only/ptb_text_only",
            files="*/validation/*.parquet",
            revision=CONVERSION,
        ),
        split="validation",
        detokenizer=detokenizers.ptb,
        text_field="sentence",
    ),
    # NOTE(paper): a line is a document and keeps its line end, as a row is in the scripts. Blank
    # lines are left out: each would be one more EOS to predict, and says nothing of a model.
    "wikitext": ZeroShotSet(
        place=HubPlace(
            repository="Salesforce/wikitext", files="wikitext-103-raw-v1/validation-*.parquet"
        ),
        split="validation",
        detokenizer=detokenizers.wikitext,
        ending="\n",
    ),
    "lm1b": ZeroShotSet(
        place=HubPlace(
            repository="billion-word-benchmark/lm1b",
            files="*/test/*.parquet",
            revision=CONVERSION,
        ),
        split="test",
        detokenizer=detokenizers.lm1b,
    ),
    "lambada": ZeroShotSet(
        place=HubPlace(repository="EleutherAI/lambada_openai", files="data/lambada_test.jsonl"),
        split="test",
        detokenizer=detokenizers.lambada,
    ),
    # Published as running text: the scripts have no rules for it either.
    "ag_news": ZeroShotSet(
        place=HubPlace(repository="fancyzhx/ag_news", files="data/test-*.parquet"),
        split="test",
        detokenizer=detokenizers.unchanged,
    ),
    "pubmed": _papers("ccdv/pubmed-summarization"),
    "arxiv": _papers("ccdv/arxiv-summarization"),
}
"""The sets by name, in the order of the table's columns."""


def zero_shot_set(name: str) -> ZeroShotSet:
    """Returns the set of that name.

    Raises:
        ValueError: There is none.
    """
    for known in get_args(SetName):
        if name == known:
            return ZERO_SHOT_SETS[known]
    raise ValueError(f"set_name={name!r} must be one of {', '.join(ZERO_SHOT_SETS)}.")
