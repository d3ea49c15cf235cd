"""Choose: drafts by the model or, where that is faster, token trees of the own text and of the memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from stages.contract.blocks import Draft, SequenceState, Verdict
from stages.contract.snapshot import State
from stages.contract.stage import Stage
from stages.drafting.costs import BlockTimes, CostModel, StageSeconds
from stages.drafting.sources import NO_EXPLORATION, Choice, Exploration, SourceChooser, is_trial
from stages.memory.text_memory import GrownTree, TextMemory
from store.events import Action, DraftSource

if TYPE_CHECKING:
    from stages.decode import Decode
    from stages.drafting.no_model import NoModel

# Judged tokens of the model's drafts, each a label of the head. A new head has learned nothing before its first step,
# which is made with 32 labels; one that came trained is reset to its weights as loaded.
LABELS_AFTER_DRIFT, TRAINED_LABELS_AFTER_DRIFT = 32, 12
DRAFTS_PER_TOKEN = 0.2  # of the model, expected in the rest of a row once its prompt is read (.24 in the default run)


class ChooseDraft(Stage[SequenceState, Draft]):
    """Rows to drafts, each from the source with the highest expected tokens per second.

    The model skips a row that has a tree, and reads the missed pieces the next time it drafts for the row.

    Args:
        costs: costs of the models' passes: updated here, and predicting what is logged.
        labels_after_drift: how many tokens of the model's drafts are judged after a drift before trees are used again.
        keeps: whether past blocks change what is chosen.
    """

    def __init__(
        self,
        decode: "Decode | NoModel",
        memory: TextMemory,
        chooser: SourceChooser,
        costs: CostModel,
        *,
        model: bool = True,
        exploration: Exploration = NO_EXPLORATION,
        labels_after_drift: int = LABELS_AFTER_DRIFT,
        keeps: bool = True,
    ) -> None:
        self.memory, self._keeps = memory, keeps
        self._decode, self._chooser, self._costs, self._model = decode, chooser, costs, model
        self._exploration, self._labels_after_drift = exploration, labels_after_drift
        decode.acceptance = chooser.measure_acceptance
        self._choices: dict[SequenceState, Choice] = {}  # of this block
        self._expected: dict[SequenceState, float] = {}  # accepted candidates of each row's tree in this block
        self._due = 0  # tokens of the model's drafts that are judged before trees are used again

    @override
    def admit(self, row: SequenceState) -> None:
        self._decode.admit(row)
        self.memory.admit(row)

    @override
    def release(self, row: SequenceState) -> None:
        self._decode.release(row)
        self.memory.release(row)
        self._expected.pop(row, None)
        self._choices.pop(row, None)

    @override
    def __call__(self, batch: Sequence[SequenceState]) -> list[Draft]:
        ready = [row for row in batch if row.may_draft]
        grown = dict(zip(ready, self.memory.grow(ready), strict=True))
        self._expected = {row: one.expected for row, one in grown.items()}
        self._choices = {
            row: self._exploration.choose(row.offset, row.block, self._prefer(row, one)) for row, one in grown.items()
        }
        trees = {row: one for row, one in grown.items() if one.tree and self._choices[row].action is Action.COPIES}
        by_model = {row for row, choice in self._choices.items() if choice.action is Action.MODEL}
        drafts = self._decode(batch, skipped=self._choices.keys() - by_model, whole=self._due > 0)
        tokens = len(ready) + sum(len(one.tree.candidates) for one in trees.values() if one.tree)
        seconds = self._costs.verification_cost(tokens) / len(ready) if ready else 0.0
        drafts = [
            self._make_draft(row, trees[row], seconds) if row in trees else draft
            for row, draft in zip(batch, drafts, strict=True)
        ]
        choices = [self._choices.get(row) for row in batch]
        return [
            replace(draft, action=choice.action, propensity=choice.propensity) if choice else draft
            for draft, choice in zip(drafts, choices, strict=True)
        ]

    def _prefer(self, row: SequenceState, grown: GrownTree) -> Action:
        """Return the action with the highest expected tokens per second; in trials and after a drift, the model's."""
        candidates = len(grown.tree.candidates) if grown.tree else 0
        can_draft = self._model and self._decode.speculates
        if can_draft and (self._due or is_trial(row, self._chooser.trial_interval)):
            return Action.MODEL
        reading = 0.0  # what each draft of the model bears of the cost of reading the prompt
        if can_draft and not self._decode.has_read(row):
            drafts = 1 + DRAFTS_PER_TOKEN * row.remaining_tokens
            reading = self._costs.prompt_cost(len(row.pieces)) / drafts
        return self._chooser.choose(candidates, grown.expected, model=can_draft, more=reading)

    def _make_draft(self, row: SequenceState, grown: GrownTree, seconds: float) -> Draft:
        assert grown.tree is not None
        source = grown.tree.candidates[0].source
        expected = 1 + grown.expected
        return Draft(row, (), self._decode.empty_probs(), (), None, (), source, grown.tree, expected, seconds)

    def observe(self, verdicts: Sequence[Verdict], seconds: StageSeconds | None = None) -> None:
        """Update the sources with the block's verdicts and the costs with its seconds, if they were measured. Called
        once per block, after verification.

        Rows that entered after the drafts were made, as another engine's do, have nothing to compare.
        """
        if not self._keeps:
            return
        verdicts = [verdict for verdict in verdicts if verdict.proposal.draft.row in self._choices]
        first = any(verdict.proposal.draft.row.block == 1 for verdict in verdicts)  # which may read a prompt
        if seconds and not first and self._decode.prompts.measured:
            self._observe_times(verdicts, seconds)
        preferred = [one for one in verdicts if not self._is_drawn(one)]
        if by_model := [one for one in preferred if one.proposal.draft.source is DraftSource.MODEL]:
            judged = sum(max(1, one.judged) for one in by_model if one.proposal.draft.pieces)
            self._due = max(0, self._due - judged)
        self.memory.observe(verdicts)
        for verdict in preferred:
            draft = verdict.proposal.draft
            action = self._choices[draft.row].action
            self._chooser.observe(verdict, action, self._expected[draft.row], self._decode.count_drawn(draft))

    def _observe_times(self, verdicts: Sequence[Verdict], seconds: StageSeconds) -> None:
        """Update the costs with a block in which the target read no prompt."""
        drafts, prompts = [verdict.proposal.draft for verdict in verdicts], self._decode.prompts
        times = BlockTimes(
            lengths=[self._decode.count_drawn(draft) for draft in drafts],
            tokens=sum(1 + len(verdict.proposal.verifiable) for verdict in verdicts),
            drafting=max(0.0, seconds.drafting - prompts.seconds),
            verifying=seconds.verifying,
            around=seconds.around,
            prompts=prompts,
            trees=sum(draft.action is Action.COPIES and draft.tree is not None for draft in drafts),
        )
        self._costs.observe(times)

    def _is_drawn(self, verdict: Verdict) -> bool:
        choice = self._choices.get(verdict.proposal.draft.row)
        return choice is not None and choice.drawn

    def resume_speculation(self) -> None:
        """Draft with the model again from the next block on, also where trees are preferred."""
        self._chooser.try_model()

    def respond_to_drift(self) -> None:
        """Give the text after a drift more weight in the memory, and draft with the model until the acceptance head,
        which was reset, has labels to be trained on."""
        self.memory.respond_to_drift()
        self._due = self._labels_after_drift

    def report(self) -> None:
        """Log how many drafts ended at a distribution that was not finite."""
        self._decode.report()

    @override
    def state_dict(self, rows: Collection[SequenceState]) -> State:
        return {
            "decode": self._decode.state_dict(rows),
            "memory": self.memory.state_dict(),
            "chooser": self._chooser.state_dict(),
            "due": self._due,
            "costs": self._costs.state_dict(),
        }

    @override
    def load_state_dict(self, state: State) -> None:
        self._decode.load_state_dict(state["decode"])
        self.memory.load_state_dict(state["memory"])
        self._chooser.load_state_dict(state["chooser"])
        self._due = state["due"]
        self._costs.load_state_dict(state["costs"])
        for row in self._decode.admitted_rows:
            self.memory.admit(row)
