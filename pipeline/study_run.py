"""One run of a study: the prompts of a seed through the pipeline's own loop, without a log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from pipeline.bench import machine_of
from pipeline.build import build_loop
from pipeline.build_models import Models, load_models
from pipeline.config import Config
from pipeline.loop import Loop
from pipeline.source import BUILTIN_LIMIT, Source, open_sources
from pipeline.study_records import Alarm, Key, Passed, Record
from stages.baselines import settle
from store.errors import SourceError
from store.events import Drifted, Event, PromptCompleted, PromptReceived, PromptRejected, Recalled, Updated
from store.registry import NoRegistry, default_uri

POOL = 20_000  # prompts of a source among which a seed chooses
ROUNDS = 2  # segments of each source when sources alternate


@dataclass(frozen=True)
class Task:
    """What one run is to do. It can be sent to another process.

    Attributes:
        key: the run's name.
        config: every setting of its arm, target and seed.
        segment: prompts of a segment when the sources alternate A B A B; None for one source after another.
    """

    key: Key
    config: Config
    segment: int | None


@dataclass(frozen=True)
class Prompts:
    """A seed's stream.

    Attributes:
        chosen: with offsets from 0 without gaps.
        segments: the first offset of each part, and the end of the last.
        rejected: rows that could not be prompts.
    """

    chosen: tuple[PromptReceived, ...]
    segments: tuple[int, ...]
    rejected: int

    @property
    def digest(self) -> str:
        """sha256 of the texts."""
        return sha256("\0".join(prompt.text for prompt in self.chosen).encode()).hexdigest()


def choose_prompts(config: Config, segment: int | None) -> Prompts:
    """Each source's prompts, shuffled by the seed, up to the limit.

    Raises:
        SourceError: a source cannot be read, or has too few prompts for its segments.
    """
    options = config.source.model_copy(update={"limit": POOL})
    sources = open_sources(config.sources, options)
    events = [list(source.read(0)) for source in sources]
    parts = [
        _shuffled(source, [event for event in read if isinstance(event, PromptReceived)], config.seed, limit)
        for source, read, limit in zip(sources, events, _limits(config, segment), strict=True)
    ]
    if segment is not None:
        parts = _alternating(parts, segment, config.sources)
    chosen = [prompt for part in parts for prompt in part]
    if not chosen:
        raise SourceError(f"A study needs prompts, but {', '.join(config.sources)} has none; see --where.")
    ends = [sum(map(len, parts[:number])) for number in range(len(parts) + 1)]
    numbered = tuple(replace(prompt, offset=offset) for offset, prompt in enumerate(chosen))
    return Prompts(numbered, tuple(ends), sum(isinstance(one, PromptRejected) for read in events for one in read))


def _limits(config: Config, segment: int | None) -> Iterator[int | None]:
    for name in config.sources:
        usual = BUILTIN_LIMIT if name.startswith("builtin:") else None
        yield config.source.limit or usual if segment is None else ROUNDS * segment


def _shuffled(source: Source, prompts: Sequence[PromptReceived], seed: int, limit: int | None) -> list[PromptReceived]:
    shuffled = list(prompts)
    Random(f"{seed} {source.dataset}").shuffle(shuffled)
    return shuffled[:limit]


def _alternating(
    parts: Sequence[Sequence[PromptReceived]], segment: int, names: Sequence[str]
) -> list[list[PromptReceived]]:
    for part, name in zip(parts, names, strict=True):
        if len(part) < ROUNDS * segment:
            needed = f"{ROUNDS} segments of {segment} prompts"
            raise SourceError(f"The source '{name}' must have {needed}, got {len(part)} prompts; see --alternate.")
    return [list(part[n * segment : (n + 1) * segment]) for n in range(ROUNDS) for part in parts]


@dataclass(frozen=True)
class Seconds:
    """Two clocks: wall time, and the processor time of this process, which others on the machine disturb less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        """Read both."""
        return cls(perf_counter(), process_time())

    def __sub__(self, began: "Seconds") -> "Seconds":
        return Seconds(round(self.wall - began.wall, 4), round(self.cpu - began.cpu, 4))


class Collector:
    """Takes from the events of a run what a record keeps."""

    def __init__(self) -> None:
        self.passed: list[Passed] = []
        self.alarms: list[Alarm] = []
        self.recalls: list[int] = []
        self.learning = 0.0
        self.rejected = 0

    def add(self, event: Event, now: Seconds) -> None:
        """Add an event that came when the run had taken so many seconds."""
        match event:
            case PromptCompleted():
                counts = (event.emitted, event.blocks, event.drafted, event.judged, event.accepted)
                self.passed.append(Passed(event.offset, *counts, at=now.wall, cpu=now.cpu))
            case Drifted():
                self.alarms.append(Alarm(event.offset, event.direction, event.action))
            case Recalled(version=int()):
                self.recalls.append(event.offset)
            case Updated():
                self.learning += event.seconds
            case PromptRejected():
                self.rejected += 1


def run_task(task: Task, passed: Callable[[], None] = lambda: None) -> Record:
    """Load, run the stream to its end, count.

    Args:
        task: what is to be done.
        passed: called after each completed prompt.

    Raises:
        UsageError: for anything that cannot work.
    """
    prompts = choose_prompts(task.config, task.segment)
    with TemporaryDirectory() as scratch:
        notices: list[str] = []
        loop, models = _open(task.config, Path(scratch), notices.append)
        collector, began = Collector(), Seconds.now()
        for event in loop.run(iter(prompts.chosen)):
            collector.add(event, Seconds.now() - began)
            if isinstance(event, PromptCompleted):
                passed()
        settle(models.target.device)
        seconds = Seconds.now() - began
    cache_bytes, cache_entries = _cache_size(loop)
    return Record(
        key=task.key,
        passed=tuple(collector.passed),
        alarms=tuple(collector.alarms),
        recalls=tuple(collector.recalls),
        segments=prompts.segments,
        seconds=seconds.wall,
        cpu_seconds=seconds.cpu,
        learning=round(collector.learning, 3),
        cache_bytes=cache_bytes,
        cache_entries=cache_entries,
        rejected=prompts.rejected + collector.rejected,
        prompts=prompts.digest,
        same_vocabulary=_same_vocabulary(models),
        machine=machine_of(models),
        notices=tuple(notices),
    )


def _open(config: Config, scratch: Path, notice: Callable[[str], None]) -> tuple[Loop, Models]:
    """The loop of one target, and its models."""
    uri = config.publish.mlflow_uri or default_uri(Path("runs"))
    (models,) = load_models(config, uri, scratch / "fetched")
    return build_loop(config, (models,), NoRegistry(), scratch / "run", notice), models


def _cache_size(loop: Loop) -> tuple[int, int]:
    """Bytes and entries of the n-gram cache."""
    (lane,) = loop.lanes.values()
    cache = lane.stages.translate.cache
    return cache.bytes, len(cache)


def _same_vocabulary(models: Models) -> bool:
    """Whether every token that is spelt at all is spelt by the piece of the same number."""
    return all(pieces in (None, (token,)) for token, pieces in enumerate(models.pair.pieces))
