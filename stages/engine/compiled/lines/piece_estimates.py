"""What the drafter's distribution shows of a drafted piece, and the acceptance head's estimate, in one compiled call.

The numbers are those of `stages/drafting/head.py`, whose functions of torch they replace on a CPU: for one line of
4,096 logits these take more time than the drafter's pass.

Shapes: B lines, D drafter ids, W width of the drafter, F head features, H inner width of the head.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from torch import Tensor

from stages.engine.compiled.lines.line import Line, can_read
from stages.engine.compiled.llvm.emitter import FLOAT, INT, LONG, POINTER, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.machine import compile_call
from stages.engine.compiled.llvm.vector_math import exponential, logarithm, one_and_exponential

LOWEST_LOG = -10.0  # of the piece's own probability, as a feature
NORM_EPS = 1e-5  # of `torch.nn.LayerNorm`


class Estimate(IntEnum):
    """Numbers of the table that the compiled function reads: sizes, and addresses of what it reads and writes."""

    LINES = 0
    LOGITS = 1
    LOGITS_STRIDE = 2
    SIZE = 3  # D
    HIDDEN = 4
    HIDDEN_STRIDE = 5
    WIDTH = 6  # W
    INNER = 7  # H
    LAYERS = 8  # inner ones
    PIECES = 9  # one integer per line
    INDEX = 10  # one number: the feature of the index
    FEATURES = 11
    ESTIMATES = 12
    SCRATCH = 13
    WEIGHTS = 14  # of the head: addresses, in the order of its parameters


class _Weight(IntEnum):
    """The order of the head's parameters."""

    NORM_SCALE, NORM_SHIFT, ENTER, ENTER_BIAS, INNER = range(5)


