"""The memory of a target as a source of drafts: its table, its calibration, and what it keeps per row."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stages.contract.blocks import Candidate, SequenceState, TokenTree, Verdict
from stages.contract.snapshot import State
from stages.drafting.costs import VerificationCosts
from stages.memory.calibration import Calibration
from stages.memory.counting import LONGEST
from stages.memory.memory_share import LearnedText, MemoryShare
from stages.memory.ngram_table import NgramTable, first_hash
from stages.memory.row_texts import RowTexts
from stages.memory.search_calls import RowNumbers, Search
from store.events import DraftSource


class TreeLimits(NamedTuple):
    """Limits of a row's tree: candidates, candidates after one place, and candidates of one path."""

    nodes: int
    width: int
    depth: int


class GrownTree(NamedTuple):
    """A row's tree, and the number of its candidates that are expected to be accepted."""

    tree: TokenTree | None
    expected: float


@dataclass
class _RowMemory:
    """State of a row: the line of its text, and the length of the text in this block."""

    line: int
    length: int = 0


class TextMemory:
    """Proposes token trees from a row's own text and from what the target emitted in completed rows.

    It needs no model. It learns at two moments: the chances of its options from
    every emitted token, whatever drafted it, and the text of a row when the row is released. Private rows are not
    learned.

    Args:
        costs: costs of the target's passes.
        limits: limits of a row's tree.
        ends: target ids after which nothing follows.
        own: whether the row's own text is a source.
        budget_bytes: size of the table of completed rows; 0 for no such source.
        order: tokens of the longest context.
    """

    def __init__(
        self,
        costs: VerificationCosts,
        limits: TreeLimits,
        ends: Collection[int],
        *,
        own: bool = True,
        budget_bytes: int = 1 << 26,
        order: int = LONGEST,
    ) -> None:
        self.table = NgramTable(budget_bytes, order) if budget_bytes else None
        self.calibration = Calibration()
        self._costs, self._limits, self._ends = costs, limits, frozenset(ends)
        chances, nodes, width = self.calibration.arrays, limits.nodes, limits.width
        self._search = Search(chances, sorted(self._ends), own=own, nodes=nodes, width=width)
        self._texts = RowTexts()
        self._searches = own or self.table is not None
        self._rows: dict[SequenceState, _RowMemory] = {}
        self._unshared: list[LearnedText] | None = None  # None if nothing is shared

    def admit(self, row: SequenceState) -> None:
        """Add a row: a new one, or one of a checkpoint that is resumed."""
        self._rows[row] = _RowMemory(self._texts.take_line())

    def release(self, row: SequenceState) -> None:
        """Remove a row, measure how common what the target emitted in it is, and learn that."""
        self._texts.free_line(self._rows.pop(row).line)
        emitted = [token for token in row.tokens[row.prompt_length :] if token not in self._ends]
        if self.table is not None and emitted:
            row.frequency = self.table.mean_frequency(emitted, row.scope)
        if self.table is not None and not row.private:
            self.table.learn(row.tokens, row.prompt_length, row.scope)
            if self._unshared is not None:
                begin = min(row.prompt_length, LONGEST)
                text = tuple(row.tokens[row.prompt_length - begin :])
                self._unshared.append(LearnedText(text, begin, row.scope))

    def start_sharing(self) -> None:
        """Collect what is learned from now on for `take_share`."""
        self._unshared = []

    def take_share(self) -> MemoryShare:
        """Return the texts that were learned here since the last call, and the hits and trials of all of them."""
        texts = tuple(self._unshared or ())
        if self._unshared:
            self._unshared.clear()
        return MemoryShare(texts, self.calibration.evidence())

    def add_share(self, share: MemoryShare) -> None:
        """Learn what other memories learned. Their hits and trials replace those of the last share."""
        if self.table is not None:
            for text in share.texts:
                self.table.learn(text.tokens, text.begin, text.scope)
        if share.cells:
            self.calibration.pool(share.cells)

    def grow(self, batch: Sequence[SequenceState]) -> list[GrownTree]:
        """Return a tree per row; see `grow_rows`. Draws no random numbers."""
        if not batch or not self._searches:
            return [GrownTree(None, 0.0) for _ in batch]
        for row in batch:
            of_row = self._rows[row]
            self._texts.extend(of_row.line, of_row.length, row.tokens)
            of_row.length = len(row.tokens)
        table = NOTHING if self.table is None else self.table
        rows, curve = self._list_rows(batch), self._costs.verification_curve()
        fields, chances = self._search.grow(table.arrays, table.order, self._texts.tokens, rows, curve)
        return _make_trees(fields, chances, len(batch))

    def _list_rows(self, batch: Sequence[SequenceState]) -> RowNumbers:
        own = [self._rows[row] for row in batch]
        return RowNumbers(
            [of_row.line for of_row in own],
            [of_row.length for of_row in own],
            [as_signed(first_hash(row.scope)) for row in batch],
            [min(self._limits.depth, row.remaining_tokens) for row in batch],
        )

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Learn from every emitted token how good the options in its place were, and count those that the table
        predicted. Called once per block, with rows that `grow` was called for.
        """
        if not verdicts or not self._searches:
            return
        table = NOTHING if self.table is None else self.table
        rows, emitted = [one.proposal.draft.row for one in verdicts], [one.emitted for one in verdicts]
        numbers = self._list_rows(rows)
        predicted = self._search.observe(table.arrays, table.order, self._texts.tokens, numbers, emitted)
        for row, count in zip(rows, predicted, strict=True):
            row.predicted += count

    def respond_to_drift(self) -> None:
        """Give what is learned from now on more weight."""
        if self.table is not None:
            self.table.decay()

    def state_dict(self) -> State:
        """Return the state for a checkpoint; what is kept per row is computed from the rows."""
        table = self.table.state_dict() if self.table is not None else None
        return {"calibration": self.calibration.state_dict(), "table": table}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. The rows are admitted afterwards."""
        self.calibration.load_state_dict(state["calibration"])
        if self.table is not None:
            self.table.load_state_dict(state["table"])


def as_signed(number: int) -> int:
    """Return the integer of 64 bits with a sign that has the bits of one without."""
    return number - (1 << 64) if number >> 63 else number


SOURCES = DraftSource.LOOKUP, DraftSource.MEMORY  # by their numbers in the search
NOTHING = NgramTable(0)  # where there is no table


def _make_trees(fields: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], rows: int) -> list[GrownTree]:
    """Return the trees of a batch from what `search.grow` found."""
    candidates: list[list[Candidate]] = [[] for _ in range(rows)]
    expected = [0.0] * rows
    for (token, source, context, seen, row, parent, depth), (chance, survival) in zip(fields, chances, strict=True):
        candidates[row].append(Candidate(token, parent, depth, chance, SOURCES[source], context, seen))
        expected[row] += survival
    return [
        GrownTree(TokenTree(tuple(own)) if own else None, total)
        for own, total in zip(candidates, expected, strict=True)
    ]
