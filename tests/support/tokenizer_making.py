"""Small tokenizers of both kinds, made in the test."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.vocabulary.token_bytes import BYTE_TO_CHARACTER, SPACE_MARK

# A few merges of bytes, and a few pieces with the space mark: enough to be cut in more than one way.
MERGES = [(b"a", b"b"), (b"ab", b"c"), (b"\xc3", b"\xa9"), (b" ", b"a"), (b"\xe2", b"\x82")]
LETTERS = ["▁", "a", "b", "c", "é", "."]
LETTER_MERGES = [("a", "b"), ("▁", "a"), ("▁a", "b")]

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def _wrap(tokenizer: Tokenizer, specials: Sequence[str], texts: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in texts])
    roles = {role: name for role, name in ROLES.items() if name in specials}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def _byte_level_model(merges: Sequence[tuple[bytes, bytes]], without: bytes, words: Sequence[str]) -> models.BPE:
    def spelt(text: bytes) -> str:
        return "".join(BYTE_TO_CHARACTER[byte] for byte in text)

    pairs = [(spelt(left), spelt(right)) for left, right in merges]
    known = [BYTE_TO_CHARACTER[byte] for byte in range(256) if byte not in without]
    contents = [*known, *(left + right for left, right in pairs), *words]
    return models.BPE(
        vocab={content: index for index, content in enumerate(contents)}, merges=pairs, ignore_merges=bool(words)
    )


def byte_level(
    merges: Sequence[tuple[bytes, bytes]], specials: Sequence[str] = ("<s>", "</s>"), *, texts: Sequence[str] = (),
    without: bytes = b"", words: Sequence[str] = (),
) -> PreTrainedTokenizerFast:  # fmt: skip
    """A byte-level BPE: ids 0..255 are the bytes, then one per merge, the special tokens, added text.

    Bytes `without` a token shift what follows; `words` come after the merges, and the model looks them up first.
    """
    tokenizer = Tokenizer(_byte_level_model(merges, without, words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer, specials, texts)


def space_mark(
    words: Sequence[str], merges: Sequence[tuple[str, str]] = (), *, special_bytes: bool = False,
    specials: Sequence[str] = ("<s>", "</s>"),
) -> PreTrainedTokenizerFast:  # fmt: skip
    """A SentencePiece-style BPE: first `<0x00>`..`<0xFF>`, then `words` (with the space mark), then merged words."""
    contents = [*(f"<0x{byte:02X}>" for byte in range(256)), *words, *(left + right for left, right in merges)]
    vocabulary = {content: index for index, content in enumerate(dict.fromkeys(contents))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))] if special_bytes else specials
    return _wrap(tokenizer, names)


def word_level(words: Sequence[str]) -> Any:
    """A tokenizer of neither kind."""
    tokenizer = Tokenizer(models.WordLevel(vocab={word: n for n, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrap(tokenizer, ())
