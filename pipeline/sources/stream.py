"""Sources of prompts: files, standard input, the hub, built-in streams, joined into one stream."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from reprlib import repr as short

from pipeline.config.sections import SourceSettings
from pipeline.sources.corpus import BUILTIN_STREAMS, BuiltinRows
from pipeline.sources.files import ManyRows, StandardInputRows, kind_of, list_files, name_dataset, open_file
from pipeline.sources.hub_and_ray import HubRows, RayRows
from pipeline.sources.kafka import KafkaRows
from pipeline.sources.rows import TARGET, Fault, PromptRule, Rows, SourceRow, prompt_id
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

STANDARD_INPUT = "-"
BUILTIN_LIMIT = 150
NAMED: dict[str, type[HubRows] | type[RayRows] | type[KafkaRows]] = {
    "hf://": HubRows,
    "ray:": RayRows,
    "kafka://": KafkaRows,
}


@dataclass(frozen=True)
class Source:
    """Prompts of one dataset, in an order that never changes: the rule makes them of rows, up to the limit.

    Two sources of the same name count as one dataset. With several targets a row may name its own.
    """

    dataset: str
    rows: Rows
    rule: PromptRule
    limit: int | None
    targets: tuple[str, ...] = ()

    def size(self) -> int | None:
        """Estimate how many prompts will be accepted, for a progress display only; None if that is unknown.

        With conditions only the limit is known.
        """
        known = [self.limit, None if self.rule.where else self.rows.count()]
        return min((number for number in known if number is not None), default=None)

    def read(self, offset: int) -> Iterator[PromptReceived | PromptRejected]:
        """Yield every row as an event, accepted prompts numbered from `offset` on without gaps.

        Called at most once: standard input cannot be rewound. A row that cannot be a prompt is a PromptRejected; rows
        that the settings exclude, and blank lines, are skipped. Prompt ids may repeat. Raises `SourceError` if the
        source breaks off. A bad row never raises.
        """
        end = None if self.limit is None else offset + self.limit
        try:
            for row in self.rows.read(self.rule.columns):
                for event in self._make_events(row, offset):
                    yield event
                    offset += isinstance(event, PromptReceived)
                    if offset == end:
                        return
        except OSError as error:
            raise SourceError(f"The source '{self.dataset}' broke off: {error.strerror or error}.") from error

    def _make_events(self, row: SourceRow, offset: int) -> Iterator[PromptReceived | PromptRejected]:
        """Yield the row's prompts, numbered from `offset` on, or why it has none."""
        if isinstance(row.values, Fault):
            yield PromptRejected(self.dataset, row.line, row.values.reason)
            return
        texts = self.rule.apply(row.values)
        if isinstance(texts, Fault):
            yield PromptRejected(self.dataset, row.line, texts.reason)
            return
        name = prompt_id(row.values, otherwise=f"{self.dataset}:{row.line}")
        named = row.values.get(TARGET) if len(self.targets) > 1 else None
        target = None if named in (None, "") else str(named)
        if target not in (None, *self.targets):
            known, got = ", ".join(self.targets), short(target)
            reason = f"the column '{TARGET}' must name one of the targets {known}, got {got}"
            yield PromptRejected(self.dataset, row.line, reason)
            return
        for turn, text in enumerate(texts):
            own = f"{name}#{turn + 1}" if len(texts) > 1 else name
            yield PromptReceived(offset + turn, own, self.dataset, row.line, text, target)


