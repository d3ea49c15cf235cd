"""Drafts for an engine that runs the target itself: token ids go in after each of its passes, drafts come out.

It knows nothing of vLLM. An engine calls `step` after every pass with the rows that the pass emitted tokens for. The
memory (stages/memory) proposes chains, as long as they are expected to raise the tokens per second. It learns from the
emitted tokens: the chances of its options at once, a text when its row is gone.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pipeline.recorder import PromptCounters, Recorder, Seconds, Versions
from pipeline.vllm_plugin.pass_costs import PassCosts
from pipeline.vllm_plugin.sequences import EngineRow, SequenceTable
from pipeline.vllm_plugin.settings import PluginSettings
from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.drafting.costs import Costs
from stages.memory.text_memory import TextMemory
from stages.memory.tree_growth import GrownTree, TreeLimits
from store.events import Event

VERSIONS = Versions(0, 0, 0)  # no drafter model is updated
TRIAL_INTERVAL = 8  # passes; one of so many is without drafts until the cost of such a pass is measured


@dataclass
class _Drafted:
    """Counters of a sequence, and its last draft."""

    counters: PromptCounters
    draft: Draft


class EngineDrafter:
    """Drafts of unequal length for the rows of an engine's batch.

    Args:
        settings: sources, and the limits of the memory.
        most: maximum number of tokens of a draft.
        longest: maximum number of tokens of a text.
        ends: token ids after which nothing follows.
        target: the target's name, for events.
        clock: seconds, from any moment on.
        emit: receives the events: one per row and pass, and one per row that is gone. Texts are not in them.
    """

    def __init__(
        self,
        settings: PluginSettings,
        most: int,
        longest: int,
        ends: Collection[int],
        target: str,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
    ) -> None:
        given = settings.pass_costs
        self._measured = PassCosts() if given is None else None
        self.memory = TextMemory(
            self._measured or Costs(given or (), drafter=((1, 0.0),)),
            TreeLimits(nodes=most, width=1, depth=most),
            ends,
            own="own" in settings.sources,
            budget_bytes=settings.memory_bytes if "memory" in settings.sources else 0,
            order=settings.order,
        )
        self._table, self._ends = SequenceTable(longest), frozenset(ends)
        self._unmeasured = 0  # passes of a batch without a measured pass that has no drafts
        self._in_flight: dict[SequenceState, _Drafted] = {}
        self._recorder = Recorder(target, _no_bytes, _no_text, text=False)
        self._clock, self._emit, self._returned = clock, emit, clock()

    def step(self, rows: Sequence[EngineRow], *, only_decoded: bool = True) -> list[list[int]]:
        """Learn from a pass and draft for the next one.

        Args:
            rows: those for which the pass emitted tokens.
            only_decoded: whether the pass did nothing else: it read no prompt, so that its time is that of these rows.

        Returns:
            per row its draft, which may be empty.
        """
        now = self._clock()
        recognised, left = self._table.recognise(rows)
        if only_decoded and recognised and not any(one.is_new for one in recognised):
            self._measure([one.sequence for one in recognised], now - self._returned)
        seconds = Seconds(0.0, 0.0, (now - self._returned) / max(1, len(rows)))
        for sequence in left:
            self._finish(sequence, now)
        for one in recognised:
            if one.is_new:
                self.memory.admit(one.sequence)
                self._in_flight[one.sequence] = _Drafted(PromptCounters(now), Draft.from_tree(one.sequence, None, 1.0))
            else:
                self._observe(one.sequence, one.emitted, len(recognised), seconds)
        drafts = self._draft([one.sequence for one in recognised])
        self._returned = self._clock()
        return drafts

    def finish_all(self) -> None:
        """Learn the texts of all rows, as at the end of the engine."""
        _, left = self._table.recognise([])
        for sequence in left:
            self._finish(sequence, self._clock())

    def _measure(self, sequences: Sequence[SequenceState], seconds: float) -> None:
        if self._measured:
            drafted = sum(len(_tokens_of(self._in_flight[one].draft)) for one in sequences)
            self._measured.observe(len(sequences) + drafted, seconds)

    def _observe(self, sequence: SequenceState, emitted: tuple[int, ...], rows: int, seconds: Seconds) -> None:
        """Count and learn what followed a draft."""
        in_flight = self._in_flight[sequence]
        verdict = _judge(in_flight.draft, emitted)
        sequence.block += 1
        in_flight.counters.add(verdict)
        self._emit(self._recorder.record_block(verdict, rows, seconds))
        self.memory.observe(verdict)

    def _draft(self, sequences: list[SequenceState]) -> list[list[int]]:
        grown = self.memory.grow(sequences)
        if self._measured and not self._measured.is_measured(len(sequences)):
            self._unmeasured += 1
            if self._unmeasured % TRIAL_INTERVAL == 0:
                grown = [GrownTree(None, 0.0) for _ in sequences]
        for sequence, one in zip(sequences, grown, strict=True):
            self._in_flight[sequence].draft = Draft.from_tree(sequence, one.tree, 1 + one.expected)
        return [list(one.tree.tokens) if one.tree else [] for one in grown]

    def _finish(self, sequence: SequenceState, now: float) -> None:
        """Learn a text up to its end. What a pass emitted after the end of the sequence is no part of it."""
        emitted = sequence.tokens[sequence.prompt_length :]
        end = next((place for place, token in enumerate(emitted) if token in self._ends), None)
        if end is not None:
            del sequence.tokens[sequence.prompt_length + end + 1 :]
        sequence.finish = "length" if end is None else "stop"
        in_flight = self._in_flight.pop(sequence)
        self.memory.release(sequence)
        self._emit(self._recorder.record_completion(sequence, in_flight.counters, now, VERSIONS))


def _judge(draft: Draft, emitted: tuple[int, ...]) -> Verdict:
    """Return what became of a draft: the engine accepts its tokens as long as they are those that it emits."""
    drafted = _tokens_of(draft)
    pairs = zip(drafted, emitted, strict=False)
    accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Verdict(Proposal(draft, ()), (), emitted, min(accepted + 1, len(drafted), len(emitted)), accepted)


def _tokens_of(draft: Draft) -> tuple[int, ...]:
    return draft.tree.tokens if draft.tree else ()


def _no_bytes(token: int) -> None:
    return None


def _no_text(tokens: list[int]) -> str:
    return ""
