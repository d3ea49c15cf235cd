"""The acceptance head: estimates the probability that a drafted piece is accepted.

Paper: equations 5 to 7; the architecture follows SpecDec++ (residual blocks over the drafter's last hidden state). This
head reads the state *before* the piece, which is available already, with the piece's index in the draft and four
numbers of the drafter's distribution: so stopping wastes no drafter pass, and it works across vocabularies. The
distribution is the softmax at temperature 1 whatever the sampling, since the one-hot distribution of greedy drafting
has the same entropy and the same largest probability everywhere.

Shapes: B rows, D drafter ids, W width of the drafter, F features.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.contract.blocks import EXTRA_FEATURES
from stages.engine.compiled.lines.piece_estimates import PieceEstimates
from stages.engine.models.huggingface import raise_write_errors
from store.errors import ModelError

INNER_WIDTH = 64


class AcceptanceHead(nn.Module):
    """P(a piece is accepted | all before it in its draft are), as a logit.

    Args:
        seed: seed of the initial weights; a reset with the same seed gives the same head.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(width)
            self.enter = nn.Linear(width + EXTRA_FEATURES, INNER_WIDTH)
            self.inner = nn.ModuleList(nn.Linear(INNER_WIDTH, INNER_WIDTH) for _ in range(2))
            self.leave = nn.Linear(INNER_WIDTH, 1)
            # Optimistic before the first labels: pieces that are never drafted give no labels.
            nn.init.constant_(self.leave.bias, 1.5)
        self._compiled = PieceEstimates(width, INNER_WIDTH, len(self.inner))
        self.came_trained = False  # whether its first weights were read from a file
        self._weights = list(self.parameters())  # to list them takes as long as to compute with them

    def forward(self, features_BF: Tensor) -> Tensor:
        """Return the logits of acceptance (B,)."""
        hidden_BW, extra = features_BF[:, :-EXTRA_FEATURES], features_BF[:, -EXTRA_FEATURES:]
        state = self.enter(torch.cat([self.norm(hidden_BW), extra], dim=-1))
        for layer in self.inner:
            state = state + nn.functional.silu(layer(state))
        logits_B1: Tensor = self.leave(nn.functional.silu(state))
        return logits_B1[:, 0]

    def estimate(self, hidden_BW: Tensor, logits_BD: Tensor, pieces_B: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the features of drafted pieces (B, F), and their estimated probabilities of acceptance (B,).

        On a CPU by one compiled call; the numbers are those of torch's functions but for the last digits.
        """
        if self._compiled.reads(hidden_BW, logits_BD):
            found = self._compiled(hidden_BW, logits_BD, pieces_B.tolist(), index, self._weights)
            return torch.from_numpy(found[0]), torch.from_numpy(found[1])
        features_BF = piece_features(hidden_BW, logits_BD, pieces_B, index)
        return features_BF, self(features_BF).sigmoid()


def piece_features(hidden_BW: Tensor, logits_BD: Tensor, pieces_B: Tensor, index: int) -> Tensor:
    """Return the head's input for one drafted piece per row (B, F).

    The features after the hidden state are the log probability of the piece, the entropy, the index, the largest
    probability, and its distance from the second largest. Those of a distribution that is not finite are not finite.

    Args:
        hidden_BW: the drafter's state before the piece.
        logits_BD: its logits there, before the sampling transform; pieces that may not be drafted at -inf.
        pieces_B: the drafted piece.
        index: number of pieces before it in its draft.
    """
    log_BD = logits_BD.float().log_softmax(-1)
    # The bound changes no product: what is below it has probability 0. A NaN stays one.
    entropy_B = -(log_BD.exp() * log_BD.clamp(min=-200)).sum(-1)
    largest_B2 = log_BD.topk(min(2, log_BD.shape[1])).values.exp()
    first_B = largest_B2[:, 0]
    second_B = largest_B2[:, 1] if largest_B2.shape[1] > 1 else torch.zeros_like(first_B)
    own_B = log_BD.gather(1, pieces_B[:, None])[:, 0].clamp(min=-10)
    extra = [own_B, entropy_B, torch.full_like(first_B, index / 8), first_B, first_B - second_B]
    return torch.cat([hidden_BW.float(), torch.stack(extra, dim=-1)], dim=-1)


def save_head(head: AcceptanceHead, path: Path) -> None:
    """Write the weights as safetensors."""
    with raise_write_errors(path.parent):
        save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, path)


def load_head(head: AcceptanceHead, path: Path) -> None:
    """Read weights that `save_head` wrote.

    Raises:
        ModelError: the weights belong to a drafter of another width.
    """
    try:
        head.load_state_dict(load_file(path))
        head.came_trained = True
    except (RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path} must be the head of a drafter of this width; it does not fit: {error}") from error
