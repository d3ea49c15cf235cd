"""Metrics for Prometheus: vLLM's names where they mean the same, `omnidraft:` otherwise."""

from collections import deque
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from pipeline.event_metrics import EventMetrics
from pipeline.serve.messages import Chunk, EngineStatus, Finish
from store.events import BlockDone, DraftSource, Event

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_BLOCKS = 1024
LAG = "Completed prompts that the learner has not processed yet."
# Seconds, as vLLM's.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
                       160)  # fmt: skip
BETWEEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
# Names as in vLLM, where vLLM has them.
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "abort", Finish.FAILED: "error"}


class Metrics:
    """Counters and histograms of the engine's events and of the requests. The target's name is a label of all."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._recent = deque[BlockDone](maxlen=RECENT_BLOCKS)  # for moving averages

        def count(name: str, text: str, *labels: str) -> Counter:
            counter = Counter(name, text, ("model_name", *labels), registry=self._registry)
            return counter if labels else counter.labels(self._model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)
            return made.labels(self._model)

        self._drafts = count("vllm:spec_decode_num_drafts", "Blocks in which target tokens were proposed.")
        self._proposed = count("vllm:spec_decode_num_draft_tokens", "Target tokens that were proposed.")
        self._accepted = count("vllm:spec_decode_num_accepted_tokens", "Proposed target tokens that were accepted.")
        text = "Accepted target tokens by their place in the proposal."
        self._at_position = count("vllm:spec_decode_num_accepted_tokens_per_pos", text, "position")
        self._events = EventMetrics(model, self._registry)
        text = "Time from a request's arrival to its first token."
        self.first_token = histogram("vllm:time_to_first_token_seconds", text, FIRST_TOKEN_BUCKETS)
        text = "Time between two chunks of one completion; a chunk has the tokens of one block."
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", text, BETWEEN_BUCKETS)
        text = "Duration of a whole completion."
        self._whole = histogram("vllm:e2e_request_latency_seconds", text, WHOLE_BUCKETS)
        self._prompts = count("vllm:prompt_tokens", "Prompt tokens of finished completions.")
        self._generated = count("vllm:generation_tokens", "Target tokens generated.")
        self._finished = count("vllm:request_success", "Completions, by how they ended.", "finished_reason")
        self._answers = count("omnidraft:http_responses", "Responses by their HTTP status.", "status")

    def count_event(self, event: Event) -> None:
        """Count an event. Called for every event, on any thread: it takes a few microseconds."""
        self._events.count_event(event)
        if isinstance(event, BlockDone):
            self._recent.append(event)
            if event.proposed:
                self._drafts.inc()
                self._proposed.inc(event.proposed)
                self._accepted.inc(event.accepted)
                for index in range(event.accepted):  # not by decisions: private requests have none
                    self._at_position.labels(self._model, str(index)).inc()

    def count_tokens(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def count_finish(self, last: Chunk, seconds: float | None = None) -> None:
        """Count a completion that ended with this chunk.

        `seconds` is the time since its request arrived; None if the client disconnected.
        """
        reason = REASONS.get(last.finish, last.finish.value) if last.finish else ""
        self._finished.labels(self._model, reason).inc()
        if last.usage is not None:
            self._prompts.inc(last.usage.prompt)
        if seconds is not None:
            self._whole.observe(seconds)

    def count_response(self, status: int) -> None:
        self._answers.labels(self._model, str(status)).inc()

    def render(self, status: EngineStatus) -> bytes:
        recent = self._recent.copy()  # a deque must not grow while it is read
        return generate_latest(self._registry) + generate_latest(_StatusCollector(self._model, status, recent))


class _StatusCollector(Collector):
    def __init__(self, model: str, status: EngineStatus, recent: Sequence[BlockDone]) -> None:
        self._model, self._status, self._recent = model, status, recent

    @override
    def collect(self) -> Iterator[Metric]:
        status, prefixes, blocks = self._status, self._status.prefixes, self._recent
        drafted = [block for block in blocks if block.drafter is DraftSource.MODEL]
        judged = sum(block.judged for block in drafted)
        rate = sum(block.accepted for block in drafted) / judged if judged else None
        efficiency = sum(block.emitted for block in blocks) / len(blocks) if blocks else None
        recently = f"over the last {RECENT_BLOCKS} blocks"
        gauges = {
            "vllm:num_requests_running": ("Completions being decoded.", status.running),
            "vllm:num_requests_waiting": ("Completions in the queue.", status.waiting),
            "omnidraft:ready": ("Whether requests are accepted.", status.ready),
            "omnidraft:drafter_version": ("Updates in service.", status.drafter_version),
            "omnidraft:head_version": ("Updates of the head in service.", status.head_version),
            "omnidraft:version_published": ("Newest published version.", status.published_version),
            "omnidraft:learner_alive": ("Whether the learner runs.", status.learner_alive),
            "omnidraft:learner_lag_prompts": (LAG, status.learner_lag),
            "omnidraft:learner_waits": ("Whether the learner waits until no request runs.", status.learner_waits),
            "omnidraft:acceptance_rate": (f"Accepted over judged tokens of the drafter model {recently}.", rate),
            "omnidraft:prefix_cache_bytes": ("Size of the prefix cache.", status.prefix_bytes),
            "omnidraft:block_efficiency": (f"Emitted tokens per target pass {recently}.", efficiency),
        }
        counters = {
            "omnidraft:engine_restarts": ("Restarts of the engine after an error.", status.engine_restarts),
            "omnidraft:learner_restarts": ("Restarts of the learner after an error.", status.learner_restarts),
            "omnidraft:learner_dropped": ("Completed prompts that the learner dropped.", status.learner_dropped),
            "vllm:prefix_cache_queries": ("Prompt tokens for which the prefix cache was searched.", prefixes.tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens copied from the prefix cache.", prefixes.copied_tokens),
            "omnidraft:prefix_cache_prompts": ("Prompts with a prefix that was copied.", prefixes.copied_prompts),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in values.items():
                if value is not None:
                    family = kind(name, text, labels=("model_name",))
                    family.add_metric((self._model,), value)
                    yield family
