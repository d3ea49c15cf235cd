"""Which of the forward passes over weights of one's own computes a model: the compiled or the packed one."""

from typing import Any

from stages.compiled.llama_forward import CompiledLlamaForward
from stages.compiled.llama_weights import CompiledLlamaWeights, has_compiled_forward, prefers_compiled_forward
from stages.forward_pass.measurements import Measurements
from stages.forward_pass.packed_llama import PackedLlamaForward
from stages.forward_pass.packed_weights import PackedLlamaWeights, has_packed_forward
from stages.forward_pass.slot_forward import SlotForward
from stages.quantisation.modules import count_attached, drop_groups

CODES = ("auto", "int4", "fastest", "float32")  # formats that compute with the codes of a file where possible


def choose_weights(model: Any) -> str:
    """Return the format of weights for `auto`: `fastest`, which the compiled forward computes from the codes of a file;
    `int4` if it cannot, most weights of the matrices were stored in four bits, and the packed forward can.
    """
    few, more = count_attached(model)
    packs = model.device.type == "cpu" and has_packed_forward(model) and not has_compiled_forward(model)
    return "int4" if few > more and packs else "fastest"


def pack_weights(model: Any, weights: str, measurements: Measurements, *, one_kernel: bool) -> PackedLlamaWeights:
    """Pack the weights of a model that `has_packed_forward`.

    Args:
        model: a Hugging Face causal language model.
        weights, measurements, one_kernel: as for `PackedLlamaWeights`.
    """
    compiled = prefers_compiled_forward(model, weights, one_kernel=one_kernel)
    made = CompiledLlamaWeights if compiled else PackedLlamaWeights
    return made(model, weights, measurements, one_kernel=one_kernel)


def make_forward(weights: PackedLlamaWeights) -> SlotForward:
    """Make the forward pass over packed weights."""
    return CompiledLlamaForward(weights) if isinstance(weights, CompiledLlamaWeights) else PackedLlamaForward(weights)


def rounds_inputs(weights: PackedLlamaWeights | None) -> bool:
    """Whether a forward pass over packed weights of few bits rounds the inputs of matrices."""
    return not isinstance(weights, CompiledLlamaWeights)


def keep_useful_codes(model: Any, weights: str) -> None:
    """Drop the codes that a file came with where no forward pass of this format computes with them."""
    if weights in ("fastest", "float32") and not has_compiled_forward(model):
        drop_groups(model)
