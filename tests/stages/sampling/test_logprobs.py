"""Log probabilities are those that a plain pass over the whole text gives, whatever was drafted."""

import math

import pytest
import torch
from doubles import row_of

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.ngrams.trie import Trie
from stages.sampling.logprobs import RejectedPlace, TokenLogprobs, compute_logprobs, compute_raw_values
from stages.sampling.params import SamplingParams
from stages.verification.parsing import parse
from stages.verification.rules import TrieRule
from stages.verify import Verify

KNOWN, WIDTH, PIECES = 9, 11, 4
SPELLING = ((0,), (1,), (0, 1), (2,), (3,), (1, 2), None, (3, 3), (2, 0, 1))
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    llama = new_llama(2, vocab_size=WIDTH, num_key_value_heads=1, **SHAPE)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(4)  # distributions that differ from place to place
    return LanguageModel(llama, "tiny")


def verify_blocks(model: LanguageModel, rows: list[SequenceState], blocks: int) -> list[list[Verdict]]:
    """Several blocks of all rows, drafts taken from each row's own numbers."""
    trie = Trie(WIDTH, PIECES)
    trie.insert_all((pieces, token) for token, pieces in enumerate(SPELLING) if pieces)
    context = [pieces or () for pieces in SPELLING]
    verify = Verify(model.share_weights(), TrieRule(trie), SamplingParams(0.8), context, KNOWN, (), None)
    for row in rows:
        verify.admit(row)
    found = []
    for block in range(blocks):
        drafts = [tuple((row.offset + block + n) % PIECES for n in range(block % 4)) for row in rows]
        distributions = [torch.full((len(pieces), PIECES), 1 / PIECES) for pieces in drafts]
        found.append(
            verify(
                [
                    Proposal(Draft(row, pieces, draft_probs_KD, (), None, ()), parse(trie, pieces))
                    for row, pieces, draft_probs_KD in zip(rows, drafts, distributions, strict=True)
                ]
            )
        )
    return found


@torch.no_grad()
def plain(model: LanguageModel, row: SequenceState) -> torch.Tensor:
    """Log probabilities at the place of each emitted token, by `transformers` on the whole text."""
    logits_TV = model.model(torch.tensor([row.tokens])).logits[0, row.prompt_length - 1 : -1]
    logits_TV[:, KNOWN:] = -torch.inf
    return logits_TV.double().log_softmax(-1)


@pytest.mark.parametrize("requested", [(None, None), (0, None), (3, 0, None), (20, 1)])
def test_they_are_those_of_the_whole_text_before_temperature(model: LanguageModel, requested: tuple[int | None, ...]):
    rows = [row_of([1, 2, 3][: 1 + n], offset=n) for n in range(len(requested))]
    for row, most in zip(rows, requested, strict=True):
        row.sampling = SamplingParams(0.8, logprobs=most)
    blocks = verify_blocks(model, rows, 7)
    assert any(verdict.accepted for verdicts in blocks for verdict in verdicts)
    for number, (row, most) in enumerate(zip(rows, requested, strict=True)):
        found = [one for verdicts in blocks for one in verdicts[number].logprobs]
        if most is None:
            assert found == []
            continue
        assert [one.token for one in found] == row.tokens[row.prompt_length :]
        for one, target_probs_V in zip(found, plain(model, row), strict=True):
            assert one.logprob == pytest.approx(float(target_probs_V[one.token]), abs=1e-4)
            want = target_probs_V.topk(min(most, KNOWN))
            assert [token for token, _ in one.top] == want.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(want.values.tolist(), abs=1e-4)


def test_nothing_is_computed_where_no_row_requests_them(model: LanguageModel, monkeypatch):
    monkeypatch.setattr("stages.verify.compute_logprobs", lambda *args: pytest.fail("no row requests them"))
    verify_blocks(model, [row_of([1])], 2)


def test_alternatives_that_are_impossible_are_left_out():
    logits_NV = torch.tensor([[0.0, -math.inf, 0.0], [1.0, 2.0, 3.0]])
    first, second = compute_logprobs(logits_NV, [2, 0], [3, 1])
    assert (first.token, sorted(token for token, _ in first.top)) == (2, [0, 2])
    assert first.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in second.top] == [2]
    assert compute_logprobs(logits_NV, [2, 0], [0, 0])[0] == TokenLogprobs(2, first.logprob)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gaps", [False, True])
def test_all_types_give_the_values_of_float64(dtype: torch.dtype, *, gaps: bool):
    logits_NV = torch.randn(5, 2 * 320, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    logits_NV[:, 300:310] = -torch.inf
    logits_NV = logits_NV.to(dtype)
    logits_NV = logits_NV[:, ::2] if gaps else logits_NV[:, :320]
    probs_NV = logits_NV.double().softmax(-1)
    entropies_N = torch.special.entr(probs_NV).sum(-1)
    places = [RejectedPlace(4, 7, 9), RejectedPlace(1, None, 3), RejectedPlace(1, 153, 0)]
    for place, found in zip(places, compute_raw_values(logits_NV, places), strict=True):
        if place.proposed is None:
            assert found.proposed is None
        else:
            assert found.proposed == pytest.approx(float(probs_NV[place.line, place.proposed]), rel=1e-5, abs=1e-9)
        assert found.emitted == pytest.approx(float(probs_NV[place.line, place.emitted]), rel=1e-5, abs=1e-9)
        assert found.entropy == pytest.approx(float(entropies_N[place.line]), rel=1e-5)
