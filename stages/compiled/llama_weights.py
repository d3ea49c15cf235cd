"""Weights of Llama-like models for the compiled forward: codes of few bits, in the layout of its products.

Shapes: W width, H heads, E of a head, P positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stages.compiled.emitter import VECTOR_SIZE
from stages.compiled.packing import PackedMatrix, can_pack_inputs, pack_matrix
from stages.compiled.products import ProductKind
from stages.compiled.program import CompiledSteps, compile_steps
from stages.compiled.shape import ModelShape
from stages.forward_pass.kernel_choice import Matrix, join_matrices
from stages.forward_pass.packed_weights import PackedLlamaWeights, has_packed_forward
from stages.quantisation.modules import find_attached, find_groups, has_groups

ROUNDED_INPUTS = ("codes", "int4")  # formats of codes whose inputs have 16 bits
SMALL = 16 << 20  # parameters of a model whose passes take longer for single operations than for reading weights


def prefers_compiled_forward(model: Any, weights: str, *, one_kernel: bool) -> bool:
    """Check whether the compiled forward computes a model in this format of weights, and is the fastest to do so.

    Numbers of 32 bits, read from memory, it multiplies with up to four rows faster than oneDNN, and with more rows
    slower (docs/experiments.md). Of codes and numbers of 16 bits it reads less.
    """
    if not has_compiled_forward(model):
        return False
    if weights not in ("fastest", "float32"):
        return weights in ROUNDED_INPUTS
    small = sum(weight.numel() for weight in model.parameters()) < SMALL
    sample = model.model.layers[-1].mlp.down_proj.weight.detach()
    short = torch.equal(sample.bfloat16().float(), sample)
    return one_kernel or small or short or has_groups(model)


def has_compiled_forward(model: Any) -> bool:
    """Check whether the compiled forward supports this model: one that the packed forward does, in float32 on a CPU,
    with sizes that its vectors divide. `prove_forward` compares its outputs.
    """
    if not has_packed_forward(model) or model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    config, size = model.config, model.model.layers[0].self_attn.head_dim
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * size)
    return size % VECTOR_SIZE == 0 and all(map(can_pack_inputs, inputs))


@dataclass(frozen=True)
class CompiledLayer:
    """The matrices and norms of one transformer layer."""

    enter_norm_W: Tensor
    query_key_value: PackedMatrix
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    leave: PackedMatrix
    inner_norm_W: Tensor
    gate_up: PackedMatrix
    down: PackedMatrix

    def matrices(self) -> Iterator[PackedMatrix]:
        """Yield all matrices of the layer."""
        yield from (self.query_key_value, self.leave, self.gate_up, self.down)


class CompiledLlamaWeights(PackedLlamaWeights):
    """A model's weights for the compiled forward; several forwards, each with its own cache, may share them.

    Args: see `PackedLlamaWeights`.
    """

    layers: list[CompiledLayer]  # type: ignore[assignment] # matrices in the place of kernels

    @override
    @torch.inference_mode()
    def refresh(self) -> None:
        super().refresh()
        self.splits_tokens = False  # a token's outputs never depend on what else a pass computes
        self.norm_W = self.norm_W.contiguous()
        config = self.model.config
        self.shape = ModelShape(
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=self.heads,
            key_heads=self.key_heads,
            head_size=self.head_size,
            eps=float(self.eps),
            head_norms=self.layers[0].query_norm_E is not None,
        )
        self._kinds = frozenset(matrix.kind for layer in self.layers for matrix in layer.matrices())
        self._compiled: dict[ProductKind, CompiledSteps] = {}  # by the kind of the output layer

    def compile(self, output: PackedMatrix) -> CompiledSteps:
        """Return the compiled steps of this model and an output layer."""
        if output.kind not in self._compiled:
            kinds = self._kinds | {output.kind}
            if any(not kind.has_groups for kind in kinds):  # weights that are trained leave the numbers of bfloat16
                kinds |= {ProductKind(16), ProductKind(32)}
            self._compiled[output.kind] = compile_steps(self.shape, kinds)
        return self._compiled[output.kind]

    @torch.inference_mode()
    def pack_output_layer(self, ids: Tensor | None) -> PackedMatrix:
        """Pack the output layer, or its rows of these ids only. It is never quantised here."""
        head = self.model.lm_head
        bias_O = None if head.bias is None else head.bias.detach()
        matrix = Matrix(head.weight.detach(), bias_O, find_attached(head))
        return self._pack(matrix if ids is None else matrix.take(ids))

    @override
    def describe(self) -> str:
        bits = sorted({matrix.kind.bits for layer in self.layers for matrix in layer.matrices()})
        inputs = "inputs of 16 bits" if self._format in ROUNDED_INPUTS else "float32"
        return f"compiled forward, weights of {' and '.join(map(str, bits))} bits, {inputs}"

    @override
    def _make_rotations(self, longest: int) -> Tensor:
        """Return, per position, the cosines of a head's half and then its sines (P, E)."""
        positions = torch.arange(longest, device=self.device)[None]
        cos_1PE, sin_1PE = self.model.model.rotary_emb(torch.zeros(1, device=self.device), positions)
        half = self.head_size // 2
        return torch.cat([cos_1PE[0, :, :half], sin_1PE[0, :, :half]], dim=1).float().contiguous()

    def rotation_table(self, longest: int) -> Tensor:
        """Return the rotations of at least that many positions."""
        if len(self._rotations_PE) < longest:
            self._rotations_PE = self._make_rotations(longest)
        return self._rotations_PE

    @override
    def _make_layer(self, layer: Any) -> CompiledLayer:  # type: ignore[override] # see `layers`
        attention, inner, read = layer.self_attn, layer.mlp, self._read
        heads = [read(one) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return CompiledLayer(
            layer.input_layernorm.weight.detach().contiguous(),
            self._pack(join_matrices(heads)),
            self._head_norm(attention, "q_norm"),
            self._head_norm(attention, "k_norm"),
            self._pack(read(attention.o_proj)),
            layer.post_attention_layernorm.weight.detach().contiguous(),
            self._pack(join_matrices([read(inner.gate_proj), read(inner.up_proj)])),
            self._pack(read(inner.down_proj)),
        )

    def _read(self, linear: nn.Linear) -> Matrix:
        """Return the matrix of a module, with the codes that it has or, in four bits, that it is quantised to."""
        bias_O = None if linear.bias is None else linear.bias.detach()
        if self._format == "int4":
            groups = find_groups(linear, quantise=not has_groups(self.model))
        else:
            groups = find_attached(linear)
        return Matrix(linear.weight.detach(), bias_O, groups)

    @override
    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        norm = getattr(attention, name, None)
        return None if norm is None else norm.weight.detach().contiguous()

    def _pack(self, matrix: Matrix) -> PackedMatrix:
        return pack_matrix(matrix.weight_OI, matrix.bias_O, matrix.groups, rounds=self._format in ROUNDED_INPUTS)
