"""Running replays in tests: settings for a tiny pair, the log of a run as tables, and the command as it is typed."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tiny_pair import TinyPair

from pipeline.cli.app import main
from pipeline.config.settings import Config
from pipeline.reports.progress import PlainDisplay
from pipeline.run.replay import Replay
from store.events import Event, PromptCompleted
from store.log.manifest import part_path, read_manifest

QUICK = {
    "sampling.max_new_tokens": 16,
    "learn.interval": 2,
    "learn.spacing": "fixed",  # other sources draft too, and a short run is no evidence that learning pays
    "learn.rate": 5e-3,
    "draft.pause": False,  # every block shows what drafting does
    "draft.costs": 0.1,  # by its size the tiny drafter is dear, and drafts would be a piece long
}


def config_of(pair: TinyPair, **changes: Any) -> Config:
    """Settings of a quick run over both prompt files; `section__key` stands for `section.key`."""
    models = {"targets": (str(pair.target),), "drafter": str(pair.drafter), "sources": (str(pair.sums), str(pair.more))}
    fixed = {**models, **QUICK, "publish.enabled": False, "device": "cpu"}
    return Config().with_overrides({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def run_replay(config: Config, folder: Path) -> dict[str, Any]:
    """The summary of a whole run."""
    with PlainDisplay(perf_counter) as display:
        return Replay(config, folder).run(display)


class StoppingDisplay(PlainDisplay):
    """Interrupts the run, as a user does, after some completed prompts."""

    def __init__(self, prompts: int) -> None:
        super().__init__(perf_counter)
        self._left = prompts

    def show(self, event: Event) -> None:
        super().show(event)
        if isinstance(event, PromptCompleted):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)


def table_of(run: Path, table: str) -> pa.Table:
    """All committed rows of one of the log's tables."""
    parts = read_manifest(run).tables[table]
    return pa.concat_tables([parquet.read_table(part_path(run, part)) for part in parts])


@dataclass(frozen=True)
class Typed:
    """The result of a command."""

    status: int
    out: str
    err: str


class Command:
    """`omnidraft`, typed in this process. `Command(...)("replay", "--batch", "2")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Typed:
        self._monkeypatch.setattr(sys, "argv", ["omnidraft", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        status = end.value.code
        return Typed(status if isinstance(status, int) else 0, *self._capsys.readouterr())
