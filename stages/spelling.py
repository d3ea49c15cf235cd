"""Cutting text into the tokens of a vocabulary, control tokens left out of it; and spelling byte strings, many at once.

A byte string is cut as its tokenizer would cut it in the middle of a text: no space is put before it. What a tokenizer
cannot cut (broken characters, a literal space mark) goes byte by byte. Every cut is compared with the bytes that it has
to spell before it is believed.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from stages.token_bytes import BYTE_TO_CHARACTER, SPACE_MARK, text_tokens

Pieces = tuple[int, ...]

_AT_ONCE = 32_768  # strings per call: bounds the memory
_UNWRITABLE = re.compile(f"([{SPACE_MARK}\udc80-\udcff]+)")  # the mark itself, and bytes under `surrogateescape`


def without_prefix(pre_tokenizer: Any, *, anywhere: bool) -> Any:
    """A copy that puts no space before a text that goes on; with `anywhere`, none before any text."""
    if pre_tokenizer is None:
        return None
    state = re.sub(rb'"prepend_scheme":"first"', b'"prepend_scheme":"never"', pre_tokenizer.__getstate__())
    if anywhere:
        state = re.sub(rb'"prepend_scheme":"always"', b'"prepend_scheme":"never"', state)
        state = re.sub(rb'"add_prefix_space":true', b'"add_prefix_space":false', state)
    copy = pre_tokenizers.Whitespace()
    copy.__setstate__(state)
    return copy


class Cutter:
    """A tokenizer's own cuts, without its control tokens: their names are text like any other.

    The model is shared with the tokenizer, not copied.

    Args:
        backend: the tokenizer.
        controls: ids of its control tokens.
        normalizer, pre_tokenizer: what prepares a text for the model; by default nothing.
    """

    def __init__(
        self, backend: Any, controls: Collection[int], normalizer: Any = None, pre_tokenizer: Any = None
    ) -> None:
        self._tokenizer = Tokenizer(backend.model)
        if normalizer is not None:
            self._tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = pre_tokenizer
        added = text_tokens(backend, controls)
        self._tokenizer.add_tokens(list(added.values()))
        numbers = {self._tokenizer.token_to_id(token.content): index for index, token in added.items()}
        self._renumbered = {ours: theirs for ours, theirs in numbers.items() if ours != theirs}

    def cut(self, text: str) -> list[int]:
        """Ids of a whole text."""
        return self._as_there(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def cut_each(self, texts: Sequence[str]) -> list[Pieces]:
        """Ids of every text by itself; one call for many, which halves the time."""
        found: list[Pieces] = []
        for start in range(0, len(texts), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            cut = self._tokenizer.encode(part, is_pretokenized=True, add_special_tokens=False)
            ids = tuple(self._as_there(cut.ids))
            ends = np.bincount(np.array(cut.word_ids, dtype=np.intp), minlength=len(part)).cumsum().tolist()
            found += [ids[begin:end] for begin, end in pairwise([0, *ends])]
        return found

    def _as_there(self, ids: list[int]) -> list[int]:
        return [self._renumbered.get(index, index) for index in ids] if self._renumbered else ids


class Speller:
    """Spells byte strings in ordinary tokens.

    Args:
        backend: the tokenizer.
        byte_level: whether its model reads bytes; else it reads text with marked spaces.
        token_bytes: per id its bytes.
        controls: ids that must not be used.
        id_of_bytes: the id for a byte string that is one token.
    """

    def __init__(
        self, backend: Any, byte_level: bool, token_bytes: Sequence[bytes | None], controls: Collection[int],
        id_of_bytes: Mapping[bytes, int],
    ) -> None:  # fmt: skip
        self._byte_level, self._id_of_bytes = byte_level, id_of_bytes
        self._ordinary = [None if index in controls else spelt for index, spelt in enumerate(token_bytes)]
        self._text = Cutter(backend, controls, pre_tokenizer=without_prefix(backend.pre_tokenizer, anywhere=True))
        self._model = Cutter(backend, controls)

    def spell(self, texts: Sequence[bytes]) -> list[Pieces | None]:
        """Ids that spell exactly the bytes of each text; None where the vocabulary lacks a byte."""
        found: dict[bytes, Pieces] = {text: (self._id_of_bytes[text],) for text in texts if text in self._id_of_bytes}
        found[b""] = ()
        in_parts = self._as_characters if self._byte_level else self._around_broken
        for cut in (self._as_text, in_parts, self._singly):
            rest = [text for text in dict.fromkeys(texts) if text not in found]
            cuts = zip(rest, cut(rest), strict=True)
            found.update((text, pieces) for text, pieces in cuts if self._is_spelt(text, pieces))
        return [found.get(text) for text in texts]

    def _is_spelt(self, text: bytes, pieces: Pieces) -> bool:
        spelt = [self._ordinary[piece] for piece in pieces]
        return None not in spelt and b"".join(spelt) == text  # type: ignore[arg-type]

    def _as_text(self, texts: Sequence[bytes]) -> list[Pieces]:
        """As the tokenizer cuts text. What is no text, or holds a literal space mark, comes out wrong."""
        readable = [text.decode(errors="replace") for text in texts]
        return self._text.cut_each(readable if self._byte_level else [_marked(text) for text in readable])

    def _as_characters(self, texts: Sequence[bytes]) -> list[Pieces]:
        """By the merges alone, which see bytes and not text."""
        return self._model.cut_each([text.decode("latin-1").translate(BYTE_TO_CHARACTER) for text in texts])

    def _around_broken(self, texts: Sequence[bytes]) -> list[Pieces]:
        """Broken characters and literal space marks byte by byte; the text between them as the tokenizer cuts it."""
        rows = [_UNWRITABLE.split(text.decode(errors="surrogateescape")) for text in texts]
        cuts = iter(self._text.cut_each([_marked(part) for row in rows for part in row[::2]]))
        found = []
        for row in rows:
            pieces: Pieces = ()
            for place, part in enumerate(row):
                pieces += self._bytes(part.encode(errors="surrogateescape")) if place % 2 else next(cuts)
            found.append(pieces)
        return found

    def _singly(self, texts: Sequence[bytes]) -> list[Pieces]:
        return [self._bytes(text) for text in texts]

    def _bytes(self, text: bytes) -> Pieces:
        """One id per byte; bytes that the vocabulary lacks are left out."""
        ids = (self._id_of_bytes.get(bytes([byte])) for byte in text)
        return tuple(index for index in ids if index is not None)


def _marked(text: str) -> str:
    return text.replace(" ", SPACE_MARK)
