"""Options after a text: what finds them in the own text and in the table, and what their chances learn.

This and the growth of trees (`tree_growth.py`) is compiled by Numba. Between two passes of a target, whatever Python
runs is read from memory again: in Python a search of three places took 130 microseconds, 3 to 5% of a small target's
block, whether it found something or not. The same in plain functions, one idea each, is in
`tests/stages/memory/test_search.py`, which compares every tree and chance.

Shapes: T tokens of a text, B rows of a batch.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.engine.compiled.lines.compiling import compiled
from stages.memory.calibration import RANKS, ChanceArrays, chance_of, count_trial, memory_cell, own_cell
from stages.memory.counting import CONTINUATIONS, LONGEST, Hash, TableArrays, Tokens, find_contexts

LONGEST_MATCH = 32  # longer matches of the own text are counted as this long
REACH = 4096  # tokens at the end of a text that are searched
MOST_OPTIONS = 1 + 2 * RANKS  # of the own text, and of two contexts of the memory
LOOKUP, MEMORY = 0, 1  # sources of an option

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Sources(NamedTuple):
    """What options are taken from, and what ends a text."""

    table: TableArrays
    chances: ChanceArrays
    ends: Integers
    order: int
    own: bool


class Options(NamedTuple):
    """The options of a place, by descending chance: integers (options, `FIELDS`) and chances (options, 2)."""

    fields: Integers
    chances: Floats


TOKEN, SOURCE, CONTEXT, SEEN, CELL, MATCH_PLACE, MATCH_LENGTH, FIELDS = range(8)
CHANCE, REMEMBERED = range(2)


@compiled
def _write(fields: Integers, option: int, token: int, source: int, context: int, seen: int, cell: int) -> None:
    fields[option, TOKEN], fields[option, SOURCE] = token, source
    fields[option, CONTEXT], fields[option, SEEN], fields[option, CELL] = context, seen, cell


@compiled
def _match_own(text: Tokens, suffix: Tokens) -> tuple[int, int]:
    """Return where the longest end of a suffix that occurs in a text with a continuation is continued, the last such
    place, and its length; a length of 0 if there is none.
    """
    found, matched, last = 0, 0, suffix[-1]
    longest = min(len(suffix), LONGEST)
    for place in range(len(text) - 1, max(0, len(text) - 1 - REACH), -1):
        if text[place - 1] != last:
            continue
        length = 1
        while length < longest and length < place and text[place - 1 - length] == suffix[-1 - length]:
            length += 1
        if length > matched:
            found, matched = place, length
            if length == longest:
                break
    return found, matched


@compiled
def _extend_match(text: Tokens, place: int, length: int) -> int:
    while length < min(place, LONGEST_MATCH) and text[place - length - 1] == text[len(text) - length - 1]:
        length += 1
    return length


@compiled
def find_options(
    sources: Sources,
    text: Tokens,
    suffix: Tokens,
    first: Hash,
    before_place: int,
    before_length: int,
    at_end: bool,
    options: Options,
) -> int:
    """Write the options after a suffix by descending chance, each token once. Returns their number.

    They are the continuation of the own text, and those of the two longest contexts that the table knows. Of a token
    that several of them propose, the source with the highest chance counts.

    Args:
        suffix: the last tokens of the text, or of a path of candidates after it.
        first: hash of no token in the scope.
        before_place, before_length: match of the candidate that the suffix ends with, which a match may continue.
        at_end: whether the suffix is the end of the text itself.
    """
    count, fields, chances = 0, options.fields, options.chances
    if len(suffix) == 0:
        return 0
    if sources.own:
        place, length = _match_own(text, suffix)
        if length:
            if at_end:
                length = _extend_match(text, place, length)
            elif before_length and before_place + 1 == place:
                length = max(length, before_length + 1)
            cell = own_cell(length)
            _write(fields, np.int64(0), np.int64(text[place]), np.int64(LOOKUP), length, np.int64(1), cell)
            fields[0, MATCH_PLACE], fields[0, MATCH_LENGTH] = place, length
            chances[0, CHANCE], chances[0, REMEMBERED] = chance_of(sources.chances, cell), 0.0
            count = 1
    count = _add_remembered(sources, suffix, first, options, count)
    for number in range(1, count):  # by descending chance, of equal ones the smaller token first
        place = number
        while place and _comes_first(fields, chances, place, place - 1):
            for field in range(FIELDS):
                fields[place, field], fields[place - 1, field] = fields[place - 1, field], fields[place, field]
            for field in range(2):
                chances[place, field], chances[place - 1, field] = chances[place - 1, field], chances[place, field]
            place -= 1
    return count


@compiled
def _comes_first(fields: Integers, chances: Floats, one: int, other: int) -> bool:
    if chances[one, CHANCE] != chances[other, CHANCE]:
        return chances[one, CHANCE] > chances[other, CHANCE]
    return fields[one, TOKEN] < fields[other, TOKEN]


@compiled
def _add_remembered(
    sources: Sources,
    suffix: Tokens,
    first: Hash,
    options: Options,
    count: int,
) -> int:
    """Add what the table knows after the two longest known contexts. Returns the number of options."""
    table = sources.table
    known, longest, second = find_contexts(table, suffix, sources.order, first)
    for context, slot in ((known, longest), (known - 1, second)):
        for rank in range(RANKS if slot >= 0 else 0):
            place = slot * CONTINUATIONS + rank
            seen = np.int64(table.counts[place])
            if not seen:
                break
            cell = memory_cell(context, np.int64(table.totals[slot]), seen, rank)
            chance = chance_of(sources.chances, cell)
            count = _add_option(options, count, np.int64(table.tokens[place]), context, seen, cell, chance)
    return count


@compiled
def _add_option(options: Options, count: int, token: int, context: int, seen: int, cell: int, chance: float) -> int:
    """Add an option of the table, or give a known one of the same token the higher chance. Returns their number."""
    fields, chances = options.fields, options.chances
    place = 0
    while place < count and fields[place, TOKEN] != token:
        place += 1
    if place == count:
        fields[place, MATCH_PLACE], fields[place, MATCH_LENGTH] = -1, 0
        count += 1
    elif chances[place, CHANCE] >= chance:
        chances[place, REMEMBERED] = max(chances[place, REMEMBERED], chance)
        return count
    _write(fields, place, token, np.int64(MEMORY), context, seen, cell)
    chances[place, CHANCE], chances[place, REMEMBERED] = chance, chance
    return count


class SearchedRows(NamedTuple):
    """The rows of a batch: their texts, one per line of `texts`, and what limits their trees."""

    texts: Tokens  # (lines, T)
    lines: Integers  # of each row
    lengths: Integers  # tokens of its text
    first: npt.NDArray[np.uint64]  # hash of no token in its scope
    depths: Integers  # candidates of a path at most
    # nodes, width: candidates of a tree, and after one place, at most
    nodes: int
    width: int


@compiled
def is_in(tokens: Integers, token: int) -> bool:
    """Return whether a token is one of some."""
    found = False
    for one in tokens:
        found = found or one == token
    return found


@compiled
def _observe_row(sources: Sources, text: Tokens, emitted: Integers, first: Hash) -> int:
    """Count the options at the places of a row's emitted tokens. Returns how many of these the table predicted.

    The options of all places are found before any is counted, so that the block's own counts affect none of them.
    """
    known, places = min(LONGEST, len(text)), len(emitted)
    line = np.empty(known + places, np.int32)
    for place in range(len(line)):
        line[place] = text[len(text) - known + place] if place < known else emitted[place - known]
    fields, chances = np.empty((places, MOST_OPTIONS, FIELDS), np.int64), np.empty((places, MOST_OPTIONS, 2))
    counts, predicted = np.zeros(places, np.int64), 0
    before_place, before_length = np.int64(-1), np.int64(0)
    for depth in range(places):
        options = Options(fields[depth], chances[depth])
        if depth == 0 or not is_in(sources.ends, emitted[depth - 1]):
            suffix = line[max(0, known + depth - LONGEST) : known + depth]
            counts[depth] = find_options(sources, text, suffix, first, before_place, before_length, depth == 0, options)
        before_place, before_length, best = np.int64(-1), np.int64(0), -1
        for number in range(counts[depth]):
            if options.fields[number, TOKEN] == emitted[depth]:
                before_place, before_length = options.fields[number, MATCH_PLACE], options.fields[number, MATCH_LENGTH]
            remembered = options.chances[number, REMEMBERED]
            if remembered > (options.chances[best, REMEMBERED] if best >= 0 else 0.0):
                best = number
        predicted += best >= 0 and options.fields[best, TOKEN] == emitted[depth]
    for depth in range(places):
        for number in range(counts[depth]):
            hit = fields[depth, number, TOKEN] == emitted[depth]
            count_trial(sources.chances, fields[depth, number, CELL], hit)
    return predicted


@compiled
def observe_rows(
    sources: Sources, batch: SearchedRows, emitted: Integers, counts: Integers, predicted: Integers
) -> None:
    """Count the hits and trials of all options at the places of emitted tokens.

    Args:
        batch: the rows, with their texts before the block.
        predicted: written: per row, how many of its tokens the table alone held for the likeliest (B,).
    """
    begin = 0
    for row in range(len(counts)):
        text, end = batch.texts[batch.lines[row], : batch.lengths[row]], begin + counts[row]
        predicted[row] = _observe_row(sources, text, emitted[begin:end], batch.first[row])
        begin = end
