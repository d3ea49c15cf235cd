"""The search for token trees: options after a text, the tree that is grown of them, and what their chances learn.

All of it is compiled by Numba. Between two passes of a target, whatever Python runs is read from memory again: in
Python a search of three places took 130 microseconds, 3 to 5% of a small target's block, whether it found something or
not. The same in plain functions, one idea each: `tests/support/plain_options.py`, `plain_own_text.py` and
`plain_tree_growth.py`; `tests/stages/memory/test_search.py` compares every tree and chance.

Shapes: T tokens of a text, B rows of a batch, P points of a curve of costs, N candidates.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.memory.calibration import COUNT_EDGES, DECAY, OWN_CELLS, OWN_EDGES, RANKS, SHARE_EDGES, ChanceArrays
from stages.memory.compiling import compiled
from stages.memory.counting import CONTINUATIONS, LONGEST, Hash, TableArrays, find_slot, next_hash

LONGEST_MATCH = 32  # longer matches of the own text are counted as this long
REACH = 4096  # tokens at the end of a text that are searched
LOOK_AHEAD = 4  # candidates beyond the best number after which growing ends: costs may have steps
LEAST_SURVIVAL = 0.02  # a candidate below it costs more time to find than it saves
MOST_OPTIONS = 1 + 2 * RANKS  # of the own text, and of two contexts of the memory
LOOKUP, MEMORY = 0, 1  # sources of an option
_OWN_EDGES, _COUNT_EDGES = np.array(OWN_EDGES, np.float64), np.array(COUNT_EDGES, np.float64)
_SHARE_EDGES = np.array(SHARE_EDGES, np.float64)

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
def _bisect_right(edges: Floats, number: float) -> int:
    place = 0
    while place < len(edges) and edges[place] <= number:
        place += 1
    return place


@compiled
def _memory_cell(context: int, total: int, count: int, rank: int) -> int:
    counts, shares = len(_COUNT_EDGES) + 1, len(_SHARE_EDGES) + 1
    share = _bisect_right(_SHARE_EDGES, count / total) if total else 0
    place = ((context - 1) * counts + _bisect_right(_COUNT_EDGES, float(total))) * shares + share
    return OWN_CELLS + place * RANKS + rank


@compiled
def _chance(chances: ChanceArrays, cell: int) -> float:
    trials = chances.trials[cell] + chances.trials_elsewhere[cell]
    return (chances.hits[cell] + chances.hits_elsewhere[cell]) / trials


@compiled
def _write(fields: Integers, option: int, token: int, source: int, context: int, seen: int, cell: int) -> None:
    fields[option, TOKEN], fields[option, SOURCE] = token, source
    fields[option, CONTEXT], fields[option, SEEN], fields[option, CELL] = context, seen, cell


@compiled
def _match_own(text: npt.NDArray[np.int32], suffix: npt.NDArray[np.int32]) -> tuple[int, int]:
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
def _extend_match(text: npt.NDArray[np.int32], place: int, length: int) -> int:
    while length < min(place, LONGEST_MATCH) and text[place - length - 1] == text[len(text) - length - 1]:
        length += 1
    return length


@compiled
def _find_options(
    sources: Sources,
    text: npt.NDArray[np.int32],
    suffix: npt.NDArray[np.int32],
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
        sources, options: what is searched, and where options are written.
        text: the own text.
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
            cell = _bisect_right(_OWN_EDGES, float(length))
            _write(fields, np.int64(0), np.int64(text[place]), np.int64(LOOKUP), length, np.int64(1), cell)
            fields[0, MATCH_PLACE], fields[0, MATCH_LENGTH] = place, length
            chances[0, CHANCE], chances[0, REMEMBERED] = _chance(sources.chances, cell), 0.0
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
    suffix: npt.NDArray[np.int32],
    first: Hash,
    options: Options,
    count: int,
) -> int:
    """Add what the table knows after the two longest known contexts. Returns the number of options."""
    table = sources.table
    known, deepest, second, value = 0, -1, -1, first
    for number in range(min(len(suffix), sources.order)):
        value = next_hash(value, suffix[len(suffix) - 1 - number])
        slot = find_slot(table.hashes, value)
        if slot < 0:
            break
        known, deepest, second = known + 1, slot, deepest
    for context, slot in ((known, deepest), (known - 1, second)):
        for rank in range(RANKS if slot >= 0 else 0):
            place = slot * CONTINUATIONS + rank
            seen = np.int64(table.counts[place])
            if not seen:
                break
            cell = _memory_cell(context, np.int64(table.totals[slot]), seen, rank)
            chance = _chance(sources.chances, cell)
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
    """The rows of a batch: their texts, one per line of `texts`, and what limits their trees.

    Attributes:
        texts: (lines, T).
        lines: of each row.
        lengths: tokens of its text.
        first: hash of no token in its scope.
        depths: candidates of a path at most.
        nodes, width: candidates of a tree, and after one place, at most.
    """

    texts: npt.NDArray[np.int32]
    lines: Integers
    lengths: Integers
    first: npt.NDArray[np.uint64]
    depths: Integers
    nodes: int
    width: int


class Curve(NamedTuple):
    """Costs of passes by their tokens: points of a curve, and what is added to all."""

    sizes: Integers
    costs: Floats
    around: float


@compiled
def _cost(curve: Curve, tokens: int) -> float:
    """Return the cost of a pass over so many tokens; as `_interpolate` of `stages/drafting/costs.py`."""
    sizes, costs = curve.sizes, curve.costs
    if len(sizes) == 1 or tokens <= sizes[0]:
        return costs[0] + curve.around
    after = 1
    while after < len(sizes) - 1 and sizes[after] < tokens:
        after += 1
    low, high = sizes[after - 1], sizes[after]
    return costs[after - 1] + (costs[after] - costs[after - 1]) * (tokens - low) / (high - low) + curve.around


class Heap(NamedTuple):
    """Candidates that may be added: integers (N, `NODE_FIELDS`), chances and survivals (N, 2), and which are left."""

    fields: Integers
    chances: Floats
    left: npt.NDArray[np.bool_]


ROW, PARENT, DEPTH = FIELDS, FIELDS + 1, FIELDS + 2  # after the fields of an option; the parent is a number in the heap
NODE_FIELDS = FIELDS + 3
SURVIVAL = 1  # in the place of what is remembered


@compiled
def _is_in(tokens: Integers, token: int) -> bool:
    found = False
    for one in tokens:
        found = found or one == token
    return found


@compiled
def _push(
    sources: Sources,
    batch: SearchedRows,
    row: int,
    parent: int,
    counts: Integers,
    heap: Heap,
    pushed: int,
    options: Options,
) -> int:
    """Push the candidates after another one, or after the text. Returns the number of all that were pushed."""
    depth = heap.fields[parent, DEPTH] + 1 if parent >= 0 else 0
    if depth == batch.depths[row] or counts[row] == batch.nodes:
        return pushed
    if parent >= 0 and _is_in(sources.ends, heap.fields[parent, TOKEN]):
        return pushed
    length = batch.lengths[row]
    text = batch.texts[batch.lines[row], :length]
    suffix = np.empty(min(LONGEST, length + depth), np.int32)
    place, node = len(suffix) - 1, parent
    while node >= 0 and place >= 0:
        suffix[place] = heap.fields[node, TOKEN]
        place, node = place - 1, heap.fields[node, PARENT]
    for number in range(place + 1):
        suffix[number] = text[length - place - 1 + number]
    before = (heap.fields[parent, MATCH_PLACE], heap.fields[parent, MATCH_LENGTH]) if parent >= 0 else (-1, 0)
    found = _find_options(sources, text, suffix, batch.first[row], before[0], before[1], parent < 0, options)
    survival = heap.chances[parent, SURVIVAL] if parent >= 0 else 1.0
    for number in range(min(found, batch.width)):
        product = survival * options.chances[number, CHANCE]
        if product < LEAST_SURVIVAL:
            break
        for field in range(FIELDS):
            heap.fields[pushed, field] = options.fields[number, field]
        heap.fields[pushed, ROW], heap.fields[pushed, PARENT], heap.fields[pushed, DEPTH] = row, parent, depth
        heap.chances[pushed, CHANCE], heap.chances[pushed, SURVIVAL] = options.chances[number, CHANCE], product
        heap.left[pushed] = True
        pushed += 1
    return pushed


@compiled
def _highest(heap: Heap, pushed: int) -> int:
    """Return the number of the most probable candidate that is left, the first of equals; -1 if there is none."""
    best = -1
    for number in range(pushed):
        if heap.left[number] and (best < 0 or heap.chances[number, SURVIVAL] > heap.chances[best, SURVIVAL]):
            best = number
    return best


@compiled
def grow_rows(sources: Sources, batch: SearchedRows, curve: Curve, fields: Integers, chances: Floats) -> int:
    """Grow the trees of a batch.

    The likeliest candidate of all rows is added, and its own continuations may be added then. Chosen are the first so
    many that give the highest expected tokens per cost: a block of B rows and n candidates emits B tokens and the sum
    of their survivals, and costs a target pass over B + n tokens.

    A pass over two tokens costs a tenth more than one over one. If the text is followed by 7 with 0.5, and 7 by 8 with
    0.9, then (1 + 0.5) / 1.1 and (1 + 0.5 + 0.45) / 1.2 both raise the rate: the tree has both.

    Args:
        sources, batch, curve: what is searched, for which rows, and what passes cost.
        fields: written: of the chosen candidates, row by row and depth first, the token, source, context, seen, row,
            parent in its tree and depth (N, 7).
        chances: written: their chances and survivals (N, 2).

    Returns:
        N.
    """
    rows = len(batch.lines)
    most = batch.width * (rows + rows * batch.nodes)
    heap = Heap(np.empty((most, NODE_FIELDS), np.int64), np.empty((most, 2)), np.zeros(most, np.bool_))
    options = Options(np.empty((MOST_OPTIONS, FIELDS), np.int64), np.empty((MOST_OPTIONS, 2)))
    counts, added = np.zeros(rows, np.int64), np.empty(rows * batch.nodes, np.int64)
    pushed, text_itself = np.int64(0), np.int64(-1)  # as literals they would be types of their own, compiled each
    for row in range(rows):
        pushed = _push(sources, batch, row, text_itself, counts, heap, pushed, options)
    emitted, best, chosen, taken = float(rows), rows / _cost(curve, rows), np.int64(0), 0
    while chosen + LOOK_AHEAD > taken:
        top = _highest(heap, pushed)
        survival = heap.chances[top, SURVIVAL] if top >= 0 else 0.0
        pays = False
        for more in range(1, chosen + LOOK_AHEAD - taken + 1):
            if emitted + more * survival > best * _cost(curve, rows + taken + more):
                pays = True
        if not pays:
            break
        while top >= 0 and counts[heap.fields[top, ROW]] == batch.nodes:
            heap.left[top] = False
            top = _highest(heap, pushed)
        if top < 0:
            break
        row = heap.fields[top, ROW]
        heap.left[top], added[taken] = False, top
        counts[row] += 1
        taken += 1
        pushed = _push(sources, batch, row, top, counts, heap, pushed, options)
        emitted += heap.chances[top, SURVIVAL]
        rate = emitted / _cost(curve, rows + taken)
        if rate > best:
            best, chosen = rate, taken
    _list_depth_first(heap, added, chosen, rows, fields, chances)
    return chosen


@compiled
def _list_depth_first(heap: Heap, added: Integers, chosen: int, rows: int, fields: Integers, chances: Floats) -> None:
    """Write the chosen candidates, each after its parent and all that is below its elder siblings."""
    numbers, stack, written = np.empty(len(heap.left), np.int64), np.empty(chosen + 1, np.int64), 0
    for row in range(rows):
        begin, height = written, 0
        for place in range(chosen - 1, -1, -1):
            if heap.fields[added[place], ROW] == row and heap.fields[added[place], PARENT] < 0:
                stack[height] = added[place]
                height += 1
        while height:
            height -= 1
            node = stack[height]
            numbers[node] = written - begin
            parent = heap.fields[node, PARENT]
            for field in range(CELL):
                fields[written, field] = heap.fields[node, field]
            fields[written, CELL], fields[written, CELL + 1] = row, -1 if parent < 0 else numbers[parent]
            fields[written, CELL + 2] = heap.fields[node, DEPTH]
            chances[written, CHANCE], chances[written, SURVIVAL] = (
                heap.chances[node, CHANCE],
                heap.chances[node, SURVIVAL],
            )
            written += 1
            for place in range(chosen - 1, -1, -1):
                if heap.fields[added[place], PARENT] == node:
                    stack[height] = added[place]
                    height += 1


@compiled
def _observe_row(sources: Sources, text: npt.NDArray[np.int32], emitted: Integers, first: Hash) -> int:
    """Count the options at the places of a row's emitted tokens. Returns how many of these the table predicted.

    The options of all places are found before any is counted, so none is judged by what the block itself taught.
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
        if depth == 0 or not _is_in(sources.ends, emitted[depth - 1]):
            suffix = line[max(0, known + depth - LONGEST) : known + depth]
            counts[depth] = _find_options(
                sources, text, suffix, first, before_place, before_length, depth == 0, options
            )
        before_place, before_length, best = np.int64(-1), np.int64(0), -1
        for number in range(counts[depth]):
            if options.fields[number, TOKEN] == emitted[depth]:
                before_place, before_length = options.fields[number, MATCH_PLACE], options.fields[number, MATCH_LENGTH]
            remembered = options.chances[number, REMEMBERED]
            if remembered > (options.chances[best, REMEMBERED] if best >= 0 else 0.0):
                best = number
        predicted += best >= 0 and options.fields[best, TOKEN] == emitted[depth]
    hits, trials = sources.chances.hits, sources.chances.trials
    for depth in range(places):
        for number in range(counts[depth]):
            cell = fields[depth, number, CELL]
            hits[cell] = DECAY * hits[cell] + (fields[depth, number, TOKEN] == emitted[depth])
            trials[cell] = DECAY * trials[cell] + 1
    return predicted


@compiled
def observe_rows(
    sources: Sources, batch: SearchedRows, emitted: Integers, counts: Integers, predicted: Integers
) -> None:
    """Count the hits and trials of all options at the places of emitted tokens.

    Args:
        sources: whose chances learn.
        batch: the rows, with their texts before the block.
        emitted: the tokens of all rows, joined.
        counts: their numbers per row.
        predicted: written: per row, how many of its tokens the table alone held for the likeliest (B,).
    """
    begin = 0
    for row in range(len(counts)):
        text, end = batch.texts[batch.lines[row], : batch.lengths[row]], begin + counts[row]
        predicted[row] = _observe_row(sources, text, emitted[begin:end], batch.first[row])
        begin = end
