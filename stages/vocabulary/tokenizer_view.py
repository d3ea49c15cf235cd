"""Vocabularies as bytes.

Every token of text is a byte string; two vocabularies are compared by bytes and never by decoded characters, because
many tokens are not valid UTF-8 by themselves. Special tokens have no bytes: they are matched by role and name.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import Any

from stages.vocabulary.spelling import Pieces, Speller, TextTokenizer, strip_prefix_space
from stages.vocabulary.token_bytes import Roles, find_text_tokens, is_byte_level, load_view, serialize_parts
from store.errors import VocabularyError

# Bytes that occur in UTF-8. A vocabulary that can write each of them leaves no character out of a text.
_IN_UTF_8 = [bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5))]
# Composition makes one character of those of its canonical decomposition; U+1F82 has four, and no character has more.
_COMPOSED = len(unicodedata.normalize("NFD", "\u1f82"))
# Maximum number of characters that a normaliser joins to one; 1 for those that only add or replace characters.
_SHRINKING = {
    "NFC": _COMPOSED,
    "NFKC": _COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Prepend": 1,
    "ByteLevel": 1,
    "Lowercase": 1,
}
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Split", "Punctuation"}


class Vocabulary:
    """A fast tokenizer seen as byte strings.

    Raises:
        VocabularyError: the tokenizer is neither byte-level nor of the space-mark kind.
    """

    def __init__(self, tokenizer: Any, name: str = "") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise VocabularyError(f"{name or 'the model'} needs a fast tokenizer (tokenizer.json); convert it first")
        roles = Roles(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self.name = name
        self.bos, self.eos, self.pad = roles.bos, roles.eos, roles.pad
        self.tokenizer, self._backend = tokenizer, backend
        self._byte_level = is_byte_level(backend, name)
        view = load_view(tokenizer, roles, self._byte_level)
        self.token_bytes = view.token_bytes  # per id the bytes it stands for; None for special and unused ids
        # name to id of the control tokens, in id order: the special ones, and those that look like `<...>` or
        # `[...]` and no text maps to, such as the `<|EOT|>` of DeepSeek Coder; the bytes of these are their
        # name
        self.specials: Mapping[str, int] = view.controls
        # sha256 of the tokens and of the rules of tokenisation; independent of the tokenizer's source
        self.digest = view.digest
        self.size = len(self.token_bytes)  # number of ids that the tokenizer knows; a model's output layer may be wider
        self._preferred = view.preferred

    @cached_property
    def id_of_bytes(self) -> dict[bytes, int]:
        """The id of text with these bytes; of tokens with the same bytes, the one that the tokenizer prefers."""
        return {self.token_bytes[index] or b"": index for index in self._preferred.nonzero()[0].tolist()}

    def spell(self, text: bytes) -> Pieces | None:
        """Return ids that spell exactly these bytes, tokenised as in the middle of a text.

        No space is put before them, and control tokens are not used. None if the vocabulary cannot spell them.
        """
        return self.spell_each([text])[0]

    def spell_each(self, texts: Sequence[bytes]) -> list[Pieces | None]:
        """Spell many byte strings; much faster than one by one."""
        return self._speller.spell(texts)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self._backend, self._byte_level, self.token_bytes, self._controls, self.id_of_bytes)

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self.specials.values())

    def encode(self, text: str) -> list[int]:
        """Encode a user's text, with BOS if the tokenizer adds it; names of control tokens are text."""
        ids = self.encode_text(text)
        return [self.bos, *ids] if self._adds_bos and self.bos is not None else ids

    def encode_text(self, text: str, *, first: bool = True) -> list[int]:
        """Encode a part of a prompt: as `encode`, but without BOS.

        Args:
            first: False after a control token, where some tokenizers put no space before the text.
        """
        ids = (self._whole if first else self._continued).tokenize(text)
        return ids if self._controls.isdisjoint(ids) else [piece for index in ids for piece in self._spell_name(index)]

    def fewest_tokens(self, characters: int) -> int:
        """Return a lower bound of the number of tokens of a text with so many characters; 0 if there is none."""
        return -(-characters // self._reach) if self._reach else 0

    @cached_property
    def _reach(self) -> int | None:
        unknown = self.tokenizer.unk_token
        return longest_reach(self._backend, self.token_bytes, self._controls, unknown, self.id_of_bytes)

    def _spell_name(self, index: int) -> Pieces:
        """Spell a control token that the model returned for its name in ordinary tokens; the unknown token stays."""
        if index not in self._controls or index == self.tokenizer.unk_token_id:
            return (index,)
        return self.spell(self._backend.id_to_token(index).encode()) or ()

    @cached_property
    def _whole(self) -> TextTokenizer:
        return TextTokenizer(self._backend, self._controls, self._backend.normalizer, self._backend.pre_tokenizer)

    @cached_property
    def _continued(self) -> TextTokenizer:
        pre_tokenizer = strip_prefix_space(self._backend.pre_tokenizer, anywhere=False)
        return TextTokenizer(self._backend, self._controls, self._backend.normalizer, pre_tokenizer)

    @cached_property
    def _adds_bos(self) -> bool:
        return bool(self.tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [self.bos])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids by their bytes; broken characters are replaced, special tokens left out."""
        return b"".join(self.bytes_of(index) or b"" for index in ids).decode(errors="replace")

    def bytes_of(self, index: int) -> bytes | None:
        """Return the bytes of an id; None for special ids and for ids beyond the tokenizer."""
        return self.token_bytes[index] if 0 <= index < self.size else None


def longest_reach(
    backend: Any,
    token_bytes: Sequence[bytes | None],
    controls: Collection[int],
    unknown: str | None,
    id_of_bytes: Mapping[bytes, int],
) -> int | None:
    """Return the maximum number of characters of a user's text per token; None if it is unlimited.

    A token counts for the characters that begin in its bytes: each character begins in one token, and the rest of its
    bytes do not count. The number is multiplied by the characters that the normaliser may compose to one. It is
    unlimited if a tokenizer may drop any amount of text or join it in one token: it strips white space, removes
    separators, or has one unknown token for a run of characters.

    Args:
        controls: ids of the control tokens, which no text maps to.
        unknown: name of the unknown token, the exception: the model may return it for its name.
        id_of_bytes: ids of the byte strings that are one token of text.
    """
    parts = {name: json.loads(state) if state else None for name, state in serialize_parts(backend).items()}
    shrinking, added = _max_shrink(parts["normalizer"]), find_text_tokens(backend, controls).values()
    if shrinking is None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not _keeps_all(parts["pre_tokenizer"]) or not _writes_all(backend, parts, id_of_bytes):
        return None
    begun = (len(re.sub(rb"[\x80-\xbf]", b"", spelt)) for spelt in token_bytes if spelt)
    # An added token is searched in the normalised text; some normalisers lengthen it.
    normalise = backend.normalizer.normalize_str if backend.normalizer else str
    names = [unknown or "", *(normalise(token.content) for token in added)]
    return shrinking * max(1, *begun, *map(len, names))


def _max_shrink(normalizer: Any) -> int | None:
    """Return the maximum number of characters that become one; None if it is unlimited."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for shrinking in map(_max_shrink, normalizer["normalizers"]):
            if shrinking is None:
                return None
            product *= shrinking
        return product
    if normalizer["type"] == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return max(1, ceil(len(pattern) / len(content))) if pattern and content else None
    return _SHRINKING.get(normalizer["type"])


def _keeps_all(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in _KEEPING and pre_tokenizer.get("behavior") != "Removed"


def _writes_all(backend: Any, parts: Mapping[str, Any], id_of_bytes: Mapping[bytes, int]) -> bool:
    """Check whether the model has tokens for any text, so that none of it is dropped or joined as unknown."""
    model = backend.model
    affixes = getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None)
    in_bytes = '"ByteLevel"' in json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
    if type(model).__name__ not in ("BPE", "Unigram") or affixes or not (in_bytes or model.byte_fallback):
        return False
    return all(byte in id_of_bytes for byte in _IN_UTF_8)
