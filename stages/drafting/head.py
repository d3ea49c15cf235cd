"""The acceptance head: estimates the probability that a drafted piece is accepted.

Paper: equations 5 to 7; the architecture follows SpecDec++ (residual blocks over the drafter's last hidden state). This
head reads the state *before* the piece, which is available already, with the piece's probability, the distribution's
entropy and the piece's index in the draft: so stopping wastes no drafter pass, and it works across vocabularies.

Shapes: B rows, W width of the drafter, F features.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.models.huggingface import raise_write_errors
from store.errors import ModelError

EXTRA_FEATURES = 3
INNER_WIDTH = 64


class AcceptanceHead(nn.Module):
    """P(a piece is accepted | all before it in its draft are), as a logit.

    Args:
        width: the drafter's hidden size.
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

    def forward(self, features_BF: Tensor) -> Tensor:
        """Return the logits of acceptance (B,)."""
        hidden_BW, extra = features_BF[:, :-EXTRA_FEATURES], features_BF[:, -EXTRA_FEATURES:]
        state = self.enter(torch.cat([self.norm(hidden_BW), extra], dim=-1))
        for layer in self.inner:
            state = state + nn.functional.silu(layer(state))
        logits_B1: Tensor = self.leave(nn.functional.silu(state))
        return logits_B1[:, 0]


def piece_features(hidden_BW: Tensor, probability_B: Tensor, entropy_B: Tensor, index: int) -> Tensor:
    """Return the head's input for one drafted piece per row (B, F)."""
    place_B = torch.full_like(entropy_B, index / 8)
    return torch.cat([hidden_BW, torch.stack([probability_B.log().clamp(min=-10), entropy_B, place_B], dim=-1)], dim=-1)


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
    except (RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path} must be the head of a drafter of this width; it does not fit: {error}") from error
