"""The comparison: one drafter pass per piece against heads that propose several pieces after one pass.

Shapes: N places, X features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.reports.tables import Table
from pipeline.study.parallel_heads.blocks import (
    BlockCosts,
    Drafts,
    best_length,
    draft_in_passes,
    draft_with_states,
    tokens_per_block,
)
from pipeline.study.parallel_heads.fitting import DrafterKnowledge, Features, FittedHead, Prior, fit_head
from pipeline.study.parallel_heads.places import OFFSETS, Places

AS_LOADED = "one pass per piece, as loaded"


@dataclass(frozen=True)
class FeatureSets:
    """What heads read of a place.

    Attributes:
        knowledge: of the drafter.
        scale: of the hidden state, so that its numbers have variance 1 as those of the other features.
    """

    knowledge: DrafterKnowledge
    scale: float

    @classmethod
    def from_places(cls, knowledge: DrafterKnowledge, places: Places) -> "FeatureSets":
        """Scale the hidden states by those of the places that heads are fitted on."""
        return cls(knowledge, 1 / float(places.hidden_PW.square().mean().sqrt()))

    def with_hidden(self, places: Places, offset: int) -> Tensor:
        """Return the hidden state and a constant (N, X)."""
        return torch.cat([self.scale * places.hidden_PW, torch.ones(len(places.before_P), 1)], 1)

    def with_previous(self, places: Places, offset: int) -> Tensor:
        """Return also the reduced embedding of the previous piece (N, X)."""
        return torch.cat([self.with_hidden(places, offset), self.knowledge.embedding(places, offset)], 1)

    def with_state(self, places: Places, offset: int) -> Tensor:
        """Return the hidden state and the target's state (N, X)."""
        return torch.cat([self.with_hidden(places, offset), places.states_PF], 1)

    def with_both(self, places: Places, offset: int) -> Tensor:
        """Return the hidden state, the previous piece and the target's state (N, X)."""
        return torch.cat([self.with_previous(places, offset), places.states_PF], 1)


def compare_ways(knowledge: DrafterKnowledge, learned: Places, held_out: Places) -> Iterator[Drafts]:
    """Fit all ways of drafting on some places and yield the drafts of each at others."""
    sets = FeatureSets.from_places(knowledge, learned)
    own = fit_head(learned, 0, sets.with_hidden, knowledge.own)
    loaded = FittedHead(0, sets.with_hidden, knowledge.own, torch.zeros_like(own.weight_DX), 0.0, 0.0)
    stated = fit_head(learned, 0, sets.with_state, knowledge.own)
    yield draft_in_passes(AS_LOADED, held_out, loaded, (), OFFSETS)
    yield draft_in_passes("one pass per piece, refitted", held_out, own, (), OFFSETS)
    yield draft_with_states("one pass per piece, refitted, target's state", held_out, stated)
    ways: Sequence[tuple[str, Features, Prior]] = (
        ("hidden state", sets.with_hidden, knowledge.nothing),
        ("hidden state, previous piece", sets.with_previous, knowledge.nothing),
        ("hidden state, bigrams and previous piece", sets.with_previous, knowledge.bigram),
    )
    for name, features, prior in ways:
        later = _fit_later(learned, features, prior)
        for passes in range(1, OFFSETS):
            prefix = "one pass" if passes == 1 else f"{passes} passes"
            yield draft_in_passes(f"{prefix}, heads: {name}", held_out, own, later, passes)
    for name, features, prior in (
        ("hidden state, target's state", sets.with_state, knowledge.nothing),
        ("hidden state, bigrams, previous piece, target's state", sets.with_both, knowledge.bigram),
    ):
        yield draft_in_passes(f"one pass, heads: {name}", held_out, stated, _fit_later(learned, features, prior), 1)


def _fit_later(places: Places, features: Features, prior: Prior) -> list[FittedHead]:
    return [fit_head(places, offset, features, prior) for offset in range(1, OFFSETS)]


def accuracy_table(all_drafts: Sequence[Drafts]) -> Table:
    """Return how often each piece is right where all before it are, and the accepted pieces of a draft."""
    offsets = range(OFFSETS)
    heads = ("way", *(f"piece {offset + 1}" for offset in offsets), *(f"accepted of {n + 1}" for n in offsets))
    rows = [
        (
            drafts.name,
            *(f"{drafts.share_right(offset):.3f}" for offset in offsets),
            *(f"{float(drafts.count_accepted(n + 1).float().mean()):.2f}" for n in offsets),
        )
        for drafts in all_drafts
    ]
    return Table(heads, rows, "right pieces where all before them are right, and accepted pieces, at all tokens")


def speed_table(all_drafts: Sequence[Drafts], held_out: Places, all_costs: Sequence[BlockCosts]) -> Table:
    """Return tokens per block by the length of drafts, and tokens per second at the best length by costs."""
    lengths = range(1, OFFSETS + 1)
    heads = ("way", *(f"tokens, {length} drafted" for length in lengths), *map(_name_costs, all_costs))
    rows = []
    for drafts in all_drafts:
        speeds = [best_length(drafts, held_out, costs) for costs in all_costs]
        tokens = (f"{tokens_per_block(drafts, held_out, length):.2f}" for length in lengths)
        rows.append((drafts.name, *tokens, *(f"{speed:.0f} ({length})" for length, speed in speeds)))
    note = "Speeds are computed from counts and costs, not measured. In brackets the best length of drafts, 0 for none."
    return Table(heads, rows, "tokens per block, and tokens per second", (note,))


def _name_costs(costs: BlockCosts) -> str:
    return f"costs {costs.target:g}, {costs.token:g}, {costs.drafter:g}, {costs.head:g} ms"
