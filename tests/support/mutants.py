"""Mutants: small faults that the tests must find. The lists are the files `tests/mutants/*.toml`.

A mutant names a file, a text that occurs in it once, the text that takes its place, and the tests that must fail then.
"""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "tests" / "mutants"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        area: name of the list.
        file: relative to the repository.
        old, new: the text that is replaced, and what replaces it.
        tests: files or tests, tried in order until one fails.
        survives: why no test can fail, if none can.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    @contextmanager
    def apply(self, folder: Path) -> Iterator[None]:
        """Apply the mutant to a copy of the repository during the block."""
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")


def read_mutants() -> list[Mutant]:
    """Return all mutants, in the order of the lists."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            found.append(Mutant(path.stem, **entry | {"tests": tuple(entry["tests"])}))
    return found
