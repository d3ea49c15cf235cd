"""Transforms of the target's logits that a request sets, each a function of the tokens emitted before.

They are applied before temperature, top-k and top-p. Emitted tokens have exactly the transformed distribution, because
the logits at every drafted place are transformed with the draft up to there as part of the history.

Definitions and order are those of vLLM: bias, then the penalties for repetition, frequency and presence. The penalties
for frequency and presence are those of OpenAI's interface.

Shapes: V target tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from store.errors import ConfigError

MAX_PENALTY = 2.0  # of presence and frequency, in both directions, as at OpenAI
MAX_REPETITION = 100.0  # and 1 / 100; far outside of them a float32 logit could become infinite
MAX_BIAS = 100.0  # in both directions, as at OpenAI


class LogitTransform(Protocol):
    """A change of the target's logits at one place of one row, as a function of what the row emitted before it."""

    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        """Change the logits in place. At least one of them must remain finite.

        Args:
            logits_V: the target's logits; ids that are never emitted at -inf.
            emitted: the tokens after the prompt and before this place. At a drafted place these end with a draft that
                may be rejected, so calls come in any order.
        """
        ...


class LogitBias(LogitTransform):
    """Adds a constant to the logits of some tokens.

    >>> logits_V = torch.tensor([1.0, 2.0, 3.0])
    >>> LogitBias([(0, 4.0), (2, -100.0)]).apply(logits_V, [])
    >>> logits_V
    tensor([  5.,   2., -97.])

    Args:
        biases: pairs of a token and what is added to its logit.
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._tokens = torch.tensor([token for token, _ in biases], dtype=torch.long)
        self._biases = torch.tensor([bias for _, bias in biases], dtype=torch.float64)

    @override
    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        logits_V[self._tokens.to(logits_V.device)] += self._biases.to(logits_V)


class Penalties(LogitTransform):
    """Penalties for tokens that occurred before.

    The logits of tokens in the prompt or the emitted text are divided by `repetition` if positive, else multiplied by
    it. Then `frequency` times a token's count in the emitted text is subtracted, and `presence` if it occurs there.

    >>> logits_V = torch.tensor([2.0, -2.0, 3.0, 1.0])
    >>> Penalties([0, 1], presence=0.5, frequency=0.25, repetition=2.0).apply(logits_V, [1, 2, 2])
    >>> logits_V
    tensor([ 1.0000, -4.7500,  0.5000,  1.0000])

    Args:
        prompt: the tokens of the prompt.
        presence, frequency, repetition: the penalties; 0, 0 and 1 change nothing.
    """

    def __init__(self, prompt: Sequence[int], presence: float, frequency: float, repetition: float) -> None:
        self._presence, self._frequency, self._repetition = presence, frequency, repetition
        self._prompt = frozenset(prompt if repetition != 1 else ())
        self._prompt_ids = torch.tensor(sorted(self._prompt), dtype=torch.long)

    @override
    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        counts = Counter(emitted)
        if self._repetition != 1:
            self._divide(logits_V, self._prompt_ids)
            self._divide(logits_V, torch.tensor([token for token in counts if token not in self._prompt]).long())
        tokens = torch.tensor(list(counts), dtype=torch.long, device=logits_V.device)
        frequencies = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[tokens] -= self._frequency * frequencies + self._presence

    def _divide(self, logits_V: Tensor, tokens: Tensor) -> None:
        tokens = tokens.to(logits_V.device)
        values = logits_V[tokens]
        logits_V[tokens] = torch.where(values > 0, values / self._repetition, values * self._repetition)


@dataclass(frozen=True)
class TokenControls:
    """Controls of a request per token: penalties, biases, and the tokens that end the sequence.

    Attributes:
        presence_penalty, frequency_penalty: from -2 to 2.
        repetition_penalty: from 0.01 to 100; 1 changes nothing.
        logit_bias: pairs of a token and a number from -100 to 100, each token once.
        ignore_eos: whether the target's own ends of sequence are tokens like any other.
        stop_token_ids: further tokens that end the sequence.

    Raises:
        ConfigError: a value is out of range, or not a number.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    def find_unknown_id(self, vocabulary_size: int) -> tuple[str, int] | None:
        """Return the first token id that the target does not have, after the name of its attribute; None if none.

        >>> TokenControls(stop_token_ids=(3, 7)).find_unknown_id(5)
        ('stop_token_ids', 7)
        """
        ids = [("logit_bias", token) for token, _ in self.logit_bias]
        ids += [("stop_token_ids", token) for token in self.stop_token_ids]
        return next((pair for pair in ids if not 0 <= pair[1] < vocabulary_size), None)

    def make_transforms(self, prompt: Sequence[int]) -> tuple[LogitTransform, ...]:
        """Make the transforms of a row with this prompt, in the order in which they are applied; none if none is due.

        >>> TokenControls().make_transforms([1])
        ()
        """
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        bias = (LogitBias(self.logit_bias),) if self.logit_bias else ()
        return (*bias, Penalties(prompt, *penalties)) if penalties != (0, 0, 1) else bias


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be from {least:g} to {most:g}, got {value}")


NO_CONTROLS = TokenControls()
