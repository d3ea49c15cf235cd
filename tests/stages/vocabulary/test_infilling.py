"""Prompts that fill in the middle are those that the models were trained on; other tokenizers are refused."""

import pytest
from tokenizer_making import byte_level

from stages.vocabulary.infilling import FORMS, encode_gap
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError


@pytest.mark.parametrize("form", FORMS)
def test_both_parts_stand_between_the_tokens_of_the_model(form: tuple[str, str, str]):
    vocabulary = Vocabulary(byte_level([], specials=(*form, "<|file_sep|>")), "coder")
    ids = vocabulary.specials
    tokens, ends = encode_gap(vocabulary, "a " + form[1], "b", vocabulary.encode_text)
    begin, hole, middle = (ids[name] for name in form)
    assert (tokens[0], tokens[-1], tokens.count(hole)) == (begin, middle, 1), "names in the text are text"
    assert vocabulary.decode(tokens[1 : tokens.index(hole)]) == "a " + form[1]
    assert vocabulary.decode(tokens[tokens.index(hole) : -1]) == "b"
    assert ends == (*(ids[name] for name in form), ids["<|file_sep|>"])


def test_a_tokenizer_without_all_three_tokens_is_refused():
    vocabulary = Vocabulary(byte_level([], specials=FORMS[0][:2]), "tiny")
    with pytest.raises(ConfigError, match="suffix must be empty for tiny, whose tokenizer has no tokens to fill in"):
        encode_gap(vocabulary, "a", "b", vocabulary.encode_text)
