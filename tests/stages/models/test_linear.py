"""Linear kernels: the same numbers whichever computes them, and eight bits that do not depend on company."""

import pytest
import torch
from torch.nn import functional

from stages.models import linear
from stages.models.linear import KINDS, ByRowsLinear, DenseLinear, Int8Linear, PackedLinear, make_kernel, pick_fastest
from stages.models.measurements import Measurements

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def weights(outputs: int = 24, inputs: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


def inputs(rows: int, width: int = 40) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


@packs
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_packed_weights_give_what_plain_ones_give(rows: int, with_bias: bool):
    weight_OI, bias_O = weights()
    bias = bias_O if with_bias else None
    with torch.inference_mode():
        want = DenseLinear(weight_OI, bias)(inputs(rows))
        torch.testing.assert_close(PackedLinear(weight_OI, bias)(inputs(rows)), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_eight_bits_are_near(rows: int):
    weight_OI, bias_O = weights(64, 256)
    x_NI = inputs(rows, 256)
    want = functional.linear(x_NI, weight_OI, bias_O)
    error = (Int8Linear(weight_OI, bias_O)(x_NI) - want).abs().mean() / want.abs().mean()
    assert 0 < error < 0.03


def test_eight_bits_give_a_row_the_same_outputs_whatever_stands_beside_it():
    kernel, x_NI = Int8Linear(*weights(64, 256)), inputs(12, 256)
    x_NI[3] *= 1000
    together = kernel(x_NI)
    alone = torch.cat([kernel(x_NI[row : row + 1]) for row in range(12)])
    assert torch.equal(together, alone)


def test_a_row_of_zeros_stays_finite_in_eight_bits():
    assert torch.isfinite(Int8Linear(*weights())(torch.zeros(2, 40))).all()


@packs
def test_one_row_and_several_may_have_kernels_of_their_own():
    kernel = make_kernel(*weights(), single="plain", several="packed")
    assert isinstance(kernel, ByRowsLinear)
    assert isinstance(make_kernel(*weights(), single="plain", several="plain"), DenseLinear)
    with torch.inference_mode():
        for rows in (1, 3):
            torch.testing.assert_close(
                kernel(inputs(rows)), DenseLinear(*weights())(inputs(rows)), atol=1e-4, rtol=1e-5
            )


@packs
def test_what_is_fastest_is_measured_once(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path))
    measured: list[int] = []

    def measure(weight_OI: torch.Tensor, rows: int) -> str:
        measured.append(rows)
        return "packed"

    monkeypatch.setattr(linear, "_measure", measure)
    assert [pick_fastest(weights()[0], rows, Measurements()) for rows in (1, 8, 1, 8)] == ["packed"] * 4
    assert measured == [1, 8]
    assert pick_fastest(weights()[0].double(), 1, Measurements()) == "plain", "oneDNN packs no doubles"


@packs
def test_measuring_names_the_faster_kind(monkeypatch: pytest.MonkeyPatch):
    """By a clock that goes only while a kernel computes."""
    now = [0.0]

    def lasting(kind: type, seconds: float) -> type:
        class Lasting(kind):  # type: ignore[misc, valid-type]
            def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
                now[0] += seconds
                return super().__call__(x_NI)

        return Lasting

    monkeypatch.setattr(linear, "perf_counter", lambda: now[0])
    for slower, faster in (("plain", "packed"), ("packed", "plain")):
        monkeypatch.setattr(linear, "KINDS", {slower: lasting(KINDS[slower], 2), faster: lasting(KINDS[faster], 1)})
        assert linear._measure(weights()[0], 3) == faster
