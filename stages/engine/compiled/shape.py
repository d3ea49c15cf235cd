"""What a model's compiled functions are made for: its numbers, and what its family computes otherwise than Llama.

A layer is two parts, attention and the gated one: each has a norm before it, after it, or both, and is added to the
state. What a family does not have, its models leave out: a norm whose name is None, a multiplier of 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from stages.engine.forward_pass.packed_weights import FIXED_ROTARY


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


Number = Callable[[Any], float]  # of a configuration


def _one(config: Any) -> float:
    return 1.0


@dataclass(frozen=True)
class PartNorms:
    """Names of the norms of a layer's part."""

    before: str | None  # of what the part reads; None: it reads the state itself
    after: str | None = None  # of what is added to the state; None: that is added as it is


@dataclass(frozen=True)
class Family:
    """Differences of a family of models from Llama."""

    # attention, gated: norms of the two parts of a layer
    attention: PartNorms = PartNorms("input_layernorm")
    gated: PartNorms = PartNorms("post_attention_layernorm")
    # query_key_value, gate_up: modules whose matrices are multiplied as one
    query_key_value: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norm_offset: float = 0.0  # added to the weights of norms
    embedding: Number = _one  # multiplier of embeddings
    part: Number = _one  # multiplier of what a part adds to the state
    logits: Number = _one  # multiplier of the logits
    gate: str = "hidden_act"  # field of the configuration that names the function of the gate

    def find_gate(self, config: Any) -> GateFunction | None:
        """Return the function of the gate; None if it is none of those that are compiled."""
        name = getattr(config, self.gate)
        return GateFunction(name) if name in {gate.value for gate in GateFunction} else None


_LLAMA = Family()
_NORMS_AFTER = Family(
    attention=PartNorms(None, "post_attention_layernorm"), gated=PartNorms(None, "post_feedforward_layernorm")
)
_GEMMA_2 = Family(
    attention=PartNorms("input_layernorm", "post_attention_layernorm"),
    gated=PartNorms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    norm_offset=1.0,
    embedding=lambda config: float(config.hidden_size**0.5),
    gate="hidden_activation",
)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": Family(norm_offset=1.0, embedding=_GEMMA_2.embedding),
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_2,
    "granite": Family(
        embedding=lambda config: config.embedding_multiplier,
        part=lambda config: config.residual_multiplier,
        logits=lambda config: 1 / config.logits_scaling,
    ),
    "phi3": Family(query_key_value=("qkv_proj",), gate_up=("gate_up_proj",)),
    "olmo2": _NORMS_AFTER,
    "olmo3": _NORMS_AFTER,
}


COMPILED_TYPES = frozenset(_FAMILIES)  # of models, by their configurations


def find_family(model: Any) -> Family | None:
    """Return the family of a model whose parts are all compiled; None for others."""
    config = model.config
    family = _FAMILIES.get(config.model_type)
    if family is None or family.find_gate(config) is None or getattr(config, "quantization_config", None) is not None:
        return None
    return family if set(find_rotary_kinds(model).values()) <= FIXED_ROTARY else None


def find_rotary_kinds(model: Any) -> dict[str | None, str]:
    """Return how positions rotate heads, per type of layer, those that attend to all before those with windows; of the
    type None in a model that has but one way.
    """
    kinds = model.model.rotary_emb.rope_type
    return dict(sorted(kinds.items())) if isinstance(kinds, dict) else {None: kinds}
