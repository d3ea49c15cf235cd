"""Compiled forward of Llama-like models: a pass is one call, and a token's bits never depend on its neighbours.

The steps of all layers are a table that is written once (`steps.py`); a pass fills in the header.

Shapes: N new tokens, W width, V vocabulary, S steps.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stages.engine.compiled.llama_weights import CompiledLayer, CompiledLlamaWeights, CompiledPart
from stages.engine.compiled.llvm.emitter import VECTOR_SIZE
from stages.engine.compiled.llvm.vector_math import INPUT_SUMS, InputSum, sizes_of_group
from stages.engine.compiled.packing import PackedMatrix
from stages.engine.compiled.program import CompiledSteps, Integers
from stages.engine.compiled.steps import FIELDS, HEADERS, Field, Header, StepKind, bits_of
from stages.engine.forward_pass.forward import ForwardBatch
from stages.engine.forward_pass.slot_forward import SlotForward
from stages.engine.quantisation.groups import GROUP

HEAD_STEPS = 2  # the last norm and the output layer, left out where no logits are wanted
SHARES = 8  # chunks of a product: some for each of a few threads
KEYS_AT_A_TIME = 256  # by which the memory of attention scores grows


class CompiledLlamaForward(SlotForward):
    """Compiled forward with its own keys and values over shared weights."""

    weights: CompiledLlamaWeights

    def __init__(self, weights: CompiledLlamaWeights) -> None:
        super().__init__(weights)
        self._buffers: _Buffers | None = None
        self._lots = dict[int, int]()  # of places that were moved: the slots of their rows begin at `lot * capacity`
        self._written: tuple[tuple[object, ...], Integers] | None = None  # what the table was made of, and the table

    @override
    def share(self) -> "CompiledLlamaForward":
        return CompiledLlamaForward(self.weights)

    @override
    def _begin(self, row: int) -> int:
        return self._lots.get(row, row) * self._capacity

    @override
    def move(self, source: int, destination: int, length: int) -> None:
        """Exchange the slots of two rows. Nothing is copied: a pass lists the slots of every row anyway."""
        ours, theirs = self._lots.get(source, source), self._lots.get(destination, destination)
        self._lots[source], self._lots[destination] = theirs, ours

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        output, kept = self.find_output_layer(), batch.wanted_tokens
        logits_NV = torch.empty(len(kept), output.padded)
        buffers = self._run(batch, output, logits_NV)
        if output.padded != output.outputs:
            logits_NV = logits_NV[:, : output.outputs]
        if cap := self.weights.logit_cap:
            logits_NV.div_(cap).tanh_().mul_(cap)
        logits_NV = self._place_logits(logits_NV)
        return logits_NV, buffers.read_inputs(len(kept), output) if batch.hidden else logits_NV

    def read_states(self, tokens: Sequence[int], output: PackedMatrix) -> Tensor:
        """Compute the last hidden states of a text (T, W), which takes the place of the first row. `output` is any
        output layer of the model, which is not computed.
        """
        self.reserve(1, len(tokens))
        buffers = self._run(ForwardBatch(0, [tokens], [0], wanted=[0]), output, torch.empty(0, output.padded))
        return self.weights.normalise(buffers.state_NW[: len(tokens)], self.weights.norm_W)

    def _run(self, batch: ForwardBatch, output: PackedMatrix, logits_NV: Tensor) -> "_Buffers":
        """Compute a batch, and the logits of its wanted tokens if there are any. Returns what it has written."""
        ids = list(chain(*batch.tokens))
        steps = self.weights.compile(output)
        buffers = self._reserve_buffers(len(ids))
        table = self._write_table(steps, output, buffers)
        begins = [self._begin(batch.first + row) for row in range(len(batch.tokens))]
        lines = _Lines(batch, begins, self.weights.window)
        rotations_KPR = self.weights.rotation_tables(self._capacity)
        numbers, header = lines.make_header(rotations_KPR, buffers)
        states = buffers.states[: len(ids)]
        states[:] = self.weights.embeddings[ids]
        if self.weights.embedding_factor != 1:
            states *= self.weights.embedding_factor
        table[-1, Field.OUTPUTS] = logits_NV.data_ptr()
        steps.run(table if len(logits_NV) else table[:-HEAD_STEPS], header)
        del numbers, rotations_KPR  # whose addresses the header has; another thread may need longer tables meanwhile
        return buffers

    def _reserve_buffers(self, rows: int) -> "_Buffers":
        """Return buffers of at least that many rows, and of scores for at least the longest text of the cache."""
        have = self._buffers
        if have is None or have.rows < rows or have.keys < self._capacity or have.threads != torch.get_num_threads():
            rows = max(rows, 0 if have is None else have.rows)
            self._buffers = have = _Buffers(self.weights, rows, self._capacity)
        return have

    def _write_table(self, steps: CompiledSteps, output: PackedMatrix, buffers: "_Buffers") -> Integers:
        """Return the table of all steps (S, `FIELDS`); written again only if an address has changed."""
        made_of = (steps, output, buffers, self.weights.version, self._caches_SX[0])
        if self._written is None or any(a is not b for a, b in zip(self._written[0], made_of, strict=True)):
            writer = TableWriter(steps, self.weights, buffers)
            rows: list[dict[Field, int]] = []
            for layer, slides, cache_SX in zip(self.weights.layers, self.weights.slides, self._caches_SX, strict=True):
                rows += writer.list_layer(layer, cache_SX.data_ptr(), slides=slides)
            rows += writer.list_head(self.weights.norm_W, output)
            self._written = made_of, make_table(rows)
        return self._written[1]


class _Buffers:
    """What the steps of a pass write for later ones: memory for numbers of rows, keys and threads."""

    def __init__(self, weights: CompiledLlamaWeights, rows: int, keys: int) -> None:
        shape = weights.shape
        self.rows, self.threads = rows, torch.get_num_threads()
        self.keys = -(-keys // KEYS_AT_A_TIME) * KEYS_AT_A_TIME
        widest = max(shape.width, shape.inner, shape.heads * shape.head_size)
        self.state_NW = torch.empty(rows, shape.width)  # the state of every new token; `states` is the same memory
        self.states = self.state_NW.numpy()
        self.joined = torch.empty(rows, shape.joined)
        self.mixed = torch.empty(rows, shape.heads * shape.head_size)
        self.added = torch.empty(rows, shape.width)  # what is normalised before it is added to the state
        self.opened = torch.empty(rows, 2 * shape.inner)
        self.inputs = torch.empty(rows, widest)
        self.input_sums = torch.empty(rows, widest // GROUP, INPUT_SUMS)
        # Per thread: the scores of the heads that share keys, and a line with a number for each of them.
        self.score_size = self.keys + VECTOR_SIZE  # the last vector may end later
        self.scores = torch.empty(self.threads, shape.heads // shape.key_heads + 1, self.score_size)
        self.scores_address = self.scores.data_ptr()

    def read_inputs(self, rows: int, product: PackedMatrix) -> Tensor:
        """Return a copy of the inputs of the last product, as it has read them (N, I)."""
        kind, groups = product.kind, rows * product.groups
        if not rows:  # a part of a prompt that is read in several passes
            return torch.zeros(0, product.groups * GROUP)
        if not kind.rounds:
            return self.inputs.view(-1)[: groups * GROUP].view(rows, -1).clone()
        size, _ = sizes_of_group(kind.input_bits)
        low_GX, *high = self.inputs.view(-1).view(torch.int8)[: groups * size].view(groups, -1, GROUP).float().unbind(1)
        scales_G1 = self.input_sums.view(-1, INPUT_SUMS)[:groups, InputSum.SCALE, None]
        return (sum((256 * one for one in high), low_GX) * scales_G1).view(rows, -1)


@dataclass
class TableWriter:
    """Lists the steps of a model as the fields that differ from 0."""

    steps: CompiledSteps
    weights: CompiledLlamaWeights
    buffers: _Buffers

    def list_layer(self, layer: CompiledLayer, cache: int, *, slides: bool) -> Iterator[dict[Field, int]]:
        joined, mixed, opened = (
            buffer.data_ptr() for buffer in (self.buffers.joined, self.buffers.mixed, self.buffers.opened)
        )
        yield from self._enter(layer.attention, joined)
        norms = {Field.WEIGHTS: _address(layer.query_norm), Field.KEY_WEIGHTS: _address(layer.key_norm)}
        source = {Field.INPUTS: joined, Field.CACHE: cache}
        yield {**by_row(StepKind.ROTATE), **source, Field.SLIDES: int(slides), **norms}
        attend = {
            Field.OUTPUTS: mixed,
            Field.SLIDES: int(slides and self.weights.window is not None),
            Field.PER_ROW: self.weights.key_heads,
            Field.CHUNK: 1,
        }
        yield {Field.KIND: StepKind.ATTEND, **source, **attend}
        yield {**by_row(StepKind.ROUND), Field.INPUTS: mixed, **self.inputs_of(layer.attention.leave)}
        yield from self._leave(layer.attention)
        yield from self._enter(layer.gated, opened)
        gate = {Field.INPUTS: opened, Field.STRIDE: 2 * self.weights.shape.inner}
        yield {**by_row(StepKind.GATE), **gate, **self.inputs_of(layer.gated.leave)}
        yield from self._leave(layer.gated)

    def list_head(self, norm_W: Tensor, output: PackedMatrix) -> Iterator[dict[Field, int]]:
        """Yield the last norm and the output layer; the address of the logits is left to the pass."""
        wanted = {Field.WANTED_ONLY: 1}
        yield self._prepare(norm_W, output) | wanted
        yield self.multiply(output, 0, output.padded, self.weights.logit_factor) | wanted

    def _enter(self, part: CompiledPart, outputs: int) -> Iterator[dict[Field, int]]:
        """Yield the steps from the state to the outputs of a part's first matrices."""
        stride = sum(matrix.padded for matrix in part.enter)
        yield self._prepare(part.before_W, part.enter[0])
        for matrix in part.enter:
            yield self.multiply(matrix, outputs, stride)
            outputs += 4 * matrix.padded

    def _leave(self, part: CompiledPart) -> Iterator[dict[Field, int]]:
        """Yield the steps that add the outputs of a part's last matrix to the state."""
        state, added = self.buffers.state_NW.data_ptr(), self.buffers.added.data_ptr()
        width, factor = self.weights.shape.width, self.weights.part_factor
        if part.after_W is None:
            yield self.multiply(part.leave, state, width, factor) | {Field.ADDS: 1}
            return
        yield self.multiply(part.leave, added, width)
        addresses = {Field.INPUTS: added, Field.OUTPUTS: state, Field.WEIGHTS: part.after_W.data_ptr()}
        yield {**by_row(StepKind.ADD), **addresses}

    def _prepare(self, weight_W: Tensor | None, product: PackedMatrix) -> dict[Field, int]:
        """Return the step that makes the inputs of a product of the state, by a norm if there is one."""
        kind = StepKind.ROUND if weight_W is None else StepKind.NORMALISE
        source = {Field.INPUTS: self.buffers.state_NW.data_ptr(), Field.WEIGHTS: _address(weight_W)}
        return {**by_row(kind), **source, **self.inputs_of(product)}

    def inputs_of(self, product: PackedMatrix) -> dict[Field, int]:
        """Return where a step writes the inputs of a product, and how."""
        buffers = self.buffers
        return {
            Field.OUTPUTS: buffers.inputs.data_ptr(),
            Field.OUTPUT_SUMS: buffers.input_sums.data_ptr(),
            Field.GROUPS: product.groups,
            Field.INPUT_BITS: product.kind.input_bits,
        }

    def multiply(self, matrix: PackedMatrix, outputs: int, stride: int, factor: float = 1.0) -> dict[Field, int]:
        return {
            Field.KIND: self.steps.numbers[matrix.kind],
            Field.INPUTS: self.buffers.inputs.data_ptr(),
            Field.INPUT_SUMS: self.buffers.input_sums.data_ptr(),
            Field.MATRIX: matrix.data.data_ptr(),
            Field.SCALES: matrix.scales.data_ptr(),
            Field.BIAS: _address(matrix.bias_O),
            Field.OUTPUTS: outputs,
            Field.GROUPS: matrix.groups,
            Field.STRIDE: stride,
            Field.FACTOR: bits_of(factor),
            Field.FIXED: matrix.blocks,
            Field.CHUNK: -(-matrix.blocks // SHARES),
        }


def make_table(rows: Sequence[Mapping[Field, int]]) -> Integers:
    """Return the table of steps that are given as the fields that differ from 0."""
    fields = [Field(number) for number in range(FIELDS)]
    return np.array([[int(row.get(field, 0)) for field in fields] for row in rows], dtype=np.int64)


def by_row(kind: StepKind) -> dict[Field, int]:
    """Return the fields of a step whose items are rows, each a chunk."""
    return {Field.KIND: kind, Field.PER_ROW: 1, Field.CHUNK: 1}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Lines:
    """The integers of a pass, of which one array is made: positions, slots, wanted rows, keys. `begins` has the first
    slot of each of its rows; `window` is the number of tokens that sliding layers attend to.
    """

    def __init__(self, batch: ForwardBatch, begins: Sequence[int], window: int | None) -> None:
        self._wanted = batch.wanted_tokens
        self._positions = list(chain(*batch.positions))
        self._slots: list[int] = []
        self._keys: list[int] = []
        self._window_keys: list[int] | None = None if window is None else []
        self._branches: list[int] = []
        for row, (begin, slots) in enumerate(zip(begins, batch.slots, strict=True)):
            self._slots.extend(range(begin + slots.start, begin + slots.stop))
            if batch.paths is None and window is None:  # as below, for most passes
                for slot in slots:
                    self._keys += (begin, slot + 1, 0, 0)
                continue
            for number in range(len(slots)):
                path = None if batch.paths is None else batch.paths[row][number]
                self._keys += self._list_keys(begin, slots.start, number, path, None)
                if self._window_keys is not None:
                    self._window_keys += self._list_keys(begin, slots.start, number, path, window)

    def _list_keys(
        self, begin: int, start: int, number: int, path: Sequence[int] | None, window: int | None
    ) -> tuple[int, int, int, int]:
        """Return what a token attends to, see `KeyList`. `path` are those that it follows in a tree, and itself, None
        in a chain; it attends to at most `window`, its own included.
        """
        branch = len(self._branches)
        if path is None:
            seen = start + number + 1
            consecutive = seen if window is None else min(seen, window)
            return begin + seen - consecutive, consecutive, branch, 0
        seen_path = path if window is None else path[-window:]
        consecutive = start if window is None else min(start, window - len(seen_path))
        self._branches.extend(begin + start + token for token in seen_path)
        return begin + start - consecutive, consecutive, branch, len(seen_path)

    def make_header(self, rotations_KPR: Tensor, buffers: _Buffers) -> tuple["array[int]", "array[int]"]:
        """Return the numbers, and the header with their addresses. Keep both, and the tables, during the pass."""
        lines = [
            self._positions,
            self._slots,
            self._wanted,
            self._keys,
            self._window_keys or [],
            [*self._branches, 0],  # one more, which is read and not used
        ]
        numbers = array("q", chain(*lines))
        begins = accumulate(map(len, lines), initial=0)
        address, _ = numbers.buffer_info()
        positions, slots, kept, keys, window_keys, branches, _ = (address + 8 * begin for begin in begins)
        rotations = rotations_KPR.data_ptr()
        table_size = 4 * rotations_KPR.stride(0) * (len(rotations_KPR) - 1)
        header = array("q", bytes(8 * HEADERS))
        header[Header.ROWS] = len(self._positions)
        header[Header.WANTED] = len(self._wanted)
        header[Header.WANTED_ROWS] = kept
        header[Header.SLOTS] = slots
        header[Header.POSITIONS] = positions
        header[Header.ROTATIONS] = rotations
        header[Header.WINDOW_ROTATIONS] = rotations + table_size
        header[Header.SCORES] = buffers.scores_address
        header[Header.SCORES_SIZE] = buffers.score_size
        header[Header.KEYS] = keys
        header[Header.WINDOW_KEYS] = keys if self._window_keys is None else window_keys
        header[Header.BRANCHES] = branches
        return numbers, header
