"""Matrices of few bits: codes in groups of 32 or 16 inputs, each group with a scale and a minimum.

A weight is `scale * code + minimum`. So are the weights of GGUF's Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K and Q8_0, in
groups of 16 those of Q2_K, Q3_K and Q6_K, and those of a matrix that is quantised here.

torch's kernel for four bits, for groups of 32, computes with a scale and a zero per group in bfloat16: a weight is
`scale * (code - 8) + zero`. Codes of more than four bits are divided into two planes of four bits, high and low: the
kernel reads them as one matrix with twice the inputs.

Shapes: O outputs, I inputs, G groups of an output, J inputs of all planes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs of a group, of most matrices
MIDDLE = 8  # the code of a plane that the kernel multiplies as 0
SHRINKS = (1.0, 0.95, 0.9, 0.85)  # ranges that are tried for a group, as shares of the range of its weights
SMALLEST = 1e-30  # a scale that can be divided by


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix whose weights are `scale * code + minimum`."""

    codes_OI: Tensor  # from 0, in eight bits each
    scale_OG: Tensor  # float32
    minimum_OG: Tensor  # float32
    bits: int  # of a code; at most 8

    @classmethod
    @torch.no_grad()
    def quantise(cls, weight_OI: Tensor) -> "GroupedMatrix":
        """Quantise a matrix to four bits.

        Of a few ranges, each group has the one with the smallest squared error. Scales and zeros are numbers of
        bfloat16, so that the kernel computes with these weights and no others.

        Args:
            weight_OI: its number of inputs is divisible by `GROUP`.
        """
        weight_OGX = weight_OI.float().unflatten(1, (-1, GROUP))
        low_OG, high_OG = weight_OGX.aminmax(dim=2)
        centre_OG, width_OG = (low_OG + high_OG) / 2, (high_OG - low_OG) / 15
        least_OG = torch.full_like(centre_OG, torch.inf)
        codes_OGX = torch.zeros_like(weight_OGX, dtype=torch.uint8)
        scale_OG, zero_OG = torch.zeros_like(centre_OG), torch.zeros_like(centre_OG)
        for shrink in SHRINKS:
            tried_OG = (width_OG * shrink).bfloat16().float()
            middle_OG = (centre_OG + tried_OG / 2).bfloat16().float()
            steps_OGX = (weight_OGX - middle_OG[..., None]) / tried_OG.clamp_min(SMALLEST)[..., None]
            steps_OGX = steps_OGX.round_().clamp_(-MIDDLE, MIDDLE - 1)
            error_OG = (steps_OGX * tried_OG[..., None] + middle_OG[..., None] - weight_OGX).square_().sum(2)
            better_OG = error_OG < least_OG
            least_OG = torch.where(better_OG, error_OG, least_OG)
            scale_OG, zero_OG = (
                torch.where(better_OG, new, old) for new, old in ((tried_OG, scale_OG), (middle_OG, zero_OG))
            )
            codes_OGX = torch.where(better_OG[..., None], (steps_OGX + MIDDLE).to(torch.uint8), codes_OGX)
        return cls(codes_OGX.flatten(1), scale_OG, zero_OG - MIDDLE * scale_OG, 4)

    def take(self, rows_O: Tensor) -> "GroupedMatrix":
        """Return the outputs with these indices."""
        return GroupedMatrix(self.codes_OI[rows_O], self.scale_OG[rows_O], self.minimum_OG[rows_O], self.bits)

    def dequantise(self) -> Tensor:
        """Return the weights in float32 (O, I)."""
        codes_OGX = self.codes_OI.unflatten(1, (-1, self.size)).float()
        weight_OI: Tensor = codes_OGX.mul_(self.scale_OG[..., None]).add_(self.minimum_OG[..., None]).flatten(1)
        return weight_OI

    @property
    def size(self) -> int:
        """Number of inputs of a group."""
        return self.codes_OI.shape[1] // self.scale_OG.shape[1]

    @property
    def has_kernel(self) -> bool:
        """Whether torch's kernel for four bits multiplies it."""
        return self.size == GROUP

    @property
    def planes(self) -> int:
        """Number of planes of four bits."""
        return 1 if self.bits <= 4 else 2

    def split_planes(self) -> tuple[Tensor, Tensor]:
        """Return the codes of all planes (O, J), the high ones first, and the kernel's scales and zeros (G, O, 2).

        The rounding of a scale is an error in proportion to the code. The zero is chosen such that the code in the
        middle of the range has none, or that of the zero's own rounding.
        """
        scale_OG, middle_OG = self.scale_OG.bfloat16().float(), self._find_middle()
        if self.planes == 1:
            zeros, codes_OJ, scales = [middle_OG], self.codes_OI, [scale_OG]
        else:
            codes_OJ = torch.cat([self.codes_OI >> 4, self.codes_OI & 15], dim=1)
            whole_OG = middle_OG + (17 * MIDDLE - self._middle) * scale_OG
            high_OG = whole_OG.bfloat16().float()
            zeros, scales = [high_OG, whole_OG - high_OG], [16 * scale_OG, scale_OG]
        both_GO2 = torch.stack([torch.cat(scales, dim=1).t(), torch.cat(zeros, dim=1).t()], dim=2)
        return codes_OJ, both_GO2.bfloat16().contiguous()

    def round_as_kernel(self) -> Tensor:
        """Return the weights that the kernel for four bits computes with, in float32 (O, I)."""
        codes_OJ, both_GO2 = self.split_planes()
        scale_OG, zero_OG = both_GO2.float().permute(2, 1, 0)
        steps_OGX = codes_OJ.unflatten(1, (-1, GROUP)).float() - MIDDLE
        weight_OJ = (steps_OGX * scale_OG[..., None] + zero_OG[..., None]).flatten(1)
        weight_OI: Tensor = weight_OJ.unflatten(1, (self.planes, -1)).sum(1)
        return weight_OI

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _find_middle(self) -> Tensor:
        """Return, per group (O, G), the weight of the code in the middle of the range."""
        return self._middle * self.scale_OG + self.minimum_OG


def join_groups(parts: Sequence[GroupedMatrix | None]) -> GroupedMatrix | None:
    """Return matrices one below the other; None unless all of them have codes of the same number of bits, in groups of
    the same size.
    """
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({(part.bits, part.size) for part in present}) != 1:
        return None
    codes_OI = torch.cat([part.codes_OI for part in present])
    scale_OG, minimum_OG = (torch.cat([getattr(part, name) for part in present]) for name in ("scale_OG", "minimum_OG"))
    return GroupedMatrix(codes_OI, scale_OG, minimum_OG, present[0].bits)
