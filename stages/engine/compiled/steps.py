"""The table by which compiled code and Python speak: a program is a list of steps, a step is a row of integers.

Addresses are integers too. What differs from pass to pass is in the header, so that the steps of a model are written
once.

The work of a step is a number of items: rows, key heads of rows, or blocks of outputs. A thread takes some of them at a
time, and goes to the next step when all items are done. So a thread that the system does not run for a while keeps
nobody waiting, unless it holds items.
"""

import struct
from enum import IntEnum


class StepKind(IntEnum):
    """What a step does; products have numbers from `PRODUCTS` on."""

    NORMALISE = 0
    ROUND = 1
    ROTATE = 2
    ATTEND = 3
    GATE = 4
    ADD = 5
    PRODUCTS = 8


class Field(IntEnum):
    """What the integers of a step are."""

    KIND = 0
    INPUTS = 1  # address of what is read, per row
    INPUT_SUMS = 2  # of the sums of its groups
    OUTPUTS = 3  # address of what is written
    OUTPUT_SUMS = 4
    MATRIX = 5  # of a product: addresses of its words or numbers, scales and bias (0: none)
    SCALES = 6
    BIAS = 7
    GROUPS = 8  # of the inputs
    STRIDE = 9  # numbers of a row of the outputs
    ADDS = 10  # whether a product is added to what its outputs hold
    WANTED_ONLY = 11  # whether only the rows whose logits are wanted are computed
    INPUT_BITS = 12  # of what is written: 32, or 16 or 8 if it is rounded with one scale per group
    WEIGHTS = 13  # address of the weights of a norm
    KEY_WEIGHTS = 14  # of those of the norm of keys; unused where queries and keys have no norms
    CACHE = 15  # address of a layer's keys and values
    SLIDES = 16  # whether a layer attends to a window, or rotates as such layers do
    PER_ROW = 17  # items of work per row
    FIXED = 18  # items of work whatever the number of rows
    CHUNK = 19  # items that a thread takes at a time
    FACTOR = 20  # of a product: the bits of a number of float32 that its outputs are multiplied by


class Header(IntEnum):
    """What the integers of the header are."""

    ROWS = 0  # number of new tokens
    WANTED = 1  # number of those whose logits are wanted
    WANTED_ROWS = 2  # address of their indices
    SLOTS = 3  # address of the slot of every new token in the cache
    POSITIONS = 4  # address of its position
    ROTATIONS = 5  # address of cosines and sines by position
    SCORES = 6  # address of the attention scores, for each thread
    SCORES_SIZE = 7  # numbers per head
    KEYS = 8  # address of what every new token attends to, see `KeyList`
    WINDOW_KEYS = 9  # the same in a layer that attends to a window
    BRANCHES = 10  # address of the slots of all trees' paths
    WINDOW_ROTATIONS = 11  # as ROTATIONS, in a layer that attends to a window


class KeyList(IntEnum):
    """Which keys a token attends to: consecutive slots, and then those of its path in a tree."""

    BEGIN = 0  # the first slot
    CONSECUTIVE = 1  # how many follow each other
    BRANCH = 2  # where its path begins among the branches
    LENGTH = 3  # how many tokens of a path there are


COUNTERS = 8  # integers per step: items taken, items done, and the rest of a line of the cache
FIELDS, HEADERS, KEY_FIELDS = max(Field) + 1, max(Header) + 1, len(KeyList)


def bits_of(number: float) -> int:
    """Return the bits of a number of float32, as a table has them.

    >>> hex(bits_of(1.0))
    '0x3f800000'
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return int(bits)
