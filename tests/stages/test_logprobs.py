"""Log probabilities are those that a plain pass over the whole text gives, whatever was drafted."""

import math

import pytest
import torch
from doubles import row_of

from stages.acceptance import TrieRule
from stages.blocks import Draft, Proposal, Row, Verdict
from stages.distributions import Sampling
from stages.huggingface import new_llama
from stages.language_model import LanguageModel
from stages.logprobs import TokenLogprobs, logprobs_of
from stages.teach import teach_nothing
from stages.translate import parse
from stages.trie import Trie
from stages.verify import Verify

KNOWN, WIDTH, PIECES = 9, 11, 4
SPELLING = ((0,), (1,), (0, 1), (2,), (3,), (1, 2), None, (3, 3), (2, 0, 1))
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    llama = new_llama(2, vocab_size=WIDTH, num_key_value_heads=1, **SHAPE)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(4)  # laws that differ from place to place
    return LanguageModel(llama, "tiny")


def verified(model: LanguageModel, rows: list[Row], blocks: int) -> list[list[Verdict]]:
    """Several blocks of all rows, drafts taken from each row's own numbers."""
    trie = Trie(WIDTH, PIECES)
    trie.insert_all((pieces, token) for token, pieces in enumerate(SPELLING) if pieces)
    context = [pieces or () for pieces in SPELLING]
    verify = Verify(model.beside(), TrieRule(trie), Sampling(0.8), context, KNOWN, (), teach_nothing)
    for row in rows:
        verify.admit(row)
    found = []
    for block in range(blocks):
        drafts = [tuple((row.offset + block + n) % PIECES for n in range(block % 4)) for row in rows]
        laws = [torch.full((len(pieces), PIECES), 1 / PIECES) for pieces in drafts]
        found.append(
            verify(
                [
                    Proposal(Draft(row, pieces, laws_KD, (), None, ()), parse(trie, pieces))
                    for row, pieces, laws_KD in zip(rows, drafts, laws, strict=True)
                ]
            )
        )
    return found


@torch.no_grad()
def plain(model: LanguageModel, row: Row) -> torch.Tensor:
    """Of each emitted token's place the log probabilities, by `transformers` on the whole text."""
    logits_TV = model.model(torch.tensor([row.tokens])).logits[0, row.prompt_length - 1 : -1]
    logits_TV[:, KNOWN:] = -torch.inf
    return logits_TV.double().log_softmax(-1)


@pytest.mark.parametrize("asked", [(None, None), (0, None), (3, 0, None), (20, 1)])
def test_they_are_those_of_the_whole_text_before_temperature(model: LanguageModel, asked: tuple[int | None, ...]):
    rows = [row_of([1, 2, 3][: 1 + n], offset=n) for n in range(len(asked))]
    for row, most in zip(rows, asked, strict=True):
        row.logprobs = most
    blocks = verified(model, rows, 7)
    assert any(verdict.accepted for verdicts in blocks for verdict in verdicts)
    for number, (row, most) in enumerate(zip(rows, asked, strict=True)):
        found = [one for verdicts in blocks for one in verdicts[number].logprobs]
        if most is None:
            assert found == []
            continue
        assert [one.token for one in found] == row.tokens[row.prompt_length :]
        for one, law_V in zip(found, plain(model, row), strict=True):
            assert one.logprob == pytest.approx(float(law_V[one.token]), abs=1e-4)
            want = law_V.topk(min(most, KNOWN))
            assert [token for token, _ in one.top] == want.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(want.values.tolist(), abs=1e-4)


def test_nothing_is_computed_where_no_row_asks(model: LanguageModel, monkeypatch):
    monkeypatch.setattr("stages.verify.logprobs_of", lambda *args: pytest.fail("nobody asked"))
    verified(model, [row_of([1])], 2)


def test_alternatives_that_are_impossible_are_left_out():
    logits_NV = torch.tensor([[0.0, -math.inf, 0.0], [1.0, 2.0, 3.0]])
    first, second = logprobs_of(logits_NV, [2, 0], [3, 1])
    assert (first.token, sorted(token for token, _ in first.top)) == (2, [0, 2])
    assert first.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in second.top] == [2]
    assert logprobs_of(logits_NV, [2, 0], [0, 0])[0] == TokenLogprobs(2, first.logprob)
