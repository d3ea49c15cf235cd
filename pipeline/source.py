"""Where prompts come from: files, standard input, the hub, built-in streams, joined into one stream."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, Protocol

from pipeline.config_sections import SourceSettings
from pipeline.source_feeds import BUILTIN_STREAMS, BuiltinRows, HubRows
from pipeline.source_files import SUFFIXES, StandardInputRows, open_file
from pipeline.source_kafka import KafkaRows
from pipeline.source_ray import RayRows
from pipeline.source_rows import Fault, PromptRule, Row, Rows, prompt_id, short
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

STANDARD_INPUT = "-"
BUILTIN_LIMIT = 150
NAMED: dict[str, type[HubRows] | type[RayRows] | type[KafkaRows]] = {
    "hf://": HubRows,
    "ray:": RayRows,
    "kafka://": KafkaRows,
}


class Source(Protocol):
    """Prompts of one dataset, in an order that never changes.

    Making a source checks that it can be read, so that nothing is written for one that cannot.
    """

    @property
    def dataset(self) -> str:
        """Name of the dataset, carried by every event. Two sources of the same name count as one dataset."""

    def size(self) -> int | None:
        """About how many prompts will be accepted, for a progress display only; None if that is unknown."""

    def read(self, offset: int) -> Iterator[PromptReceived | PromptRejected]:
        """Every row as an event, accepted prompts numbered from `offset` on without gaps.

        Called at most once: standard input cannot be rewound. A row that cannot be a prompt is one
        PromptRejected with its line, and the rows after it follow; rows that the settings leave out,
        and blank lines, are passed over silently. Rows are read as they are asked for. The same input
        gives the same events. Not promised: that prompt ids differ, or that a prompt fits a model.

        Raises:
            SourceError: the source breaks off. A bad row never raises.
        """


@dataclass(frozen=True)
class RowSource:
    """A source over rows: the rule makes prompts of them, up to the limit.

    With several targets a row may name its own in the rule's target column.
    """

    dataset: str
    rows: Rows
    rule: PromptRule
    limit: int | None
    targets: tuple[str, ...] = ()

    def size(self) -> int | None:
        """The rows' number as far as known, at most the limit; with conditions only the limit is known."""
        known = [self.limit, None if self.rule.where else self.rows.count()]
        return min((number for number in known if number is not None), default=None)

    def read(self, offset: int) -> Iterator[PromptReceived | PromptRejected]:
        """As `Source.read`."""
        end = None if self.limit is None else offset + self.limit
        try:
            for row in self.rows.read(self.rule.columns):
                event = self._event(row, offset)
                if event is not None:
                    yield event
                if isinstance(event, PromptReceived):
                    offset += 1
                    if offset == end:
                        return
        except OSError as error:
            raise SourceError(f"The source '{self.dataset}' broke off: {error.strerror or error}.") from error

    def _event(self, row: Row, offset: int) -> PromptReceived | PromptRejected | None:
        if isinstance(row.values, Fault):
            return PromptRejected(self.dataset, row.line, row.values.reason)
        match self.rule.apply(row.values):
            case Fault(reason):
                return PromptRejected(self.dataset, row.line, reason)
            case str() as text:
                name = prompt_id(row.values, otherwise=f"{self.dataset}:{row.line}")
                target = self._target(row)
                if target not in (None, *self.targets):
                    return PromptRejected(self.dataset, row.line, self._unknown_target(str(target)))
                return PromptReceived(offset, name, self.dataset, row.line, text, target)
        return None

    def _target(self, row: Row) -> str | None:
        """The target that the row names, if there is a choice."""
        asked = None if isinstance(row.values, Fault) else row.values.get(self.rule.target_column)
        return None if asked in (None, "") or len(self.targets) < 2 else str(asked)

    def _unknown_target(self, target: str) -> str:
        known = ", ".join(self.targets)
        return f"the column '{self.rule.target_column}' must name one of the targets {known}, got {short(target)}"


