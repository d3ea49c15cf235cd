"""What a round of the pipeline cost, by part, from its events."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.run.rounds import Round
from store.events import (
    BlockDone,
    DraftSource,
    Event,
    Outcome,
    PromptCompleted,
    TokenDecision,
    Translation,
    Updated,
)


@dataclass(frozen=True)
class Step:
    """One block of all rows in flight."""

    drafted: tuple[int, ...]  # pieces per row that the drafter model drew; it ran as often as the longest has pieces
    proposed: tuple[int, ...]  # target tokens per row; the target read one more of each row


@dataclass(frozen=True)
class Work:
    """Cost of a round, by part of the pipeline. Seconds are parts of the round's."""

    steps: tuple[Step, ...]  # steps in order
    # judged, accepted: numbers of target tokens
    judged: int
    accepted: int
    prompt_tokens: int  # number of target tokens of the round's prompts
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

    @property
    def blocks(self) -> int:
        """Number of blocks of single rows."""
        return sum(len(step.drafted) for step in self.steps)


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
        steps=tuple(_steps(blocks, _nameless(events))),
        judged=sum(block.judged for block in blocks if block.drafter is DraftSource.MODEL),
        accepted=sum(block.accepted for block in blocks if block.drafter is DraftSource.MODEL),
        prompt_tokens=sum(event.prompt_tokens for event in events if isinstance(event, PromptCompleted)),
        decode=sum(block.seconds_decode for block in blocks),
        translate=sum(block.seconds_translate for block in blocks),
        verify=sum(block.seconds_verify for block in blocks),
        learning=waited + sum(update.waited for update in updates),
        learning_beside=max(0.0, sum(update.seconds - update.waited for update in updates) - waited),
        **records,
    )


def _nameless(events: Sequence[Event]) -> set[tuple[int, int]]:
    """Return offset and number of the blocks whose last proposed token has no name: the target did not read it."""
    decisions = (event for event in events if isinstance(event, TokenDecision) and event.outcome != Outcome.UNDRAFTED)
    return {(event.offset, event.block) for event in decisions if event.translation == Translation.NONE}


def _steps(blocks: Sequence[BlockDone], nameless: Container[tuple[int, int]]) -> Iterator[Step]:
    """Group blocks into steps: the blocks of one step follow each other, and each has their number in `rows`."""
    start = 0
    while start < len(blocks):
        rows = blocks[start : start + blocks[start].rows]
        drawn = tuple(row.drafted if row.drafter is DraftSource.MODEL else 0 for row in rows)
        yield Step(drawn, tuple(row.proposed - ((row.offset, row.block) in nameless) for row in rows))
        start += len(rows)
