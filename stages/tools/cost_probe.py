"""Measures the costs of drafting and verifying on this machine, on synthetic sequences."""

from collections.abc import Callable
from time import perf_counter

from stages.contract.blocks import SequenceState
from stages.decode import Decode
from stages.drafting.costs import Costs, make_monotone
from stages.models.devices import synchronize
from stages.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource

CONTEXT = 64  # tokens in the cache of each sequence
REPEATS, MAX_SECONDS = 9, 0.5  # per measurement; after so many seconds three repeats are enough
COUNTS = (1, 2, 3, 5, 9, 17)  # tokens per row of a target pass


def measure(target: LanguageModel, decode: Decode, batch: int) -> Costs:
    """Time target passes and drafts, on sequences that are released afterwards.

    Args:
        target: without admitted sequences.
        decode: always drafts to its limit, at least one piece; without admitted sequences.
        batch: maximum number of sequences in flight.
    """
    some = sorted({1, max(1, batch // 2), batch})
    return Costs(
        target=make_monotone(_target_curve(target, batch)),
        drafter=make_monotone([(rows, _draft_seconds(decode, rows)) for rows in some]),
    )


def _target_curve(target: LanguageModel, batch: int) -> list[tuple[int, float]]:
    rows = [_make_sequence(number, target, max(COUNTS)) for number in range(batch)]
    for row in rows:
        target.admit(row, row.tokens)

    def read(count: int) -> None:
        target.forward(rows, [[3] * count] * batch, [count] * batch)
        synchronize(target.device)
        for row in rows:
            target.roll_back(row, len(row.tokens) - 1)

    curve = [(batch * count, _seconds(lambda count=count: read(count))) for count in COUNTS]  # type: ignore[misc]
    for row in rows:
        target.release(row)
    return curve


def _draft_seconds(decode: Decode, batch: int) -> float:
    rows = [_make_sequence(number, decode.model, decode.max_draft) for number in range(batch)]
    for row in rows:
        decode.admit(row)
    seconds = _seconds(lambda: decode(rows))
    for row in rows:
        decode.release(row)
    return seconds / decode.max_draft


def _make_sequence(number: int, model: LanguageModel, remaining: int) -> SequenceState:
    """Make a synthetic sequence that leaves `remaining` tokens of the model's context."""
    length = max(2, min(CONTEXT, model.max_length - remaining))
    ids = [3 + (7 * place + number) % max(1, model.vocabulary_size - 3) for place in range(length)]
    return SequenceState(number, "", "", "", ids, length, list(ids), SeededRandomSource(0, number), CONTEXT)


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs; other load of the machine can only add to them."""
    run()
    found: list[float] = []
    while len(found) < REPEATS and (len(found) < 3 or sum(found) < MAX_SECONDS):
        started = perf_counter()
        run()
        found.append(perf_counter() - started)
    return min(found)
