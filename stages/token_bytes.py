"""The bytes behind every token of a tokenizer, and which tokens a text can never be cut into.

Two kinds of tokenizer are read: byte-level ones, which write every byte as a printable character (GPT-2's alphabet),
and those that mark spaces with a character and write rare bytes as `<0x0A>` (SentencePiece).

A *control* token has a meaning beside the text: the special tokens, and those that look like `<...>` or `[...]` and are
either added to the vocabulary or out of the reach of its merges, whether or not the tokenizer calls them special.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from store.errors import VocabularyError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # some tokenizers wrongly mark these special: they are text
_MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_TO_CHARACTER = _byte_alphabet()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}
# As Latin-1 characters, so that one `encode` gives the bytes; Latin-1 outside the alphabet goes where that fails.
_TO_LATIN_1 = {n: CHARACTER_TO_BYTE.get(chr(n), 0xFFFF) for n in range(0x180)}


@dataclass(frozen=True)
class Roles:
    """Ids of the tokens that begin a text, end it and fill up a batch; None where the tokenizer has none."""

    bos: int | None
    eos: int | None
    pad: int | None


@dataclass(frozen=True)
class TokenView:
    """What is read of a tokenizer once and kept on disk.

    Attributes:
        token_bytes: per id the bytes it stands for; None for special and unused ids.
        preferred: per id whether text with these bytes becomes this token, not another one with the same bytes.
        controls: name to id of the control tokens, in id order.
        digest: sha256 of all of this, the roles, and of how the tokenizer cuts a text.
    """

    token_bytes: tuple[bytes | None, ...]
    preferred: npt.NDArray[np.bool_]
    controls: Mapping[str, int]
    digest: str


def states(backend: Any) -> dict[str, str]:
    """The serialised parts of a tokenizer, but for its model, as JSON; empty for a part that it lacks."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    return {name: part.__getstate__().decode() if part is not None else "" for name, part in parts.items()}


def is_byte_level(backend: Any, name: str) -> bool:
    """Whether the tokenizer is byte-level; otherwise it marks spaces.

    Raises:
        VocabularyError: for a tokenizer that is neither.
    """
    parts = states(backend)
    kinds = set(re.findall(r'"type":"(\w+)"', parts["decoder"] + parts["pre_tokenizer"]))
    if "ByteLevel" not in kinds and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
        raise VocabularyError(
            f"the tokenizer of {name} must be byte-level or mark spaces with {SPACE_MARK!r} (SentencePiece); "
            f"its decoder is {parts['decoder'] or None}"
        )
    return "ByteLevel" in kinds


def _byte_level_bytes(content: str) -> bytes:
    try:
        return content.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # a token outside the alphabet is written as itself
        return content.encode()


def _space_mark_bytes(content: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(content):
        return bytes([int(content[3:5], 16)])
    return content.replace(SPACE_MARK, " ").encode()


def text_tokens(backend: Any, controls: Collection[int]) -> dict[int, Any]:
    """Added tokens that are plain text, such as runs of spaces: id to token. They are cut out before the merges."""
    return {
        index: token
        for index, token in backend.get_added_tokens_decoder().items()
        if index not in controls and not token.special and not _BYTE_TOKEN.fullmatch(token.content)
    }


class Kind(IntEnum):
    """What a token is. Of ordinary tokens with the same bytes, text becomes the lowest kind, then the lowest id."""

    ADDED = 0  # plain text, cut out of a text before the merges see it
    NORMAL = 1
    BYTE = 2  # a byte-fallback token: only where nothing else spells the byte
    MARKER = 3  # a control token that is shown: its bytes are its name
    SPECIAL = 4  # a control token without bytes


class _Reader:
    """Tells the kind and the bytes of a tokenizer's tokens."""

    def __init__(self, backend: Any, roles: Roles, byte_level: bool) -> None:
        self._model, self._byte_level = backend.model, byte_level
        self._added = backend.get_added_tokens_decoder()
        self._ends = {roles.bos, roles.eos}

    def kind(self, index: int, content: str) -> Kind:
        if not self._byte_level and _BYTE_TOKEN.fullmatch(content):
            return Kind.BYTE
        token = self._added.get(index)
        if index in self._ends or (token is not None and token.special):
            return Kind.SPECIAL
        if content[:1] in "<[" and _MARKER.fullmatch(content) and not self._is_merged(index, content):
            return Kind.MARKER
        return Kind.NORMAL if token is None else Kind.ADDED

    def _is_merged(self, index: int, content: str) -> bool:
        return index not in self._added and [token.id for token in self._model.tokenize(content)] == [index]

    def spelt(self, index: int, kind: Kind, content: str) -> bytes | None:
        if kind is Kind.SPECIAL:
            return None
        if index in self._added and kind is not Kind.BYTE:
            return content.encode()
        return _byte_level_bytes(content) if self._byte_level else _space_mark_bytes(content)


def _preferred(token_bytes: Sequence[bytes | None], kinds: Sequence[Kind]) -> npt.NDArray[np.bool_]:
    chosen: dict[bytes, int] = {}
    for index in sorted(range(len(kinds)), key=kinds.__getitem__):
        spelt = token_bytes[index]
        if spelt and kinds[index] <= Kind.BYTE:
            chosen.setdefault(spelt, index)
    preferred = np.zeros(len(kinds), dtype=bool)
    preferred[list(chosen.values())] = True
    return preferred


def flattened(token_bytes: Sequence[bytes | None]) -> tuple[npt.NDArray[np.int32], bytes]:
    """Lengths per id, -1 for None, and all bytes in a row."""
    lengths = np.array([-1 if spelt is None else len(spelt) for spelt in token_bytes], dtype=np.int32)
    return lengths, b"".join(spelt or b"" for spelt in token_bytes)


def read_view(backend: Any, roles: Roles, byte_level: bool) -> TokenView:
    """Read a `tokenizers.Tokenizer`; one or two seconds for 200,000 tokens."""
    reader = _Reader(backend, roles, byte_level)
    contents = {index: content for content, index in backend.get_vocab(with_added_tokens=True).items()}
    kinds = [Kind.SPECIAL] * (max(contents) + 1)
    token_bytes: list[bytes | None] = [None] * len(kinds)
    for index, content in contents.items():
        kinds[index] = reader.kind(index, content)
        token_bytes[index] = reader.spelt(index, kinds[index], content)
    controls = {contents[n]: n for n in sorted(contents) if kinds[n] >= Kind.MARKER}
    return TokenView(
        tuple(token_bytes), _preferred(token_bytes, kinds), controls, _digest(backend, roles, token_bytes, controls)
    )


def _digest(backend: Any, roles: Roles, token_bytes: Sequence[bytes | None], controls: Mapping[str, int]) -> str:
    digest = hashlib.sha256(json.dumps([vars(roles), controls, states(backend)]).encode())
    lengths, spelt = flattened(token_bytes)
    for part in (lengths.tobytes(), spelt, backend.model.__getstate__()):
        digest.update(part)
    return digest.hexdigest()
