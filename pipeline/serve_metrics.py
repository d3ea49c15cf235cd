"""Figures for Prometheus: vLLM's names where they mean the same, `omnidraft:` otherwise."""

import threading
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.serve_requests import Chunk, Figures, Finish
from store.events import BlockDone, Drafter, Drifted, Event, Recalled, Updated

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_BLOCKS = 1024
# Seconds, as vLLM's.
TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
# As vLLM calls them, as far as it knows them.
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "abort", Finish.FAILED: "error"}


class Metrics:
    """Counts what the engine does (`event`) and what requests experience.

    Args:
        model: the target's name; a label of every figure, as in vLLM.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._recent = _Recent()
        self._add_drafting()
        self._add_learning()
        self._add_requests()
        self._per_position: dict[int, Counter] = {}

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        counter = Counter(name, told, ("model_name", *labels), registry=self._registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, told, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)

    def _add_drafting(self) -> None:
        count = self._counter
        self._drafts = count("vllm:spec_decode_num_drafts", "Blocks in which target tokens were proposed.")
        self._proposed = count("vllm:spec_decode_num_draft_tokens", "Target tokens that were proposed.")
        self._accepted = count("vllm:spec_decode_num_accepted_tokens", "Proposed target tokens that were accepted.")
        told = "Accepted target tokens by their place in the proposal."
        self._at_position = count("vllm:spec_decode_num_accepted_tokens_per_pos", told, "position")
        told = "Draft-verify rounds of one completion; emitted tokens over these are the block efficiency."
        self._blocks = count("omnidraft:blocks", told)
        self._emitted = count("omnidraft:emitted_tokens", "Target tokens emitted in blocks.")
        pieces = count("omnidraft:drafted_pieces", "Drafter tokens drafted, by who drafted them.", "drafter")
        self._pieces = {drafter: pieces.labels(self._model, drafter.value) for drafter in Drafter}

    def _add_learning(self) -> None:
        count = self._counter
        self._drifts = count("omnidraft:drifts", "Changes of the acceptance rate.", "direction", "action")
        self._updates = count("omnidraft:updates", "Learning steps, served or dropped.", "part", "served")
        self._recalls = count("omnidraft:recalls", "Times that earlier versions were scored after a drift.", "recalled")

    def _add_requests(self) -> None:
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", TO_FIRST
        )
        told = "Between two chunks of new tokens of one completion; a chunk has the tokens of one block."
        self.between_tokens = self._histogram("vllm:inter_token_latency_seconds", told, BETWEEN)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Of a whole completion.", WHOLE)
        self._prompts = self._counter("vllm:prompt_tokens", "Prompt tokens of finished completions.")
        self._generated = self._counter("vllm:generation_tokens", "Target tokens generated.")
        self._finished = self._counter("vllm:request_success", "Completions, by how they ended.", "finished_reason")
        self._answers = self._counter("omnidraft:http_responses", "Answers by their HTTP status.", "status")

    def event(self, event: Event) -> None:
        """Count what happened. Called for every event, on any thread: it takes a few microseconds."""
        match event:
            case BlockDone():
                self._block(event)
            case Updated():
                self._updates.labels(self._model, event.part, str(event.served).lower()).inc()
            case Drifted():
                self._drifts.labels(self._model, event.direction, event.action).inc()
            case Recalled():
                self._recalls.labels(self._model, str(event.version is not None).lower()).inc()

    def _position(self, index: int) -> Counter:
        if (counter := self._per_position.get(index)) is None:
            counter = self._per_position[index] = self._at_position.labels(self._model, str(index))
        return counter

    def _block(self, block: BlockDone) -> None:
        self._blocks.inc()
        self._emitted.inc(block.emitted)
        if block.proposed:
            self._drafts.inc()
            self._proposed.inc(block.proposed)
            self._accepted.inc(block.accepted)
            for index in range(block.accepted):  # of decisions there are none where nothing is to be stored
                self._position(index).inc()
        if block.drafted:
            self._pieces[block.drafter].inc(block.drafted)
        self._recent.push(block)

    def generated(self, tokens: int) -> None:
        """Count new tokens of a completion."""
        self._generated.inc(tokens)

    def finished(self, last: Chunk, seconds: float | None = None) -> None:
        """Count a completion that ended with this chunk, `seconds` after its request came; None if nobody waited."""
        reason = REASONS.get(last.finish, last.finish.value) if last.finish else ""
        self._finished.labels(self._model, reason).inc()
        if last.usage is not None:
            self._prompts.inc(last.usage.prompt)
        if seconds is not None:
            self._whole.observe(seconds)

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._answers.labels(self._model, str(status)).inc()

    def text(self, figures: Figures) -> bytes:
        """All of it in Prometheus's text format, with the engine's figures of this moment."""
        return generate_latest(self._registry) + generate_latest(_Moment(self._model, figures, self._recent))


class _Recent:
    """The last blocks."""

    def __init__(self) -> None:
        self._blocks: deque[BlockDone] = deque(maxlen=RECENT_BLOCKS)
        self._lock = threading.Lock()  # a deque must not grow while it is read

    def push(self, block: BlockDone) -> None:
        with self._lock:
            self._blocks.append(block)

    def rates(self) -> tuple[float | None, float | None]:
        """Accepted over judged of what the model drafted, and emitted over blocks; None before there is any."""
        with self._lock:
            blocks = list(self._blocks)
        drafted = [block for block in blocks if block.drafter is Drafter.MODEL]
        judged = sum(block.judged for block in drafted)
        rate = sum(block.accepted for block in drafted) / judged if judged else None
        return rate, sum(block.emitted for block in blocks) / len(blocks) if blocks else None


class _Moment(Collector):
    """The engine's figures as metrics."""

    def __init__(self, model: str, figures: Figures, recent: _Recent) -> None:
        self._model, self._figures, self._recent = model, figures, recent

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        rate, efficiency = self._recent.rates()
        alive = None if figures.learner_alive is None else int(figures.learner_alive)
        recently = f"over the last {RECENT_BLOCKS} blocks"
        yield from self._gauge("vllm:num_requests_running", "Completions being decoded.", figures.running)
        yield from self._gauge("vllm:num_requests_waiting", "Completions in the queue.", figures.waiting)
        yield from self._gauge("omnidraft:ready", "Whether requests are taken.", int(figures.ready))
        yield from self._gauge("omnidraft:drafter_version", "Updates in service.", figures.drafter_version)
        yield from self._gauge("omnidraft:head_version", "Updates of the head in service.", figures.head_version)
        yield from self._gauge("omnidraft:version_published", "The newest version.", figures.published_version)
        yield from self._gauge("omnidraft:learner_alive", "Whether the learner runs.", alive)
        told = "Completed prompts that the learner has not looked at yet."
        yield from self._gauge("omnidraft:learner_lag_prompts", told, figures.learner_lag)
        told = f"Accepted over judged tokens of the drafter model {recently}."
        yield from self._gauge("omnidraft:acceptance_rate", told, rate)
        yield from self._gauge("omnidraft:block_efficiency", f"Emitted tokens per target pass {recently}.", efficiency)
        dropped = CounterMetricFamily(
            "omnidraft:learner_dropped", "Completed prompts that the learner never looks at.", labels=("model_name",)
        )
        dropped.add_metric((self._model,), figures.learner_dropped)
        yield dropped

    def _gauge(self, name: str, told: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            gauge = GaugeMetricFamily(name, told, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
