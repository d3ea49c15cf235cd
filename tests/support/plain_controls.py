"""The controls of requests, written the long way: one token at a time, with plain numbers."""

from collections.abc import Sequence

from stages.sampling.params import SamplingParams


def control(
    logits: Sequence[float], prompt: Sequence[int], emitted: Sequence[int], controls: SamplingParams
) -> list[float]:
    """Return the logits after bias, repetition, frequency and presence, in this order, as vLLM documents them."""
    changed = list(logits)
    for token, bias in controls.logit_bias:
        changed[token] += bias
    for token in range(len(changed)):
        if token in prompt or token in emitted:
            penalty = controls.repetition_penalty
            changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        changed[token] -= controls.frequency_penalty * emitted.count(token)
        changed[token] -= controls.presence_penalty * (token in emitted)
    return changed
