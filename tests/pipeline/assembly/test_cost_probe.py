"""Costs are measured by doing the work, and the rows are released afterwards."""

import pytest
import torch
from doubles import TableModel, row_of

from pipeline.assembly import cost_probe
from pipeline.assembly.cost_probe import measure
from stages.decode import Decode
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import FixedLength
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.sampling.params import SamplingParams
from stages.translate import Translate
from stages.verification.rules import TrieRule
from stages.verify import Verify

VOCABULARY = 12


class Clock:
    """Time passes only while a model works: so much per pass and so much per token."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel(TableModel):
    def __init__(self, clock: Clock, per_pass: float, per_token: float) -> None:
        super().__init__(lambda history: torch.zeros(VOCABULARY), VOCABULARY)
        self._clock, self._per_pass, self._per_token = clock, per_pass, per_token

    def forward(self, rows, tokens, wanted, **options):
        self._clock.now += self._per_pass + self._per_token * sum(map(len, tokens))
        return super().forward(rows, tokens, wanted, **options)


class TimedVerify(Verify):
    """Time passes around the pass too: so much per block, and so much more if anything was drafted."""

    def __init__(self, clock: Clock, model: TimedModel, trie: Trie) -> None:
        context = [(token,) for token in range(VOCABULARY)]
        super().__init__(model, TrieRule(trie), SamplingParams(), context, VOCABULARY, (), None)
        self._clock = clock

    def __call__(self, batch):
        self._clock.now += 0.5 + 0.375 * any(proposal.draft.pieces for proposal in batch)
        return super().__call__(batch)


def make_stages(clock: Clock, model: TimedModel) -> tuple[Translate, Verify]:
    trie = Trie(VOCABULARY, VOCABULARY)
    trie.insert_all([((token,), token) for token in range(VOCABULARY)])
    cache = NgramCache(trie, 0)
    return Translate(trie, cache, [(token,) for token in range(VOCABULARY)]), TimedVerify(clock, model, trie)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_measured_costs_are_those_of_the_passes(batch: int, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(cost_probe, "perf_counter", clock)
    target, drafter = TimedModel(clock, 1.0, 0.125), TimedModel(clock, 0.25, 0.0625)
    drafter.max_length = 40  # shorter than the rows that are read in a longer context
    head = AcceptanceHead(drafter.hidden_size, 0)
    decode = Decode(drafter, head, FixedLength(), SamplingParams(), range(VOCABULARY), 4, None)
    costs = measure(target, decode, *make_stages(clock, target), batch)
    assert (costs.around, costs.per_draft) == pytest.approx((0.5, 0.375))
    for count in (1, 2, 3, 5, 9):
        assert costs.verification_cost(batch * count) == pytest.approx(1.5 + 0.125 * batch * count)
    assert costs.drafts_cost([2] * batch) == pytest.approx(0.375 + 2 * (0.25 + 0.0625 * batch))
    assert costs.drafts_cost([0] * batch) == 0
    for rows in {1, batch}:
        assert costs.drafting_cost(rows) == pytest.approx(0.25 + 0.0625 * rows)
    row = row_of([1, 2])
    target.admit(row, row.tokens)
    decode.admit(row)
    assert len(decode([row])[0].pieces) == 4, "no probe is left in the batch"
