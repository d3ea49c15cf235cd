"""Sampling parameters: how a completion is drawn and when it ends, as one value from the settings or a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.sampling.transforms import LogitBias, LogitTransform, Penalties
from store.errors import ConfigError

GREEDY_BELOW = 1e-5  # a logit divided by less may leave the range of a float32
HOTTEST = 1e6  # all but uniform; far above it a float32 has no number for the temperature
MAX_PENALTY = 2.0  # of presence and frequency, in both directions, as at OpenAI
MAX_REPETITION = 100.0  # and 1 / 100; far outside of them a float32 logit could become infinite
MAX_BIAS = 100.0  # in both directions, as at OpenAI

Transform = tuple[float, int, float, float]


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one completion, named as in vLLM. Temperature 0 is greedy decoding, as the limit.

    A batch holds the rows of many users: values out of range are rejected here, before they reach a forward pass.
    Raises `ConfigError` if a value is out of range, or not a number.
    """

    temperature: float = 0.0  # below `GREEDY_BELOW` as 0
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    # keep the smallest set of most probable tokens whose mass reaches this, the likeliest always; 1 keeps all
    top_p: float = 1.0
    # keep the tokens with at least this share of the likeliest token's probability, before top-k and top-p
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # each token once
    ignore_eos: bool = False  # whether the target's own ends of sequence are tokens like any other
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end the sequence
    stop: tuple[str, ...] = ()  # strings before which the completion ends
    max_tokens: int = 64  # 0: the prompt is only read; reduced to what the models' contexts leave
    seed: int | None = None  # of the random numbers; None derives them from the run's seed and the prompt's offset
    # alternatives per token, 0 for the emitted token's own log probability alone; None for none at all
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, HOTTEST)
        _check_range("top_k", self.top_k, 0, float("inf"))
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
        _check_range("max_tokens", self.max_tokens, 0, float("inf"))
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop must be a text or texts that are not empty, got {self.stop!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def transform(self) -> Transform:
        """What makes a distribution of logits: rows with equal ones are computed together."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def find_unknown_id(self, vocabulary_size: int) -> tuple[str, int] | None:
        """Return the first token id that the target does not have, after the name of its parameter; None if none.

        >>> SamplingParams(stop_token_ids=(3, 7)).find_unknown_id(5)
        ('stop_token_ids', 7)
        """
        ids = [("logit_bias", token) for token, _ in self.logit_bias]
        ids += [("stop_token_ids", token) for token in self.stop_token_ids]
        return next((pair for pair in ids if not 0 <= pair[1] < vocabulary_size), None)

    def make_transforms(self, prompt: Sequence[int]) -> tuple[LogitTransform, ...]:
        """Make the transforms of a row with this prompt, in the order in which they are applied; none if none is due.

        >>> SamplingParams().make_transforms([1])
        ()
        """
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        bias = (LogitBias(self.logit_bias),) if self.logit_bias else ()
        return (*bias, Penalties(prompt, *penalties)) if penalties != (0, 0, 1) else bias


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (isinstance(value, int | float) and least <= value <= most):
        raise ConfigError(f"{name} must be from {least:g} to {most:g}, got {value!r}")
