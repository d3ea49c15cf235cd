"""Costs are measured by doing the work, and nothing stays behind."""

import pytest
import torch
from doubles import TableModel, row_of

from stages.decode import Decode
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import FixedLength
from stages.sampling.distributions import Sampling
from stages.tools import cost_probe
from stages.tools.cost_probe import measure

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

    def forward(self, rows, tokens, wanted, *, hidden=False):
        self._clock.now += self._per_pass + self._per_token * sum(map(len, tokens))
        return super().forward(rows, tokens, wanted, hidden=hidden)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_measured_costs_are_those_of_the_passes(batch: int, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(cost_probe, "perf_counter", clock)
    target, drafter = TimedModel(clock, 1.0, 0.125), TimedModel(clock, 0.25, 0.0625)
    drafter.max_length = 40  # shorter than the rows that are read where there is room
    head = AcceptanceHead(drafter.hidden_size, 0)
    decode = Decode(drafter, head, FixedLength(), Sampling(), range(VOCABULARY), 4, None)
    costs = measure(target, decode, batch)
    for count in (1, 2, 3, 5, 9):
        assert costs.verification_cost(batch * count) == pytest.approx(1 + 0.125 * batch * count)
    for rows in {1, batch}:
        assert costs.drafting_cost(rows) == pytest.approx(0.25 + 0.0625 * rows)
    row = row_of([1, 2])
    target.admit(row, row.tokens)
    decode.admit(row)
    assert len(decode([row])[0].pieces) == 4, "no probe is left in the batch"
