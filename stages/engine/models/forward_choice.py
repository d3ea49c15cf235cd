"""Which of the forward passes over weights of one's own computes a model: the compiled or the packed one."""

from typing import Any

from stages.engine.compiled.llama_forward import CompiledLlamaForward
from stages.engine.compiled.llama_weights import (
    ROUNDED_INPUTS,
    CompiledLlamaWeights,
    has_compiled_forward,
    prefers_compiled_forward,
)
from stages.engine.forward_pass.measurements import Measurements
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights, has_packed_forward
from stages.engine.forward_pass.proof import ROUNDED, ROUNDED_IN_8_BITS, ROUNDED_IN_16_BITS, tolerance
from stages.engine.forward_pass.slot_forward import SlotForward
from stages.engine.quantisation.modules import CODE_FORMATS, ROUNDING, drop_groups, has_groups
from store.errors import ModelError

# Formats that compute with the codes of a file where possible.
CODES = ("auto", *CODE_FORMATS, "int4", "fastest", "float32")


def choose_weights(model: Any) -> str:
    """Return the format of weights for `auto`: that of a quantised GGUF file if a forward pass computes with its codes,
    else `fastest`.
    """
    return "codes" if has_compiled_forward(model) and has_groups(model) else "fastest"


def can_pack(model: Any, weights: str) -> bool:
    """Check whether a forward pass over weights of its own computes a model in a format of weights."""
    return has_packed_forward(model) or prefers_compiled_forward(model, weights, batch_invariant=True)


def pack_weights(model: Any, weights: str, measurements: Measurements, *, batch_invariant: bool) -> PackedLlamaWeights:
    """Pack the weights of a model that `can_pack`.

    Args:
        model: a Hugging Face causal language model.
        weights, measurements, batch_invariant: as for `PackedLlamaWeights`.

    Raises:
        ModelError: `codes`, `codes8` or `int4` without the compiled forward.
    """
    compiled = prefers_compiled_forward(model, weights, batch_invariant=batch_invariant)
    if weights in ROUNDED_INPUTS and not compiled:
        raise ModelError(
            f"weights in {weights} need the compiled forward pass (Llama-like models in float32 on a CPU, with heads "
            "of a multiple of 16 numbers); try weights = 'fastest'"
        )
    made = CompiledLlamaWeights if compiled else PackedLlamaWeights
    return made(model, weights, measurements, batch_invariant=batch_invariant)


def make_forward(weights: PackedLlamaWeights) -> SlotForward:
    """Make the forward pass over packed weights."""
    return CompiledLlamaForward(weights) if isinstance(weights, CompiledLlamaWeights) else PackedLlamaForward(weights)


def limit_of(weights: str, packed: PackedLlamaWeights | None, model: Any) -> float:
    """Return the largest deviation of a correct forward pass in this format of weights."""
    if weights not in ROUNDING:
        return tolerance(model)
    if not isinstance(packed, CompiledLlamaWeights):
        return ROUNDED
    return ROUNDED_IN_8_BITS if ROUNDED_INPUTS[weights] == 8 else ROUNDED_IN_16_BITS


def drop_useless_codes(model: Any) -> None:
    """Drop the codes that a file came with where no forward pass computes with them."""
    if not has_compiled_forward(model):
        drop_groups(model)
