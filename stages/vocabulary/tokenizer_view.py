"""Vocabularies as bytes.

Every token of text is a byte string; two vocabularies are compared by bytes and never by decoded characters, because
many tokens are not valid UTF-8 by themselves. Special tokens have no bytes: they are matched by role and name.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from stages.vocabulary.spelling import Pieces, Speller, TextTokenizer, strip_prefix_space
from stages.vocabulary.token_bytes import Roles, is_byte_level, load_view
from store.errors import VocabularyError


class Vocabulary:
    """A fast tokenizer seen as byte strings. Raises `VocabularyError` if the tokenizer is neither byte-level nor of the
    space-mark kind.
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

    def encode_controls(self, text: str, *, begin: bool = True) -> list[int]:
        """Encode a text in which the names of control tokens are these tokens; `begin`: with BOS, as `encode`."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [self.bos, *ids] if begin and self._adds_bos and self.bos is not None else ids

    def encode_text(self, text: str, *, first: bool = True) -> list[int]:
        """Encode a part of a prompt: as `encode`, but without BOS. `first` is False after a control token, where some
        tokenizers put no space before the text.
        """
        ids = (self._whole if first else self._continued).tokenize(text)
        return ids if self._controls.isdisjoint(ids) else [piece for index in ids for piece in self._spell_name(index)]

    def fewest_tokens(self, characters: int) -> int:
        """Return the number of tokens of a text with so many characters if each were the longest one."""
        return -(-characters // self._longest)

    @cached_property
    def _longest(self) -> int:
        return max((len(spelt) for spelt in self.token_bytes if spelt), default=1)

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
