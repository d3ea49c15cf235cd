"""Drafts for an engine that runs the target itself: token ids go in after each of its passes, drafts come out.

It knows nothing of vLLM. An engine calls `step` after every pass with the rows of its batch. The rows are the
sequences of a `TargetRunner`, as in our own loop; only verification is the engine's.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

from typing_extensions import override

from pipeline.loop import DraftedBlock, TargetRunner
from pipeline.vllm_plugin.pass_costs import PassCosts
from pipeline.vllm_plugin.sequences import Departed, EngineRow, Recognised, RowRequest, SequenceTable
from stages.contract.blocks import SequenceState
from stages.drafting.sources import Choice, Exploration, SourceChooser
from stages.learn.examples.top_distributions import TopDistributions
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import SeededRandomSource
from stages.verification.judge import Judge, PassResult
from store.events import Action, Event

DATASET = "vllm"  # of all requests, in the log
TRIAL_INTERVAL = 8  # passes; one of so many is without drafts until the cost of such a pass is measured


class PlainTrials(Exploration):
    """Decides that a pass has no drafts, where the cost of such a pass is not measured yet. Given costs, which need no
    trials, are None here.
    """

    def __init__(self, costs: PassCosts | None) -> None:
        super().__init__(0.0, 0, ())
        self._costs, self._unmeasured, self._tries = costs, 0, False

    def begin_pass(self, rows: int) -> None:
        self._tries = False
        if self._costs and rows and not self._costs.is_measured(rows):
            self._unmeasured += 1
            self._tries = self._unmeasured % TRIAL_INTERVAL == 0

    @override
    def choose(self, offset: int, block: int, preferred: Action) -> Choice:
        return Choice(Action.NOTHING, 1.0, drawn=True) if self._tries else Choice(preferred, 1.0, drawn=False)


class PromptMaker:
    """Makes a sequence of the tokens of a prompt. `spell` returns the drafter's pieces of a prompt, `decode` its text,
    which the log keeps, and `accepts_examples` whether a training example of the next prompt is recorded.
    """

    def __init__(
        self,
        longest: int,
        spell: Callable[[list[int]], list[int]],
        decode: Callable[[list[int]], str],
        accepts_examples: Callable[[], bool],
    ) -> None:
        self._longest, self._spell, self._decode, self._accepts = longest, spell, decode, accepts_examples
        self.offset = 0

    def __call__(self, tokens: list[int], request: RowRequest) -> SequenceState:
        """Return the sequence. One token more than a draft follows it, so the last place is never drafted for."""
        offset, rng = self.offset, SeededRandomSource(0, self.offset)
        self.offset += 1
        text, remaining = self._decode(tokens), max(0, min(self._longest, request.longest) - len(tokens) - 1)
        pieces = self._spell(tokens)
        sequence = SequenceState(offset, request.name, DATASET, text, tokens, len(tokens), pieces, rng, remaining)
        sequence.sampling = SamplingParams(ignore_eos=request.ignores_ends, stop_token_ids=tuple(request.ends))
        sequence.record_example = self._accepts()
        return sequence


class EngineDrafter:
    """Drafts of unequal length for the rows of an engine's batch. The runner's last stage is the judge."""

    def __init__(
        self,
        runner: TargetRunner,
        judge: Judge,
        make: PromptMaker,
        trials: PlainTrials,
        chooser: SourceChooser,
        take: Callable[[Iterable[Event]], None],
    ) -> None:
        self.runner, self.make = runner, make
        self._judge, self._table, self._trials, self._chooser = judge, SequenceTable(make), trials, chooser
        self._take = take
        self._block: DraftedBlock | None = None  # whose drafts the engine verifies now
        self._drafts: dict[SequenceState, list[int]] = {}

    def step(
        self,
        rows: Sequence[EngineRow],
        top: TopDistributions | None = None,
        waiting: Collection[str] = (),
        *,
        drafts: bool = True,
    ) -> list[list[int]]:
        """Learn from a pass and return per row a draft for the next one, which may be empty. `top` has the target's
        distributions of the pass: for each row one line after its text, and one after each of the drafted tokens that
        were read. `waiting` is as of `SequenceTable.recognise`; `drafts`: whether anything may be drafted.
        """
        recognised, departed = self._table.recognise(rows, waiting)
        self._finish(departed)
        self._finish_block(recognised, self._divide(rows, recognised, top))
        if not drafts:
            self._table.pause()
        drafting = len(self.runner) - self._table.paused
        self._trials.begin_pass(drafting)
        self._chooser.rows = max(1, drafting)
        self._take(self._draft())
        return [self._drafts.get(one.sequence, []) if one else [] for one in recognised]

    def finish_all(self) -> None:
        """Learn the texts of all rows: no pass follows. A row that continues is a new one."""
        _, departed = self._table.recognise([])
        self._finish(departed)
        self._block, self._drafts = None, {}

    def _finish(self, departed: Sequence[Departed]) -> None:
        for one in departed:
            self._take(self.runner.finish_early(one.sequence.offset, one.finish))

    def _finish_block(
        self, recognised: Sequence[Recognised | None], of_rows: Sequence[TopDistributions | None]
    ) -> None:
        """Give the runner what became of its drafts, and the distributions of each row. A new row has no draft, but the
        pass emitted its first token.
        """
        proposals = list(self._block.proposals) if self._block else []
        present = [(one, lines) for one, lines in zip(recognised, of_rows, strict=True) if one]
        for one, lines in present:
            self._judge.results[one.sequence] = PassResult(one.emitted, lines, one.limit)
            if one.is_new:
                self.runner.admit_sequence(one.sequence)
                proposals.append(self._judge.propose_nothing(one.sequence))
        if not present:
            return
        reading = any(one is None or one.is_new or one.has_returned for one in recognised)
        measured = self._block is not None and not reading
        block = self._block or self.runner.empty_block()
        self._take(self.runner.finish_block(block.with_proposals(proposals), measured=measured))
        for one, _ in present:
            if one.sequence.finish:
                self._table.forget(one.sequence)

    def _divide(
        self, rows: Sequence[EngineRow], recognised: Sequence[Recognised | None], top: TopDistributions | None
    ) -> list[TopDistributions | None]:
        """Return the lines of each row; None where they are not known, as when the engine cut a draft and does not say
        so.
        """
        drafted = [len(self._drafts.get(one.sequence, ()) if one else ()) for one in recognised]
        counts = [1 + (own if row.verified is None else row.verified) for row, own in zip(rows, drafted, strict=True)]
        if top is None or len(top) != sum(counts):
            return [None] * len(recognised)
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        return [top.select(*edge) for edge in pairwise(edges)]

    def _draft(self) -> Iterable[Event]:
        self._block = yield from self.runner.draft_block()
        self._drafts = {one.draft.row: list(one.verifiable) for one in self._block.proposals}
