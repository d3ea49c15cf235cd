"""The protocol of all stages, and the order of calls within a block."""

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from stages.contract.blocks import SequenceState
from stages.contract.snapshot import State

Input = TypeVar("Input", contravariant=True)
Output = TypeVar("Output")


class Stage(Protocol[Input, Output]):
    """One step of a block, for a whole batch.

    The loop calls `admit` once for a row before its first block and `release` once after its last; in between it
    calls the stage once per block with one input for every admitted row, in the loop's order. After a release the last
    row takes the released row's place in that order.

    A stage
    - returns one output per input, in order; an empty batch gives an empty list;
    - keeps no reference to an input after the call, except per-row state until `release`;
    - gives the same result for a row for any other rows in the batch, up to rounding of the models' arithmetic;
    - draws random numbers only from the rows' own `rng`.

    Errors that are not `OmnidraftError` are programming errors; after one, the stage must not be used again.
    """

    def __call__(self, batch: Sequence[Input]) -> list[Output]:
        """Process one block of the batch."""
        ...

    def admit(self, row: SequenceState) -> None:
        """Add a row at the end of the order. By default there is no per-row state."""
        return

    def release(self, row: SequenceState) -> None:
        """Remove a row and free its state."""
        return

    def state_dict(self, rows: Collection[SequenceState]) -> State:
        """Return, between two blocks, the state from which an equally configured stage can resume (see
        `stages.contract.snapshot`), with that of these of its rows. By default there is none.
        """
        return None

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, before the first block."""
        return
