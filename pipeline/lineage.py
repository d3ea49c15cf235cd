"""From a registered version back to the drafter that its run began with."""

from collections.abc import Sequence

from store.versions import RegisteredVersion


def lineage_of(number: int, known: Sequence[RegisteredVersion]) -> list[int]:
    """A version, its parent, and so on to its floor, as far as the registry still knows them.

    Parents are tags that anyone may edit: a circle ends where it would begin again.
    """
    parents = {version.number: version.parent for version in known}
    found = [number]
    while (parent := parents.get(found[-1])) in parents and parent is not None and parent not in found:
        found.append(parent)
    return found
