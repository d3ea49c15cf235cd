"""Counting continuations in the arrays of an `NgramTable`, and finding contexts there, compiled by Numba.

Shapes: S slots of the table, T tokens of a text.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.engine.compiled.lines.compiling import compile_function, compiled

LONGEST = 8  # tokens of the longest context
WAYS = 8  # slots of a bucket: a context lies in one of them
CONTINUATIONS = 4  # kept per context
MULTIPLIER = 0x9E3779B97F4A7C15
FREE = 0  # hash of an empty slot
_MULTIPLIER, _ONE, _SHIFT, _FREE = np.uint64(MULTIPLIER), np.uint64(1), np.uint64(29), np.uint64(FREE)

Hash = np.uint64  # for which Python has no type
Tokens = npt.NDArray[np.int32]


class TableArrays(NamedTuple):
    """The arrays of a table, flat: per slot its hash, its continuations with their counts, its total, when it was last
    counted, and its scope.
    """

    hashes: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint32]
    totals: npt.NDArray[np.uint32]
    stamps: npt.NDArray[np.uint32]
    scopes: npt.NDArray[np.uint32]


@compiled
def next_hash(value: Hash, token: int) -> Hash:
    """Return the hash of a context that is longer by a token in front; as `context_hashes`."""
    mixed = (value ^ (np.uint64(token) + _ONE)) * _MULTIPLIER
    return mixed ^ (mixed >> _SHIFT)


@compiled
def _bucket(hashes: npt.NDArray[np.uint64], value: Hash) -> int:
    return np.int64(value % np.uint64(len(hashes) // WAYS)) * WAYS


@compile_function
def find_slot(hashes: npt.NDArray[np.uint64], value: Hash) -> int:
    """Return the slot of a context, -1 if there is none."""
    begin = _bucket(hashes, value)
    for slot in range(begin, begin + WAYS):
        if hashes[slot] == value:
            return slot
    return -1


@compiled
def find_contexts(table: TableArrays, suffix: Tokens, order: int, first: Hash) -> tuple[int, int, int]:
    """Return the length of the longest known context at the end of a text, its slot, and the slot of the one that is
    shorter by a token, -1 for none.

    Contexts are tried from the shortest on and the first unknown one ends the search: whatever follows a long context
    was counted after its suffixes too. `first` is the hash of no token in the scope.
    """
    known, longest, second, value = 0, -1, -1, first
    for number in range(min(len(suffix), order)):
        value = next_hash(value, suffix[len(suffix) - 1 - number])
        slot = find_slot(table.hashes, value)
        if slot < 0:
            break
        known, longest, second = known + 1, slot, longest
    return known, longest, second


@compile_function
def learn(
    table: TableArrays,
    text: Tokens,
    begin: int,
    order: int,
    first: Hash,
    scope: int,
    clock: int,
    most: int,
) -> tuple[int, int]:
    """Count every token from `begin` on after its contexts, until more contexts than so many were added. Returns the
    index of the first token that was not counted, and the number of contexts that were added.

    Args:
        text: a text; contexts reach back before `begin`.
        begin: index of the first token that is counted, at least 1.
        first: hash of no token in the scope.
        clock: number of the text, as the stamp of what is counted.
        most: new contexts beyond which the table is to grow before the next token.
    """
    added = np.int64(0)
    for place in range(begin, len(text)):
        if added > most:
            return place, added
        value = first
        for before in range(place - 1, max(0, place - order) - 1, -1):
            value = next_hash(value, text[before])
            slot, is_new = _touch(table, value, scope)
            added += is_new
            table.stamps[slot] = clock
            table.totals[slot] += 1
            _raise(table, slot, text[place])
    return len(text), added


@compiled
def _touch(table: TableArrays, value: Hash, scope: int) -> tuple[int, int]:
    """Return the slot of a context, which is made if there is none, and by how many the contexts are more then."""
    begin = _bucket(table.hashes, value)
    free, worst = np.int64(-1), begin
    for slot in range(begin, begin + WAYS):
        if table.hashes[slot] == value:
            return slot, 0
        if free < 0 and table.hashes[slot] == _FREE:
            free = slot
        if (table.totals[slot], table.stamps[slot]) < (table.totals[worst], table.stamps[worst]):
            worst = slot
    slot = free if free >= 0 else worst
    if free < 0:  # the least frequent one is evicted, of equals the least recently counted
        table.totals[slot] = 0
        for place in range(slot * CONTINUATIONS, (slot + 1) * CONTINUATIONS):
            table.tokens[place] = table.counts[place] = 0
    table.hashes[slot], table.scopes[slot] = value, scope
    return slot, 1 if free >= 0 else 0


@compiled
def _raise(table: TableArrays, slot: int, token: int) -> None:
    """Count a continuation, and keep the order: by count, and the last to reach it first. A new one takes the place of
    the last.
    """
    tokens, counts, begin = table.tokens, table.counts, slot * CONTINUATIONS
    place = begin
    while place < begin + CONTINUATIONS - 1 and counts[place] and tokens[place] != token:
        place += 1
    count = np.int64(counts[place]) + 1 if tokens[place] == token else np.int64(1)
    while place > begin and counts[place - 1] <= count:
        tokens[place], counts[place] = tokens[place - 1], counts[place - 1]
        place -= 1
    tokens[place], counts[place] = token, count
