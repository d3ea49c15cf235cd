"""Compiled products against the matrices that they stand for, and the bits of a row among others."""

import re
from array import array
from collections.abc import Iterable
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from emulation import PROCESSORS, EmulatedSteps, compile_for
from llvmlite import ir
from torch import Tensor

from stages.engine.compiled.llama_forward import TableWriter, by_row, make_table
from stages.engine.compiled.llvm.emitter import VECTOR_SIZE
from stages.engine.compiled.llvm.machine import Features
from stages.engine.compiled.llvm.vector_math import FLOAT_BITS, INPUT_SUMS, LARGEST_CODES
from stages.engine.compiled.packed_memory import PackedMemory
from stages.engine.compiled.packing import (
    NUMBERS,
    PackedMatrix,
    pack_matrices,
    pack_matrix,
)
from stages.engine.compiled.products import MOST, NUMBER_BITS, ProductKind, emit_product
from stages.engine.compiled.program import CompiledSteps
from stages.engine.compiled.shape import ModelShape
from stages.engine.compiled.steps import HEADERS, Field, Header, StepKind
from stages.engine.forward_pass.kernels import Matrix
from stages.engine.quantisation.groups import GROUP, GroupedMatrix
from stages.engine.quantisation.layouts import CODE_TYPES
from stages.engine.quantisation.stored import StoredMatrix

SHAPE = ModelShape(width=64, inner=96, heads=2, key_heads=1, head_size=16, rotated=16, eps=1e-5, scale=0.25)
OUTPUTS = 70  # the last block of outputs is padded
ROUNDED, EXACT = {16: 3e-4, 8: 1e-2}, 2e-6
FACTOR = 0.5  # of the outputs


