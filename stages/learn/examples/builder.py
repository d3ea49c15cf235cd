"""Builds the training examples of one prompt, block by block: one of each part of a long answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod

import numpy as np
import torch

from stages.contract.blocks import (
    STOP,
    AcceptanceLabel,
    Decision,
    Numbers,
    SequenceState,
    TopLogits,
    TopTokens,
    TrainingExample,
    Verdict,
)
from stages.contract.snapshot import State
from stages.sampling.distributions import acceptance_probability
from store.events import DraftSource, Outcome, Translation

PART_TOKENS = 64  # of an answer, after which it is learned from although it goes on
CONTEXT = 256  # pieces of a text that a later part begins with, so that it costs no more than an answer
JUDGED = (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.ALTERNATIVE)


def _piece_acceptances(decision: Decision) -> dict[int, float]:
    """Return, per drafted piece (index in the draft), the probability that its acceptance tests pass.

    The test of a STOP belongs to the piece that was compared; where the pieces ran out, to the last piece of the token.
    """
    found: dict[int, float] = {}
    proposed, levels = decision.proposed, decision.piece_levels or (decision.drafter_levels, decision.target_levels)
    if proposed is None or decision.outcome not in JUDGED:
        return found
    passed = decision.passed_levels
    if decision.piece_levels:  # a chain is tested up to the first level that cannot pass, whatever its alternatives are
        certain = (acceptance_probability(drafter, target) > 0 for drafter, target in zip(*levels, strict=True))
        passed = sum(takewhile(bool, certain))
    judged = proposed.tests[: passed + (decision.outcome is not Outcome.ACCEPTED)]
    for test, drafter, target in zip(judged, *levels, strict=False):
        piece = proposed.stop - 1 if test.option == STOP and test.position is None else test.position
        if piece is not None:
            found[piece] = found.get(piece, 1.0) * acceptance_probability(drafter, target)
    return found


def make_labels(verdict: Verdict) -> list[AcceptanceLabel]:
    """Return one acceptance label per judged piece of a block."""
    draft = verdict.proposal.draft
    if draft.features_KF is None:
        return []
    acceptance: dict[int, list[float]] = {}
    for decision in verdict.decisions:
        for piece, chance in _piece_acceptances(decision).items():
            acceptance.setdefault(piece, []).append(chance)
    # Copied: a view would keep the features of the whole batch in memory, and send them to another process.
    return [
        AcceptanceLabel(draft.features_KF[piece].clone(), prod(chances))
        for piece, chances in sorted(acceptance.items())
    ]


def _join(stored: Sequence[TopTokens | TopLogits]) -> TopTokens | None:
    """Return the soft targets of consecutive blocks in one object, spelt; None without any."""
    spelt = [one for one in stored if isinstance(one, TopTokens)]  # before a checkpoint
    if logits := [one for one in stored if isinstance(one, TopLogits)]:
        positions, tokens, ids, values, sums = (
            np.concatenate([getattr(one, name) for one in logits])
            for name in ("positions", "tokens", "ids", "logits", "sums")
        )
        whole = TopLogits(positions, tokens, ids, values, sums, logits[0].spell)
        spelt.append(whole.spell(whole))
    return TopTokens(*map(np.concatenate, zip(*(vars(one).values() for one in spelt), strict=True))) if spelt else None


def _ngram_positions(verdict: Verdict) -> list[int]:
    """Return the positions of a block's accepted n-grams among the pieces of its sequence."""
    begins: list[int] = verdict.soft_targets.positions.tolist() if verdict.soft_targets else []
    found: list[int] = []
    for begin, decision in zip(begins, verdict.decisions, strict=False):
        proposed = decision.proposed
        if decision.outcome is Outcome.ACCEPTED and proposed and proposed.translation is Translation.NGRAM:
            found += range(begin, begin + proposed.stop - proposed.start)
    return found


@dataclass
class ExampleBuilder:
    """Collects the training examples of one sequence while it is in flight. Positions are those of a part's text."""

    soft_targets: list[TopTokens | TopLogits] = field(default_factory=list)
    labels: list[AcceptanceLabel] = field(default_factory=list)
    ngram_positions: list[int] = field(default_factory=list)
    judged: int = 0
    copied: int = 0
    states: list[Numbers] = field(default_factory=list)
    begin: int = 0  # of the part's text among the row's pieces

    def add_verdict(self, verdict: Verdict) -> None:
        if found := verdict.soft_targets:
            self.soft_targets.append(replace(found, positions=found.positions - self.begin))
        self.labels += make_labels(verdict)
        self.ngram_positions += [position - self.begin for position in _ngram_positions(verdict)]
        if verdict.proposal.draft.source is DraftSource.MODEL:  # the drafter's gain is measured on its own drafts
            self.judged += verdict.judged
        else:
            self.copied += len(verdict.emitted)
        if verdict.states is not None:
            self.states.append(verdict.states.numpy())

    @classmethod
    def after(cls, row: SequenceState) -> "ExampleBuilder":
        """Begin a later part of an answer."""
        return cls(begin=max(0, len(row.pieces) - CONTEXT))

    @property
    def is_part(self) -> bool:
        """Whether there are tokens enough for an example, although the answer goes on."""
        return sum(len(found.positions) for found in self.soft_targets) >= PART_TOKENS

    def build(self, row: SequenceState, target: str) -> TrainingExample:
        return TrainingExample(
            row.offset,
            target,
            tuple(row.pieces[self.begin :]),
            _join(self.soft_targets),
            tuple(self.labels),
            tuple(self.ngram_positions),
            self.judged,
            np.concatenate(self.states) if self.states else None,
            row.scope,
            self.copied,
        )

    def state_dict(self, row: SequenceState) -> State:
        """Return the state for a checkpoint: the example so far, without its target, and its labels."""
        features = [label.features_F for label in self.labels]
        return {
            "example": self.build(row, ""),
            "features": torch.stack(features) if features else (),
            "acceptances": [label.acceptance for label in self.labels],
            "begin": self.begin,
        }

    @classmethod
    def from_state(cls, state: State) -> "ExampleBuilder":
        example = state["example"]
        labels = list(map(AcceptanceLabel, state["features"], state["acceptances"]))
        soft_targets: list[TopTokens | TopLogits] = [example.soft_targets] if example.soft_targets else []
        states = [] if example.states is None else [example.states]
        counts = example.judged, example.copied
        return cls(soft_targets, labels, list(example.ngram_positions), *counts, states, state["begin"])
