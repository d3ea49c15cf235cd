"""Growing token trees: candidates of all rows of a batch, the likeliest first, as many as raise tokens per second.

Shapes: P points of a curve of costs, N candidates.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.engine.compiled.lines.compiling import compiled
from stages.memory.counting import LONGEST
from stages.memory.options import (
    CHANCE,
    FIELDS,
    MATCH_LENGTH,
    MATCH_PLACE,
    MOST_OPTIONS,
    TOKEN,
    Floats,
    Integers,
    Options,
    SearchedRows,
    Sources,
    find_options,
    is_in,
)

LOOK_AHEAD = 4  # candidates beyond the best number after which growing ends: costs may have steps
LEAST_SURVIVAL = 0.02  # a candidate below it costs more time to find than it saves


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
# Of a chosen candidate, after the token, the source, the context and how often it was seen there.
FOUND_ROW, FOUND_PARENT, FOUND_DEPTH, FOUND_FIELDS = range(4, 8)


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
    if parent >= 0 and is_in(sources.ends, heap.fields[parent, TOKEN]):
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
    found = find_options(sources, text, suffix, batch.first[row], before[0], before[1], parent < 0, options)
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
    """Grow the trees of a batch. Returns N.

    The likeliest candidate of all rows is added, and its own continuations may be added then. Chosen are the first so
    many that give the highest expected tokens per cost: a block of B rows and n candidates emits B tokens and the sum
    of their survivals, and costs a target pass over B + n tokens.

    A pass over two tokens costs a tenth more than one over one. If the text is followed by 7 with 0.5, and 7 by 8 with
    0.9, then (1 + 0.5) / 1.1 and (1 + 0.5 + 0.45) / 1.2 both raise the rate: the tree has both.

    Args:
        fields: written: of the chosen candidates, row by row and depth first, the token, source, context, seen, row,
            parent in its tree and depth (N, `FOUND_FIELDS`).
        chances: written: their chances and survivals (N, 2).
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
    """Write the chosen candidates, each after its parent, a likelier candidate of a place first."""
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
            for field in range(FOUND_ROW):  # the first fields are those of an option
                fields[written, field] = heap.fields[node, field]
            fields[written, FOUND_ROW], fields[written, FOUND_DEPTH] = row, heap.fields[node, DEPTH]
            fields[written, FOUND_PARENT] = -1 if parent < 0 else numbers[parent]
            chances[written, CHANCE], chances[written, SURVIVAL] = (
                heap.chances[node, CHANCE],
                heap.chances[node, SURVIVAL],
            )
            written += 1
            for place in range(chosen - 1, -1, -1):
                if heap.fields[added[place], PARENT] == node:
                    stack[height] = added[place]
                    height += 1
