"""The sums of a ridge regression, from which a correction of the drafter's output layer follows in closed form.

Shapes: N positions, W features, D drafter ids, C of them with products.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softshrink

RIDGE = 0.1  # added to the diagonal of the first sum, as a share of its mean
# Taken from every difference of probabilities: most pieces are neither likely nor emitted, and nothing is solved for
# them. Without a jump, so that what is read again is taken away to the same digits.
SMALLEST = 0.01
ROUNDING = 1e-10  # of the largest value of a sum: what remains where everything is taken away again


class Change(NamedTuple):
    """What an output layer has more than the drafter's as loaded, in the rows in which they differ (C of the D)."""

    pieces_C: Tensor
    weights_CW: Tensor

    @classmethod
    def of_rows(cls, difference_DW: Tensor) -> "Change":
        """Take the rows that are not all zeros."""
        (pieces_C,) = difference_DW.any(1).nonzero(as_tuple=True)
        return cls(pieces_C, difference_DW[pieces_C])

    def add_to_rows(self, layer_DW: Tensor, factor: float) -> Tensor:
        """Add a multiple of it to a copy of a layer."""
        return layer_DW.index_add(0, self.pieces_C, self.weights_CW, alpha=factor)

    def add_to(self, logits_ND: Tensor, change_NC: Tensor, factor: float) -> Tensor:
        """Add a multiple of the change of these pieces' logits to a copy of the logits."""
        return logits_ND.index_add(1, self.pieces_C, change_NC, alpha=factor)


class LeastSquaresSums:
    """The sums of a ridge regression from hidden states to what the drafter's probabilities lack.

    Two positions with orthogonal hidden states. At the first, piece 1 lacks half of its probability, and piece 0 has as
    much too many; at the second, nothing is wrong. The solution follows each state, shrunk a little by the ridge:

    >>> sums = LeastSquaresSums(width=2, vocabulary=3, device=torch.device("cpu"))
    >>> hidden_NW = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> sums.add(hidden_NW, missing_ND=torch.tensor([[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    >>> correction = sums.solve()
    >>> correction.pieces_C
    tensor([0, 1])
    >>> (hidden_NW @ correction.weights_CW.T).round(decimals=2)
    tensor([[-0.4500,  0.4500],
            [ 0.0000,  0.0000]])
    """

    def __init__(self, width: int, vocabulary: int, device: torch.device) -> None:
        # sum of the outer products of hidden states
        self.states_WW = torch.zeros(width, width, dtype=torch.float64, device=device)
        # sum of the outer products of hidden states and missing probabilities
        self.products_WD = torch.zeros(width, vocabulary, dtype=torch.float64, device=device)
        self._seen_D = torch.zeros(vocabulary, dtype=torch.bool, device=device)  # pieces with products

    def add(self, hidden_NW: Tensor, missing_ND: Tensor, weight: float = 1.0) -> None:
        """Add positions: their hidden states, and the target's probabilities less the drafter's. A negative weight
        takes away what was added with the positive one.
        """
        hidden_NW, largest = hidden_NW.double(), self.states_WW.abs().max()
        self.states_WW += weight * (hidden_NW.T @ hidden_NW)
        missing_ND = softshrink(missing_ND, SMALLEST)
        (pieces_C,) = missing_ND.any(0).nonzero(as_tuple=True)
        self.products_WD.index_add_(1, pieces_C, weight * (hidden_NW.T @ missing_ND[:, pieces_C].double()))
        self._seen_D[pieces_C] = True
        if weight < 0 and bool(self.states_WW.abs().max() < ROUNDING * largest):  # nothing but errors is left
            self.states_WW.zero_()
            self.products_WD.zero_()

    def merge(self, other: "LeastSquaresSums") -> None:
        """Add all positions of other sums, as if they had been added to these."""
        self.states_WW += other.states_WW
        self.products_WD += other.products_WD
        self._seen_D |= other._seen_D

    def scale(self, factor: float) -> None:
        """Give all positions so far a smaller weight."""
        self.states_WW *= factor
        self.products_WD *= factor

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums, of the pieces that have products: a part of the vocabulary."""
        (pieces_C,) = self._seen_D.nonzero(as_tuple=True)
        products_WC, outputs = self.products_WD[:, pieces_C].contiguous(), torch.tensor(len(self._seen_D))
        return {"states": self.states_WW, "products": products_WC, "pieces": pieces_C, "outputs": outputs}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], device: torch.device | None = None) -> "LeastSquaresSums":
        """Return the sums of such a state; on its device, where none is given."""
        states_WW = state["states"].to(device)
        sums = cls(len(states_WW), int(state["outputs"]), states_WW.device)
        sums.add_sums(states_WW, state["products"].to(states_WW.device), state["pieces"].to(states_WW.device))
        return sums

    def add_sums(self, states_WW: Tensor, products_WC: Tensor, pieces_C: Tensor) -> None:
        """Add sums whose products are those of some pieces."""
        self.states_WW += states_WW
        self.products_WD.index_add_(1, pieces_C, products_WC)
        self._seen_D[pieces_C] = True

    def solve(self, usual_WW: Tensor | float = 0.0, ridge: float = RIDGE) -> "Change":
        """Return the rows of the layer that gives the missing probabilities: none without positions.

        Args:
            usual_WW: the sum of the outer products of hidden states at which nothing is missing.
        """
        width, diagonal_W = len(self.states_WW), self.states_WW.diagonal()
        (pieces_C,) = self._seen_D.nonzero(as_tuple=True)
        if not bool(diagonal_W.any()):
            return Change(pieces_C[:0], self.products_WD.T[:0].float())
        occurs_W = diagonal_W > 1e-9 * diagonal_W.max()  # a feature that never did is no reason for less ridge
        scale = float(diagonal_W[occurs_W].mean())
        ridge_WW = ridge * scale * torch.eye(width, dtype=torch.float64, device=self.states_WW.device)
        factor_WW = torch.linalg.cholesky(self.states_WW + usual_WW + ridge_WW)
        return Change(pieces_C, torch.cholesky_solve(self.products_WD[:, pieces_C], factor_WW).float().T.contiguous())
