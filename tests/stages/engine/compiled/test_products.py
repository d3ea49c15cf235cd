"""Compiled products against the matrices that they stand for, and the bits of a row among others."""

from array import array
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.engine.compiled.llama_forward import TableWriter, by_row, make_table
from stages.engine.compiled.llvm.machine import Features
from stages.engine.compiled.llvm.vector_math import FLOAT_BITS, LARGEST_CODES
from stages.engine.compiled.packing import PackedMatrix, pack_codes, pack_matrices, pack_matrix, widen_codes
from stages.engine.compiled.products import ProductKind
from stages.engine.compiled.program import CompiledSteps
from stages.engine.compiled.shape import ModelShape
from stages.engine.compiled.steps import HEADERS, Field, Header, StepKind
from stages.engine.forward_pass.kernels import Matrix
from stages.engine.quantisation.groups import GROUP, GroupedMatrix

SHAPE = ModelShape(width=64, inner=96, heads=2, key_heads=1, head_size=16, rotated=16, eps=1e-5, scale=0.25)
OUTPUTS, INPUTS = 70, 96  # the last block of outputs is padded
ROUNDED, EXACT = {16: 3e-4, 8: 1e-2}, 2e-6
FACTOR = 0.5  # of the outputs


def make_matrix(kind: str, input_bits: int) -> tuple[PackedMatrix, Tensor]:
    """A packed matrix of a kind, and its weights in float64."""
    torch.manual_seed(len(kind))
    if kind in ("float32", "bfloat16"):
        weight_OI = torch.randn(OUTPUTS, INPUTS)
        weight_OI = weight_OI.bfloat16().float() if kind == "bfloat16" else weight_OI
        return pack_matrix(weight_OI, torch.randn(OUTPUTS), None, input_bits=input_bits), weight_OI.double()
    bits, size = int(kind[0]), 16 if "halves" in kind else GROUP
    codes_OI = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS), dtype=torch.uint8)
    scales, minima = torch.rand(OUTPUTS, INPUTS // size) / 99, -torch.rand(OUTPUTS, INPUTS // size)
    if "wide" not in kind:
        scales, minima = scales.half().float(), minima.half().float()
    if "signed" in kind:
        scales *= torch.randint(0, 2, scales.shape) * 2 - 1
        minima = -(1 << bits - 1) * scales
    groups = GroupedMatrix(codes_OI, scales, minima, bits)
    packed = pack_matrix(groups.dequantise(), torch.randn(OUTPUTS), widen_codes(groups), input_bits=input_bits)
    codes_OGX = groups.codes_OI.double().unflatten(1, (-1, size))
    return packed, (codes_OGX * scales.double()[..., None] + minima.double()[..., None]).flatten(1)


def multiply(matrix: PackedMatrix, x_NI: Tensor) -> Tensor:
    """Prepare rows and multiply them by two steps of a program, added to ones."""
    steps = CompiledSteps(SHAPE, frozenset({matrix.kind}))
    rows, outputs = len(x_NI), torch.ones(len(x_NI), matrix.padded)
    inputs, sums = torch.full((rows, INPUTS), 7.0), torch.zeros(rows, 4 * INPUTS // GROUP)
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
    groups = x_NI.double().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / LARGEST_CODES[bits]
    return (groups / scale).round().mul(scale).flatten(1)


KINDS = [
    "4",
    "4 wide",
    "8",
    "8 wide",
    "4 signed",
    "5 signed",
    "8 signed wide",
    "3 signed halves",
    "6 signed halves wide",
    "float32",
    "bfloat16",
]
BITS = (FLOAT_BITS, *LARGEST_CODES)
SOME = [f"{kind}-{BITS[number % len(BITS)]}" for number, kind in enumerate(KINDS)]
OTHERS = [f"{kind}-{BITS[(number + 1) % len(BITS)]}" for number, kind in enumerate(KINDS)]


@pytest.mark.representatives(*SOME)
@pytest.mark.parametrize("input_bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_its_matrix(kind: str, input_bits: int):
    matrix, weight_OI = make_matrix(kind, input_bits)
    assert matrix.kind.has_groups == kind[0].isdigit()
    assert matrix.kind.wide_scales == kind.endswith("wide")
    assert matrix.kind.signed == ("signed" in kind)
    assert matrix.kind.scales == 1 + ("halves" in kind)
    assert matrix.kind.input_bits == (input_bits if matrix.kind.has_groups else FLOAT_BITS)
    assert matrix.bias_O is not None
    for rows in (1, 2, 5, 6, 7, 13):
        x_NI = torch.randn(rows, INPUTS) * torch.logspace(-2, 2, INPUTS)
        read_NI = round_inputs(x_NI, input_bits) if matrix.kind.rounds else x_NI.double()
        expected_NO = read_NI @ weight_OI.t() + matrix.bias_O[:OUTPUTS].double()
        found_NO = multiply(matrix, x_NI)
        size = float((x_NI.double().abs() @ weight_OI.abs().t()).max())
        assert float((found_NO - expected_NO).abs().max()) < EXACT * size
        if matrix.kind.rounds:
            exact_NO = x_NI.double() @ weight_OI.t() + matrix.bias_O[:OUTPUTS].double()
            assert 0 < float((found_NO - exact_NO).abs().max()) < ROUNDED[input_bits] * size


@pytest.mark.representatives(*OTHERS)
@pytest.mark.parametrize("input_bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_others(kind: str, input_bits: int):
    matrix, _ = make_matrix(kind, input_bits)
    x_NI = torch.randn(20, INPUTS)
    together_NO = multiply(matrix, x_NI)
    for rows in (1, 3, 6, 7, 12):
        parts = [multiply(matrix, part.contiguous()) for part in x_NI.split(rows)]
        assert torch.equal(torch.cat(parts), together_NO)


@pytest.mark.representatives(7)
@pytest.mark.parametrize(
    "features", [Features(wide_registers=False, dots=0), Features(wide_registers=False, dots=256)], ids=str
)
@pytest.mark.parametrize(
    "kind", ["4", "8 wide", "8 signed wide", "3 signed halves", "6 signed halves wide", "bfloat16"]
)
@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_other_processors_have_other_instructions_for_the_same_numbers(
    kind: str, input_bits: int, features: Features, monkeypatch: pytest.MonkeyPatch
):
    here = Features.detect()
    if features.dots and not here.dots:
        pytest.skip("this processor has no products of pairs of 16 bits")
    matrix, _ = make_matrix(kind, input_bits)
    x_NI = torch.randn(9, INPUTS)
    expected_NO = multiply(matrix, x_NI)
    monkeypatch.setattr(Features, "detect", lambda: features)
    found_NO = multiply(matrix, x_NI)
    assert torch.allclose(found_NO, expected_NO, rtol=1e-5, atol=1e-5)


def codes_of(bits: int, outputs: int, *, size: int = GROUP, centred: bool = False) -> Matrix:
    """A matrix of codes, as a file has them."""
    codes_OI = torch.randint(0, 1 << bits, (outputs, INPUTS), dtype=torch.uint8)
    scales = torch.rand(outputs, INPUTS // size).half().float()
    minima = -(1 << bits - 1) * scales if centred else -torch.rand(outputs, INPUTS // size).half().float()
    groups = GroupedMatrix(codes_OI, scales, minima, bits)
    return Matrix(groups.dequantise(), None, widen_codes(groups))


@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_matrices_of_the_same_inputs_are_one_where_they_are_stored_alike(input_bits: int):
    kind_of = partial(ProductKind, input_bits=input_bits)
    five, eight = (codes_of(bits, 32, centred=True) for bits in (5, 8))
    six = codes_of(6, 32, size=16, centred=True)
    plain, four = Matrix(torch.randn(32, INPUTS), None), codes_of(4, 32)
    for parts, kinds in (
        ([five, eight], [kind_of(8, signed=True)]),
        ([five, six], [kind_of(8, signed=True), kind_of(8, signed=True, scales=2)]),
        ([four, four], [kind_of(4)]),
        ([four, plain], [ProductKind(32)]),
        ([codes_of(4, 16), six], [ProductKind(32)]),  # the first does not fill its blocks
    ):
        packed = pack_matrices(parts, input_bits=input_bits)
        assert [replace(one.kind, wide_scales=False) for one in packed] == kinds
        x_NI = torch.randn(7, INPUTS)
        found_NO = torch.cat([multiply(one, x_NI) for one in packed], dim=1)
        expected_NO = x_NI @ torch.cat([part.weight_OI for part in parts]).t()
        assert float((found_NO - expected_NO).abs().max() / expected_NO.abs().max()) < ROUNDED[input_bits]


def test_groups_of_16_with_minima_are_multiplied_as_numbers():
    matrix = codes_of(2, 32, size=16)
    assert matrix.groups is None
    (packed,) = pack_matrices([matrix], input_bits=16)
    assert packed.kind == ProductKind(32)


def test_without_a_team_one_thread_computes_all_items(monkeypatch: pytest.MonkeyPatch):
    matrix, _ = make_matrix("4", FLOAT_BITS)
    x_NI = torch.randn(9, INPUTS)
    expected_NO = multiply(matrix, x_NI)
    for module in ("llvm.machine", "program"):
        monkeypatch.setattr(f"stages.engine.compiled.{module}.find_team_functions", dict)
    assert torch.equal(multiply(matrix, x_NI), expected_NO)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("input_bits", [FLOAT_BITS, *LARGEST_CODES])
def test_what_is_no_number_is_seen_in_the_outputs(input_bits: int, poison: float):
    matrix, _ = make_matrix("8", input_bits)
    x_NI = torch.randn(2, INPUTS)
    x_NI[1, 40] = poison
    found_NO = multiply(matrix, x_NI)
    assert bool(found_NO[0].isfinite().all())
    assert not bool(found_NO[1].isfinite().any())


@pytest.mark.parametrize("input_bits", list(LARGEST_CODES))
def test_zeros_stay_zeros(input_bits: int):
    matrix, _ = make_matrix("4", input_bits)
    assert matrix.bias_O is not None
    assert torch.allclose(multiply(matrix, torch.zeros(1, INPUTS))[0], matrix.bias_O[:OUTPUTS], atol=1e-6)


def _find_code(packed: Tensor, output: int, number: int, bits: int, part: int) -> int:
    per_word = 32 // bits
    word, place = divmod(number % GROUP, per_word)
    value = int(packed[output // 16, number // GROUP, word, output % 16]) & 0xFFFFFFFF
    parts = 32 // part
    return value >> (place // parts * bits + part * (place % parts)) & ((1 << bits) - 1)


@pytest.mark.parametrize("part", [8, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_packed_in_parts(bits: int, part: int):
    codes_OI = torch.randint(0, 1 << bits, (32, 64), dtype=torch.uint8)
    packed = pack_codes(codes_OI, bits, part)
    places = [(output, number) for output in range(32) for number in range(64)]
    assert [_find_code(packed, *place, bits, part) for place in places] == [int(codes_OI[place]) for place in places]
