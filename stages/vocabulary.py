"""Vocabularies as bytes, and the pieces of one that spell the tokens of another.

Every token of text is a byte string; two vocabularies meet there and never in decoded characters, because many
tokens are not valid UTF-8 by themselves. Special tokens have no bytes: they are matched by role.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from store.errors import VocabularyError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # some tokenizers wrongly mark these special: they are text


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_TO_CHARACTER = _byte_alphabet()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


def _kinds(part: Any) -> set[str]:
    """The types named anywhere in a part of a serialised tokenizer."""
    if isinstance(part, dict):
        return {str(part.get("type"))}.union(*(_kinds(value) for value in part.values()))
    if isinstance(part, list):
        return set().union(*(_kinds(value) for value in part)) if part else set()
    return set()


def _byte_level_bytes(content: str) -> bytes:
    try:
        return bytes(CHARACTER_TO_BYTE[character] for character in content)
    except KeyError:  # a token outside the alphabet is written as itself
        return content.encode()


def _space_mark_bytes(content: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(content):
        return bytes([int(content[3:5], 16)])
    return content.replace(SPACE_MARK, " ").encode()


class Vocabulary:
    """A fast tokenizer seen as byte strings.

    Attributes:
        size: number of ids that the tokenizer knows; a model's output layer may be wider.
        token_bytes: per id the bytes it stands for; None for special and unused ids.
        bos, eos: ids of the roles, or None.
        digest: sha256 of the serialised tokenizer.

    Raises:
        VocabularyError: for a tokenizer that is neither byte-level nor of the space-mark kind.
    """

    def __init__(self, tokenizer: Any, name: str = "") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise VocabularyError(f"{name or 'the model'} needs a fast tokenizer (tokenizer.json); convert it first")
        serialized = backend.to_str()
        state = json.loads(serialized)
        kinds = _kinds(state.get("decoder")) | _kinds(state.get("pre_tokenizer"))
        self.name = name
        self.digest = hashlib.sha256(serialized.encode()).hexdigest()
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id
        self._tokenizer, self._model = tokenizer, backend.model
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
            raise VocabularyError(
                f"the tokenizer of {name} must be byte-level or mark spaces with {SPACE_MARK!r} (SentencePiece); "
                f"its decoder is {state.get('decoder')}"
            )
        self.token_bytes = self._read_token_bytes(state)
        self.size = len(self.token_bytes)

    def _read_token_bytes(self, state: dict[str, Any]) -> tuple[bytes | None, ...]:
        convert = _byte_level_bytes if self._byte_level else _space_mark_bytes
        added = {token["id"]: token for token in state["added_tokens"]}
        contents = {index: content for content, index in self._tokenizer.get_vocab().items()}
        found: list[bytes | None] = []
        for index in range(max(contents) + 1):
            if index not in contents:
                found.append(None)
            elif index in added and not (convert is _space_mark_bytes and _BYTE_TOKEN.fullmatch(contents[index])):
                found.append(None if added[index]["special"] else added[index]["content"].encode())
            else:
                found.append(convert(contents[index]))
        return tuple(found)

    @cached_property
    def id_of_bytes(self) -> dict[bytes, int]:
        """The id that spells a byte string. Where a byte-fallback token repeats a normal piece, the normal one."""
        chosen: dict[bytes, int] = {}
        known = self._tokenizer.get_vocab()
        byte_tokens = {known.get(f"<0x{byte:02X}>") for byte in range(256)}
        for index, spelt in enumerate(self.token_bytes):
            if spelt and (spelt not in chosen or chosen[spelt] in byte_tokens):
                chosen[spelt] = index
        return chosen

    def spell(self, text: bytes) -> tuple[int, ...] | None:
        """Ids that spell exactly these bytes, as the tokenizer would cut them in the middle of a text.

        No space is put before them. None if the vocabulary cannot spell them.
        """
        if not text:
            return ()
        if text in self.id_of_bytes:
            return (self.id_of_bytes[text],)
        pieces = self._cut(text)
        if b"".join(self.token_bytes[piece] or b"" for piece in pieces) == text:
            return pieces
        single = [self.id_of_bytes.get(bytes([byte])) for byte in text]
        return None if None in single else tuple(piece for piece in single if piece is not None)

    def _cut(self, text: bytes) -> tuple[int, ...]:
        if self._byte_level:
            return tuple(token.id for token in self._model.tokenize("".join(BYTE_TO_CHARACTER[b] for b in text)))
        try:
            characters = text.decode().replace(" ", SPACE_MARK)
        except UnicodeDecodeError:
            return ()
        return tuple(token.id for token in self._model.tokenize(characters))

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text with the BOS that the tokenizer adds by itself; names of special tokens are text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [self.bos, *ids] if self._adds_bos and self.bos is not None else ids

    @cached_property
    def _adds_bos(self) -> bool:
        return self._tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [self.bos]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, by their bytes; broken characters are replaced, special tokens left out."""
        return b"".join(self.bytes_of(index) or b"" for index in ids).decode(errors="replace")

    def bytes_of(self, index: int) -> bytes | None:
        """Bytes of an id; None for special ids and for ids beyond the tokenizer."""
        return self.token_bytes[index] if index < self.size else None


@dataclass(frozen=True)
class Pair:
    """A target's vocabulary in a drafter's pieces.

    Attributes:
        pieces: per target id the drafter pieces that spell it; None where there are none: special tokens without
            a counterpart, unused ids, duplicates of another token's bytes.
        context: like `pieces`, but also for duplicates: what the drafter reads when the token was emitted.
        drafter_size: number of the drafter's ids.
        digest: sha256 of the two vocabularies' digests.
        unspelt: target tokens with bytes that the drafter cannot spell.
    """

    pieces: tuple[tuple[int, ...] | None, ...]
    context: tuple[tuple[int, ...], ...]
    drafter_size: int
    digest: str
    unspelt: int

    @property
    def direct(self) -> int:
        """Number of target tokens that are one piece."""
        return sum(1 for pieces in self.pieces if pieces and len(pieces) == 1)


def pair(target: Vocabulary, drafter: Vocabulary) -> Pair:
    """Spell every target token in the drafter's pieces.

    EOS maps to EOS by role. Other special tokens have no pieces: the drafter never proposes them.
    Of several target tokens with the same pieces, the one that the target's tokenizer prefers keeps them.

    Raises:
        VocabularyError: if more than one target token in a hundred cannot be spelt.
    """
    preferred = set(target.id_of_bytes.values())
    pieces: list[tuple[int, ...] | None] = []
    context: list[tuple[int, ...]] = []
    unspelt = 0
    for index, spelt in enumerate(target.token_bytes):
        cut = drafter.spell(spelt) if spelt else None
        unspelt += bool(spelt) and cut is None
        if index == target.eos and drafter.eos is not None:
            cut = (drafter.eos,)
        context.append(cut or ())
        pieces.append(cut if cut and (index in preferred or index == target.eos) else None)
    if unspelt > len(pieces) // 100:
        raise VocabularyError(
            f"the drafter {drafter.name} must be able to spell the target's bytes, but has no pieces for {unspelt:,} "
            f"of {len(pieces):,} tokens of {target.name}; use a drafter with a byte-level or byte-fallback tokenizer"
        )
    digest = hashlib.sha256((target.digest + drafter.digest).encode()).hexdigest()
    return Pair(tuple(pieces), tuple(context), drafter.size, digest, unspelt)
