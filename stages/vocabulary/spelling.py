"""Tokenises text without control tokens, and spells byte strings in the tokens of a vocabulary, many at once.

A byte string is tokenised as in the middle of a text: without a space before it. Parts that a tokenizer cannot
represent (broken characters, a literal space mark) are spelt byte by byte. Every result is checked against the bytes
that it must spell.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from stages.vocabulary.token_bytes import BYTE_TO_CHARACTER, SPACE_MARK, find_text_tokens

Pieces = tuple[int, ...]

_AT_ONCE = 32_768  # strings per call; limits memory
_UNWRITABLE = re.compile(f"([{SPACE_MARK}\udc80-\udcff]+)")  # the mark itself, and bytes under `surrogateescape`


def strip_prefix_space(pre_tokenizer: Any, *, anywhere: bool) -> Any:
    """Copy a pre-tokenizer without the space that it puts before a continued text; with `anywhere`, before any text."""
    if pre_tokenizer is None:
        return None
    state = re.sub(rb'"prepend_scheme":"first"', b'"prepend_scheme":"never"', pre_tokenizer.__getstate__())
    if anywhere:
        state = re.sub(rb'"prepend_scheme":"always"', b'"prepend_scheme":"never"', state)
        state = re.sub(rb'"add_prefix_space":true', b'"add_prefix_space":false', state)
    copy = pre_tokenizers.Whitespace()
    copy.__setstate__(state)
    return copy


class TextTokenizer:
    """Tokenises text as a tokenizer does, but treats the names of its control tokens as text.

    The model is shared with the tokenizer, not copied.
    """

    def __init__(
        self, backend: Any, controls: Collection[int], normalizer: Any = None, pre_tokenizer: Any = None
    ) -> None:
        self._tokenizer = Tokenizer(backend.model)
        if normalizer is not None:
            self._tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = pre_tokenizer
        added = find_text_tokens(backend, controls)
        self._tokenizer.add_tokens(list(added.values()))
        numbers = {self._tokenizer.token_to_id(token.content): index for index, token in added.items()}
        self._renumbered = {ours: theirs for ours, theirs in numbers.items() if ours != theirs}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a whole text. Releases the interpreter lock.

        `encode` of the `tokenizers` library holds Python's interpreter lock until it returns, a second for a megabyte;
        its calls for batches do not.
        """
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return self._renumber(found.ids)

    def tokenize_each(self, texts: Sequence[str]) -> list[Pieces]:
        """Return the ids of each text; one call for many, which halves the time."""
        found: list[Pieces] = []
        for start in range(0, len(texts), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            cut = self._tokenizer.encode(part, is_pretokenized=True, add_special_tokens=False)
            ids = tuple(self._renumber(cut.ids))
            ends = np.bincount(np.array(cut.word_ids, dtype=np.intp), minlength=len(part)).cumsum().tolist()
            found += [ids[begin:end] for begin, end in pairwise([0, *ends])]
        return found

    def _renumber(self, ids: list[int]) -> list[int]:
        return [self._renumbered.get(index, index) for index in ids] if self._renumbered else ids


class Speller:
    """Spells byte strings in ordinary tokens: all but the controls."""

    def __init__(
        self, backend: Any, byte_level: bool, token_bytes: Sequence[bytes | None], controls: Collection[int],
        id_of_bytes: Mapping[bytes, int],
    ) -> None:  # fmt: skip
        self._byte_level, self._id_of_bytes = byte_level, id_of_bytes
        self._ordinary = [None if index in controls else spelt for index, spelt in enumerate(token_bytes)]
        self._text = TextTokenizer(
            backend, controls, pre_tokenizer=strip_prefix_space(backend.pre_tokenizer, anywhere=True)
        )
        self._model = TextTokenizer(backend, controls)

    def spell(self, texts: Sequence[bytes]) -> list[Pieces | None]:
        """Return ids that spell exactly the bytes of each text; None if the vocabulary lacks a byte."""
        found: dict[bytes, Pieces] = {text: (self._id_of_bytes[text],) for text in texts if text in self._id_of_bytes}
        found[b""] = ()
        in_parts = self._spell_merges if self._byte_level else self._spell_around_broken
        for cut in (self._spell_text, in_parts, lambda rest: list(map(self._spell_bytes, rest))):
            rest = [text for text in dict.fromkeys(texts) if text not in found]
            cuts = zip(rest, cut(rest), strict=True)
            found.update((text, pieces) for text, pieces in cuts if self._is_spelt(text, pieces))
        return [found.get(text) for text in texts]

    def _is_spelt(self, text: bytes, pieces: Pieces) -> bool:
        spelt = [self._ordinary[piece] for piece in pieces]
        return None not in spelt and b"".join(spelt) == text  # type: ignore[arg-type]

    def _spell_text(self, texts: Sequence[bytes]) -> list[Pieces]:
        """Tokenise as text. Wrong for broken characters and literal space marks; the caller checks."""
        readable = [text.decode(errors="replace") for text in texts]
        return self._text.tokenize_each(readable if self._byte_level else [_mark_spaces(text) for text in readable])

    def _spell_merges(self, texts: Sequence[bytes]) -> list[Pieces]:
        """Tokenise by the merges only, which read bytes and not text."""
        return self._model.tokenize_each([text.decode("latin-1").translate(BYTE_TO_CHARACTER) for text in texts])

    def _spell_around_broken(self, texts: Sequence[bytes]) -> list[Pieces]:
        """Spell broken characters and literal space marks byte by byte, and tokenise the text between them."""
        rows = [_UNWRITABLE.split(text.decode(errors="surrogateescape")) for text in texts]
        cuts = iter(self._text.tokenize_each([_mark_spaces(part) for row in rows for part in row[::2]]))
        found = []
        for row in rows:
            pieces: Pieces = ()
            for place, part in enumerate(row):
                pieces += self._spell_bytes(part.encode(errors="surrogateescape")) if place % 2 else next(cuts)
            found.append(pieces)
        return found

    def _spell_bytes(self, text: bytes) -> Pieces:
        """Spell with one id per byte; bytes that the vocabulary lacks are left out."""
        ids = (self._id_of_bytes.get(bytes([byte])) for byte in text)
        return tuple(index for index in ids if index is not None)


def _mark_spaces(text: str) -> str:
    return text.replace(" ", SPACE_MARK)
