"""The three forms that batches have, and what the contract suite does with each."""

import copy
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

Batch = dict[str, Any]
BLOCK = 32
"""Slots of a window, and of a sentence tensor."""
BYTES = 257
"""The byte tokenizer's vocabulary: 256 and the end of a text."""


class Windows:
    """Rows of tokens (B, T)."""

    sizes: ClassVar = {"vocab_size": BYTES, "block_size": BLOCK}
    fixture = "make_data"
    """Builds the datamodule; ``batch_size`` and ``eval_batch_size`` count rows."""
    datamodule = "datamodules.LocalText"
    prompts: ClassVar = [[7, 99, 3, 42, 5], [200], list(range(40, 52))]

    def batch(self, rows: int = 2, length: int = BLOCK, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        stream = torch.randint(0, 256, (rows, length + 1), generator=generator)
        return {
            "tokens": stream[:, :-1],
            "targets": stream[:, 1:].clone(),
            "mask": torch.ones(rows, length, dtype=torch.bool),
            "sequence_id": torch.arange(rows) + 1000 * seed,
            "num_bytes": torch.full((rows,), length),
        }

    def dealt(self, text: str, cache: str, processes: int) -> Any:
        """A datamodule whose batches are four rows over all processes together."""
        from datamodules import LocalText

        size = {"block_size": BLOCK, "batch_size": 4 // processes}
        return LocalText(data_files=text, cache_dir=cache, **size)

    def change(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """The batch with one other token a row, and which targets are predicted before it."""
        changed, place = copy.deepcopy(batch), batch["tokens"].shape[1] // 2
        changed["tokens"][:, place] = (changed["tokens"][:, place] + 1) % 256
        before = torch.arange(batch["tokens"].shape[1]) < place
        return changed, before.expand_as(batch["tokens"])

    def pad(self, batch: Batch) -> Batch:
        """The batch with more padding, each row three tokens shorter, and a row that only fills."""
        rows, width = batch["tokens"].shape
        real = torch.arange(width) < width - 3 * torch.arange(rows)[:, None]
        for key in {"tokens", "targets", "mask", "lexical"} & set(batch):
            filling = -100 if key == "targets" else 0
            batch[key] = F.pad(batch[key].masked_fill(~real, filling), (0, 7, 0, 1), value=filling)
        more = {key: F.pad(batch[key], (0, 1)) for key in ("sequence_id", "num_bytes")}
        return batch | more

    def row(self, batch: Batch, row: int) -> Batch:
        """A row by itself, without padding."""
        own = one_row(batch, row)
        length = int(own["mask"].sum())
        return {key: value[:, :length] if value.dim() > 1 else value for key, value in own.items()}

    def in_order(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, N) as they are read, and where they stand in the flattened batch."""
        return batch["tokens"], torch.arange(batch["tokens"].numel()).view_as(batch["tokens"])

    def begin(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What a decoding cache of ``in_order`` begins with, and how long it is."""
        return begin_with_one(self.in_order(batch)[0])


class MarkedWindows(Windows):
    """Windows over sentences between BOS and EOS: every eighth token ends one."""

    sizes: ClassVar = {"vocab_size": BYTES + 3, "block_size": BLOCK}
    fixture = "make_marked_windows"
    datamodule = "datamodules.SentenceWindows"

    def batch(self, rows: int = 2, length: int = BLOCK, seed: int = 0) -> Batch:
        """Random bytes with EOS and BOS among them."""
        batch = super().batch(rows, length, seed)
        place = torch.arange(length)
        for key, shift in (("tokens", 0), ("targets", 1)):
            for at, boundary in ((5, BYTES + 1), (6, BYTES)):
                batch[key][:, (place + shift) % 8 == at] = boundary
        return {**batch, "lexical": batch["targets"] < BYTES}

    def dealt(self, text: str, cache: str, processes: int) -> Any:
        from datamodules import SentenceWindows

        corpus = super().dealt(text, cache, processes)
        size = {"block_size": BLOCK, "batch_size": 4 // processes}
        return SentenceWindows(corpus=corpus, splitter="spans:7", **size)


class Sentences:
    """Documents of sentences (B, S, U) between BOS and EOS, EOD at a document's end."""

    sizes: ClassVar = {"vocab_size": BYTES + 3, "block_size": BLOCK}
    fixture = "make_sentences"
    datamodule = "datamodules.Sentences"
    prompts: ClassVar = [
        [257, 7, 99, 3, 258, 257, 42, 5],
        [257],
        [257, *range(40, 49), 258, 257, 1, 258, 257, 9, 9, 4, 258, 257],
    ]
    words = (6, 3, 9, 1, 5)
    """Content tokens of one sentence after the other."""

    def batch(self, rows: int = 2, length: int = BLOCK, seed: int = 0) -> Batch:
        """Random bytes: about ``length`` slots in each but the last row, which is shorter."""
        shape = []
        for row in range(rows):
            limit, counts = length if row + 1 < rows else 2 * length // 3, []
            while sum(counts) + 2 * len(counts) + 3 < limit:
                counts.append(self.words[(len(counts) + row) % len(self.words)])
            shape.append(counts)
        return marked_documents(shape, 256, self.sizes["vocab_size"], BLOCK, seed)

    def dealt(self, text: str, cache: str, processes: int) -> Any:
        from dealt_streams import DealtStreams

        return DealtStreams()

    def change(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """The batch with one other word in each row's second sentence."""
        changed, sentence, place = copy.deepcopy(batch), 1, 1
        changed["tokens"][:, sentence, place] = (changed["tokens"][:, sentence, place] + 1) % 256
        _, most, width = batch["tokens"].shape
        before = torch.arange(most * width).view(most, width) < sentence * width + place
        return changed, before.expand_as(batch["tokens"])

    def pad(self, batch: Batch) -> Batch:
        """One row, two sentences and three slots more, all of them filling."""
        filled = {key: F.pad(batch[key], (0, 3, 0, 2, 0, 1)) for key in ("tokens", "mask")}
        filled["lexical"] = F.pad(batch["lexical"], (0, 3, 0, 2, 0, 1))
        filled["targets"] = F.pad(batch["targets"], (0, 3, 0, 2, 0, 1), value=-100)
        filled |= {key: F.pad(batch[key], (0, 2, 0, 1)) for key in ("lengths", "is_last")}
        filled |= {key: F.pad(batch[key], (0, 1)) for key in ("sequence_id", "num_bytes")}
        return filled

    def row(self, batch: Batch, row: int) -> Batch:
        """A row by itself, without padding."""
        own = one_row(batch, row)
        sentences, slots = int((own["lengths"] > 0).sum()), int(own["lengths"].max())
        cut = {2: (slice(None), slice(sentences)), 3: (slice(None), slice(sentences), slice(slots))}
        return {key: value[cut.get(value.dim(), slice(None))] for key, value in own.items()}

    def in_order(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, N) as they are read, and where they stand in the flattened batch.

        Behind a short row's end its last slot is read again and again.
        """
        places = torch.arange(batch["tokens"].numel()).view_as(batch["tokens"])
        rows = [own[mask] for own, mask in zip(places, batch["mask"], strict=True)]
        places = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        last = torch.stack([row[-1] for row in rows])[:, None]
        places = torch.where(places < 0, last, places)
        return batch["tokens"].flatten()[places], places

    def begin(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What a decoding cache of ``in_order`` begins with, and how long it is."""
        return begin_with_one(self.in_order(batch)[0])


class StoredSentences(Sentences):
    """The same from a corpus, dealt to devices by its datamodule."""

    def dealt(self, text: str, cache: str, processes: int) -> Any:
        from dealt_streams import StreamsOfTwo

        return StreamsOfTwo(text, cache, processes)


def one_row(batch: Batch, row: int) -> Batch:
    return {key: value[row : row + 1] for key, value in batch.items()}


def begin_with_one(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row, which a cache has not consumed yet."""
    return tokens[:, :1], torch.ones(len(tokens), dtype=torch.int64)


def marked_documents(
    shape: list[list[int]], words: int, vocab: int, slots: int, seed: int = 0, ends: int = 1
) -> Batch:
    """Rows of sentences of random words.

    Args:
        shape: numbers of content tokens (1 to ``slots - 3``), one list a row.
        words: content tokens are below this.
        vocab: BOS, EOS and EOD are its last three.
        slots: width U.
        seed: of the words.
        ends: every ``ends``-th row ends with its document.
    """
    generator = torch.Generator().manual_seed(seed)
    bos, eos, eod = vocab - 3, vocab - 2, vocab - 1
    most = max(map(len, shape))
    tokens = torch.zeros(len(shape), most, slots, dtype=torch.int64)
    targets = torch.full_like(tokens, -100)
    lengths = torch.zeros(len(shape), most, dtype=torch.int64)
    is_last = torch.zeros(len(shape), most, dtype=torch.bool)
    for row, sentences in enumerate(shape):
        is_last[row, len(sentences) - 1] = row % ends == 0
        for t, count in enumerate(sentences):
            content = torch.randint(0, words, (count,), generator=generator).tolist()
            used = torch.tensor([bos, *content, *([eod] if is_last[row, t] else []), eos])
            lengths[row, t] = len(used)
            tokens[row, t, : len(used)] = used
            targets[row, t, : len(used) - 1] = used[1:]
    return {
        "tokens": tokens,
        "lengths": lengths,
        "is_last": is_last,
        "targets": targets,
        "mask": torch.arange(slots) < lengths[..., None],
        "lexical": (targets >= 0) & (targets < bos),
        "sequence_id": torch.arange(len(shape)) + 1000 * seed,
        "num_bytes": torch.tensor([sum(sentences) for sentences in shape]),
    }


class Reasoning:
    """Queries (B, Q) behind an EOS, their reasoning steps (B, R, Z), and answers (B, A)."""

    sizes: ClassVar = {"vocab_size": BYTES, "block_size": 96}
    fixture = "make_reasoning"
    datamodule = "datamodules.StateTracking"
    options: ClassVar = {
        "task": "vars",
        "operations": [1, 2],
        "test_operations": [3],
        "train_examples": 44,
        "val_examples": 6,
        "test_examples": 6,
        "block_size": 96,
        "batch_size": 4,
    }
    """Of the small datamodule."""
    wording: ClassVar = {"answer_prefix": tuple(b" Final values:"), "step_separator": (10,)}
    """Ids of its fixed text."""
    prompts: ClassVar = [[256, 7, 99, 3, 42, 5], [256, 200], [256, *range(40, 59)]]
    steps = (3, 1, 0, 2)
    """Steps of one row after the other; the first two stand at one place after the other."""

    def batch(self, rows: int = 2, length: int = BLOCK, seed: int = 0) -> Batch:
        """Random bytes: queries of ``length`` tokens and, in every second row, five less."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, generator=generator)

        row, odd = torch.arange(rows), torch.arange(rows) % 2
        query_lengths = length - 5 * odd
        query = torch.where(torch.arange(length) < query_lengths[:, None], draw(rows, length), 256)
        query[:, 0] = 256
        count = torch.tensor(self.steps)[row % len(self.steps)][:, None]
        there = torch.arange(3) < count  # places: two neighbours, and the end of the query
        places = torch.tensor([[length // 3, length // 3 + 1, 0]]).repeat(rows, 1)
        places[:, 2] = query_lengths - 1
        step_lengths = torch.where(there, torch.tensor([2, 4, 1]), 0)
        steps = torch.where(torch.arange(4) < step_lengths[..., None], draw(rows, 3, 4), 256)
        answers, place = 8 - 2 * odd[:, None], torch.arange(8)
        targets = torch.where(place < answers, draw(rows, 8), -100)
        targets[place == answers - 1] = 256
        return {
            "query": query,
            "query_lengths": query_lengths,
            "steps": steps,
            "step_lengths": step_lengths,
            "step_places": torch.where(there, places, -1),
            "targets": targets,
            "sequence_id": row + 1000 * seed,
            "group": count[:, 0],
            "num_bytes": answers[:, 0] - 1,
        }

    def dealt(self, text: str, cache: str, processes: int) -> Any:
        from datamodules import StateTracking

        return StateTracking(**{**self.options, "cache_dir": cache, "batch_size": 4 // processes})

    def change(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """The batch with one other token in each answer, and which targets are predicted before."""
        changed, place = copy.deepcopy(batch), 3
        changed["targets"][:, place] = (changed["targets"][:, place] + 1) % 256
        before = torch.arange(batch["targets"].shape[1]) < place
        return changed, before.expand_as(batch["targets"])

    def pad(self, batch: Batch) -> Batch:
        """Longer queries, one step more, longer steps and answers, all of it filling."""
        wide = {
            "query": F.pad(batch["query"], (0, 11), value=256),
            "steps": F.pad(batch["steps"], (0, 3, 0, 1), value=256),
            "step_lengths": F.pad(batch["step_lengths"], (0, 1)),
            "step_places": F.pad(batch["step_places"], (0, 1), value=-1),
            "targets": F.pad(batch["targets"], (0, 5), value=-100),
        }
        return batch | wide

    def row(self, batch: Batch, row: int) -> Batch:
        """A row by itself, without padding."""
        own = one_row(batch, row)
        steps, size = int((own["step_lengths"] > 0).sum()), int(own["step_lengths"].max())
        return own | {
            "query": own["query"][:, : own["query_lengths"]],
            "steps": own["steps"][:, :steps, :size],
            "step_lengths": own["step_lengths"][:, :steps],
            "step_places": own["step_places"][:, :steps],
            "targets": own["targets"][:, : (own["targets"] >= 0).sum()],
        }

    def in_order(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers (B, N) as they are read, and where their targets stand in the flattened batch.

        The first token stands for the answer's prefix, which a model reads by itself.
        """
        targets = batch["targets"]
        read = F.pad(torch.where(targets >= 0, targets, 256)[:, :-1], (1, 0), value=256)
        return read, torch.arange(targets.numel()).view_as(targets)

    def begin(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What a decoding cache of ``in_order`` begins with, and how long it is."""
        return batch["query"], batch["query_lengths"]


WINDOWS, MARKED_WINDOWS, SENTENCES = Windows(), MarkedWindows(), Sentences()
REASONING = Reasoning()
