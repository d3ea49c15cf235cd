"""The drafter's files in the folders of versions: written when it has learned, else those of an earlier version."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from store.files import link_or_copy


class _Written(NamedTuple):
    version: int
    folder: Path
    names: list[str]


class DrafterFiles:
    """Puts the drafter into the folders of versions, most of which differ in memory, head and n-grams alone.

    Args:
        save: writes the drafter into a folder, which it makes.
        version: the number of updates in service; equal numbers mean equal weights.
    """

    def __init__(self, save: Callable[[Path], None], version: Callable[[], int]) -> None:
        self._save, self._version = save, version
        self._last: _Written | None = None

    def write(self, folder: Path) -> None:
        """Write the drafter into a new folder, or link the files of the last version that has the same one."""
        last, version = self._last, self._version()
        if last and last.version == version and all((last.folder / name).is_file() for name in last.names):
            for name in last.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(last.folder / name, folder / name)
        else:
            self._save(folder)
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        self._last = _Written(version, folder, names)
