"""The adaptive head: how likely is a drafted piece to be accepted?

Paper: equations 5 to 7; the head's form follows SpecDec++ (residual blocks over the drafter's last hidden state). Ours
reads the state *before* the piece, which is there already, with the piece's probability, the law's entropy and the
piece's place in the draft: so stopping wastes no drafter pass, and it works across vocabularies.

Shapes: B rows, W width of the drafter, F features.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.saving import writing
from store.errors import ModelError

EXTRA_FEATURES = 3
INNER_WIDTH = 64


class AcceptanceHead(nn.Module):
    """P(a piece is accepted | all before it in its draft are), as a logit.

    Args:
        width: the drafter's hidden size.
        seed: of the initial weights; the same seed gives the same head again after a reset.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(width)
            self.enter = nn.Linear(width + EXTRA_FEATURES, INNER_WIDTH)
            self.inner = nn.ModuleList(nn.Linear(INNER_WIDTH, INNER_WIDTH) for _ in range(2))
            self.leave = nn.Linear(INNER_WIDTH, 1)
            # Hopeful until it has seen labels: what is never drafted teaches nothing.
            nn.init.constant_(self.leave.bias, 1.5)

    def forward(self, features_BF: Tensor) -> Tensor:
        """Logits (B,)."""
        hidden_BW, extra = features_BF[:, :-EXTRA_FEATURES], features_BF[:, -EXTRA_FEATURES:]
        state = self.enter(torch.cat([self.norm(hidden_BW), extra], dim=-1))
        for layer in self.inner:
            state = state + nn.functional.silu(layer(state))
        return self.leave(nn.functional.silu(state))[:, 0]


def piece_features(hidden_BW: Tensor, probability_B: Tensor, entropy_B: Tensor, index: int) -> Tensor:
    """What the head sees of one drafted piece per row (B, F)."""
    place_B = torch.full_like(entropy_B, index / 8)
    return torch.cat([hidden_BW, torch.stack([probability_B.log().clamp(min=-10), entropy_B, place_B], dim=-1)], dim=-1)


def save_head(head: AcceptanceHead, path: Path) -> None:
    """Write the weights as safetensors."""
    with writing(path.parent):
        save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, path)


def load_head(head: AcceptanceHead, path: Path) -> None:
    """Read weights that `save_head` wrote.

    Raises:
        ModelError: if they belong to a drafter of another width.
    """
    try:
        head.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path} must be the head of a drafter of this width; it does not fit: {error}") from error
