"""Costs of passes, kept up to date by what blocks take."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import numpy as np
from typing_extensions import override

from stages.contract.snapshot import State
from stages.drafting.costs import BlockTimes, CostModel, Costs, Curve

DECAY = 0.98  # of all sums, per block: costs of drafts that are no longer made are forgotten
PRIOR_BLOCKS = 0.5  # weight of the costs at the beginning, which are guessed: decays with the sums,
LEAST_PRIOR = 0.04  # but for this share, which decides about what is not tried
COMMON = 10.0  # weight of the factor of what is in every block: what drafts alone explain is theirs
PRIOR_PIECES = 10.0  # of prompts that the drafter read at no cost
EARLY, INTERVAL = 32, 8  # blocks after each of which the factors are updated; then between two updates, if none jumps
KNOWN = 128  # blocks after which the costs are stored for later runs, again and again
LARGEST_JUMP = 0.5  # of what was expected of a block, and beyond it: it was interrupted, or the first of its kind


class _Fit:
    """Costs as a sum of parts with factors, none of them negative: least squares with exponentially decaying weights.

    Args:
        prior: the factors at the beginning.
        weights: of each of them.
    """

    def __init__(self, prior: Sequence[float], weights: Sequence[float]) -> None:
        self._prior, self._weights, self.factors = np.array(prior), np.diag(weights), list(prior)
        self._products, self._sums = np.zeros((len(prior), len(prior))), np.zeros(len(prior))

    def expect(self, parts: Sequence[float]) -> float:
        return sum(factor * part for factor, part in zip(self.factors, parts, strict=True))

    def observe(self, parts: Sequence[float], cost: float, scale: float) -> None:
        """Add a block. `scale`: the cost that the whole block was expected to have: errors are relative to it."""
        line = np.array(parts) / scale
        self._products = DECAY * self._products + np.outer(line, line)
        self._sums = DECAY * self._sums + line * (cost / scale)

    def solve(self, weight: float) -> None:
        """Update the factors. `weight`: of those at the beginning, in blocks."""
        from scipy.optimize import nnls

        lower = np.linalg.cholesky(self._products + weight * self._weights)
        sums = self._sums + weight * self._weights @ self._prior
        self.factors = nnls(lower.T, np.linalg.solve(lower, sums))[0].tolist()

    def state_dict(self) -> State:
        return [self._products.tolist(), self._sums.tolist(), self.factors]

    def load_state_dict(self, state: State) -> None:
        products, sums, self.factors = state
        self._products, self._sums = np.array(products), np.array(sums)


class TrackedCosts(CostModel):
    """Costs that are estimated or remembered when a run begins, corrected by the seconds of its blocks.

    A pass costs what the curve says, times a factor, and more for each token, for a tree and for a draft of the model:
    its pieces are translated and compared. All else in a block has a cost, whatever is drafted, and more for a tree,
    for a draft of the model and for each pass of the drafter. The factors are those that explain recent blocks. Where
    these say nothing, because nothing of the kind was drafted, they return to the costs at the beginning, relative to
    the machine's speed: so what was learned on a busy machine does not last. Only ratios count, so the unit may change
    with the first block.

    >>> costs = TrackedCosts(Costs(target=((1, 1.0), (5, 1.0)), drafter=((1, 0.1),)))
    >>> for _ in range(200):
    ...     costs.observe(BlockTimes(lengths=[0], tokens=1, drafting=0.0, verifying=0.010))
    ...     costs.observe(BlockTimes(lengths=[0], tokens=5, drafting=0.0, verifying=0.015))
    >>> round(costs.verification_cost(5) / costs.verification_cost(1), 1)
    1.5

    Drafts of 1 and 3 pieces take 4 and 6 ms: 3 ms and 1 for each piece.

    >>> for _ in range(200):
    ...     costs.observe(BlockTimes(lengths=[1], tokens=1, drafting=0.004, verifying=0.010))
    ...     costs.observe(BlockTimes(lengths=[3], tokens=1, drafting=0.006, verifying=0.010))
    >>> round(costs.drafts_cost([2]), 3), round(costs.drafting_cost(1), 3)
    (0.005, 0.001)

    Args:
        start: the costs at the beginning, in seconds or a larger unit.
        store: called now and then with the costs in seconds that explain recent blocks, for later runs.
    """

    def __init__(self, start: Costs, store: Callable[[Costs], None] = lambda costs: None) -> None:
        self._store = store
        self._begin(start)

    def _begin(self, start: Costs) -> None:
        self.start = start
        self._curves = replace(start, around=0.0, per_draft=0.0)
        self._least, self._plain = start.target[0]  # of the smallest pass: tokens, and the cost, of which factors are
        # of the curve; of `_plain`, in every pass, for as many tokens more, for each tree, and for drafts of the model
        self._pass = _Fit([1.0, 0.0, 0.0, 0.0, 0.0], [1.0] * 5)
        # of `_plain`, in every block, for each tree, and for drafts of the model; of the drafter's curve
        own = start.around / self._plain, 0.0, start.per_draft / self._plain, 1.0
        self._rest = _Fit(own, [COMMON, 1.0, 1.0, 1.0])
        self._unit = self._blocks = 0.0  # seconds per cost at the beginning, a decayed sum of them, and its weight
        self._number = 0  # of blocks
        self._prompts, self._pieces = 0.0, PRIOR_PIECES  # cost of prompts, decayed, and their pieces
        self._curve = self._compute_curve()

    @override
    def verification_curve(self) -> tuple[Curve, float]:
        return self._curve

    def _compute_curve(self) -> tuple[Curve, float]:
        curve, fixed, more = (factor * self._seconds for factor in self._pass.factors[:3])
        target = tuple(
            (size, curve * cost + fixed * self._plain + more * self._more(size)) for size, cost in self._curves.target
        )
        return target, self._rest.factors[0] * self._plain * self._seconds

    @override
    def drafting_cost(self, rows: int) -> float:
        return self._rest.factors[3] * self._curves.drafting_cost(rows) * self._seconds

    @override
    def drafts_cost(self, lengths: Sequence[int]) -> float:
        if not any(lengths):
            return 0.0
        own = self._pass.factors[4] + self._rest.factors[2]
        return super().drafts_cost(lengths) + own * self._plain * self._seconds

    @override
    def tree_cost(self) -> float:
        return (self._pass.factors[3] + self._rest.factors[1]) * self._plain * self._seconds

    @override
    def prompt_cost(self, pieces: int) -> float:
        return self._prompts / self._pieces * pieces * self._seconds

    @property
    def _seconds(self) -> float:
        """Seconds per unit of the costs at the beginning; 1 before the first block."""
        return self._unit / self._blocks if self._blocks else 1.0

    def _more(self, tokens: float) -> float:
        return self._plain * max(0.0, tokens / self._least - 1)

    @override
    def observe(self, block: BlockTimes) -> None:
        """Correct the costs by one block. Blocks in which the target reads prompts are left out by the caller: they
        show nothing of the cost of a token.
        """
        plain, drafts = self._plain, any(block.lengths)
        curve = self._curves.verification_cost(block.tokens)
        of_pass = [curve, plain, self._more(block.tokens), plain * block.trees, plain * drafts]
        of_rest = [plain, plain * block.trees, plain * drafts, self._curves.drafts_cost(block.lengths)]
        expected, expected_rest = self._pass.expect(of_pass), self._rest.expect(of_rest)
        whole = expected + expected_rest
        verifying, rest = block.verifying, block.drafting + block.around
        if self._blocks:  # else the unit is not known
            verifying = min(verifying, (expected + LARGEST_JUMP * whole) * self._seconds)
        self._unit, self._blocks = DECAY * self._unit + verifying / curve, DECAY * self._blocks + 1
        rest = min(rest, (expected_rest + LARGEST_JUMP * whole) * self._seconds)
        weight = PRIOR_BLOCKS * max(LEAST_PRIOR, 1 - (1 - DECAY) * self._blocks)
        self._pass.observe(of_pass, verifying / self._seconds, whole)
        self._rest.observe(of_rest, rest / self._seconds, whole)
        self._number += 1
        jumped = block.drafting + block.around > rest
        if jumped or self._number <= EARLY or self._number % INTERVAL == 0:
            self._pass.solve(weight)
            self._rest.solve(weight)
        self._prompts = DECAY * self._prompts + block.prompts.seconds / self._seconds
        self._pieces = DECAY * self._pieces + (1 - DECAY) * PRIOR_PIECES + block.prompts.pieces
        self._curve = self._compute_curve()
        if self._number % KNOWN == 0:
            self._store(self._to_costs())

    def _to_costs(self) -> Costs:
        """Return the present costs without those of trees and prompts, which the first ones show."""
        target, around = self._curve
        drafter = tuple((rows, self.drafting_cost(rows)) for rows, _ in self._curves.drafter)
        return Costs(target, drafter, around, self.drafts_cost([1]) - self.drafting_cost(1))

    @override
    def state_dict(self) -> State:
        sums = self._unit, self._blocks, self._prompts, self._pieces, self._number
        return {
            "start": astuple(self.start),
            "pass": self._pass.state_dict(),
            "rest": self._rest.state_dict(),
            "sums": sums,
        }

    @override
    def load_state_dict(self, state: State) -> None:
        self._begin(Costs.from_values(state["start"]))  # of which the factors are
        self._pass.load_state_dict(state["pass"])
        self._rest.load_state_dict(state["rest"])
        self._unit, self._blocks, self._prompts, self._pieces, self._number = state["sums"]
        self._curve = self._compute_curve()
