"""A Llama as an OpenVINO model: the graph that OpenVINO's own export makes of it, built from the weights.

The export needs an older `transformers` than this project. Names, order and shapes of the operations are those that
OpenVINO's passes look for, so that norms, rotary positions and attention become fused operations on a kept cache.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench_engine_weights import Llama

FAR = 2**63 - 1  # the end of an axis
LOWEST = float(np.finfo(np.float32).min)
ROW_AXIS, KEY_AXIS, LAST_AXIS = 0, 2, 3  # of heads


def save_graph(llama: Llama, path: Path) -> None:
    """Write the OpenVINO model to `path` (.xml, with the weights beside it)."""
    import openvino

    openvino.save_model(LlamaGraph(llama).model(), path, compress_to_fp16=False)


class LlamaGraph:
    """Builds the graph. Nodes are OpenVINO's; ids are (B, Q), hidden states (B, Q, W), heads (B, H, Q, E).

    Args:
        llama: weights and shape.
    """

    def __init__(self, llama: Llama) -> None:
        import openvino
        from openvino import opset15

        self._openvino, self._ops, self._llama = openvino, opset15, llama
        self._ids = self._parameter("input_ids", 2, np.int64)
        self._seen = self._parameter("attention_mask", 2, np.int64)
        self._positions = self._parameter("position_ids", 2, np.int64)
        self._rows = self._parameter("beam_idx", 1, np.int32)
        self._batch = self._length(self._ids, 0)
        self._cosine, self._sine = self._rotation()
        self._mask = self._causal_mask()
        self._kept: list[Any] = []

    def model(self) -> Any:
        """The whole model: logits of every position."""
        ops, weights = self._ops, self._llama.weights
        embedding = ops.constant(weights["model.embed_tokens.weight"])
        hidden = ops.gather(embedding, ops.convert(self._ids, "i32"), self._whole(0))
        for layer in range(self._llama.layers):
            hidden = self._layer(hidden, layer)
        head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
        logits = self._linear(self._norm(hidden, "model.norm.weight"), head)
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._seen, self._positions, self._rows]
        return self._openvino.Model([ops.result(logits, name="logits")], self._kept, inputs, "llama")

    def _parameter(self, name: str, rank: int, kind: type) -> Any:
        parameter = self._ops.parameter([-1] * rank, kind, name=name)
        parameter.output(0).get_tensor().set_names({name})
        return parameter

    def _whole(self, value: int | list[int]) -> Any:
        return self._ops.constant(np.array(value, np.int64))

    def _real(self, value: float, rank: int = 0) -> Any:
        return self._ops.constant(np.full((1,) * rank, value, np.float32))

    def _length(self, node: Any, axis: int) -> Any:
        """Of an axis, as a list of one."""
        return self._ops.gather(self._ops.shape_of(node, "i64"), self._whole([axis]), self._whole(0))

    def _rotation(self) -> tuple[Any, Any]:
        """Cosine and sine of every position's angles (B, 1, Q, E)."""
        ops, head = self._ops, self._llama.head
        rates = (1 / self._llama.theta ** (np.arange(0, head, 2) / head)).astype(np.float32)[None, :, None]
        ones = self._whole([1])
        rates_BE1 = ops.broadcast(
            ops.constant(rates), ops.concat([self._batch, ones, ones], 0), broadcast_spec="BIDIRECTIONAL"
        )
        positions = ops.convert(ops.unsqueeze(self._positions, self._whole(1)), "f32")
        angles = ops.transpose(ops.matmul(rates_BE1, positions, False, False), self._whole([0, 2, 1]))
        twice = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(twice), self._whole(1)), ops.unsqueeze(ops.sin(twice), self._whole(1))

    def _causal_mask(self) -> Any:
        """0 where a query sees a key, else the lowest number (B, 1, Q, K)."""
        ops = self._ops
        queries, keys = self._length(self._ids, 1), self._length(self._seen, 1)
        places_K = self._count(keys)
        places_Q = ops.add(self._count(queries), ops.subtract(keys, queries))
        before_QK = ops.less_equal(ops.unsqueeze(places_K, self._whole(0)), ops.unsqueeze(places_Q, self._whole(1)))
        there_B11K = ops.unsqueeze(ops.convert(self._seen, "boolean"), self._whole([1, 2]))
        seen_B1QK = ops.logical_and(ops.unsqueeze(before_QK, self._whole([0, 1])), there_B11K)
        return ops.select(seen_B1QK, self._real(0.0), self._real(LOWEST))

    def _count(self, length: Any) -> Any:
        ops = self._ops
        return ops.range(self._whole(0), ops.squeeze(length, self._whole([0])), self._whole(1), "i64")

    def _linear(self, hidden: Any, name: str) -> Any:
        return self._ops.matmul(hidden, self._ops.constant(self._llama.weights[name]), False, True)

    def _norm(self, hidden: Any, name: str) -> Any:
        ops = self._ops
        square = ops.reduce_mean(ops.power(hidden, self._real(2.0, 3)), self._whole([-1]), keep_dims=True)
        scale = ops.divide(self._real(1.0, 3), ops.sqrt(ops.add(square, self._real(self._llama.epsilon, 3))))
        return ops.multiply(ops.constant(self._llama.weights[name][None, None]), ops.multiply(hidden, scale))

    def _layer(self, hidden: Any, layer: int) -> Any:
        ops, name = self._ops, f"model.layers.{layer}."
        hidden = ops.add(hidden, self._attention(self._norm(hidden, f"{name}input_layernorm.weight"), layer))
        normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
        gate = ops.swish(self._linear(normed, f"{name}mlp.gate_proj.weight"))
        units = ops.multiply(gate, self._linear(normed, f"{name}mlp.up_proj.weight"))
        return ops.add(hidden, self._linear(units, f"{name}mlp.down_proj.weight"))

    def _attention(self, hidden: Any, layer: int) -> Any:
        ops, shape, name = self._ops, self._llama, f"model.layers.{layer}.self_attn."
        queries = self._rotated(self._heads(hidden, f"{name}q_proj.weight", shape.heads))
        keys = self._rotated(self._heads(hidden, f"{name}k_proj.weight", shape.pairs))
        keys = self._with_past(keys, f"past_key_values.{layer}.keypresent.{layer}.key")
        values = self._heads(hidden, f"{name}v_proj.weight", shape.pairs)
        values = self._with_past(values, f"past_key_values.{layer}.valuepresent.{layer}.value")
        found = ops.scaled_dot_product_attention(
            queries, self._shared(keys), self._shared(values), self._mask, self._real(shape.head**-0.5), causal=False
        )
        found = ops.transpose(found, self._whole([0, 2, 1, 3]))
        joined = ops.reshape(found, self._whole([0, 0, shape.heads * shape.head]), True)
        return self._linear(joined, f"{name}o_proj.weight")

    def _heads(self, hidden: Any, name: str, number: int) -> Any:
        split = self._ops.reshape(self._linear(hidden, name), self._whole([0, 0, number, self._llama.head]), True)
        return self._ops.transpose(split, self._whole([0, 2, 1, 3]))

    def _rotated(self, heads: Any) -> Any:
        ops, half = self._ops, self._llama.head // 2
        second, first = self._part(heads, half, FAR), self._part(heads, 0, half)
        turned = ops.concat([ops.multiply(second, self._real(-1.0, 4)), first], -1)
        return ops.add(ops.multiply(heads, self._cosine), ops.multiply(turned, self._sine))

    def _part(self, heads: Any, start: int, stop: int) -> Any:
        places = (self._whole([number]) for number in (start, stop, 1, LAST_AXIS))
        return self._ops.slice(heads, *places)

    def _with_past(self, new: Any, name: str) -> Any:
        """What the cache holds and the new behind it; the cache keeps both."""
        from openvino.op.util import Variable, VariableInfo

        ops, shape = self._ops, self._llama
        about = VariableInfo()
        about.data_shape = self._openvino.PartialShape([-1, shape.pairs, -1, shape.head])
        about.data_type, about.variable_id = self._openvino.Type.f32, name
        variable = Variable(about)
        empty = [self._batch, self._whole([shape.pairs]), self._whole([0]), self._whole([shape.head])]
        past = ops.read_value(ops.broadcast(self._real(0.0), ops.concat(empty, 0)), variable)
        both = ops.concat([ops.gather(past, self._rows, self._whole(ROW_AXIS)), new], KEY_AXIS)
        self._kept.append(ops.assign(both, variable))
        return both

    def _shared(self, heads: Any) -> Any:
        """Every key-value head once for each of its query heads."""
        ops, shape = self._ops, self._llama
        lengths = ops.shape_of(heads, "i64")
        front, back = (ops.gather(lengths, self._whole(axes), self._whole(0)) for axes in ([0, 1], [2, 3]))
        wanted = ops.concat([front, self._whole([shape.heads // shape.pairs]), back], 0)
        copies = ops.broadcast(ops.unsqueeze(heads, self._whole(2)), wanted, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(copies, self._whole([0, shape.heads, -1, shape.head]), True)
