"""One run of a study: runs the prompts of a seed through the pipeline's loop, without a log."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from benchmarks.studies.messages import collect_messages
from benchmarks.studies.place_accuracy import MeasuringDistiller
from benchmarks.studies.records import Alarm, Key, PromptCounts, Record
from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_models, registry_uri
from pipeline.config.settings import Config
from pipeline.learning.local_learner import LocalLearner
from pipeline.loop import Loop
from pipeline.reports.machine import machine_of
from pipeline.sources.stream import BUILTIN_LIMIT, Source, open_sources
from stages.distill import Distill
from stages.engine.models.devices import synchronize
from stages.vocabulary.pair import Pair
from store.errors import ConfigError, SourceError
from store.events import (
    Drifted,
    Event,
    Outcome,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    Recalled,
    TokenDecision,
    Translation,
    Updated,
)

POOL = 20_000  # prompts of a source from which a seed chooses
ROUNDS = 2  # segments per source when sources alternate


@dataclass(frozen=True)
class StudyTask:
    """Description of one run. It can be pickled for another process."""

    key: Key  # target, seed and arm of the run
    config: Config  # all settings of the run
    segment: int | None  # prompts per segment if the sources alternate A B A B; None for one source after another
    measures_places: bool = False  # whether the drafter is measured at every token of the completions


@dataclass(frozen=True)
class StudyPrompts:
    """The stream of a seed."""

    chosen: tuple[PromptReceived, ...]  # prompts with consecutive offsets from 0
    segments: tuple[int, ...]  # first offset of each part, and the end of the last part
    rejected: int  # number of source rows that could not be prompts

    @property
    def digest(self) -> str:
        """Hex sha256 of the texts in order."""
        return sha256("\0".join(prompt.text for prompt in self.chosen).encode()).hexdigest()


def choose_prompts(config: Config, segment: int | None) -> StudyPrompts:
    """Choose the prompts of each source: shuffled by the seed, up to the limit.

    Raises:
        SourceError: a source cannot be read, or has too few prompts for its segments.
    """
    options = config.source.model_copy(update={"limit": POOL})
    sources = open_sources(config.sources, options)
    events = [list(source.read(0)) for source in sources]
    parts = [
        _shuffle(source, [event for event in read if isinstance(event, PromptReceived)], config.seed, limit)
        for source, read, limit in zip(sources, events, _limits(config, segment), strict=True)
    ]
    if segment is not None:
        parts = _alternating(parts, segment, config.sources)
    chosen = [prompt for part in parts for prompt in part]
    if not chosen:
        raise SourceError(f"A study needs prompts, but {', '.join(config.sources)} has none; see --where.")
    ends = [sum(map(len, parts[:number])) for number in range(len(parts) + 1)]
    numbered = tuple(replace(prompt, offset=offset) for offset, prompt in enumerate(chosen))
    return StudyPrompts(numbered, tuple(ends), sum(isinstance(one, PromptRejected) for read in events for one in read))


def _limits(config: Config, segment: int | None) -> Iterator[int | None]:
    for name in config.sources:
        usual = BUILTIN_LIMIT if name.startswith("builtin:") else None
        yield config.source.limit or usual if segment is None else ROUNDS * segment


def _shuffle(source: Source, prompts: Sequence[PromptReceived], seed: int, limit: int | None) -> list[PromptReceived]:
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
class ClockTimes:
    """Wall time and processor time of this process in seconds. Other processes disturb the latter less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "ClockTimes":
        """Read the wall clock and the processor clock."""
        return cls(perf_counter(), process_time())

    def __sub__(self, began: "ClockTimes") -> "ClockTimes":
        return ClockTimes(round(self.wall - began.wall, 4), round(self.cpu - began.cpu, 4))


