"""The memory of a target as a source of drafts: its table, its calibration, and what it keeps per row."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from stages.contract.blocks import SequenceState, Verdict
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.drafting.costs import VerificationCosts
from stages.memory.calibration import Calibration
from stages.memory.memory_share import LearnedText, MemoryShare
from stages.memory.ngram_table import LONGEST, NgramTable
from stages.memory.options import Option, OptionFinder, best_remembered, last_tokens
from stages.memory.own_text import SuffixIndex
from stages.memory.tree_growth import GrownTree, Path, TreeLimits, grow_trees


@dataclass
class _RowMemory:
    """State of a row: the index of its text, the length of the text in this block, and the options found after it."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    length: int = 0
    options: dict[Path, list[Option]] = field(default_factory=dict)


@dataclass(frozen=True)
class TextMemoryState:
    """Saved state of a `TextMemory`; what it keeps per row is computed from the rows. `table` is None without one."""

    calibration: Saved
    table: Saved


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
        decays: whether a drift halves the counts.
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
        decays: bool = True,
    ) -> None:
        self.table = NgramTable(budget_bytes, order) if budget_bytes else None
        self.calibration = Calibration()
        self._finder = OptionFinder(self.table, self.calibration, own=own)
        self._costs, self._limits, self._ends, self._decays = costs, limits, frozenset(ends), decays
        self._rows: dict[SequenceState, _RowMemory] = {}
        self._unshared: list[LearnedText] | None = None  # None if nothing is shared

    def admit(self, row: SequenceState) -> None:
        """Add a row: a new one, or one of a checkpoint that is resumed."""
        self._rows[row] = _RowMemory()

    def release(self, row: SequenceState) -> None:
        """Remove a row, measure how common what the target emitted in it is, and learn that."""
        del self._rows[row]
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
        """Return a tree per row; see `grow_trees`. Draws no random numbers."""
        expand: list[Callable[[Path, Option | None], list[Option]]] = []
        for row in batch:
            of_row = self._rows[row]
            of_row.index.read(row.tokens)
            of_row.length, of_row.options = len(row.tokens), {}
            expand.append(partial(self._find_options, of_row, last_tokens(row.tokens), row.scope))
        return grow_trees(expand, [self._limits_of(row) for row in batch], self._costs)

    def _limits_of(self, row: SequenceState) -> TreeLimits:
        return self._limits._replace(depth=min(self._limits.depth, row.remaining_tokens))

    def _find_options(
        self, of_row: _RowMemory, text: tuple[int, ...], scope: int, path: Path, before: Option | None
    ) -> list[Option]:
        """Return the options after a path of candidates, and keep them for `observe`."""
        if path and path[-1] in self._ends:
            return []
        suffix = (text + path)[-LONGEST:] if path else text
        options = self._finder.find(suffix, of_row.index, scope, before, at_end=not path)
        of_row.options[path] = options
        return options

    def observe(self, verdict: Verdict) -> None:
        """Learn from every emitted token how good the options in its place were, and count those that the table
        predicted. Called once per block and row.
        """
        row = verdict.proposal.draft.row
        of_row, emitted = self._rows[row], verdict.emitted
        text = last_tokens(row.tokens[max(0, of_row.length - LONGEST) : of_row.length])
        before: Option | None = None
        for depth, token in enumerate(emitted):
            path = emitted[:depth]
            options = of_row.options.get(path)
            if options is None:
                options = self._find_options(of_row, text, row.scope, path, before)
            row.predicted += best_remembered(options) == token
            for option in options:
                self.calibration.observe(option.cell, hit=option.token == token)
            before = next((option for option in options if option.token == token), None)

    def respond_to_drift(self) -> None:
        """Give what is learned from now on more weight."""
        if self.table is not None and self._decays:
            self.table.decay()

    def save(self, writer: SnapshotWriter) -> TextMemoryState:
        """Return the state for a checkpoint."""
        return TextMemoryState(self.calibration.save(), self.table.save(writer) if self.table is not None else None)

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state. The rows are admitted afterwards."""
        state = reader.decode(TextMemoryState, saved)
        self.calibration.restore(state.calibration, reader)
        if self.table is not None:
            self.table.restore(state.table, reader)
