"""Records of a study's runs: counts of every prompt, in one JSON file that is written after every run.

All results are computed from these counts, so a study can be resumed and its tables rebuilt without any model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from store.errors import CorruptError, RunError
from store.files import write_whole

FORMAT = 1


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a run of a study by target, seed and arm."""

    target: str
    seed: int
    arm: str


@dataclass(frozen=True)
class PromptCounts:
    """Counts of one completed prompt, as in `PromptCompleted`."""

    offset: int
    emitted: int
    blocks: int
    drafted: int
    judged: int
    accepted: int
    # at, cpu: wall and processor seconds from the start of the run to the completion, before learning from it
    at: float
    cpu: float
    # number of the completion's tokens whose first piece was the drafter's likeliest, before learning from it
    # (above temperature 0: the expected number that it would have had accepted). Measured if `places`.
    first_right: float = 0.0
    places: int = 0  # number of the completion's tokens; 0 if this was not measured
    ngrams: int = 0  # number of accepted n-grams
    entries: int = 0  # entries of the n-gram caches at the completion


@dataclass(frozen=True)
class Alarm:
    """An alarm of the drift detector, as in `Drifted`."""

    offset: int
    action: str


@dataclass(frozen=True)
class Record:
    """Record of one run."""

    key: Key  # target, seed and arm of the run
    passed: tuple[PromptCounts, ...]  # completed prompts, in the order of completion
    alarms: tuple[Alarm, ...]  # alarms of the drift detector, in stream order
    recalls: tuple[int, ...]  # stream offsets at which an earlier version of the drafter was restored
    segments: tuple[int, ...]  # first stream offset of each part of the stream, and the end of the last part
    seconds: float  # wall time of the run, learning included, loading excluded
    cpu_seconds: float  # processor time of the same
    learning: float  # wall seconds spent on updates
    # cache_bytes, cache_entries: size of the n-gram caches of all targets at the end
    cache_bytes: int
    cache_entries: int
    rejected: int  # number of source rows that could not be prompts
    prompts: str  # sha256 of the texts of the prompts in order. Runs with different prompts are never compared.
    same_vocabulary: bool  # whether target and drafter share one vocabulary
    machine: Mapping[str, Any]  # processor, libraries and load that the speed depends on
    notices: tuple[str, ...] = ()  # messages of the run's log, from level info on
    accepted_ngrams: int = 0  # number of accepted tokens that were proposed as several pieces
    ngram_counts: tuple[int, ...] = ()  # how often each emitted token of several pieces was emitted, largest first

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, with one list per count of the prompts."""
        names = [field.name for field in fields(PromptCounts)]
        columns = zip(*map(astuple, self.passed), strict=True) if self.passed else [()] * len(names)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "key": asdict(self.key),
            "passed": {name: list(column) for name, column in zip(names, columns, strict=True)},
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Record":
        """The record of values that `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of a record.
        """
        columns = values["passed"]
        known = [field.name for field in fields(PromptCounts) if field.name in columns or field.default is MISSING]
        rows = zip(*(columns[name] for name in known), strict=True)
        changed = {
            "key": Key(**values["key"]),
            "passed": tuple(PromptCounts(**dict(zip(known, row, strict=True))) for row in rows),
            "alarms": tuple(Alarm(**alarm) for alarm in values["alarms"]),
            "recalls": tuple(values["recalls"]),
            "segments": tuple(values["segments"]),
            "notices": tuple(values["notices"]),
            "ngram_counts": tuple(values.get("ngram_counts", ())),
        }
        return cls(**{**values, **changed})


class StudyFile:
    """The runs of one study and the settings that they share.

    Args:
        path: JSON file; need not exist.
        settings: settings that all runs share, as JSON values by dotted key.

    Raises:
        RunError: the file holds runs with other settings or of another format, or its folder cannot be created.
        CorruptError: the file cannot be parsed.
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
        """Add a finished run and replace the file atomically."""
        self.records[record.key] = record
        self.write({})

    def write(self, results: Mapping[str, Any]) -> None:
        """Write all runs, with the results computed from them for other readers."""
        runs = [self.records[key].to_json() for key in sorted(self.records)]
        content = {"format": FORMAT, "settings": self.settings, "figures": dict(results)}
        lines = [f"{json.dumps(name)}: {_dump(value)}" for name, value in content.items()]
        lines.append('"runs": [\n' + ",\n".join(map(_dump, runs)) + "\n]")
        try:
            write_whole(self.path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
        except OSError as error:
            raise RunError(f"the file {self.path} must be writable: {error.strerror}; see --out") from error


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise RunError(f"{path} must be of format {FORMAT}, got {content['format']}; name another file with --out")
        return {"settings": content["settings"], "runs": [Record.from_json(run) for run in content["runs"]]}
    except OSError as error:
        raise RunError(f"{path} must be a readable file: {error.strerror}; name another with --out") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must hold the runs of a study, but cannot be parsed: {error!r}") from error


def _require_equal(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    different = [key for key in sorted({*stored, *given}) if stored.get(key) != given.get(key)]
    if different:
        changes = "; ".join(f"{key} is {stored.get(key)!r} there, not {given.get(key)!r}" for key in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise RunError(f"{path} must hold runs of these settings, but {changes}{more}; name another file with --out")


def same_prompts(records: Sequence[Record]) -> None:
    """Check that runs with the same seed saw the same prompts.

    Raises:
        CorruptError: they did not, because a source changed between them.
    """
    seen: dict[int, Record] = {}
    for record in records:
        first = seen.setdefault(record.key.seed, record)
        if first.prompts != record.prompts:
            raise CorruptError(
                f"the arms '{first.key.arm}' and '{record.key.arm}' of seed {record.key.seed} must have had the same "
                "prompts, but had different ones: a source has changed; run the study again with a new file"
            )
