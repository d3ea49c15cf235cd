"""Raw values of rejected tokens: the target's own distribution, whatever computes it and whatever is sampled."""

import pytest
import torch

from stages.sampling.logprobs import RejectedPlace, compute_raw_values


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gaps", [False, True])
def test_all_types_give_the_values_of_float64(dtype: torch.dtype, *, gaps: bool):
    logits_NV = torch.randn(5, 2 * 320, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    logits_NV[:, 300:310] = -torch.inf
    logits_NV = logits_NV.to(dtype)
    logits_NV = logits_NV[:, ::2] if gaps else logits_NV[:, :320]
    probs_NV = logits_NV.double().softmax(-1)
    entropies_N = torch.special.entr(probs_NV).sum(-1)
    places = [RejectedPlace(4, 7, 9), RejectedPlace(1, None, 3), RejectedPlace(1, 153, 0)]
    for place, found in zip(places, compute_raw_values(logits_NV, places), strict=True):
        if place.proposed is None:
            assert found.proposed is None
        else:
            assert found.proposed == pytest.approx(float(probs_NV[place.line, place.proposed]), rel=1e-5, abs=1e-9)
        assert found.emitted == pytest.approx(float(probs_NV[place.line, place.emitted]), rel=1e-5, abs=1e-9)
        assert found.entropy == pytest.approx(float(entropies_N[place.line]), rel=1e-5)
