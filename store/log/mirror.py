"""Interface between a log and a copy of its commits elsewhere; store/object_store/mirror.py implements it."""

from pathlib import Path

from typing_extensions import override

from store.log.manifest import Manifest
from store.log.partitions import partition_folder


class Mirror:
    """Copies the commits of one log to another place; this base class copies nothing.

    Called by one thread at a time: `pull`, then `acquire`, then `push`.
    """

    name: str  # of the run, as on the command line

    def manifest(self) -> Manifest | None:
        """Return the manifest that the other place has; None if there is none."""
        return None

    def pull(self) -> None:
        """Make the local folder equal to the commit of the other place. Called before the folder is read."""

    def acquire(self, manifest: Manifest) -> None:
        """Take over the other place for this process. Called before its first commit, with the log's manifest."""

    def push(self, manifest: Manifest) -> None:
        """Copy a local commit; it counts when this method returns."""

    def partitions(self) -> list[str]:
        """Return the names of the run's partitions in the other place."""
        return []

    def partition(self, name: str) -> "Mirror":
        """Return the mirror of a partition of the run."""
        raise NotImplementedError


class NoMirror(Mirror):
    """The mirror of a run that is only in a local folder: copies nothing."""

    def __init__(self, local: Path) -> None:
        self._local, self.name = local, str(local)

    @override
    def partition(self, name: str) -> Mirror:
        return NoMirror(partition_folder(self._local, name))
