"""Reads the bytes of every token of a tokenizer, and the tokens that no text is tokenised to.

Two kinds of tokenizer are read: byte-level ones, which write every byte as a printable character (GPT-2's alphabet),
and those that mark spaces with a character and write rare bytes as `<0x0A>` (SentencePiece).

A *control* token has a meaning other than its text: the special tokens, and those that look like `<...>` or `[...]`
and are either added to the vocabulary or unreachable by its merges, whether or not the tokenizer marks them special.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub import try_to_load_from_cache

from stages.vocabulary.disk_cache import Arrays, digest_json, load_arrays, store_arrays
from store.errors import VocabularyError

SPACE_MARK = "▁"
_SAMPLES = 256  # tokens that are compared with a tokenizer in memory
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # some tokenizers wrongly mark these special: they are text
_MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character for every byte: printable Latin-1 maps to itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_TO_CHARACTER = _byte_alphabet()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}
# As Latin-1 characters, so that one `encode` gives the bytes; Latin-1 outside the alphabet goes where that fails.
_TO_LATIN_1 = {n: CHARACTER_TO_BYTE.get(chr(n), 0xFFFF) for n in range(0x180)}


@dataclass(frozen=True)
class Roles:
    """Ids of the tokens that begin a text, end it and pad a batch; None for a missing one."""

    bos: int | None
    eos: int | None
    pad: int | None


@dataclass(frozen=True)
class TokenView:
    """Data that is derived from a tokenizer once and cached on disk."""

    token_bytes: tuple[bytes | None, ...]  # per id the bytes it stands for; None for special and unused ids
    # per id whether text with these bytes becomes this token, not another one with the same bytes
    preferred: npt.NDArray[np.bool_]
    controls: Mapping[str, int]  # name to id of the control tokens, in id order
    digest: str  # sha256 of all of this, the roles, and of how the tokenizer cuts a text


def serialize_parts(backend: Any) -> dict[str, str]:
    """Serialise the parts of a tokenizer, except for its model, as JSON; empty for a missing part."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    return {name: part.__getstate__().decode() if part is not None else "" for name, part in parts.items()}


def is_byte_level(backend: Any, name: str) -> bool:
    """Check whether the tokenizer is byte-level; otherwise it marks spaces. Raises `VocabularyError` for a tokenizer
    that is neither.
    """
    parts = serialize_parts(backend)
    kinds = set(re.findall(r'"type":"(\w+)"', parts["decoder"] + parts["pre_tokenizer"]))
    if "ByteLevel" not in kinds and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
        raise VocabularyError(
            f"the tokenizer of {name} must be byte-level or mark spaces with {SPACE_MARK!r} (SentencePiece); "
            f"its decoder is {parts['decoder'] or None}"
        )
    return "ByteLevel" in kinds


def find_text_tokens(backend: Any, controls: Collection[int]) -> dict[int, Any]:
    """Return the added tokens of plain text, such as runs of spaces, by id. They are matched before the merges."""
    return {
        index: token
        for index, token in backend.get_added_tokens_decoder().items()
        if index not in controls and not token.special and not _BYTE_TOKEN.fullmatch(token.content)
    }


class Kind(IntEnum):
    """The kind of a token. Of ordinary tokens with the same bytes, text maps to the lowest kind, then the lowest id."""

    ADDED = 0  # plain text, cut out of a text before the merges see it
    NORMAL = 1
    BYTE = 2  # a byte-fallback token: only where nothing else spells the byte
    MARKER = 3  # a control token that is shown: its bytes are its name
    SPECIAL = 4  # a control token without bytes


class _Reader:
    def __init__(self, backend: Any, roles: Roles, byte_level: bool) -> None:
        self._model, self._byte_level = backend.model, byte_level
        self._added = backend.get_added_tokens_decoder()
        self._ends = {roles.bos, roles.eos}

    def classify(self, index: int, content: str) -> Kind:
        if not self._byte_level and _BYTE_TOKEN.fullmatch(content):
            return Kind.BYTE
        token = self._added.get(index)
        if index in self._ends or (token is not None and token.special):
            return Kind.SPECIAL
        if content[:1] in "<[" and _MARKER.fullmatch(content):
            merged = [] if token is not None else [one.id for one in self._model.tokenize(content)]
            return Kind.NORMAL if merged == [index] else Kind.MARKER
        return Kind.NORMAL if token is None else Kind.ADDED

    def spell(self, index: int, kind: Kind, content: str) -> bytes | None:
        if kind is Kind.SPECIAL:
            return None
        if index in self._added and kind is not Kind.BYTE:
            return content.encode()
        if not self._byte_level:
            is_byte = _BYTE_TOKEN.fullmatch(content)
            return bytes([int(content[3:5], 16)]) if is_byte else content.replace(SPACE_MARK, " ").encode()
        try:
            return content.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # a token outside the alphabet is written as itself
            return content.encode()


