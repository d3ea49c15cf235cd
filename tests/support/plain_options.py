"""Continuations of a text, in plain Python: candidates of the own text and of the memory, with their chances."""

from collections.abc import Sequence
from typing import NamedTuple

from plain_own_text import Match, SuffixIndex

from stages.memory.calibration import RANKS, Calibration, memory_cell, own_cell
from stages.memory.counting import LONGEST
from stages.memory.ngram_table import NgramTable
from store.events import DraftSource


class Option(NamedTuple):
    """A token that may follow, and why.

    Attributes:
        token: the target token.
        chance: estimated probability that it is emitted here.
        source: what proposes it; of several sources that with the highest chance.
        context: number of tokens before it that the source knew.
        seen: how often the source saw it there.
        cell: cell of the calibration that its chance is from.
        match: of the own text: where its next token is; None else.
        remembered: its highest chance by what the memory knows alone; 0 if that does not know it.
    """

    token: int
    chance: float
    source: DraftSource
    context: int
    seen: int
    cell: int
    match: Match | None = None
    remembered: float = 0.0


class OptionFinder:
    """Finds the options after a text.

    Args:
        table: the memory, or None for the own text alone.
        calibration: gives the chances.
        own: whether the own text is a source.
    """

    def __init__(self, table: NgramTable | None, calibration: Calibration, *, own: bool) -> None:
        self._table, self._calibration, self._own = table, calibration, own

    def find(
        self, suffix: tuple[int, ...], index: SuffixIndex, scope: int, before: Option | None = None, *, at_end: bool
    ) -> list[Option]:
        """Return the options by descending chance, each token once.

        Args:
            suffix: the last tokens of the text, at most eight.
            index: index of the own text, which this text may go beyond.
            scope: whose contexts of the memory count.
            before: the option that the suffix ends with, if it goes beyond the text.
            at_end: whether the suffix is the end of the text itself.
        """
        found: dict[int, Option] = {}
        if self._own and (match := index.find(suffix)):
            match = index.extend_match(match) if at_end else _continue_match(match, before)
            cell = own_cell(match.length)
            token, chance = index.token_at(match.place), self._calibration.chance(cell)
            found[token] = Option(token, chance, DraftSource.LOOKUP, match.length, 1, cell, match)
        if self._table is not None:
            for context, (total, tokens, counts) in self._table.find(suffix, scope):
                for rank in range(min(RANKS, len(tokens))):
                    token, count = tokens[rank], counts[rank]
                    cell = memory_cell(context, total, count, rank)
                    chance = self._calibration.chance(cell)
                    known = found.get(token)
                    if known is None or known.chance < chance:
                        there = known and known.match
                        found[token] = Option(token, chance, DraftSource.MEMORY, context, count, cell, there, chance)
                    elif known.remembered < chance:
                        found[token] = known._replace(remembered=chance)
        options = list(found.values())
        if len(options) > 1:
            options.sort(key=_by_chance)
        return options


def best_remembered(options: Sequence[Option]) -> int | None:
    """Return the token that the memory alone holds for the likeliest; None if it knows none."""
    best = max(options, key=lambda option: option.remembered, default=None)
    return best.token if best and best.remembered else None


def _by_chance(option: Option) -> tuple[float, int]:
    return -option.chance, option.token


def _continue_match(match: Match, before: Option | None) -> Match:
    """Return the match with the length of that before it, if it continues it."""
    continues = before is not None and before.match is not None and before.match.place + 1 == match.place
    if continues and before is not None and before.match is not None:
        return Match(match.place, max(match.length, before.match.length + 1))
    return match


def last_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the end of a text that options depend on."""
    return tuple(tokens[-LONGEST:])
