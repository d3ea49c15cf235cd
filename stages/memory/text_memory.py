"""The memory of a target as a source of drafts: its table, its calibration, what it keeps per row, and its file.

Shapes: L lines of texts, T tokens of the longest text.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stages.contract.blocks import Candidate, SequenceState, TokenTree, Verdict
from stages.contract.snapshot import State
from stages.drafting.costs import VerificationCosts
from stages.memory.calibration import Calibration
from stages.memory.counting import LONGEST
from stages.memory.memory_share import LearnedText, MemoryShare
from stages.memory.ngram_table import NgramTable, first_hash
from stages.memory.search_calls import RowNumbers, Search
from store.errors import CorruptError
from store.events import DraftSource


class RowTexts:
    """The texts of the rows in flight as lines of one array, which grows."""

    def __init__(self) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)  # (L, T)
        self.lines: dict[SequenceState, int] = {}
        self.lengths: dict[SequenceState, int] = {}  # of the texts in this block
        self._free: list[int] = []

    def add(self, row: SequenceState) -> None:
        """Give a row a line that nobody has."""
        if not self._free:
            lines = len(self.tokens)
            self._reserve(max(1, 2 * lines), self.tokens.shape[1])
            self._free = list(range(len(self.tokens) - 1, lines - 1, -1))
        self.lines[row], self.lengths[row] = self._free.pop(), 0

    def remove(self, row: SequenceState) -> None:
        self._free.append(self.lines.pop(row))
        del self.lengths[row]

    def extend(self, row: SequenceState) -> None:
        """Copy the tokens that were emitted since the last call; at first the hint and the prompt."""
        hint, known = len(row.hint), self.lengths[row]
        length = hint + len(row.tokens)
        if length > self.tokens.shape[1]:
            self._reserve(len(self.tokens), 2 * length)
        if not known:
            self.tokens[self.lines[row], :hint] = row.hint
            known = hint
        self.tokens[self.lines[row], known:length] = row.tokens[known - hint :]
        self.lengths[row] = length

    def _reserve(self, lines: int, length: int) -> None:
        larger = np.zeros((lines, length), np.int32)
        larger[: self.tokens.shape[0], : self.tokens.shape[1]] = self.tokens
        self.tokens = larger


class TreeLimits(NamedTuple):
    """Limits of a row's tree: candidates, candidates after one place, and candidates of one path."""

    nodes: int
    width: int
    depth: int


class GrownTree(NamedTuple):
    """A row's tree, and the number of its candidates that are expected to be accepted."""

    tree: TokenTree | None
    expected: float


class TextMemory:
    """Proposes token trees from a row's own text and from what the target emitted in completed rows.

    It needs no model. It learns at two moments: the chances of its options from every emitted token, whatever drafted
    it, and the text of a row when the row is released, if it `keeps` texts. Private rows are not learned. Nothing
    follows the target ids `ends`. `own`: whether the row's own text is a source; the table of completed rows takes
    `budget_bytes`, 0 for no such source.
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
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self.table = NgramTable(budget_bytes, order) if budget_bytes else None
        self.calibration = Calibration()
        self._costs, self._limits = costs, limits
        self._texts = RowTexts()
        self._search = Search(
            NgramTable(0) if self.table is None else self.table,
            self.calibration.arrays,
            lambda: self._texts.tokens,
            sorted(set(ends)),
            own=own,
            nodes=limits.nodes,
            width=limits.width,
        )
        self._searches = own or self.table is not None
        self._unshared: list[LearnedText] | None = None  # None if nothing is shared

    def admit(self, row: SequenceState) -> None:
        """Add a row: a new one, or one of a checkpoint that is resumed."""
        self._texts.add(row)

    def release(self, row: SequenceState) -> None:
        """Remove a row, and learn what the target emitted in it."""
        self._texts.remove(row)
        if self.table is not None and not row.private and self._keeps:
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
        if share.cells is not None:
            self.calibration.pool(share.cells)

    def grow(self, batch: Sequence[SequenceState]) -> list[GrownTree]:
        """Return a tree per row; see `grow_rows`. Draws no random numbers."""
        if not batch or not self._searches:
            return [GrownTree(None, 0.0) for _ in batch]
        for row in batch:
            self._texts.extend(row)
        fields, chances = self._search.grow(self._list_rows(batch), self._costs.verification_curve())
        return _make_trees(fields, chances, len(batch))

    def _list_rows(self, batch: Sequence[SequenceState]) -> RowNumbers:
        hashes = [first_hash(row.scope) for row in batch]
        return RowNumbers(
            [self._texts.lines[row] for row in batch],
            [self._texts.lengths[row] for row in batch],
            [number - (1 << 64) if number >> 63 else number for number in hashes],  # their bits as signed integers
            [min(self._limits.depth, row.remaining_tokens) for row in batch],
        )

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Learn from every emitted token how good the options in its place were, and count those that the table
        predicted. Called once per block, with rows that `grow` was called for.
        """
        if not verdicts or not self._searches:
            return
        rows, emitted = [one.proposal.draft.row for one in verdicts], [one.emitted for one in verdicts]
        for row, count in zip(rows, self._search.observe(self._list_rows(rows), emitted), strict=True):
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