class PieceEstimates:
    """Computes features and estimates of drafted pieces.

    Args:
        width: W.
        extra: features after the hidden state, F - W.
        inner: H, a multiple of a vector's size.
        layers: number of the head's inner layers.
    """

    def __init__(self, width: int, extra: int, inner: int, layers: int) -> None:
        self._width, self._features, self._inner, self._layers = width, width + extra, inner, layers
        # The last vector of the logits, the largest two by place, the head's input, its state and what is added.
        self._scratch = np.zeros(3 * VECTOR_SIZE + self._features + VECTOR_SIZE + 2 * inner, np.float32)

    @staticmethod
    def reads(hidden_BW: Tensor, logits_BD: Tensor) -> bool:
        """Return whether a state and logits can be read: at least one line, see `can_read`."""
        return len(logits_BD) > 0 and can_read(hidden_BW) and can_read(logits_BD)

    def __call__(
        self, hidden_BW: Tensor, logits_BD: Tensor, pieces: Sequence[int], index: int, weights: Sequence[Tensor]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the head's input (B, F) and its estimates of the probability of acceptance (B,).

        Args:
            hidden_BW, logits_BD, index: as of `piece_features`.
            pieces: the drafted piece of every line.
            weights: the parameters of the head, in their order.
        """
        lines, size = logits_BD.shape
        features = np.empty((lines, self._features), np.float32)
        estimates = np.empty(lines, np.float32)
        numbers, place = array("q", pieces), array("f", (index / 8,))
        sizes = lines, logits_BD.data_ptr(), logits_BD.stride(0), size, hidden_BW.data_ptr(), hidden_BW.stride(0)
        inputs = self._width, self._inner, self._layers, numbers.buffer_info()[0], place.buffer_info()[0]
        outputs = features.ctypes.data, estimates.ctypes.data, self._scratch.ctypes.data
        table = array("q", (*sizes, *inputs, *outputs, *(weight.data_ptr() for weight in weights)))
        _compile_estimation()(table.buffer_info()[0])
        return features, estimates


@cache
def _compile_estimation() -> Callable[[int], None]:
    """Return the compiled function, which reads a table of `Estimate`."""
    return compile_call("estimate_pieces", _emit_estimates)


def _emit_estimates(emit: Emitter) -> None:
    estimation = _Estimation(emit)
    with emit.loop(0, emit.field(emit.arguments[0], Estimate.LINES)) as line:
        estimation.emit_line(line)


def _constant(value: float) -> Value:
    return ir.Constant(FLOAT, value)


class _Estimation:
    """Emits the parts of an estimate, in the order in which they run."""

    def __init__(self, emit: Emitter) -> None:
        table = emit.arguments[0]
        self.emit, self.build, self.table = emit, emit.builder, table
        self.width, self.inner = emit.field(table, Estimate.WIDTH), emit.field(table, Estimate.INNER)
        tail = emit.pointer(table, Estimate.SCRATCH)
        self.line = Line(emit, emit.field(table, Estimate.SIZE), tail)
        self.pair = emit.offset(tail, VECTOR_SIZE, 4)
        self.state = emit.offset(self.pair, 2 * VECTOR_SIZE, 4)
        self.added = emit.offset(self.state, self.inner, 4)
        self.inputs = emit.offset(self.added, self.inner, 4)
        self.total = emit.variable(VECTOR, emit.floats(0.0))
        self.weighted = emit.variable(VECTOR, emit.floats(0.0))
        self.number = emit.variable(FLOAT, _constant(0.0))

    def weight(self, number: Value | int) -> Value:
        """Return the address of a parameter of the head."""
        place = self.emit.add(self.emit.long(Estimate.WEIGHTS), number)
        return self.build.inttoptr(self.emit.load(self.emit.offset(self.table, place, 8), LONG, 8), POINTER)

    def emit_line(self, line: Value) -> None:
        """Emit the features of a line's piece, and the estimate."""
        emit, table = self.emit, self.table
        logits, hidden = (
            emit.offset(emit.pointer(table, address), emit.multiply(line, emit.field(table, stride)), 4)
            for address, stride in (
                (Estimate.LOGITS, Estimate.LOGITS_STRIDE),
                (Estimate.HIDDEN, Estimate.HIDDEN_STRIDE),
            )
        )
        piece = emit.load(emit.offset(emit.pointer(table, Estimate.PIECES), line, 8), LONG, 8)
        own = emit.load(emit.offset(logits, piece, 4), FLOAT)
        features = emit.offset(
            emit.pointer(table, Estimate.FEATURES), emit.multiply(line, emit.add(self.width, len(_Feature))), 4
        )
        with emit.loop(0, self.width) as place:
            emit.store(emit.load(emit.offset(hidden, place, 4), FLOAT), emit.offset(features, place, 4))
        self._store_numbers(logits, own, emit.offset(features, self.width, 4))
        self._normalise(features)
        self._enter()
        layers = emit.field(table, Estimate.LAYERS)
        with emit.loop(0, layers) as layer:
            self._add_layer(emit.add(emit.multiply(layer, 2), _Weight.INNER))
        last = emit.add(emit.multiply(layers, 2), _Weight.INNER)
        emit.store(self._leave(last), emit.offset(emit.pointer(table, Estimate.ESTIMATES), line, 4))

    def _store_numbers(self, logits: Value, own: Value, features: Value) -> None:
        """Store the features after the hidden state: numbers of the distribution."""
        emit, build = self.emit, self.build
        self.line.begin(logits)
        first, second = self._find_two_largest(logits)
        total, weighted = self.line.sum_exponentials(logits, first)
        log_total = self._at_first(logarithm(emit, emit.spread(total)))
        own_log = build.fsub(build.fsub(own, first), log_total)
        share = build.fdiv(_constant(1.0), total)
        second = self._at_first(exponential(emit, emit.spread(build.fsub(second, first))))
        second = build.fmul(second, share)
        lowest = _constant(LOWEST_LOG)
        numbers = {
            _Feature.OWN_LOG: build.select(build.fcmp_ordered("<", own_log, lowest), lowest, own_log),
            _Feature.ENTROPY: build.fsub(log_total, build.fmul(weighted, share)),
            _Feature.INDEX: emit.load(emit.pointer(self.table, Estimate.INDEX), FLOAT),
            _Feature.FIRST: share,
            _Feature.MARGIN: build.fsub(share, second),
        }
        for feature, number in numbers.items():
            emit.store(number, emit.offset(features, int(feature), 4))

    def _at_first(self, vector: Value) -> Value:
        return self.build.extract_element(vector, ir.Constant(INT, 0))

    def _larger(self, left: Value, right: Value) -> Value:
        return self.build.select(self.build.fcmp_ordered(">", left, right), left, right)

    def _smaller(self, left: Value, right: Value) -> Value:
        return self.build.select(self.build.fcmp_ordered(">", left, right), right, left)

    def _find_two_largest(self, logits: Value) -> tuple[Value, Value]:
        """Return the largest logit and the second largest; of one logit, minus infinity is the second."""
        emit, lowest = self.emit, float("-inf")
        emit.set(self.total, emit.floats(lowest))
        emit.set(self.weighted, emit.floats(lowest))
        self._raise_two(self.line.vectors, lambda vector: self.line.load(logits, vector), self.total, self.weighted)
        emit.store(emit.get(self.total, VECTOR), self.pair)
        emit.store(emit.get(self.weighted, VECTOR), emit.offset(self.pair, VECTOR_SIZE, 4))
        first, second = emit.variable(FLOAT, _constant(lowest)), emit.variable(FLOAT, _constant(lowest))
        for variable in (first, second):
            emit.set(variable, _constant(lowest))
        self._raise_two(emit.long(2 * VECTOR_SIZE), lambda place: self._read(self.pair, place), first, second)
        return emit.get(first, FLOAT), emit.get(second, FLOAT)

    def _raise_two(self, count: Value, load: Callable[[Value], Value], first: Value, second: Value) -> None:
        """Raise two variables, of numbers or of vectors, to the largest two of what is loaded and they are."""
        with self.emit.loop(0, count) as number:
            loaded = load(number)
            before = self.emit.get(first, loaded.type)
            rest = self._smaller(before, loaded)
            self.emit.set(second, self._larger(rest, self.emit.get(second, loaded.type)))
            self.emit.set(first, self._larger(before, loaded))

    def _normalise(self, features: Value) -> None:
        """Store the head's input: the hidden state by the norm, and the other features."""
        emit, build = self.emit, self.build
        width = build.sitofp(self.width, FLOAT)
        mean = build.fdiv(self._sum(self.width, lambda place: self._read(features, place)), width)

        def square(place: Value) -> Value:
            distance = build.fsub(self._read(features, place), mean)
            return build.fmul(distance, distance)

        variance = build.fdiv(self._sum(self.width, square), width)
        spread = emit.call("llvm.sqrt.f32", FLOAT, [build.fadd(variance, _constant(NORM_EPS))])
        scale, shift = self.weight(_Weight.NORM_SCALE), self.weight(_Weight.NORM_SHIFT)
        with emit.loop(0, self.width) as place:
            number = build.fdiv(build.fsub(self._read(features, place), mean), spread)
            number = build.fadd(build.fmul(number, self._read(scale, place)), self._read(shift, place))
            emit.store(number, emit.offset(self.inputs, place, 4))
        with emit.loop(self.width, emit.add(self.width, len(_Feature))) as place:
            emit.store(self._read(features, place), emit.offset(self.inputs, place, 4))

    def _read(self, address: Value, place: Value) -> Value:
        return self.emit.load(self.emit.offset(address, place, 4), FLOAT)

    def _sum(self, count: Value, number: Callable[[Value], Value], start: Value | int = 0) -> Value:
        """Return the sum of numbers, one after the other."""
        self.emit.set(self.number, _constant(0.0))
        with self.emit.loop(start, count) as place:
            self.emit.set(self.number, self.build.fadd(self.emit.get(self.number, FLOAT), number(place)))
        return self.emit.get(self.number, FLOAT)

    def _dot(self, weights: Value, inputs: Value, count: Value) -> Value:
        """Return the sum of the products of so many weights and inputs."""
        emit, build = self.emit, self.build
        emit.set(self.total, emit.floats(0.0))
        whole = emit.multiply(emit.divide(count, VECTOR_SIZE), VECTOR_SIZE)
        with emit.loop(0, whole, VECTOR_SIZE) as place:
            left, right = (emit.load(emit.offset(one, place, 4), VECTOR) for one in (weights, inputs))
            emit.set(self.total, emit.multiply_add(left, right, emit.get(self.total, VECTOR)))
        rest = self._sum(count, lambda place: build.fmul(self._read(weights, place), self._read(inputs, place)), whole)
        return build.fadd(emit.total(emit.get(self.total, VECTOR)), rest)

    def _enter(self) -> None:
        """Compute the first state of the head."""
        features = self.emit.add(self.width, len(_Feature))
        self._multiply(self.emit.long(_Weight.ENTER), self.inputs, features, self.state)

    def _multiply(self, weight: Value, inputs: Value, count: Value, outputs: Value) -> None:
        """Store a layer's outputs, without what follows them."""
        emit, build = self.emit, self.build
        rows, bias = self.weight(weight), self.weight(emit.add(weight, 1))
        with emit.loop(0, self.inner) as row:
            output = self._dot(emit.offset(rows, emit.multiply(row, count), 4), inputs, count)
            emit.store(build.fadd(output, self._read(bias, row)), emit.offset(outputs, row, 4))

    def _activate(self, vector: Value) -> Value:
        """Return `x / (1 + exp(-x))` (SiLU)."""
        return self.build.fdiv(vector, one_and_exponential(self.emit, self.build.fneg(vector)))

    def _add_layer(self, weight: Value) -> None:
        """Add what an inner layer makes of the state."""
        emit, build = self.emit, self.build
        self._multiply(weight, self.state, self.inner, self.added)
        with emit.loop(0, self.inner, VECTOR_SIZE) as place:
            state = emit.offset(self.state, place, 4)
            added = self._activate(emit.load(emit.offset(self.added, place, 4), VECTOR))
            emit.store(build.fadd(emit.load(state, VECTOR), added), state)

    def _leave(self, weight: Value) -> Value:
        """Return the probability that the last layer makes of the state."""
        emit, build = self.emit, self.build
        with emit.loop(0, self.inner, VECTOR_SIZE) as place:
            state = emit.offset(self.state, place, 4)
            emit.store(self._activate(emit.load(state, VECTOR)), state)
        logit = self._dot(self.weight(weight), self.state, self.inner)
        logit = build.fadd(logit, self._read(self.weight(emit.add(weight, 1)), emit.long(0)))
        return self._at_first(build.fdiv(emit.floats(1.0), one_and_exponential(emit, emit.spread(build.fneg(logit)))))


class _Feature(IntEnum):
    """The features after the hidden state, as in `piece_features`."""

    OWN_LOG, ENTROPY, INDEX, FIRST, MARGIN = range(5)
