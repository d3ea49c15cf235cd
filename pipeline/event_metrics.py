"""Counters for Prometheus of what drafting and learning do, under names of our own. A server has them, and the plugin
of another engine."""

from prometheus_client import CollectorRegistry, Counter

from store.events import BlockDone, DraftSource, Drifted, Event, Recalled, Updated


class EventMetrics:
    """Counters of events. The target's name is a label of every metric, as in vLLM."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model, self._registry = model, registry
        text = "Draft-verify rounds of one completion; emitted tokens over these are the block efficiency."
        self._blocks = self._counter("omnidraft:blocks", text).labels(model)
        self._emitted = self._counter("omnidraft:emitted_tokens", "Target tokens emitted in blocks.").labels(model)
        # The source of a block is that of its draft; of a tree, that of its first candidate.
        text = "Drafter tokens, or candidates of trees, by the source of their block."
        self._pieces = self._by_source("omnidraft:drafted_pieces", text)
        self._drafted_blocks = self._by_source("omnidraft:drafted_blocks", "Blocks with a proposal, by their source.")
        text = "Target tokens that were accepted or rejected, by the source of their block."
        self._judged = self._by_source("omnidraft:judged_tokens", text)
        text = "Accepted target tokens, by the source of their block."
        self._accepted = self._by_source("omnidraft:accepted_tokens", text)
        self._drifts = self._counter("omnidraft:drifts", "Falls of the acceptance rate.", "action")
        text = "Learning steps, by whether they were put into service."
        self._updates = self._counter("omnidraft:updates", text, "part", "served")
        self._recalls = self._counter("omnidraft:recalls", "Scorings of earlier versions after a drift.", "recalled")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self._registry)

    def _by_source(self, name: str, text: str) -> dict[DraftSource, Counter]:
        counter = self._counter(name, text, "drafter")
        return {source: counter.labels(self._model, source.value) for source in DraftSource}

    def count_event(self, event: Event) -> None:
        """Count an event. Called for every event, on any thread: it takes a few microseconds."""
        match event:
            case BlockDone():
                self._count_block(event)
            case Updated():
                self._updates.labels(self._model, event.part, str(event.served).lower()).inc()
            case Drifted():
                self._drifts.labels(self._model, event.action).inc()
            case Recalled():
                self._recalls.labels(self._model, str(event.version is not None).lower()).inc()

    def _count_block(self, block: BlockDone) -> None:
        self._blocks.inc()
        self._emitted.inc(block.emitted)
        if block.proposed:
            self._drafted_blocks[block.drafter].inc()
            self._judged[block.drafter].inc(block.judged)
            self._accepted[block.drafter].inc(block.accepted)
        if block.drafted:
            self._pieces[block.drafter].inc(block.drafted)
