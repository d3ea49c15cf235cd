"""The search for the fastest forward pass that provably computes what a model does (`proof.py`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.engine.forward_pass.forward import Forward, ModuleForward
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights
from stages.engine.forward_pass.proof import check_spans, describe_error, follows_masks, follows_trees, pick_forward
from stages.engine.forward_pass.row_forward import Reading, RowForward, find_rope_switch
from stages.engine.models.forward_choice import limit_of, make_forward
from stages.engine.quantisation.modules import ROUNDING, round_weights
from store.errors import ModelError

PACKED = "packed"


class ForwardSearch:
    """Finds the first of a model's forward passes that is right.

    Args:
        model: a Hugging Face causal language model.
        name: for messages.
        weights, batch_invariant: as for `LanguageModel`.
        pack: packs its weights, once; None where no forward pass computes with packed ones.
        read: computes the logits of whole texts, as `LanguageModel.read`.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        weights: str,
        pack: Callable[[], PackedLlamaWeights] | None,
        read: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        batch_invariant: bool,
    ) -> None:
        self._model, self._name, self._weights, self._batch_invariant = model, name, weights, batch_invariant
        self._pack, self._read = pack, read
        self.candidates = self._list_candidates()  # by name what makes each forward pass, the fastest first

    @property
    def _needs_packed(self) -> bool:
        """Whether the format of the weights, or the single kernel, exists with packed weights alone."""
        return self._weights in ROUNDING or self._batch_invariant

    def _list_candidates(self) -> dict[str, Callable[[], Forward]]:
        found: dict[str, Callable[[], Forward]] = {}
        if pack := self._pack:
            found[PACKED] = lambda: make_forward(pack())
        if self._needs_packed:
            return found
        # With modules, one row beyond a switch of the rotary frequencies would change those of all rows.
        if find_rope_switch(self._model.config.get_text_config()) is None:
            found["modules"] = lambda: ModuleForward(self._model)
        return found | {reading.name.lower(): partial(RowForward, self._model, reading) for reading in Reading}

    def prove(self) -> dict[str, Any]:
        """Prove the candidates in turn, until one is right.

        Returns:
            What JSON can hold: the `forward` pass by name, the number of tokens of the `longest` text that it is proved
            for (None: any), whether it follows masks (`branches`) and reads `trees`, and the `reasons` against those
            before it.

        Raises:
            ModelError: the model fails, or no forward pass is right.
            MemoryError, torch.OutOfMemoryError: there is too little memory for a forward pass.
        """
        try:
            length, longest = check_spans(self._model)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may raise anything
            raise ModelError(f"{self._name} cannot compute a text: {describe_error(error)}") from error
        packed = self._pack() if self._pack and self._needs_packed else None  # before the modules have other weights
        limit, rounds = limit_of(self._weights, packed, self._model), self._weights in ROUNDING
        with round_weights(self._model, self._weights):
            makers = list(self.candidates.values())
            number, reasons = pick_forward(self._model, makers, limit, length, rounds_inputs=rounds)
            if number is None:
                raise ModelError(self._describe_failure(reasons))
            return {
                "forward": list(self.candidates)[number],
                "longest": longest,
                "branches": follows_masks(self._model, self._read),
                "trees": follows_trees(self._model, makers[number], limit, length),
                "reasons": reasons,
            }

    def _describe_failure(self, reasons: Sequence[str]) -> str:
        config = self._model.config.get_text_config()
        kinds = ", ".join(dict.fromkeys(getattr(config, "layer_types", None) or ())) or "of one kind"
        if self._needs_packed:
            why = f"; {reasons[0]}" if reasons else ", which does not support this architecture"
            wanted = f"weights in {self._weights} need" if self._weights in ROUNDING else "batch_invariant needs"
            return f"{self._name}: {wanted} the packed forward{why}; try weights = 'fastest'"
        tried = "; ".join(f"{name}: {reason}" for name, reason in zip(self.candidates, reasons, strict=False))
        return (
            f"{self._name} must give the same logits for a text read at once and in parts, but no forward pass does "
            f"(model type {config.model_type}, layers {kinds}; {tried}); choose another model"
        )
