"""What a study keeps of its runs: counts of every prompt, in one JSON file that is written after every run.

All figures are made from these counts, so that a study can be continued and its tables made again without any model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from store.errors import CorruptError, RunError
from store.files import write_whole

FORMAT = 1


@dataclass(frozen=True, order=True)
class Key:
    """Which run of a study."""

    target: str
    seed: int
    arm: str


@dataclass(frozen=True)
class Passed:
    """The counts of one completed prompt, as in `PromptCompleted`.

    Attributes:
        at, cpu: seconds of wall and of processor time from the run's begin to the completion, before learning from it.
    """

    offset: int
    emitted: int
    blocks: int
    drafted: int
    judged: int
    accepted: int
    at: float
    cpu: float


@dataclass(frozen=True)
class Alarm:
    """What the drift detector said, as in `Drifted`."""

    offset: int
    direction: str
    action: str


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        key: which.
        passed: completed prompts, in the order of completion.
        alarms: in stream order.
        recalls: stream offsets at which an earlier version of the drafter was taken back.
        segments: the first stream offset of each part of the stream, and the end of the last.
        seconds: wall time of the whole run, learning included, loading not.
        cpu_seconds: processor time of the same.
        learning: seconds of wall time that went into updates.
        cache_bytes, cache_entries: of the n-gram cache at the end.
        rejected: rows of the sources that could not be prompts.
        prompts: sha256 of the prompts' texts in their order. Runs with different prompts are never compared.
        same_vocabulary: whether target and drafter have one vocabulary.
        machine: what the speed depends on beside the settings.
        notices: what the user should know about the run.
    """

    key: Key
    passed: tuple[Passed, ...]
    alarms: tuple[Alarm, ...]
    recalls: tuple[int, ...]
    segments: tuple[int, ...]
    seconds: float
    cpu_seconds: float
    learning: float
    cache_bytes: int
    cache_entries: int
    rejected: int
    prompts: str
    same_vocabulary: bool
    machine: Mapping[str, Any]
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values; of the prompts one list per count."""
        names = [field.name for field in fields(Passed)]
        columns = zip(*map(astuple, self.passed), strict=True) if self.passed else [()] * len(names)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "key": asdict(self.key),
            "passed": {name: list(column) for name, column in zip(names, columns, strict=True)},
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Record":
        """The record behind `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        columns = values["passed"]
        rows = zip(*(columns[field.name] for field in fields(Passed)), strict=True)
        changed = {
            "key": Key(**values["key"]),
            "passed": tuple(Passed(*row) for row in rows),
            "alarms": tuple(Alarm(**alarm) for alarm in values["alarms"]),
            "recalls": tuple(values["recalls"]),
            "segments": tuple(values["segments"]),
            "notices": tuple(values["notices"]),
        }
        return cls(**{**values, **changed})


class StudyFile:
    """The runs of one study and the settings that they share.

    Args:
        path: JSON; need not exist.
        settings: what every run has in common, as JSON values with dotted keys.

    Raises:
        RunError: the file holds the runs of other settings, or is no study, or its folder cannot be made.
        CorruptError: the file cannot be understood.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.records: dict[Key, Record] = {}
        if path.exists():
            content = _read(path)
            _require_equal(path, content["settings"], json.loads(json.dumps(self.settings)))
            self.records = {record.key: record for record in content["runs"]}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the folder of {path} must be writable: {error.strerror}; see --out") from error

    def add(self, record: Record) -> None:
        """Keep a finished run; the file is whole at any instant."""
        self.records[record.key] = record
        self.write({})

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write everything, with the figures made from it for readers that only want those."""
        runs = [self.records[key].to_json() for key in sorted(self.records)]
        content = {"format": FORMAT, "settings": self.settings, "figures": dict(figures)}
        lines = [f"{json.dumps(name)}: {_dumped(value)}" for name, value in content.items()]
        lines.append('"runs": [\n' + ",\n".join(map(_dumped, runs)) + "\n]")
        try:
            write_whole(self.path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
        except OSError as error:
            raise RunError(f"the file {self.path} must be writable: {error.strerror}; see --out") from error


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise RunError(f"{path} must be of format {FORMAT}, got {content['format']}; name another file with --out")
        return {"settings": content["settings"], "runs": [Record.of(run) for run in content["runs"]]}
    except OSError as error:
        raise RunError(f"{path} must be a readable file: {error.strerror}; name another with --out") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must hold the runs of a study, but cannot be understood: {error!r}") from error


def _require_equal(path: Path, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    different = [key for key in sorted({*kept, *asked}) if kept.get(key) != asked.get(key)]
    if different:
        changes = "; ".join(f"{key} is {kept.get(key)!r} there, not {asked.get(key)!r}" for key in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise RunError(f"{path} must hold runs of these settings, but {changes}{more}; name another file with --out")


def same_prompts(records: Sequence[Record]) -> None:
    """Check that runs to be compared saw the same prompts.

    Raises:
        CorruptError: if not; a source has changed between them.
    """
    seen: dict[int, Record] = {}
    for record in records:
        first = seen.setdefault(record.key.seed, record)
        if first.prompts != record.prompts:
            raise CorruptError(
                f"the arms '{first.key.arm}' and '{record.key.arm}' of seed {record.key.seed} must have had the same "
                "prompts, but had others: a source has changed in between; run the study again into a new file"
            )
