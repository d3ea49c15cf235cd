"""The one protocol of all stages, and how a block runs through them."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from stages.blocks import Row
from stages.snapshot import Json, SnapshotReader, SnapshotWriter

Input = TypeVar("Input", contravariant=True)
Output = TypeVar("Output")


class Stage(Protocol[Input, Output]):
    """One step of a block, for a whole batch.

    The loop calls `admit` once for a row before its first block and `release` once after its last; in between it
    calls the stage once per block with one input for every admitted row, in the loop's order. A released row's
    place in that order is taken by the last row.

    A stage
    - returns one output per input, in order; an empty batch gives an empty list;
    - keeps nothing of an input beyond the call, except what belongs to the row until `release` (`Distill` keeps
      lessons, which belong to no row, in buffers of bounded size);
    - decides alike for a row whatever other rows are in the batch, up to rounding of the models' arithmetic;
    - draws random numbers only from the rows' own `draws`.

    Errors that are not `OmnidraftError` are programming errors; after one, the stage is not to be used again.
    """

    def __call__(self, batch: Sequence[Input]) -> list[Output]:
        """Do the step."""
        ...

    def admit(self, row: Row) -> None:
        """A row enters at the end of the order."""
        ...

    def release(self, row: Row) -> None:
        """A row leaves and frees what was kept for it."""
        ...

    def save(self, keep: SnapshotWriter) -> Json:
        """Between two blocks: what another stage of the same making needs to go on as this one would."""
        ...

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """Before the first block, instead of what would lead there: become the stage that was saved."""
        ...


class WithoutRows:
    """For stages that keep nothing per row."""

    def admit(self, row: Row) -> None:
        """Nothing to prepare."""

    def release(self, row: Row) -> None:
        """Nothing to free."""
