"""Two small vocabularies, one of each kind."""

import pytest
from tokenizer_making import LETTER_MERGES, LETTERS, MERGES, byte_level, space_mark

from stages.vocabulary.tokenizer_view import Vocabulary


@pytest.fixture(scope="module")
def bytes_words() -> Vocabulary:
    return Vocabulary(byte_level(MERGES), "bytes")


@pytest.fixture(scope="module")
def marked_words() -> Vocabulary:
    return Vocabulary(space_mark(LETTERS, LETTER_MERGES), "marked")
