"""Weights of Llama-like models for the compiled forward: codes of few bits, in the layout of its products.

Shapes: W width, H heads, E of a head, K ways to rotate, P positions, R rotated numbers of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stages.engine.compiled.llvm.emitter import VECTOR_SIZE
from stages.engine.compiled.llvm.vector_math import FLOAT_BITS
from stages.engine.compiled.packed_memory import PackedMemory
from stages.engine.compiled.packing import PackedMatrix, can_pack_inputs, find_number_type, pack_matrices
from stages.engine.compiled.products import NUMBER_BITS, ProductKind
from stages.engine.compiled.program import CompiledSteps, compile_steps
from stages.engine.compiled.shape import Family, HeadNorm, ModelShape, PartNorms, find_family, find_rotary_kinds
from stages.engine.forward_pass.kernels import Matrix, read_matrix
from stages.engine.forward_pass.measurements import digest_code, digest_file
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights, has_packed_forward
from stages.engine.quantisation.modules import (
    QUANTISED_BITS,
    count_weights,
    find_attached,
    find_groups,
    find_stored,
    has_groups,
    is_mapped,
)
from stages.engine.quantisation.stored import Codes, StoredRows
from stages.vocabulary.disk_cache import cache_path

ROUNDED_INPUTS = {"codes": 16, "codes8": 8, "int8": 16, "int4": 16}  # bits of inputs, by the format of codes
SMALL = 16 << 20  # parameters of a model whose passes take longer for single operations than for reading weights


def prefers_compiled_forward(model: Any, weights: str, *, batch_invariant: bool) -> bool:
    """Check whether the compiled forward computes a model, and is the fastest to do so, or the only one in this format.

    Numbers of 32 bits, read from memory, it multiplies with up to four rows faster than oneDNN, and with more rows
    slower (benchmarks/notes/passes.md). Of codes and numbers of 16 bits it reads less. The packed forward is for fewer
    families.
    """
    if not has_compiled_forward(model):
        return False
    if weights in ROUNDED_INPUTS or batch_invariant or not has_packed_forward(model):
        return True
    if has_groups(model) or count_weights(model) < SMALL:
        return True
    sample = model.model.layers[-1].mlp.down_proj
    return find_stored(sample) is not None or find_number_type(sample.weight.detach()) != "F32"


def has_compiled_forward(model: Any) -> bool:
    """Check whether the compiled forward supports this model, in float32 on a CPU. `prove_forward` compares its
    outputs.
    """
    return model.dtype == torch.float32 and model.device.type == "cpu" and fits_compiled_forward(model)


def fits_compiled_forward(model: Any) -> bool:
    """Check whether a model, with or without weights, is of a family of the compiled forward and has sizes that its
    vectors divide.
    """
    if find_family(model) is None:
        return False
    config, size = model.config, model.model.layers[0].self_attn.head_dim
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * size)
    return size % VECTOR_SIZE == 0 and all(map(can_pack_inputs, inputs))


@dataclass(frozen=True)
class CompiledPart:
    """One of the two parts of a layer. What it reads is normalised and multiplied, then what it adds to the state."""

    # before_W, after_W: weights of the norms; None without one
    before_W: Tensor | None
    enter: list[PackedMatrix]  # matrices of the same inputs, whose outputs follow each other
    leave: PackedMatrix  # the last matrix
    after_W: Tensor | None


@dataclass(frozen=True)
class CompiledLayer:
    """The matrices and norms of one transformer layer."""

    attention: CompiledPart
    query_norm: Tensor | None
    key_norm: Tensor | None
    gated: CompiledPart

    def matrices(self) -> Iterator[PackedMatrix]:
        for part in (self.attention, self.gated):
            yield from (*part.enter, part.leave)


class CompiledLlamaWeights(PackedLlamaWeights):
    """A model's weights for the compiled forward; several forwards, each with its own cache, may share them. Their
    format is a key of `ROUNDED_INPUTS` or `fastest`.
    """

    layers: list[CompiledLayer]  # type: ignore[assignment] # matrices in the place of kernels

    def __init__(self, model: Any, weights: str) -> None:
        self._format = weights
        self._rotations_KPR = torch.empty(1, 0, 0)  # see `rotation_tables`
        super().__init__(model)

    @override
    @torch.inference_mode()
    def refresh(self, *, layers: bool = True) -> None:
        self._output: PackedMatrix | None = None  # the whole output layer, once it is needed
        if not layers:
            super().refresh(layers=False)
            return
        family = find_family(self.model)
        assert family is not None, "see `has_compiled_forward`"
        self._family: Family = family
        self._memory = self._take_memory("layers", kept=is_mapped(self.model))
        super().refresh()
        self._memory.keep()
        self.norm_W = self._read_norm(self.model.model.norm)
        self.shape = self._make_shape()
        config = self.model.config
        self.embedding_factor, self.part_factor = family.embedding(config), family.part(config)
        self.logit_factor = family.logits(config)
        self.logit_cap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        self._kinds = frozenset(matrix.kind for layer in self.layers for matrix in layer.matrices())
        self._compiled: dict[ProductKind, CompiledSteps] = {}  # by the kind of the output layer

    def _make_shape(self) -> ModelShape:
        config, attention = self.model.config, self.model.model.layers[0].self_attn
        gate, query_norm = self._family.find_gate(config), self.layers[0].query_norm
        assert gate is not None, "see `has_compiled_forward`"
        norm = HeadNorm.NOTHING
        if query_norm is not None:
            norm = HeadNorm.EACH if len(query_norm) == self.head_size else HeadNorm.ALL
        return ModelShape(
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=self.heads,
            key_heads=self.key_heads,
            head_size=self.head_size,
            rotated=self.rotation_tables(1).shape[2],
            eps=float(self.eps),
            scale=float(attention.scaling),
            cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            head_norm=norm,
            gate=gate,
        )

    def compile(self, output: PackedMatrix) -> CompiledSteps:
        if output.kind not in self._compiled:
            kinds = self._kinds | {output.kind}
            if any(not kind.has_groups for kind in kinds):  # weights that are trained leave the numbers of 16 bits
                kinds |= {ProductKind(form) for form in NUMBER_BITS}
            self._compiled[output.kind] = compile_steps(self.shape, kinds)
        return self._compiled[output.kind]

    def _take_memory(self, part: str, *, kept: bool) -> PackedMemory:
        """Return the memory of a part of the model; it is kept if its matrices stay in files."""
        kind = f"packed-{digest_file(self.model.files)[:16]}-{part}" if kept else ""
        return PackedMemory(cache_path(kind, digest_code(), "bin") if kept else None)

    @override
    def _read_embedding(self, embedding: Any) -> None:
        stored = find_stored(embedding)
        self.embeddings = embedding.weight.detach().numpy() if stored is None else StoredRows(stored)

    @override
    @torch.inference_mode()
    def make_output_layer(self, ids: Tensor | None) -> PackedMatrix:  # type: ignore[override] # see `layers`
        """Pack the output layer, or its rows of these ids only. It is never quantised here; one that was trained, as no
        target's is, is rounded to float16: half of the bytes to read for each piece of a draft.
        """
        if ids is None and self._output is not None:
            return self._output
        head = self.model.lm_head
        matrix = read_matrix(head, _find_codes(head))
        self._memory = self._take_memory("output", kept=ids is None and find_stored(head) is not None)
        (packed,) = self._pack([matrix if ids is None else matrix.take(ids)], rounds=self.trained)
        self._memory.keep()
        if ids is None:
            self._output = packed
        return packed

    @override
    def describe(self) -> str:
        bits = sorted({matrix.kind.bits for layer in self.layers for matrix in layer.matrices()})
        rounded = ROUNDED_INPUTS.get(self._format)
        inputs = f"inputs of {rounded} bits" if rounded else "float32"
        return f"compiled forward, weights of {' and '.join(map(str, bits))} bits, {inputs}"

    def rotation_tables(self, longest: int) -> Tensor:
        """Return, per way to rotate and for at least that many positions, cosines and then sines (K, P, R). The first
        is for layers that attend to all, the last for those with windows; often they are one.
        """
        known_KPR = self._rotations_KPR
        if known_KPR.shape[1] < longest:
            positions, probe = torch.arange(longest)[None], torch.zeros(1)
            tables = []
            for kind in find_rotary_kinds(self.model):
                cos_1PE, sin_1PE = self.model.model.rotary_emb(probe, positions, *([kind] if kind else []))
                half = cos_1PE.shape[2] // 2
                tables.append(torch.cat([cos_1PE[0, :, :half], sin_1PE[0, :, :half]], dim=1))
            self._rotations_KPR = known_KPR = torch.stack(tables).float().contiguous()
        return known_KPR  # not another thread's, which may be shorter

    @override
    def _make_layer(self, layer: Any) -> CompiledLayer:  # type: ignore[override] # see `layers`
        attention, gated, family = layer.self_attn, layer.mlp, self._family
        return CompiledLayer(
            self._make_part(layer, family.attention, attention, family.query_key_value, attention.o_proj),
            self._head_norm(attention, "q_norm"),
            self._head_norm(attention, "k_norm"),
            self._make_part(layer, family.gated, gated, family.gate_up, gated.down_proj),
        )

    def _make_part(
        self, layer: Any, norms: PartNorms, owner: Any, enter: Sequence[str], leave: nn.Linear
    ) -> CompiledPart:
        before_W, after_W = (
            None if name is None else self._read_norm(getattr(layer, name)) for name in (norms.before, norms.after)
        )
        (last,) = self._pack([self._read(leave)])
        return CompiledPart(before_W, self._pack([self._read(getattr(owner, name)) for name in enter]), last, after_W)

    def _read_norm(self, norm: Any) -> Tensor:
        weight_W: Tensor = norm.weight.detach().contiguous()
        return weight_W + self._family.norm_offset if self._family.norm_offset else weight_W

    def _read(self, linear: nn.Linear) -> Matrix:
        """Return the matrix of a module, with the codes that it has or that it is quantised to."""
        bits = QUANTISED_BITS.get(self._format)
        if bits:
            return read_matrix(linear, find_groups(linear, bits, quantise=not has_groups(self.model)))
        return read_matrix(linear, _find_codes(linear))

    @override
    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        norm = getattr(attention, name, None)
        return None if norm is None else self._read_norm(norm)

    def _pack(self, parts: Sequence[Matrix], *, rounds: bool = False) -> list[PackedMatrix]:
        bits = ROUNDED_INPUTS.get(self._format, FLOAT_BITS)
        return pack_matrices(parts, self._memory, input_bits=bits, rounds=rounds)


def _find_codes(linear: nn.Linear) -> Codes | None:
    """Return what a file has of a module's weight: its codes, or its numbers of 16 bits."""
    return find_stored(linear) or find_attached(linear)
