"""The sums of a ridge regression, and its solution.

Shapes: N positions, W features of a position, D drafter ids.
"""

import torch
from torch import Tensor

RIDGE = 0.1  # added to the diagonal of the first sum, as a share of its mean
ROUNDING = 1e-10  # of the largest value of a sum: what remains where everything is taken away again


class LeastSquaresSums:
    """The sums of a ridge regression from hidden states to what the drafter's probabilities lack.

    Two positions with orthogonal hidden states. At the first, piece 1 lacks half of its probability, and piece 0 has as
    much too many; at the second, nothing is wrong. The solution follows each state, shrunk a little by the ridge:

    >>> sums = LeastSquaresSums(width=2, vocabulary=3, device=torch.device("cpu"))
    >>> hidden_NW = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> sums.add(hidden_NW, missing_ND=torch.tensor([[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    >>> correction_DW = sums.solve()
    >>> (hidden_NW @ correction_DW.T).round(decimals=2)
    tensor([[-0.4500,  0.4500,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])
    """

    def __init__(self, width: int, vocabulary: int, device: torch.device) -> None:
        # sum of the outer products of hidden states
        self.states_WW = torch.zeros(width, width, dtype=torch.float64, device=device)
        # sum of the outer products of hidden states and missing probabilities
        self.products_WD = torch.zeros(width, vocabulary, dtype=torch.float64, device=device)

    def add(self, hidden_NW: Tensor, missing_ND: Tensor, weight: float = 1.0) -> None:
        """Add positions: their hidden states, and the target's probabilities less the drafter's. A negative weight
        takes away what was added with the positive one.
        """
        hidden_NW, largest = hidden_NW.double(), self.states_WW.abs().max()
        self.states_WW += weight * (hidden_NW.T @ hidden_NW)
        self.products_WD += weight * (hidden_NW.T @ missing_ND.double())
        if weight < 0 and bool(self.states_WW.abs().max() < ROUNDING * largest):  # nothing but errors is left
            self.states_WW.zero_()
            self.products_WD.zero_()

    def merge(self, other: "LeastSquaresSums") -> None:
        """Add all positions of other sums, as if they had been added to these."""
        self.states_WW += other.states_WW
        self.products_WD += other.products_WD

    def scale(self, factor: float) -> None:
        """Give all positions so far a smaller weight."""
        self.states_WW *= factor
        self.products_WD *= factor

    @classmethod
    def from_tensors(cls, states_WW: Tensor, products_WD: Tensor) -> "LeastSquaresSums":
        """Make sums of saved tensors."""
        sums = cls(0, 0, states_WW.device)
        sums.states_WW, sums.products_WD = states_WW.double(), products_WD.double()
        return sums

    def solve(self, ridge: float = RIDGE) -> Tensor:
        """Return the layer (D, W) that gives the missing probabilities; zeros without positions.

        Args:
            ridge: added to the diagonal of the first sum, as a share of its mean.
        """
        width, diagonal_W = len(self.states_WW), self.states_WW.diagonal()
        if not bool(diagonal_W.any()):
            return torch.zeros_like(self.products_WD.T, dtype=torch.float32)
        occurs_W = diagonal_W > 1e-9 * diagonal_W.max()  # a feature that never did is no reason for less ridge
        scale = float(diagonal_W[occurs_W].mean())
        ridge_WW = ridge * scale * torch.eye(width, dtype=torch.float64, device=self.states_WW.device)
        factor_WW = torch.linalg.cholesky(self.states_WW + ridge_WW)
        return torch.cholesky_solve(self.products_WD, factor_WW).float().T
