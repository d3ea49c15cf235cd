"""The numbers of a model that its compiled functions are made for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a Llama-like model.

    Attributes:
        width: numbers of a token's state.
        inner: numbers between the two halves of a layer's second part.
        heads, key_heads: of queries, and of keys and values.
        head_size: numbers of a head.
        eps: added to the mean of squares in norms.
        head_norms: whether queries and keys are normalised.
    """

    width: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    head_norms: bool

    @property
    def joined(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.key_heads) * self.head_size

    @property
    def slot(self) -> int:
        """Numbers of a token's keys and values, in the cache."""
        return 2 * self.key_heads * self.head_size
