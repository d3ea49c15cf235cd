"""Telling one model from another behind the same name."""

import hashlib

from stages.language_model import LanguageModel

SAMPLES = 64  # numbers of each weight that are looked at


def fingerprint(model: LanguageModel) -> str:
    """A digest of a sample of all weights, and of how they are laid out: another model has another one."""
    digest = hashlib.sha256(f"{model.vocabulary_size} {model.model.dtype} {model.weights == 'int8'}".encode())
    for weight in model.model.parameters():
        numbers = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLES)]
        digest.update(numbers.float().cpu().numpy().tobytes())
    return digest.hexdigest()