def stream(sources: Iterable[Source], start: int = 0) -> Iterator[PromptReceived | PromptRejected]:
    """The sources one after another, prompts numbered from 0 across all of them.

    A stream from `start` is what follows prompt `start - 1` in the whole one, so a run can be resumed.
    The skipped part is read again, which on standard input means that it must be sent again.

    Raises:
        SourceError: a source breaks off.
    """
    offset = 0
    for source in sources:
        for event in source.read(offset):
            skipped = offset < start
            if isinstance(event, PromptReceived):
                offset += 1
            if not skipped:
                yield event


def open_sources(
    specs: Sequence[str],
    options: SourceSettings,
    *,
    seed: int = 0,
    stdin: BinaryIO | None = None,
    targets: Sequence[str] = (),
) -> list[Source]:
    """Open all sources of a stream before the first is read; arguments and errors as `open_source`."""
    if specs.count(STANDARD_INPUT) > 1:
        raise SourceError(f"Standard input can be read once, got '{STANDARD_INPUT}' {specs.count('-')} times.")
    return [open_source(spec, options, seed=seed, stdin=stdin, targets=targets) for spec in specs]


def open_source(
    spec: str,
    options: SourceSettings,
    *,
    seed: int = 0,
    stdin: BinaryIO | None = None,
    targets: Sequence[str] = (),
) -> Source:
    """Open what `spec` names.

    That is a file, `-`, `hf://owner/dataset[/config]:split`, `ray:PATH`, `kafka://HOST:PORT/TOPIC` or `builtin:NAME`.

    Args:
        spec: the source. A file's dataset is its stem.
        options: how rows become prompts. Columns are checked here wherever they are known before reading.
        seed: shuffles the built-in streams.
        stdin: what `-` reads; by default the process's standard input.
        targets: the run's targets; where there are several, a row may name its own.

    Raises:
        SourceError: there is no such source, it cannot be read, or it lacks a column that is asked for.
        ConfigError: the template or a condition cannot be parsed.
    """
    rule = PromptRule.of(options)
    dataset, rows = _open_rows(spec, seed, stdin)
    if rows.columns is not None:
        rule = rule.narrowed(rows.columns, f"'{spec}'")
    limit = options.limit or (BUILTIN_LIMIT if isinstance(rows, BuiltinRows) else None)
    return RowSource(dataset, rows, rule, limit, tuple(targets))


def _open_rows(spec: str, seed: int, stdin: BinaryIO | None) -> tuple[str, Rows]:
    if spec == STANDARD_INPUT:
        return "stdin", StandardInputRows(stdin or sys.stdin.buffer)
    for prefix, rows_of in NAMED.items():
        if spec.startswith(prefix):
            rows = rows_of(spec)
            return rows.dataset, rows
    if spec.startswith("builtin:"):
        kind = spec.removeprefix("builtin:")
        return kind, BuiltinRows(kind, seed)
    path = Path(spec)
    _check_is_file(path)
    return path.stem, open_file(path)


def _check_is_file(path: Path) -> None:
    """Not a folder or a pipe either: the columns are looked up before the rows are read."""
    try:
        if path.is_file():
            return
        got = "a folder or a pipe" if path.exists() else "a name that does not exist"
        folder = path if path.is_dir() else path.parent
        files = sorted(other for other in folder.glob("*") if other.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise SourceError(f"The source '{path}' must be a readable file: {error.strerror}.") from None
    others = (
        "Other sources are 'builtin:docs', 'builtin:code', 'hf://owner/dataset:split', 'ray:FOLDER/*.parquet', "
        "'kafka://HOST:PORT/TOPIC' and '-'."
    )
    raise SourceError(f"The source '{path}' must be a file, got {got}.{_suggestion(path, files)} {others}")


def _suggestion(path: Path, files: Sequence[Path]) -> str:
    if path.is_dir() and files:
        return f" Name a file in it, such as '{files[0]}'."
    specs = {file.name: str(file) for file in files} | {kind: f"builtin:{kind}" for kind in BUILTIN_STREAMS}
    close = get_close_matches(path.name, specs, n=1)
    return f" Did you mean '{specs[close[0]]}'?" if close else ""