SOURCES = DraftSource.LOOKUP, DraftSource.MEMORY  # by their numbers in the search


def _make_trees(fields: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], rows: int) -> list[GrownTree]:
    candidates: list[list[Candidate]] = [[] for _ in range(rows)]
    expected = [0.0] * rows
    for (token, source, context, seen, row, parent, depth), (chance, survival) in zip(fields, chances, strict=True):
        candidates[row].append(Candidate(token, parent, depth, chance, SOURCES[source], context, seen))
        expected[row] += survival
    return [
        GrownTree(TokenTree(tuple(own)) if own else None, total)
        for own, total in zip(candidates, expected, strict=True)
    ]


MEMORY_FILE = "memory.safetensors"


def write_memory(path: Path, memory: TextMemory, vocabularies: str) -> None:
    """Write a memory with its chances to a version's folder. Writes nothing for one without a table.

    `vocabularies` is the digest of the target's and the drafter's, without which token ids mean nothing. Raises
    `OSError` if the file cannot be written.
    """
    if memory.table is None:
        return
    state, cells = memory.table.state_dict(), torch.tensor(memory.calibration.cells, dtype=torch.float64)
    slots, clock, tokens = state["sizes"]
    # One entry: the library writes several in any order, and equal memories must be equal files.
    content = json.dumps({"vocabularies": vocabularies, "slots": slots, "clock": clock, "tokens": tokens})
    save_file({**state["arrays"], "hits": cells[0].clone(), "trials": cells[1].clone()}, path, {"memory": content})


def _read(path: Path) -> tuple[str, State, list[list[float]]]:
    """Return the digest of the vocabularies, the state of the table, and the cells of the calibration."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["memory"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        cells = [tensors.pop(name).tolist() for name in ("hits", "trials")]
        sizes = metadata["slots"], metadata["clock"], metadata["tokens"]
        return metadata["vocabularies"], {"sizes": sizes, "arrays": tensors}, cells
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} must hold the memory of a version, but: {error}") from error


def read_memory(path: Path, memory: TextMemory, vocabularies: str) -> bool:
    """Replace a memory by that of a file; of a larger one, what does not fit into the budget is evicted. Returns
    whether the memory was read: not if it has no table, or if the file is of other vocabularies. Raises `CorruptError`
    if the file is not one of a memory.
    """
    of_vocabularies, table, cells = _read(path)
    if memory.table is None or of_vocabularies != vocabularies:
        return False
    memory.table.load_state_dict(table)
    memory.calibration.load_cells(cells)
    return True


def read_table(path: Path) -> NgramTable:
    """Read the table of a file, whatever its vocabularies. Raises CorruptError."""
    return NgramTable.from_state(_read(path)[1])
