"""Matrices of few bits: codes in groups of 32 or 16 inputs, each group with a scale and a minimum.

A weight is `scale * code + minimum`. So are the weights of GGUF's Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q8_0, IQ4 and
MXFP4, in groups of 16 those of Q2_K, Q3_K and Q6_K, and those of a matrix that is quantised here.

Shapes: O outputs, I inputs, G groups of an output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs of a group, of most matrices
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
    def quantise(cls, weight_OI: Tensor, bits: int = 4) -> "GroupedMatrix":
        """Quantise a matrix to codes of four or eight bits.

        Of a few ranges, each group has the one with the smallest squared error. Scales and the weights in the middle
        are numbers of bfloat16. Its number of inputs is divisible by `GROUP`.
        """
        middle = 1 << bits - 1  # the code in the middle of the range
        weight_OGX = weight_OI.float().unflatten(1, (-1, GROUP))
        low_OG, high_OG = weight_OGX.aminmax(dim=2)
        centre_OG, width_OG = (low_OG + high_OG) / 2, (high_OG - low_OG) / (2 * middle - 1)
        least_OG = torch.full_like(centre_OG, torch.inf)
        codes_OGX = torch.zeros_like(weight_OGX, dtype=torch.uint8)
        scale_OG, zero_OG = torch.zeros_like(centre_OG), torch.zeros_like(centre_OG)
        for shrink in SHRINKS:
            tried_OG = (width_OG * shrink).bfloat16().float()
            middle_OG = (centre_OG + tried_OG / 2).bfloat16().float()
            steps_OGX = (weight_OGX - middle_OG[..., None]) / tried_OG.clamp_min(SMALLEST)[..., None]
            steps_OGX = steps_OGX.round_().clamp_(-middle, middle - 1)
            error_OG = (steps_OGX * tried_OG[..., None] + middle_OG[..., None] - weight_OGX).square_().sum(2)
            better_OG = error_OG < least_OG
            least_OG = torch.where(better_OG, error_OG, least_OG)
            scale_OG, zero_OG = (
                torch.where(better_OG, new, old) for new, old in ((tried_OG, scale_OG), (middle_OG, zero_OG))
            )
            codes_OGX = torch.where(better_OG[..., None], (steps_OGX + middle).to(torch.uint8), codes_OGX)
        return cls(codes_OGX.flatten(1), scale_OG, zero_OG - middle * scale_OG, bits)

    def take(self, rows_O: Tensor) -> "GroupedMatrix":
        return GroupedMatrix(self.codes_OI[rows_O], self.scale_OG[rows_O], self.minimum_OG[rows_O], self.bits)

    def dequantise(self) -> Tensor:
        """Return the weights in float32 (O, I)."""
        codes_OGX = self.codes_OI.unflatten(1, (-1, self.size)).float()
        weight_OI: Tensor = codes_OGX.mul_(self.scale_OG[..., None]).add_(self.minimum_OG[..., None]).flatten(1)
        return weight_OI

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes_OI.shape
        return outputs, inputs

    @property
    def size(self) -> int:
        return self.codes_OI.shape[1] // self.scale_OG.shape[1]
