"""What one request, one connection and all of them together may ask of `omnidraft serve`."""

from dataclasses import dataclass

MiB = 1 << 20
SPARE_DESCRIPTORS = 128  # files of the log, models, the event loop


@dataclass(frozen=True)
class Limits:
    """Bounds on requests. What lies beyond them is refused with an error that names the bound.

    Attributes:
        body_bytes: of one request's body.
        bodies_bytes: of all bodies together that are being read or tokenised.
        body_seconds: within which a body must have come whole.
        idle_seconds: within which a connection must begin a request, the first one or the next.
        reader_seconds: a client that takes nothing of its answer for so long is cut off.
        connections: open at once; beyond them the one that is idle longest is closed.
        choices: completions of one request: its prompts times `n`.
        scores: log probabilities that one request may be told: its choices times `max_tokens` times those per token.
        max_tokens: of one completion; also how many a chat gets that names no number.
        deadline_seconds: for a whole request, waiting included.
        grace_seconds: for which requests that are running may go on when the server is told to end.
    """

    body_bytes: int = MiB
    bodies_bytes: int = 64 * MiB
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    reader_seconds: float = 60.0
    connections: int = 4096
    choices: int = 16
    scores: int = 100_000
    max_tokens: int = 4096
    deadline_seconds: float = 300.0
    grace_seconds: float = 30.0


@dataclass(frozen=True)
class Defaults:
    """What a request gets that does not say otherwise."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16  # of a plain completion, as OpenAI's


def connections_allowed(limits: Limits) -> int:
    """As many as `limits` say, but no more than this process may open files."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return limits.connections
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(limits.connections, descriptors - SPARE_DESCRIPTORS))
