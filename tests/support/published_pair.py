"""Versions of the tiny pair in a store of their own, published by a real run and made once."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from constants import NO_GATE, constants
from registry_making import MODEL
from replaying import config_of, run_replay
from tiny_pair import TinyPair

from store.registry.registry import default_uri, list_versions


@dataclass(frozen=True)
class Published:
    """A folder of runs with one run in it.

    Attributes:
        runs: the folder.
        run: the run's own.
        newest: number of the newest version; 1 is the baseline.
    """

    runs: Path
    run: Path
    newest: int

    @property
    def uri(self) -> str:
        return default_uri(self.runs)

    def folder(self, number: int) -> Path:
        """The folder of a version, in the run."""
        return self.run / "versions" / f"{number - 1:06d}"


@cache
def publish(pair: TinyPair, runs: Path) -> Published:
    """Publish the versions of a run below a folder."""
    publishing = {"publish__enabled": True, "publish__interval": 8, "publish__name": MODEL}
    config = config_of(pair, **publishing, learn__method="gradient", learn__rate=2e-2)
    with constants(gate_every=NO_GATE):
        run_replay(config, runs / "tiny")
    return Published(runs, runs / "tiny", len(list_versions(default_uri(runs))))
