"""Small tokenizer.json files with the structure of published ones, as `tokenizers.Tokenizer`."""

from collections.abc import Callable, Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!'\"-#\n"
SPACE = "\u2581"


def merges_of(words: Iterable[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = {}
    for word in words:
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
            vocab.setdefault(word[:end], len(vocab))
    return list(merges)


def byte_level(
    *specials: str, normalizer=None, words: Iterable[str] = (), prefix: bool = False
) -> tokenizers.Tokenizer:
    """GPT-2's kind: one id a byte, or a word; Qwen's with ``NFC``, BLOOM's with a `prefix`."""
    vocab = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = merges_of([*("\u0120" + word for word in words), *words], vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_special_tokens(list(specials or ["<|endoftext|>"]))
    return inner


def begun(inner: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    """Begins texts with a special token, as LLaMA's and Gemma's files do."""
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, inner.token_to_id(bos))]
    )
    return inner


def pieces(*, space: bool = True, words: Iterable[str] = ("the",)) -> tokenizers.Tokenizer:
    """Llama 2's and Mistral's kind: a dummy space, byte fallback, no pre-tokenizer.

    Args:
        space: Whether the vocabulary has a piece for the space; without it, spaces are bytes.
        words: Words with a piece of their own.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for sign in LETTERS + SPACE * space:
        vocab[sign] = len(vocab)
    merges = merges_of([SPACE + word for word in words] if space else words, vocab)
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return begun(inner, "<s>")


def unigram() -> tokenizers.Tokenizer:
    """T5's and XLM-R's kind: words cut at spaces, and pieces that spell special tokens."""
    signs = [SPACE, *LETTERS, "<", ">", "/", "caf", SPACE + "the"]
    vocab = [("<pad>", 0.0), ("</s>", -0.1), ("<unk>", 0.0)]
    vocab += [(sign, -3.0 - len(sign) / 9) for sign in signs]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<pad>", "</s>"])
    return inner


def word_pieces() -> tokenizers.Tokenizer:
    """BERT's kind: lower case, no accents, spaces dropped, unknown words one token."""
    words = ["the", "page", "says", "word", "of", "it", "he", "ran", "cat", "ate", "mr", "smith"]
    signs = LETTERS[:26] + "0123456789"
    parts = ["[UNK]", "[CLS]", "[SEP]", *words, *signs, ".", "!", *(f"##{sign}" for sign in signs)]
    vocab = {piece: i for i, piece in enumerate(parts)}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return inner


PUBLISHED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_bos": lambda: begun(byte_level("<s>", "</s>"), "<s>"),
    "byte_level_nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte_level_prefix": lambda: byte_level(prefix=True),
    "pieces": pieces,
    "pieces_without_space": lambda: pieces(space=False),
    "unigram": unigram,
    "word_pieces": word_pieces,
}
"""Each kind by name; those after the first change what their ids stand for with the text."""
