"""The target's hidden state as a feature of the drafter: a term that is added to the logits of a draft.

Verification computes the target's hidden state at every token that it emits. A fixed random projection reduces it to
a few numbers in eight bits, which are stored with the text: what training reads is what drafting used. The state at the
last emitted token is a feature of every piece of the next draft, halved from piece to piece as it becomes older.

Shapes: N positions, W hidden width of the target, S numbers of a reduced state, F features of it, D drafter ids.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.contract.blocks import Numbers
from stages.engine.models.language_model import LanguageModel, read_trained_weights
from store.errors import ModelError

STATES_FILE = "target_states.safetensors"
SIZE = 256  # S: on SmolLM2 and GSM8K better than 128 (benchmarks/notes/closed-form.md)
FEATURES = SIZE + 1  # F: with a constant
STEP = 1 / 16  # of the eight bits; the numbers have variance 1
SCALE = 2.0  # of the features: the larger, the less the ridge shrinks their weights
AGE_DECAY = 0.5  # of the features with every piece since the state


class StateProjection:
    """Reduces a target's hidden states to S whole numbers.

    >>> project = StateProjection("target", 4)
    >>> states_NS = project(torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]]))
    >>> states_NS.shape, states_NS.dtype, bool((states_NS[0] == states_NS[1]).all())  # the length is divided out
    (torch.Size([2, 256]), torch.int8, True)
    """

    def __init__(self, target: str, width: int) -> None:
        seed = int.from_bytes(hashlib.sha256(target.encode()).digest()[:6], "big")
        matrix_WS = torch.randn(width, SIZE, generator=torch.Generator().manual_seed(seed))
        self._matrix_WS = (matrix_WS / (STEP * width**0.5)).numpy()

    def __call__(self, hidden_NW: Tensor) -> Tensor:
        """Return the states on the CPU (N, S), as int8. States that are not finite become zeros."""
        found = [self._reduce(own_W) for own_W in hidden_NW.float().cpu().numpy()]
        return torch.from_numpy(np.array(found, np.int8).reshape(-1, SIZE))

    def _reduce(self, own_W: Numbers) -> Numbers:
        """Reduce one state, by itself: so its numbers do not depend on others. In NumPy, whose calls take less time."""
        square = own_W.dot(own_W) / len(own_W)
        if not math.isfinite(square):
            return np.zeros(SIZE)
        numbers_S: Numbers = np.rint(own_W.dot(self._matrix_WS) / max(1e-6, math.sqrt(square))).clip(-127, 127)
        return numbers_S


def state_features(states_NS: Tensor) -> Tensor:
    """Return the features of states for the first piece of a draft (N, F)."""
    constant_N1 = states_NS.new_ones(len(states_NS), 1, dtype=torch.float32)
    return SCALE * torch.cat([states_NS.float() * STEP, constant_N1], -1)


class TargetStates(nn.Module):
    """The weights from each target's features to the drafter's logits; zeros at first."""

    def __init__(self, targets: Sequence[str], outputs: int, device: torch.device) -> None:
        super().__init__()
        self.targets = tuple(targets)
        # one matrix (D, F) per target, in float32
        self.weights = nn.ParameterList(
            torch.zeros(outputs, FEATURES, dtype=torch.float32, device=device) for _ in targets
        )
        # by target: torch's count of writes, and the pieces that have weights (C), with these (C, F)
        self._read: dict[str, tuple[int, Tensor, Tensor]] = {}

    def _find_weights(self, target: str) -> tuple[Tensor, Tensor]:
        """Return the pieces that have weights, and these: most have none, and every draft reads all of them."""
        weight_DF: Tensor = self.weights[self.targets.index(target)].detach()
        changes = weight_DF._version  # a learned term is seldom written
        if self._read.get(target, (-1,))[0] != changes:
            (pieces_C,) = weight_DF.any(1).nonzero(as_tuple=True)
            self._read[target] = changes, pieces_C, weight_DF[pieces_C]
        return self._read[target][1:]

    def is_read(self, target: str) -> bool:
        """Return whether drafts depend on a target's states: not before they have weights."""
        return len(self._find_weights(target)[0]) > 0

    def compute_logits(self, target: str, states_NS: Tensor) -> Tensor | None:
        """Return the term of the logits for the first piece of a draft after each state (N, D); None while it is 0."""
        pieces_C, weights_CF = self._find_weights(target)
        if not len(pieces_C):
            return None
        features_NF = state_features(states_NS.to(weights_CF.device))
        logits_ND = features_NF.new_zeros(len(features_NF), len(self.weights[0]))
        logits_ND[:, pieces_C] = features_NF @ weights_CF.T
        return logits_ND

    def write(self, folder: Path) -> None:
        tensors = {name: weight.detach().contiguous() for name, weight in zip(self.targets, self.weights, strict=True)}
        save_file(tensors, folder / STATES_FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take over what `read` returns."""
        for own, new in zip(self.weights, self.read(folder), strict=True):
            own.copy_(new)

    def read(self, folder: Path) -> list[Tensor]:
        """Read weights in the order of these targets; zeros for a target that the folder has none for.

        Raises:
            ModelError: the file cannot be read, or its weights are those of another drafter.
        """
        path, device = folder / STATES_FILE, self.weights[0].device
        if not path.is_file():
            return [torch.zeros_like(weight) for weight in self.weights]
        try:
            found = load_file(path, device=str(device))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} must hold the weights of target states, but: {error}") from error
        read = [found.get(name, torch.zeros_like(own)) for name, own in zip(self.targets, self.weights, strict=True)]
        for name, new, own in zip(self.targets, read, self.weights, strict=True):
            if new.shape != own.shape:
                raise ModelError(f"{path} must hold weights of {tuple(own.shape)} for {name}, got {tuple(new.shape)}")
        return read


def read_version_weights(folder: Path, drafter: LanguageModel) -> list[Tensor]:
    """Read `drafter.trained_weights` as of the time when this version was written. Raises ModelError."""
    states = drafter.extra.read(folder) if isinstance(drafter.extra, TargetStates) else []
    return [*read_trained_weights(folder, drafter), *states]
