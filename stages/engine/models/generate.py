"""Completion by `generate` of `transformers`: an oracle for greedy text, and a baseline of speed."""

from collections.abc import Sequence
from typing import Any

import torch

from stages.sampling.params import SamplingParams


def generate(
    target: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    ends: frozenset[int],
    seed: int = 0,
    **drafting: Any,
) -> list[list[int]]:
    """Complete prompts as one static batch, padded on the left. An end that is emitted is part of the completion.
    `drafting` are options of `generate` for drafts, such as an assistant model.
    """
    torch.manual_seed(seed)
    width, padding = max(map(len, prompts)), min(ends, default=0)
    ids_BT = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    seen_BT = torch.arange(width) >= width - lengths_B1
    with torch.inference_mode():
        output_BT = target.generate(
            ids_BT.to(target.device),
            attention_mask=seen_BT.long().to(target.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=padding,
            **to_generate_options(sampling),
            **drafting,
        )
    return [_cut(completion, ends) for completion in output_BT[:, width:].tolist()]


def to_generate_options(sampling: SamplingParams) -> dict[str, Any]:
    """Return `generate`'s options for a sampling transform; all are set, because its defaults differ."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {"do_sample": True, **options}


def _cut(completion: list[int], ends: frozenset[int]) -> list[int]:
    stop = next((place for place, token in enumerate(completion, 1) if token in ends), len(completion))
    return completion[:stop]