def _mark_preferred(token_bytes: Sequence[bytes | None], kinds: Sequence[Kind]) -> npt.NDArray[np.bool_]:
    chosen: dict[bytes, int] = {}
    for index in sorted(range(len(kinds)), key=kinds.__getitem__):
        spelt = token_bytes[index]
        if spelt and kinds[index] <= Kind.BYTE:
            chosen.setdefault(spelt, index)
    preferred = np.zeros(len(kinds), dtype=bool)
    preferred[list(chosen.values())] = True
    return preferred


def flatten_bytes(token_bytes: Sequence[bytes | None]) -> tuple[npt.NDArray[np.int32], bytes]:
    """Return the length per id (-1 for None) and the concatenated bytes."""
    lengths = np.array([-1 if spelt is None else len(spelt) for spelt in token_bytes], dtype=np.int32)
    return lengths, b"".join(spelt or b"" for spelt in token_bytes)


def read_view(backend: Any, roles: Roles, byte_level: bool) -> TokenView:
    """Read a `tokenizers.Tokenizer`; one or two seconds for 200,000 tokens."""
    reader = _Reader(backend, roles, byte_level)
    contents = {index: content for content, index in backend.get_vocab(with_added_tokens=True).items()}
    kinds = [Kind.SPECIAL] * (max(contents) + 1)
    token_bytes: list[bytes | None] = [None] * len(kinds)
    for index, content in contents.items():
        kinds[index] = reader.classify(index, content)
        token_bytes[index] = reader.spell(index, kinds[index], content)
    controls = {contents[n]: n for n in sorted(contents) if kinds[n] >= Kind.MARKER}
    return TokenView(
        tuple(token_bytes),
        _mark_preferred(token_bytes, kinds),
        controls,
        _digest(backend, roles, token_bytes, controls),
    )


def _digest(backend: Any, roles: Roles, token_bytes: Sequence[bytes | None], controls: Mapping[str, int]) -> str:
    digest = hashlib.sha256(json.dumps([vars(roles), controls, serialize_parts(backend)]).encode())
    lengths, spelt = flatten_bytes(token_bytes)
    for part in (lengths.tobytes(), spelt, backend.model.__getstate__()):
        digest.update(part)
    return digest.hexdigest()


def load_view(tokenizer: Any, roles: Roles, byte_level: bool) -> TokenView:
    """Load the view of a tokenizer from disk, or read and store it."""
    key = _make_key(tokenizer, roles)
    view: TokenView | None = load_arrays("vocabulary", key, _from_arrays)
    if view is None:
        view = read_view(tokenizer.backend_tokenizer, roles, byte_level)
        store_arrays("vocabulary", key, _to_arrays(view))
    return view


def _make_key(tokenizer: Any, roles: Roles) -> str:
    """Return the cache key of a view. The digest of the file represents the model if there is a file, which is fast.

    A tokenizer may have been changed after it was loaded, so properties that are fast to read are part of the key.
    """
    backend = tokenizer.backend_tokenizer
    path = _find_file(tokenizer)
    content = path.read_bytes() if path else backend.to_str().encode()
    size = backend.get_vocab_size(with_added_tokens=True)
    sampled = [backend.id_to_token(index) for index in range(0, size, size // _SAMPLES + 1)]
    added = [(index, token.content, token.special) for index, token in backend.get_added_tokens_decoder().items()]
    return digest_json(
        hashlib.sha256(content).hexdigest(), vars(roles), size, sampled, sorted(added), serialize_parts(backend)
    )


def _find_file(tokenizer: Any) -> Path | None:
    """Find the tokenizer.json that a tokenizer was loaded from: in its folder, or in the hub's cache."""
    source = str(tokenizer.name_or_path)
    if not source:
        return None
    path = Path(source) / "tokenizer.json"
    if path.is_file():
        return path
    try:
        cached = try_to_load_from_cache(source, "tokenizer.json")
    except ValueError:  # no name that the hub allows
        return None
    return Path(cached) if isinstance(cached, str) else None


def _to_arrays(view: TokenView) -> Arrays:
    lengths, spelt = flatten_bytes(view.token_bytes)
    return {
        "lengths": lengths,
        "bytes": np.frombuffer(spelt, dtype=np.uint8),
        "preferred": view.preferred,
        "controls": np.frombuffer(json.dumps(view.controls).encode(), dtype=np.uint8),
        "digest": np.array(view.digest),
    }


def _from_arrays(arrays: Arrays) -> TokenView:
    lengths, spelt = arrays["lengths"].tolist(), arrays["bytes"].tobytes()
    ends = np.maximum(arrays["lengths"], 0).cumsum().tolist()
    places = zip(lengths, ends, strict=True)
    token_bytes = tuple(None if length < 0 else spelt[end - length : end] for length, end in places)
    return TokenView(token_bytes, arrays["preferred"], json.loads(arrays["controls"].tobytes()), str(arrays["digest"]))
