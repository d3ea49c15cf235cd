"""Measuring what drafting and verifying cost on this machine, by doing both over rows made for it."""

from collections.abc import Callable
from time import perf_counter

from stages.baselines import settle
from stages.blocks import Row
from stages.costs import Costs, rising
from stages.decode import Decode
from stages.draws import SeededDraws
from stages.language_model import LanguageModel

CONTEXT = 64  # tokens that the rows have read before
REPEATS, PATIENCE = 9, 2.0  # of each figure; seconds after which three must do
COUNTS = (1, 2, 3, 5, 9)  # tokens per row of a target pass


def measure(target: LanguageModel, decode: Decode, batch: int) -> Costs:
    """Time passes of the target and drafts, over rows that are let go afterwards.

    Args:
        target: no rows may be admitted.
        decode: drafts to its limit, at least one piece, whatever it draws; no rows may be admitted.
        batch: most rows in flight.
    """
    some = sorted({1, max(1, batch // 2), batch})
    return Costs(
        target=rising(_target_curve(target, batch)),
        drafter=rising([(rows, _draft_seconds(decode, rows)) for rows in some]),
    )


def _target_curve(target: LanguageModel, batch: int) -> list[tuple[int, float]]:
    rows = [_probe(number, target, max(COUNTS)) for number in range(batch)]
    for row in rows:
        target.admit(row, row.tokens)

    def read(count: int) -> None:
        target.forward(rows, [[3] * count] * batch, [count] * batch)
        settle(target.device)
        for row in rows:
            target.roll_back(row, len(row.tokens) - 1)

    curve = [(batch * count, _seconds(lambda count=count: read(count))) for count in COUNTS]  # type: ignore[misc]
    for row in rows:
        target.release(row)
    return curve


def _draft_seconds(decode: Decode, batch: int) -> float:
    rows = [_probe(number, decode.model, decode.max_draft) for number in range(batch)]
    for row in rows:
        decode.admit(row)
    seconds = _seconds(lambda: decode(rows))
    for row in rows:
        decode.release(row)
    return seconds / decode.max_draft


def _probe(number: int, model: LanguageModel, room: int) -> Row:
    """A row of nonsense that leaves the model so much room."""
    length = max(2, min(CONTEXT, model.max_length - room))
    ids = [3 + (7 * place + number) % max(1, model.vocabulary_size - 3) for place in range(length)]
    return Row(number, "", "", "", ids, length, list(ids), SeededDraws(0, number), CONTEXT)


def _seconds(run: Callable[[], object]) -> float:
    """Of the fastest of several runs: what others do on the machine only ever adds."""
    run()
    found: list[float] = []
    while len(found) < REPEATS and (len(found) < 3 or sum(found) < PATIENCE):
        started = perf_counter()
        run()
        found.append(perf_counter() - started)
    return min(found)