def datasets_of(sources: Sequence[Source], specs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return name and source of each dataset, for MLflow."""
    return tuple((source.dataset, spec) for source, spec in zip(sources, specs, strict=True))


def total(sources: Sequence[Source]) -> int | None:
    """Estimate the number of prompts of all sources, None if one of them is unknown."""
    sizes = [source.size() for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def stream(sources: Iterable[Source]) -> Iterator[PromptReceived | PromptRejected]:
    """Yield the events of the sources one after another, prompts numbered from 0 across all of them."""
    offset = 0
    for source in sources:
        for event in source.read(offset):
            offset += isinstance(event, PromptReceived)
            yield event


def open_sources(
    specs: Sequence[str], options: SourceSettings, *, seed: int = 0, targets: Sequence[str] = ()
) -> list[Source]:
    """Open all sources of a stream before the first is read; arguments and errors as `open_source`."""
    if specs.count(STANDARD_INPUT) > 1:
        raise SourceError(f"Standard input can be read once, got '{STANDARD_INPUT}' {specs.count('-')} times.")
    return [open_source(spec, options, seed=seed, targets=targets) for spec in specs]


def open_source(spec: str, options: SourceSettings, *, seed: int = 0, targets: Sequence[str] = ()) -> Source:
    """Open the source that `spec` names.

    It names a file, `-`, `hf://owner/dataset[/config]:split`, `ray:PATH`, `kafka://HOST:PORT/TOPIC` or `builtin:NAME`.
    Columns are checked here wherever they are known before reading. The seed shuffles the built-in streams; where the
    run has several targets, a row may name its own.
    """
    rule = PromptRule.from_settings(options)
    dataset, rows = _open_rows(spec, seed)
    if rows.columns is not None:
        rule = rule.narrow_to(rows.columns, f"'{spec}'")
    limit = options.limit or (BUILTIN_LIMIT if isinstance(rows, BuiltinRows) else None)
    return Source(dataset, rows, rule, limit, tuple(targets))


def _open_rows(spec: str, seed: int) -> tuple[str, Rows]:
    if spec == STANDARD_INPUT:
        return "stdin", StandardInputRows(sys.stdin.buffer)
    for prefix, rows_of in NAMED.items():
        if spec.startswith(prefix):
            rows = rows_of(spec)
            return rows.dataset, rows
    if spec.startswith("builtin:"):
        kind = spec.removeprefix("builtin:")
        return kind, BuiltinRows(kind, seed)
    path = Path(spec)
    try:
        if path.is_file():
            return name_dataset(path), open_file(path)
        if path.is_dir():
            return path.resolve().name, ManyRows(list_files(path))
        found = glob(spec, recursive=True) if has_magic(spec) else []  # noqa: PTH207 (patterns may be absolute)
        if paths := sorted(one for one in map(Path, found) if kind_of(one)):
            return path.parent.resolve().name, ManyRows(paths)
        raise SourceError(_explain_missing(path))
    except OSError as error:
        raise SourceError(f"The source '{path}' must be a readable file: {error.strerror}.") from None


def _explain_missing(path: Path) -> str:
    """Return the message for a path that is neither a file nor a folder. A pipe is none: columns are read before the
    rows.
    """
    got = "a pipe" if path.exists() else "a name that does not exist"
    files = [other for other in path.parent.glob("*") if kind_of(other) and not other.name.startswith(".")]
    specs = {file.name: str(file) for file in sorted(files)} | {kind: f"builtin:{kind}" for kind in BUILTIN_STREAMS}
    close = get_close_matches(path.name, specs, n=1)
    hint = f" Did you mean '{specs[close[0]]}'?" if close else ""
    return (
        f"The source '{path}' must be a file, a folder or a pattern such as 'FOLDER/*.jsonl' in quotes, got {got}."
        f"{hint} Other sources are 'builtin:docs', 'builtin:code', 'builtin:questions', 'builtin:rust', "
        "'hf://owner/dataset:split', 'ray:FOLDER/*.parquet', 'kafka://HOST:PORT/TOPIC' and '-'."
    )


def require_prompt(
    events: Iterator[PromptReceived | PromptRejected], fault_of: Callable[[PromptReceived], str | None] = lambda _: None
) -> Iterator[PromptReceived | PromptRejected]:
    """Read up to the first usable prompt. Returns an iterator over all events from the first one on.

    `fault_of`: returns the reason for which a prompt cannot be used, None for a usable one.
    """
    read: list[PromptReceived | PromptRejected] = []
    first: tuple[str, str] | None = None  # where the first row is that is no prompt, and why
    for event in events:
        read.append(event)
        reason = event.reason if isinstance(event, PromptRejected) else fault_of(event)
        if reason is None:
            return chain(read, events)
        first = first or (f"line {event.line} of '{event.dataset}'", reason)
    if first is None:
        raise SourceError("The sources must hold at least one prompt, but no row is left of them; nothing was run.")
    raise SourceError(
        f"The sources must hold at least one prompt that can be used, but none of {len(read):,} rows is one; nothing "
        f"was run. The first, {first[0]}: {first[1]}"
    )
