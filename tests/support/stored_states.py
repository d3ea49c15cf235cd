"""States as they come back from the files of a snapshot."""

from typing import Any

from stages.contract.snapshot import Snapshot, read_snapshot


def store(state: Any) -> Any:
    """A state after it was written into a checkpoint and read."""
    return read_snapshot(Snapshot(state).files())
