"""Vocabularies as bytes.

Every token of text is a byte string; two vocabularies meet there and never in decoded characters, because many
tokens are not valid UTF-8 by themselves. Special tokens have no bytes: they are matched by role and name.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from stages import vocabulary_cache
from stages.spelling import Cutter, Pieces, Speller, without_prefix
from stages.token_bytes import Roles, is_byte_level, read_view
from store.errors import VocabularyError


class Vocabulary:
    """A fast tokenizer seen as byte strings.

    Attributes:
        tokenizer: what was given.
        size: number of ids that the tokenizer knows; a model's output layer may be wider.
        token_bytes: per id the bytes it stands for; None for special and unused ids.
        specials: name to id of the control tokens, in id order: the special ones, and those that look like `<...>`
            or `[...]` and never come of text, such as the `<|EOT|>` of DeepSeek Coder; these have bytes, their name.
        bos, eos, pad: ids of the roles, or None.
        digest: sha256 of what the tokens are and of how text is cut; the same wherever the tokenizer came from.

    Raises:
        VocabularyError: for a tokenizer that is neither byte-level nor of the space-mark kind.
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
        view = vocabulary_cache.view_of(tokenizer, roles, lambda: read_view(backend, roles, self._byte_level))
        self.token_bytes = view.token_bytes
        self.specials: Mapping[str, int] = view.controls
        self.digest = view.digest
        self.size = len(self.token_bytes)
        self._preferred = view.preferred

    @cached_property
    def id_of_bytes(self) -> dict[bytes, int]:
        """The id that text with these bytes becomes; of tokens with the same bytes, the tokenizer's own choice."""
        return {self.token_bytes[index] or b"": index for index in self._preferred.nonzero()[0].tolist()}

    def spell(self, text: bytes) -> Pieces | None:
        """Ids that spell exactly these bytes, as the tokenizer would cut them in the middle of a text.

        No space is put before them, and control tokens are not used. None if the vocabulary cannot spell them.
        """
        return self.spell_each([text])[0]

    def spell_each(self, texts: Sequence[bytes]) -> list[Pieces | None]:
        """`spell` of many; far faster than one by one."""
        return self._speller.spell(texts)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self._backend, self._byte_level, self.token_bytes, self._controls, self.id_of_bytes)

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self.specials.values())

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text with the BOS that the tokenizer adds by itself; names of control tokens are text."""
        ids = self.encode_text(text)
        return [self.bos, *ids] if self._adds_bos and self.bos is not None else ids

    def encode_text(self, text: str, *, first: bool = True) -> list[int]:
        """As `encode`, but without BOS: a part of a prompt.

        Args:
            text: the part.
            first: False behind a control token, where some tokenizers put no space before the text.
        """
        ids = (self._whole if first else self._continued).cut(text)
        return ids if self._controls.isdisjoint(ids) else [piece for index in ids for piece in self._spelt_out(index)]

    def _spelt_out(self, index: int) -> Pieces:
        """A control token that the model itself made of its name, in ordinary tokens; the unknown token stays."""
        if index not in self._controls or index == self.tokenizer.unk_token_id:
            return (index,)
        return self.spell(self._backend.id_to_token(index).encode()) or ()

    @cached_property
    def _whole(self) -> Cutter:
        return Cutter(self._backend, self._controls, self._backend.normalizer, self._backend.pre_tokenizer)

    @cached_property
    def _continued(self) -> Cutter:
        pre_tokenizer = without_prefix(self._backend.pre_tokenizer, anywhere=False)
        return Cutter(self._backend, self._controls, self._backend.normalizer, pre_tokenizer)

    @cached_property
    def _adds_bos(self) -> bool:
        return self.tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [self.bos]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, by their bytes; broken characters are replaced, special tokens left out."""
        return b"".join(self.bytes_of(index) or b"" for index in ids).decode(errors="replace")

    def bytes_of(self, index: int) -> bytes | None:
        """Bytes of an id; None for special ids and for ids beyond the tokenizer."""
        return self.token_bytes[index] if 0 <= index < self.size else None
