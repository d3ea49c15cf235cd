"""What a round of the pipeline cost, by part, from its events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.run.rounds import Round
from store.events import (
    BlockDone,
    DraftSource,
    Event,
    Updated,
)


@dataclass(frozen=True)
class Work:
    """Cost of a round, by part of the pipeline. Seconds are parts of the round's."""

    blocks: int  # of single rows
    # judged, accepted: numbers of target tokens
    judged: int
    accepted: int
    # decode, translate, verify: seconds of the stages
    decode: float
    translate: float
    verify: float
    learning: float  # seconds for which decoding waited for updates
    learning_beside: float = 0.0  # seconds of computing updates in parallel; not part of the round's
    # log, versions, drift: seconds of writing the log and its curves, of publishing, and of drift detection
    log: float = 0.0
    log_beside: float = 0.0  # processor seconds of writing the log in parallel; not part of the round's
    versions: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True)
class MeasuredRound(Round):
    """A round of an arm of the benchmark."""

    work: Work | None = None  # cost by part of the pipeline; None if another engine ran it
    # surprisal per prompt of its tokens under the target's distribution; empty if it was not requested
    nats: tuple[float, ...] = ()


def work_of(events: Sequence[Event], records: Mapping[str, float], waited: float) -> Work:
    """Summarise the events of a round, and the seconds for which its end waited for an update. `records`: seconds of
    the log, of versions and of drift detection, by field of `Work`.
    """
    blocks = [event for event in events if isinstance(event, BlockDone)]
    updates = [event for event in events if isinstance(event, Updated)]
    return Work(
        blocks=len(blocks),
        judged=sum(block.judged for block in blocks if block.drafter is DraftSource.MODEL),
        accepted=sum(block.accepted for block in blocks if block.drafter is DraftSource.MODEL),
        decode=sum(block.seconds_decode for block in blocks),
        translate=sum(block.seconds_translate for block in blocks),
        verify=sum(block.seconds_verify for block in blocks),
        learning=waited + sum(update.waited for update in updates),
        learning_beside=max(0.0, sum(update.seconds - update.waited for update in updates) - waited),
        **records,
    )
