"""Weights of Llama-like models for the packed forward: every matrix in the layout of its kernel.

Rotary embeddings rotate neighbouring numbers as one complex product: the rows of the query and key weights are
reordered for it once, which leaves every product of a query with a key unchanged. Query, key and value projections are
one matrix, and so are the gate and up projections.

Shapes: N new tokens, W width, H heads, E of a head, V vocabulary, P positions, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stages.engine.checkpoints.loading import report_layers
from stages.engine.forward_pass.kernels import Kernel, Matrix, join_matrices, make_kernel, read_matrix

ARCHITECTURES = {"llama", "mistral", "qwen2", "qwen3"}
FIXED_ROTARY = {"default", "linear", "llama3"}  # positions whose frequencies do not depend on the text's length


def has_packed_forward(model: Any) -> bool:
    """Check whether the packed forward supports this architecture. `prove_forward` compares its outputs."""
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
    """The kernels and norms of one transformer layer."""

    enter_norm_W: Tensor
    query_key_value: Kernel
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    leave: Kernel
    inner_norm_W: Tensor
    gate_up: Kernel
    down: Kernel


class PackedLlamaWeights:
    """A model's weights for the packed forward; several forwards, each with its own cache, may share them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        attention = model.model.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.heads: int = model.config.num_attention_heads
        self.key_heads: int = model.config.num_key_value_heads
        self.eps = torch.tensor(model.config.rms_norm_eps, dtype=torch.float64, device=model.device)
        self.dtype, self.device = model.dtype, model.device
        self.longest: int = model.config.max_position_embeddings
        kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(model.model.layers)
        self.slides = [kind == "sliding_attention" for kind in kinds]
        self._rotations_PE = torch.empty(0, self.head_size // 2, dtype=torch.complex64, device=self.device)
        self.outputs: int = model.lm_head.out_features
        self.version = 0  # incremented whenever the weights are packed
        self.trained = False  # whether they may differ from those as loaded
        self.refresh()

    @torch.inference_mode()
    def refresh(self, *, layers: bool = True) -> None:
        """Pack the weights again after they changed; without `layers` only those of the output layer did."""
        core = self.model.model
        if layers:
            self._read_embedding(core.embed_tokens)
            shown = core.layers if self.version else report_layers(self.model.config.name_or_path, core.layers)
            self.layers = [self._make_layer(layer) for layer in shown]
            self.norm_W: Tensor = core.norm.weight
        self.version += 1

    def _read_embedding(self, embedding: Any) -> None:
        self.embedding_VW: Tensor = embedding.weight

    @torch.inference_mode()
    def make_output_layer(self, ids: Tensor | None) -> Kernel:
        """Make the output layer, or its rows of these ids only. Not made in advance: a pruned forward needs no full
        one.
        """
        matrix = read_matrix(self.model.lm_head)
        return make_kernel(matrix if ids is None else matrix.take(ids))

    def rotations(self, positions_N: Tensor, longest: int) -> Tensor:
        """Return, per position below `longest`, the complex numbers that rotate neighbouring pairs (N, E / 2)."""
        if len(self._rotations_PE) < longest:
            positions = torch.arange(longest, device=self.device)[None]
            probe = torch.zeros(1, device=self.device)
            cos_1PE, sin_1PE = self.model.model.rotary_emb(probe, positions)
            half = self.head_size // 2
            self._rotations_PE = torch.complex(cos_1PE[0, :, :half].float(), sin_1PE[0, :, :half].float())
        return self._rotations_PE[positions_N]

    @property
    def window(self) -> int | None:
        """Number of tokens that a sliding layer attends to, its own included; None if no layer slides."""
        window: int | None = getattr(self.model.config, "sliding_window", None)
        return window if any(self.slides) else None

    def normalise(self, x_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Divide by the root of the mean square over the last dimension, and scale.

        In float32 by five operations: for one token of width 576 they take 11 microseconds, torch's own 21.
        """
        if x_NX.dtype != torch.float32:
            return functional.rms_norm(x_NX, weight_X.shape, weight_X, float(self.eps))
        norm_N1 = torch.linalg.vector_norm(x_NX, dim=-1, keepdim=True)
        return x_NX * torch.addcmul(self.eps, norm_N1, norm_N1, value=1 / x_NX.shape[-1]).rsqrt_() * weight_X

    def describe(self) -> str:
        return f"packed forward, {str(self.dtype).removeprefix('torch.')}"

    def _make_layer(self, layer: Any) -> Layer:
        attention, inner = layer.self_attn, layer.mlp
        turned = [self._interleave(attention.q_proj), self._interleave(attention.k_proj)]
        return Layer(
            layer.input_layernorm.weight,
            make_kernel(join_matrices([*turned, read_matrix(attention.v_proj)])),
            self._head_norm(attention, "q_norm"),
            self._head_norm(attention, "k_norm"),
            make_kernel(read_matrix(attention.o_proj)),
            layer.post_attention_layernorm.weight,
            make_kernel(join_matrices([read_matrix(inner.gate_proj), read_matrix(inner.up_proj)])),
            make_kernel(read_matrix(inner.down_proj)),
        )

    def _interleave(self, projection: Any) -> Matrix:
        """Interleave the two halves of every head in weights and bias, so that rotated pairs are neighbours."""
        matrix = read_matrix(projection)
        order = self._pairs.repeat(len(matrix.weight_OI) // self.head_size)
        return matrix.take(order + torch.arange(len(order), device=order.device) // self.head_size * self.head_size)

    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        norm = getattr(attention, name, None)
        return None if norm is None else norm.weight.detach()[self._pairs]

    @property
    def _pairs(self) -> Tensor:
        half = torch.arange(self.head_size // 2, device=self.device)
        return torch.stack([half, half + self.head_size // 2], dim=1).reshape(-1)
