"""Small tokenizers of the kinds that are published, written down here."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from datamodules.json_tokenizer import JsonTokenizer, SpecialTokens

SPACE = "\u2581"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("the", "cat", "he", "ate")


def _merged(words, vocab):
    """Adds each word to the vocabulary and returns the merges that make it, letter by letter."""
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab.setdefault(word[:end], len(vocab))
    return list(dict.fromkeys(merges))


def sentencepiece(space=True, bos=True):
    """Like LLaMA's: texts begin with a dummy space, unknown characters are byte pieces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    letters = LETTERS + LETTERS.upper() + "." + (SPACE if space else "")
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(letters)}
    words = (*(SPACE + word for word in WORDS), *WORDS) if space else WORDS
    merges = _merged(words, vocab)
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    parts = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    inner.normalizer = normalizers.Sequence(parts)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _finished(inner, "<s>" if bos else None, "</s>")


def word_piece(bos=False):
    """Like BERT's: lower case, words in pieces, spaces lost."""
    names = ["[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), *WORDS, *".,!?"]
    model = models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return _finished(inner, "[CLS]" if bos else None, "[SEP]")


def byte_level(bos=False):
    """Like GPT-2's, a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = _merged((*("\u0120" + word for word in WORDS), *WORDS), vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _finished(inner, "<s>" if bos else None, "</s>")


def _finished(inner, bos, eos):
    inner.add_special_tokens([token for token in (bos, eos) if token])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return JsonTokenizer("written here", inner.to_str(), SpecialTokens(bos, (eos,)))


KINDS = {
    "byte level": byte_level,
    "byte level, BOS": lambda: byte_level(bos=True),
    "sentencepiece": sentencepiece,
    "sentencepiece without a space piece": lambda: sentencepiece(space=False, bos=False),
    "word pieces": word_piece,
}
