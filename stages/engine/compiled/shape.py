"""The numbers of a model that its compiled functions are made for."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class GateFunction(StrEnum):
    """The function of the gate in a layer's second part, as `transformers` names it."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"


class HeadNorm(Enum):
    """What is normalised of a token's queries, and of its keys."""

    NOTHING = "nothing"
    EACH = "each head"
    ALL = "all heads together"


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a Llama-like model."""

    width: int  # numbers of a token's state
    inner: int  # numbers between the two halves of a layer's second part
    # heads, key_heads: of queries, and of keys and values
    heads: int
    key_heads: int
    head_size: int  # numbers of a head
    rotated: int  # how many of them, the first ones, are rotated by the position
    eps: float  # added to the mean of squares in norms
    scale: float  # of the products of queries and keys
    cap: float = 0.0  # limit of these products, which they approach as a hyperbolic tangent; 0: none
    head_norm: HeadNorm = HeadNorm.NOTHING  # of queries and keys
    gate: GateFunction = GateFunction.SILU  # of the second part

    @property
    def joined(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.key_heads) * self.head_size

    @property
    def slot(self) -> int:
        """Numbers of a token's keys and values, in the cache."""
        return 2 * self.key_heads * self.head_size