class Collector:
    """Collects the counts for a record from the events of a run."""

    def __init__(self, pairs: Mapping[str, Pair], count_entries: Callable[[], int]) -> None:
        self._pairs, self._count_entries = pairs, count_entries
        self.passed: list[PromptCounts] = []
        self.alarms: list[Alarm] = []
        self.recalls: list[int] = []
        self.learning = 0.0
        self.rejected = 0
        self.accepted = Counter[int]()  # accepted n-grams by the offset of their prompt
        self.emitted = Counter[tuple[str, int]]()  # emissions of tokens of several pieces, by target and token

    def add(self, event: Event, now: ClockTimes) -> None:
        """Add an event that occurred at the time `now` from the start of the run."""
        match event:
            case PromptCompleted():
                counts = (event.emitted, event.blocks, event.drafted, event.judged, event.accepted)
                ngrams = {"ngrams": self.accepted[event.offset], "entries": self._count_entries()}
                self.passed.append(PromptCounts(event.offset, *counts, at=now.wall, cpu=now.cpu, **ngrams))
            case Drifted():
                self.alarms.append(Alarm(event.offset, event.action))
            case Recalled(version=int()):
                self.recalls.append(event.offset)
            case Updated():
                self.learning += event.seconds
            case PromptRejected():
                self.rejected += 1
            case TokenDecision(emitted_id=int(token)):
                self.accepted[event.offset] += _is_accepted_ngram(event)
                if len(self._pairs[event.target].pieces[token] or ()) > 1:
                    self.emitted[event.target, token] += 1


def _is_accepted_ngram(decision: TokenDecision) -> bool:
    return decision.outcome is Outcome.ACCEPTED and decision.translation is Translation.NGRAM


def run_task(task: StudyTask) -> Record:
    """Load the models, run the stream to its end, and return the record.

    Raises:
        UsageError: the settings, models or sources cannot be used.
    """
    prompts = choose_prompts(task.config, task.segment)
    with TemporaryDirectory() as scratch:
        with collect_messages() as messages:
            loop, models = _open(task.config, Path(scratch))
            meter = _measure_places(loop) if task.measures_places else None
            pairs = {one.name: one.pair for one in models}
            collector, began = Collector(pairs, lambda: _cache_size(loop)[1]), ClockTimes.now()
            for event in loop.run(iter(prompts.chosen)):
                collector.add(event, _count_seconds(began, meter))
        synchronize(models[0].target.device)
        seconds = _count_seconds(began, meter)
    cache_bytes, cache_entries = _cache_size(loop)
    return Record(
        key=task.key,
        passed=tuple(_add_places(one, meter) for one in collector.passed),
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
        same_vocabulary=all(map(_same_vocabulary, models)),
        machine=machine_of(models[0]),
        notices=tuple(messages),
        accepted_ngrams=collector.accepted.total(),
        ngram_counts=tuple(sorted(collector.emitted.values(), reverse=True)),
    )


def _measure_places(loop: Loop) -> MeasuringDistiller:
    """Let the learner of a loop with one target measure the drafter."""
    (runner,) = loop.runners.values()
    learner = runner.learner
    if not isinstance(learner, LocalLearner) or not isinstance(learner.distill, Distill):
        raise ConfigError("A drafter that does not learn has no examples to be measured on; enable learn.enabled.")
    learner.distill = meter = MeasuringDistiller(learner.distill)
    return meter


def _count_seconds(began: ClockTimes, meter: MeasuringDistiller | None) -> ClockTimes:
    """Return the time since the run began, without that of measurements."""
    found = ClockTimes.now() - began
    return found if meter is None else found - ClockTimes(meter.wall, meter.cpu)


def _add_places(counts: PromptCounts, meter: MeasuringDistiller | None) -> PromptCounts:
    right, places = (meter.found if meter else {}).get(counts.offset, (0.0, 0))
    return replace(counts, first_right=right, places=places)


def _open(config: Config, scratch: Path) -> tuple[Loop, tuple[Models, ...]]:
    """Load the models of all targets and build the loop."""
    models = load_models(config, registry_uri(config.publish), scratch / "fetched")
    return build_loop(config, models, scratch / "run", level=logging.INFO), models


def _cache_size(loop: Loop) -> tuple[int, int]:
    """Bytes and entries of the n-gram caches of all targets."""
    caches = [runner.stages.translate.cache for runner in loop.runners.values()]
    return sum(cache.bytes for cache in caches), sum(map(len, caches))


def _same_vocabulary(models: Models) -> bool:
    """Check whether every token that has a spelling is spelt by the piece with the same id."""
    return all(pieces in (None, (token,)) for token, pieces in enumerate(models.pair.pieces))
