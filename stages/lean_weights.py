"""The weights of Llama-like models, laid out for the lean forward.

Query, key and value projections are one matrix, and so are the two that open the inner layer. Every matrix has the
kernel that is fastest for it here.

Shapes: P positions, E of a head, W width, V vocabulary, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.linear import MANY_ROWS, Kernel, fastest, make_kernel

ARCHITECTURES = {"llama", "mistral", "qwen2", "qwen3"}
FIXED_ROTARY = {"default", "linear", "llama3"}  # positions whose frequencies do not depend on the text's length


def is_lean(model: Any) -> bool:
    """Whether the lean forward is written for this architecture. Whether it computes the same is checked by running."""
    config = model.config
    return (
        config.model_type in ARCHITECTURES
        and getattr(config, "quantization_config", None) is None
        and config.hidden_act == "silu"
        and getattr(model.model.rotary_emb, "rope_type", None) in FIXED_ROTARY
        and model.model.rotary_emb.inv_freq.shape[0] * 2 == model.model.layers[0].self_attn.head_dim
    )


@dataclass(frozen=True)
class Layer:
    """One transformer layer, ready to compute."""

    enter_norm_W: Tensor
    query_key_value: Kernel
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    leave: Kernel
    inner_norm_W: Tensor
    gate_up: Kernel
    down: Kernel


class LeanWeights:
    """A model's weights as the lean forward wants them; several forwards, each with a cache of its own, may share them.

    Args:
        model: of one of the `ARCHITECTURES`.
        weights: `plain`, `packed`, or `int8` to decide how they are laid out, or `fastest` to measure it.
    """

    def __init__(self, model: Any, weights: str = "fastest") -> None:
        self.model, self._weights = model, weights
        attention = model.model.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.heads: int = model.config.num_attention_heads
        self.key_heads: int = model.config.num_key_value_heads
        self.eps: float = model.model.norm.variance_epsilon
        self.dtype, self.device = model.dtype, model.device
        self.longest: int = model.config.max_position_embeddings
        self._turns_PE = torch.empty(0, self.head_size // 2, dtype=torch.complex64, device=self.device)
        self.outputs: int = model.lm_head.weight.shape[0]
        self.version = 0  # how often the weights have been laid out
        self._kinds: dict[tuple[int, ...], tuple[str, str]] = {}
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Lay the weights out anew: they have changed."""
        core = self.model.model
        self.embedding_VW: Tensor = core.embed_tokens.weight
        self.layers = [self._layer(layer) for layer in core.layers]
        self.norm_W: Tensor = core.norm.weight
        self.version += 1

    @torch.inference_mode()
    def logits_of(self, ids: Tensor | None) -> Kernel:
        """The output layer, or its lines of these ids alone. Made when wanted: whoever prunes it needs no whole one."""
        weight_VW, bias_V = self.model.lm_head.weight, self.model.lm_head.bias
        if ids is None:
            return self._kernel(weight_VW, bias_V)
        return self._kernel(weight_VW[ids], None if bias_V is None else bias_V[ids])

    def turns(self, positions_N: Tensor, longest: int) -> Tensor:
        """Per position the complex numbers that rotate neighbouring pairs (N, half a head).

        Args:
            positions_N: below `longest`.
            longest: positions that there is room for.
        """
        if len(self._turns_PE) < longest:
            self._turns_PE = self._make_turns(longest)
        return self._turns_PE[positions_N]

    def _make_turns(self, longest: int) -> Tensor:
        positions = torch.arange(longest, device=self.device)[None]
        probe = torch.zeros(1, device=self.device)
        cos_1PE, sin_1PE = self.model.model.rotary_emb(probe, positions)
        half = self.head_size // 2
        return torch.complex(cos_1PE[0, :, :half].float(), sin_1PE[0, :, :half].float())

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return len(self.layers) * 2 * self.key_heads * self.head_size * torch.finfo(self.dtype).bits // 8

    def describe(self) -> str:
        """How the weights are laid out, for people."""
        kinds = sorted({kind for pair in self._kinds.values() for kind in pair})
        return f"lean forward, {'/'.join(kinds)} weights, {str(self.dtype).removeprefix('torch.')}"

    def _kernel(self, weight_OI: Tensor, bias_O: Tensor | None) -> Kernel:
        shape = tuple(weight_OI.shape)
        if shape not in self._kinds and self._weights != "fastest":
            self._kinds[shape] = self._weights, self._weights
        elif shape not in self._kinds:
            self._kinds[shape] = fastest(weight_OI, 1), fastest(weight_OI, MANY_ROWS)
        return make_kernel(weight_OI.detach(), None if bias_O is None else bias_O.detach(), *self._kinds[shape])

    def _layer(self, layer: Any) -> Layer:
        attention, inner = layer.self_attn, layer.mlp
        turned = [self._interleaved(attention.q_proj), self._interleaved(attention.k_proj)]
        parts = [*turned, (attention.v_proj.weight, attention.v_proj.bias)]
        biases = [bias for _, bias in parts if bias is not None]
        gates = inner.gate_proj, inner.up_proj
        gate_biases = [part.bias for part in gates if part.bias is not None]
        return Layer(
            layer.input_layernorm.weight,
            self._kernel(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None),
            self._head_norm(attention, "q_norm"),
            self._head_norm(attention, "k_norm"),
            self._kernel(attention.o_proj.weight, attention.o_proj.bias),
            layer.post_attention_layernorm.weight,
            self._kernel(torch.cat([part.weight for part in gates]), torch.cat(gate_biases) if gate_biases else None),
            self._kernel(inner.down_proj.weight, inner.down_proj.bias),
        )

    def _interleaved(self, projection: Any) -> tuple[Tensor, Tensor | None]:
        """Weights and bias with the two halves of every head interleaved: what rotates together stands together."""
        weight_OI, bias_O = projection.weight, projection.bias
        order = self._pairs.repeat(weight_OI.shape[0] // self.head_size)
        order = order + torch.arange(len(order), device=order.device) // self.head_size * self.head_size
        return weight_OI[order], None if bias_O is None else bias_O[order]

    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        norm = getattr(attention, name, None)
        return None if norm is None else norm.weight.detach()[self._pairs]

    @property
    def _pairs(self) -> Tensor:
        half = torch.arange(self.head_size // 2, device=self.device)
        return torch.stack([half, half + self.head_size // 2], dim=1).reshape(-1)