def store_matrix(kind: str, outputs: int = OUTPUTS) -> StoredMatrix:
    """Random blocks of a type of ggml, with scales of about one hundredth."""
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    inputs = 512 if per_block == 256 else 96
    blocks = generator.integers(0, 256, (outputs * inputs // per_block, size), dtype=np.uint8)
    for first in CODE_TYPES[kind].scales[: 1 if kind.startswith("IQ") else 2]:
        halves = generator.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, first : first + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :1] = generator.integers(115, 123, (len(blocks), 1))  # exponents plus 128
    return StoredMatrix(kind, inputs, blocks.reshape(outputs, -1))


def quantise_matrix(kind: str, outputs: int = OUTPUTS) -> GroupedMatrix:
    """Random codes and scales, of a kind of matrices that are quantised here."""
    bits, inputs = int(kind[-1]), 96
    codes_OI = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    scale_OG, minimum_OG = torch.rand(outputs, inputs // GROUP) / 99, -torch.rand(outputs, inputs // GROUP)
    return GroupedMatrix(codes_OI, scale_OG, minimum_OG, bits)


@cache
def make_matrix(kind: str, input_bits: int) -> tuple[PackedMatrix, Tensor]:
    """A packed matrix of a kind, and its weights in float64."""
    torch.manual_seed(len(kind))
    bias_O = torch.randn(OUTPUTS)
    if kind in NUMBER_BITS:
        weight_OI = torch.randn(OUTPUTS, 96).to(NUMBERS[kind]).float()
        return pack_matrix(Matrix(weight_OI, bias_O), PackedMemory(), input_bits=input_bits), weight_OI.double()
    codes = quantise_matrix(kind) if kind.startswith("GROUPS") else store_matrix(kind)
    weight_OI = codes.dequantise()
    matrix = Matrix(torch.empty_like(weight_OI, device="meta"), bias_O, codes)
    return pack_matrix(matrix, PackedMemory(), input_bits=input_bits), weight_OI.double()


@cache
def compile_kinds(kinds: frozenset[ProductKind], features: Features) -> CompiledSteps:
    return (EmulatedSteps if features in PROCESSORS else CompiledSteps)(SHAPE, kinds)


def multiply(matrix: PackedMatrix, x_NI: Tensor) -> Tensor:
    """Prepare rows and multiply them by two steps of a program, added to ones."""
    features = Features.detect()
    together = kinds_of(ALWAYS.get(features) or chain(SOME, *ALWAYS.values()))
    kinds = together if matrix.kind in together and features not in PROCESSORS else frozenset({matrix.kind})
    steps = compile_kinds(kinds, features)
    (rows, size), outputs = x_NI.shape, torch.ones(len(x_NI), matrix.padded)
    inputs, sums = torch.full((rows, size), 7.0), torch.zeros(rows, size // GROUP, INPUT_SUMS)
    writer: Any = TableWriter(steps, None, SimpleNamespace(inputs=inputs, input_sums=sums))
    table = make_table(
        [
            {**by_row(StepKind.ROUND), Field.INPUTS: x_NI.data_ptr(), **writer.inputs_of(matrix)},
            {**writer.multiply(matrix, outputs.data_ptr(), matrix.padded, FACTOR), Field.ADDS: 1},
        ]
    )
    header = array("q", bytes(8 * HEADERS))
    header[Header.ROWS] = rows
    steps.run(table, header)
    return (outputs[:, : matrix.outputs] - 1) / FACTOR


def round_inputs(x_NI: Tensor, bits: int) -> Tensor:
    """The inputs as products of codes read them: few bits, one scale for each group."""
    groups = x_NI.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    most = torch.full_like(largest, LARGEST_CODES[bits])
    codes, scale = (groups * (most / largest)).round(), largest / most
    return (codes.double() * scale.double()).flatten(1)


KINDS = (*CODE_TYPES, *NUMBER_BITS)
BITS = (FLOAT_BITS, *LARGEST_CODES)
SOME = [(kind, BITS[(number + 1) % len(BITS)]) for number, kind in enumerate(KINDS)] + [("Q4_K", 16)]
PLAIN, DOTS = Features(wide_registers=False, dots=0), Features(wide_registers=False, dots=256, tables=256)
ALWAYS = {  # by the features of another processor: what is always tested, and so compiled together
    PLAIN: [("Q4_0", 16), ("IQ4_XS", 16), ("MXFP4", 16), ("Q6_K", 8)],
    DOTS: [("Q4_K", 16), ("IQ4_XS", 16), ("GROUPS8", 8)],
}


def kinds_of(cases: Iterable[tuple[str, int]]) -> frozenset[ProductKind]:
    return frozenset(ProductKind(kind, FLOAT_BITS if kind in NUMBER_BITS else bits) for kind, bits in cases)


@pytest.mark.representatives(*(f"{kind}-{bits}" for kind, bits in SOME))
@pytest.mark.parametrize("input_bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_its_matrix_and_a_row_has_the_same_bits_among_any_others(kind: str, input_bits: int):
    matrix, weight_OI = make_matrix(kind, input_bits)
    assert matrix.kind == ProductKind(kind, input_bits if matrix.kind.has_groups else FLOAT_BITS)
    assert matrix.bias_O is not None
    x_NI = torch.randn(MOST + 20, weight_OI.shape[1]) * torch.logspace(-2, 2, weight_OI.shape[1])
    read_NI = round_inputs(x_NI, input_bits) if matrix.kind.rounds else x_NI.double()
    found_NO = multiply(matrix, x_NI)
    size = float((x_NI.double().abs() @ weight_OI.abs().t()).max())
    expected_NO = read_NI @ weight_OI.t() + matrix.bias_O[:OUTPUTS].double()
    assert float((found_NO - expected_NO).abs().max()) < EXACT * size
    if matrix.kind.rounds:
        exact_NO = x_NI.double() @ weight_OI.t() + matrix.bias_O[:OUTPUTS].double()
        assert 0 < float((found_NO - exact_NO).abs().max()) < ROUNDED[input_bits] * size
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 16, 20, 35):
        assert torch.equal(multiply(matrix, x_NI[-rows:].contiguous()), found_NO[-rows:])


@pytest.mark.representatives(
    *(f"{bits}-{kind}-features{place}" for place, cases in enumerate(ALWAYS.values()) for kind, bits in cases)
)
@pytest.mark.parametrize("features", ALWAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_other_processors_have_other_instructions_for_the_same_numbers(
    kind: str, input_bits: int, features: Features, monkeypatch: pytest.MonkeyPatch
):
    here = Features.detect()
    if features.dots and not here.dots:
        pytest.skip("this processor has no sums of products of bytes")
    matrix, weight_OI = make_matrix(kind, input_bits)
    x_NI = torch.randn(9, weight_OI.shape[1])
    expected_NO = multiply(matrix, x_NI)
    monkeypatch.setattr(Features, "detect", lambda: features)
    found_NO = multiply(matrix, x_NI)
    assert torch.allclose(found_NO, expected_NO, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("features", PROCESSORS, ids=PROCESSORS.values())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("input_bits", BITS)
def test_aarch64_computes_the_same_bits(
    kind: str, input_bits: int, features: Features, monkeypatch: pytest.MonkeyPatch
):
    matrix, weight_OI = make_matrix(kind, input_bits)
    x_NI = torch.randn(5, weight_OI.shape[1]) * torch.logspace(-2, 2, weight_OI.shape[1])
    expected_NO = multiply(matrix, x_NI)
    monkeypatch.setattr(Features, "detect", lambda: features)
    assert torch.equal(multiply(matrix, x_NI), expected_NO)


@pytest.mark.parametrize(("features", "dots"), [*zip(PROCESSORS, ("usdot", "sdot"), strict=False)])
def test_aarch64_has_instructions_for_products_of_bytes_and_tables(features: Features, dots: str):
    module = ir.Module("product")
    emit_product(module, ProductKind("IQ4_NL", 16), features)
    machine, optimised = compile_for(features, module)
    found = set(re.findall(r"^\t(usdot|sdot|mul|tbl)\tv", machine.emit_assembly(optimised), re.MULTILINE))
    assert found == {dots, "tbl"}


@pytest.mark.parametrize("kind", [kind for kind in CODE_TYPES if not kind.startswith("GROUPS")])
def test_packed_codes_are_as_large_as_the_file(kind: str):
    stored = store_matrix(kind, 8 * VECTOR_SIZE)
    packed = pack_matrix(Matrix(torch.empty(stored.shape, device="meta"), None, stored), PackedMemory(), input_bits=16)
    assert packed.data.nbytes + packed.scales.nbytes == stored.size
    assert packed.data.data_ptr() % 64 == packed.scales.data_ptr() % 64 == 0


def matrix_of(kind: str, outputs: int) -> Matrix:
    codes = quantise_matrix(kind, outputs) if kind.startswith("GROUPS") else store_matrix(kind, outputs)
    return Matrix(codes.dequantise(), torch.randn(outputs), codes)


def store_numbers(kind: str) -> Matrix:
    bytes_OX = torch.randn(32, 96).to(NUMBERS[kind]).view(torch.uint8).numpy()
    stored = StoredMatrix(kind, 96, bytes_OX)
    return Matrix(stored.dequantise(), torch.randn(32), stored)


@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_matrices_of_the_same_inputs_are_one_where_they_are_stored_alike(input_bits: int):
    kind_of = partial(ProductKind, input_bits=input_bits)
    four, eight, six = matrix_of("GROUPS4", 32), matrix_of("Q8_0", 32), matrix_of("Q6_K", 32)
    plain, part = Matrix(torch.randn(32, 96), torch.randn(32)), matrix_of("Q4_K", 24)
    half, short = store_numbers("F16"), store_numbers("BF16")
    stored = store_matrix("Q4_K", 40)
    stored = StoredMatrix(stored.kind, stored.inputs, stored.rows_OX, torch.randperm(40))
    other = Matrix(stored.dequantise(), torch.randn(40), stored)
    for parts, kinds in (
        ([four, four], [kind_of("GROUPS4")]),
        ([four, eight], [kind_of("GROUPS4"), kind_of("Q8_0")]),
        ([part, other, six], [kind_of("Q4_K"), kind_of("Q6_K")]),
        ([four, plain], [ProductKind("F32")]),
        ([part, six], [ProductKind("F32")]),  # the first does not fill its blocks
        ([half, half], [ProductKind("F16")]),
        ([half, short], [ProductKind("F16"), ProductKind("BF16")]),
        ([half, four], [ProductKind("F32")]),  # which read inputs of other types
    ):
        packed = pack_matrices(parts, PackedMemory(), input_bits=input_bits)
        assert [one.kind for one in packed] == kinds
        weight_OI, bias_O = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight_OI", "bias_O"))
        x_NI = torch.randn(7, weight_OI.shape[1])
        found_NO = torch.cat([multiply(one, x_NI) for one in packed], dim=1)
        size = (x_NI.abs() @ weight_OI.abs().t()).max()
        assert float((found_NO - x_NI @ weight_OI.t() - bias_O).abs().max() / size) < ROUNDED[input_bits]


@pytest.mark.parametrize(("largest", "form"), [(9.0, "F16"), (1e5, "F32"), (float("nan"), "F32")])
def test_numbers_of_32_bits_are_rounded_where_that_is_asked_and_float16_holds_them(largest: float, form: str):
    weight_OI = torch.randn(32, 96)
    weight_OI[3, 5] = largest
    (kept,), (rounded,) = (
        pack_matrices([Matrix(weight_OI, None)], PackedMemory(), input_bits=FLOAT_BITS, rounds=rounds)
        for rounds in (False, True)
    )
    assert (kept.kind.form, rounded.kind.form) == ("F32", form)


def test_without_a_team_one_thread_computes_all_items(monkeypatch: pytest.MonkeyPatch):
    matrix, _ = make_matrix("Q4_1", FLOAT_BITS)
    x_NI = torch.randn(9, 96)
    expected_NO = multiply(matrix, x_NI)
    for module in ("llvm.machine", "program"):
        monkeypatch.setattr(f"stages.engine.compiled.{module}.find_team_functions", dict)
    assert torch.equal(multiply(matrix, x_NI), expected_NO)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("input_bits", [FLOAT_BITS, *LARGEST_CODES])
def test_what_is_no_number_is_seen_in_the_outputs(input_bits: int, poison: float):
    matrix, _ = make_matrix("Q8_0", input_bits)
    x_NI = torch.randn(2, 96)
    x_NI[1, 40] = poison
    found_NO = multiply(matrix, x_NI)
    assert bool(found_NO[0].isfinite().all())
    assert not bool(found_NO[1].isfinite().any())


@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_zeros_stay_zeros(input_bits: int):
    matrix, _ = make_matrix("Q4_1", input_bits)
    assert matrix.bias_O is not None
    assert torch.allclose(multiply(matrix, torch.zeros(1, 96))[0], matrix.bias_O[:OUTPUTS], atol=1e-6)
