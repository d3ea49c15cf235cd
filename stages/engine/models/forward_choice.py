"""The choice of a forward pass: the fastest that provably computes what a model does (`proof.py`)."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stages.engine.compiled.llama_forward import CompiledLlamaForward
from stages.engine.compiled.llama_weights import (
    ROUNDED_INPUTS,
    CompiledLlamaWeights,
    has_compiled_forward,
    prefers_compiled_forward,
)
from stages.engine.forward_pass.forward import Forward
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights, has_packed_forward
from stages.engine.forward_pass.proof import (
    ROUNDED_IN_8_BITS,
    ROUNDED_IN_16_BITS,
    catch_model_errors,
    check_spans,
    pick_forward,
    tolerance,
)
from stages.engine.forward_pass.row_forward import Reading, RowForward, find_rope_switch
from stages.engine.forward_pass.slot_forward import SlotForward
from stages.engine.quantisation.modules import ROUNDING, has_groups, is_mapped, round_weights
from store.errors import ModelError

LOG = logging.getLogger("omnidraft.models")


def choose_weights(model: Any) -> str:
    """Return the format of weights for `auto`: that of a quantised GGUF file if a forward pass computes with its codes,
    else `fastest`.
    """
    return "codes" if has_compiled_forward(model) and has_groups(model) else "fastest"


LIMITS = {16: ROUNDED_IN_16_BITS, 8: ROUNDED_IN_8_BITS}  # largest deviations, by the bits of inputs
PACKED = "packed"


def can_pack(model: Any) -> bool:
    """Check whether a forward pass over weights of its own computes a model."""
    return has_packed_forward(model) or has_compiled_forward(model)


def pack_weights(model: Any, weights: str, *, batch_invariant: bool) -> PackedLlamaWeights:
    """Pack the weights of a model that `can_pack`."""
    if prefers_compiled_forward(model, weights, batch_invariant=batch_invariant):
        return CompiledLlamaWeights(model, weights)
    if need := describe_need(weights, batch_invariant=batch_invariant):
        raise ModelError(f"{need}; try weights = 'fastest'")
    return PackedLlamaWeights(model)


def describe_need(weights: str, *, batch_invariant: bool) -> str:
    """Return the beginning of a message that the compiled forward pass is needed; empty if it is not."""
    if weights not in ROUNDING and not batch_invariant:
        return ""
    wanted = f"weights in {weights} need" if weights in ROUNDING else "batch_invariant needs"
    kinds = "Llama-like models in float32 on a CPU, with heads of a multiple of 16 numbers"
    return f"{wanted} the compiled forward pass ({kinds})"


def make_forward(weights: PackedLlamaWeights) -> SlotForward:
    """Make the forward pass over packed weights."""
    return CompiledLlamaForward(weights) if isinstance(weights, CompiledLlamaWeights) else PackedLlamaForward(weights)


class ForwardSearch:
    """Finds the first of a model's forward passes that is right. `pack` packs its weights, once; None where no forward
    pass computes with packed ones.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        weights: str,
        pack: Callable[[], PackedLlamaWeights] | None,
        *,
        batch_invariant: bool,
    ) -> None:
        self._model, self._name, self._weights = model, name, weights
        self._need = describe_need(weights, batch_invariant=batch_invariant)
        self._pack = pack
        self.candidates = self._list_candidates()  # by name what makes each forward pass, the fastest first

    def _list_candidates(self) -> dict[str, Callable[[], Forward]]:
        candidates: dict[str, Callable[[], Forward]] = {}
        if pack := self._pack:
            candidates[PACKED] = lambda: make_forward(pack())
        if self._need:
            return candidates
        # With modules, one row beyond a switch of the rotary frequencies would change those of all rows.
        if find_rope_switch(self._model.config.get_text_config()) is None:
            candidates["modules"] = lambda: ModuleForward(self._model)
        return candidates | {reading.name.lower(): partial(RowForward, self._model, reading) for reading in Reading}

    def prove(self) -> dict[str, Any]:
        """Prove the candidates in turn, until one is right. Returns what JSON can hold: the `forward` pass by name, the
        number of tokens of the `longest` text that it is proved for (None: any), whether it reads `trees`, and the
        `reasons` against those before it. Raises `ModelError` if the model fails or no forward pass is right;
        `MemoryError` or `torch.OutOfMemoryError` if there is too little memory for a forward pass.
        """
        if is_mapped(self._model):
            LOG.info("proving the forward pass of %s, once on this machine", self._name)
        with catch_model_errors() as errors:
            length, longest = check_spans(self._model)
        if errors:
            raise ModelError(f"{self._name} cannot compute a text: {errors[0]}")
        rounds = self._weights in ROUNDING
        limit = LIMITS[ROUNDED_INPUTS[self._weights]] if rounds else tolerance(self._model)
        if self._pack and self._need:
            self._pack()  # before the modules have other weights
        with round_weights(self._model, self._weights):
            makers = list(self.candidates.values())
            number, trees, reasons = pick_forward(self._model, makers, limit, length, rounds_inputs=rounds)
            if number is None:
                raise ModelError(self._describe_failure(reasons))
            return {
                "forward": list(self.candidates)[number],
                "longest": longest,
                "trees": trees,
                "reasons": reasons,
            }

    def _describe_failure(self, reasons: Sequence[str]) -> str:
        config = self._model.config.get_text_config()
        kinds = ", ".join(dict.fromkeys(getattr(config, "layer_types", None) or ())) or "of one kind"
        if self._need:
            why = f"; {reasons[0]}" if reasons else ", which does not compute this model"
            return f"{self._name}: {self._need}{why}; try weights = 'fastest'"
        tried = "; ".join(f"{name}: {reason}" for name, reason in zip(self.candidates, reasons, strict=False))
        return (
            f"{self._name} must give the same logits for a text read at once and in parts, but no forward pass does "
            f"(model type {config.model_type}, layers {kinds}; {tried}); choose another model"
        )
