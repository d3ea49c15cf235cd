"""The benchmark's arms of OpenVINO GenAI on the same weights: plain, speculative and prompt lookup.

OpenVINO's export needs an older `transformers` than this project, so this module builds the graph of a Llama from the
weights. Names, order and shapes of the operations are those that OpenVINO's passes match, so that norms, rotary
positions and attention become fused operations on a stateful cache.
"""

from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from pipeline.bench.engines.weights import LOOKUP_NGRAM, PRECISIONS, EngineRequest, Llama, Mode, load_llama
from pipeline.bench.speed.text_arms import PromptWords, TextArm
from stages.tools.transformers_baselines import LOOKUP_TOKENS
from store.errors import UsageError
from store.events import PromptReceived

FAR = 2**63 - 1  # the end of an axis
LOWEST = float(np.finfo(np.float32).min)
WEIGHTS = {"float32": None, "int8": "INT8_ASYM", "int4": "INT4_ASYM"}  # of the target: modes of NNCF
GROUP = 32  # weights that share a scale in four bits, as in GGUF files
ROW_AXIS, KEY_AXIS, LAST_AXIS = 0, 2, 3  # of heads


def require_openvino(weights: str = "float32") -> str:
    """The version of OpenVINO GenAI.

    Args:
        weights: format of the target's weights, a key of `WEIGHTS`.

    Raises:
        UsageError: it is not installed, or NNCF, which compresses weights, is not.
    """
    if find_spec("openvino_genai") is None or find_spec("openvino_tokenizers") is None:
        raise UsageError("--openvino needs OpenVINO GenAI in this environment: pip install openvino-genai")
    if WEIGHTS[weights] and find_spec("nncf") is None:
        raise UsageError(f"--openvino-weights {weights} needs NNCF in this environment: pip install nncf")
    return version("openvino-genai")


class OpenVINOArm(TextArm):
    """OpenVINO GenAI with continuous batching, also with its speculative decoding or its prompt lookup.

    It reports how much it drafted, but not how much it judged, so it has no acceptance rate here.

    Args:
        request: models, sampling and precision.
        words: encodes prompts in the target's vocabulary.
        folder: folder for the converted weights.
        mode: how it decodes.
        weights: format of the target's weights, a key of `WEIGHTS`.

    Raises:
        UsageError: OpenVINO refuses the models; the message has its reason.
    """

    def __init__(
        self,
        request: EngineRequest,
        words: PromptWords,
        folder: Path,
        mode: Mode = Mode.PLAIN,
        weights: str = "float32",
    ) -> None:
        super().__init__(words)
        self._request, self._mode = request, mode
        target = convert_weights(load_llama(request.target), folder / f"target-{weights}", weights)
        with_drafter = mode is Mode.SPECULATIVE
        drafter = convert_weights(load_llama(request.drafter), folder / "drafter") if with_drafter else None
        try:
            self._pipeline = _pipeline(request, target, drafter, mode)
        except RuntimeError as error:
            raise UsageError(f"OpenVINO GenAI refuses {request.target} and its drafter: {_reason(error)}") from error

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[tuple[int, ...]]:
        """Complete all prompts; one enters as another ends, because the scheduler alone would admit all at once."""
        waiting, running = deque(enumerate(prompts)), dict[int, Any]()
        tokens: dict[int, tuple[int, ...]] = {}
        while waiting or running:
            while waiting and len(running) < self._request.batch:
                place, prompt = waiting.popleft()
                settings = _settings(self._request, prompt.offset, self._mode)
                running[place] = self._pipeline.add_request(place, _tensor(self._words.encode(prompt)), settings)
            self._pipeline.step()
            for place in [place for place, handle in running.items() if handle.get_status().name != "RUNNING"]:
                tokens[place] = tuple(map(int, running.pop(place).read_all()[0].generated_ids))
        return [tokens[place] for place in range(len(prompts))]

    @override
    def close(self) -> None:
        """Delete the pipeline and release its models."""
        del self._pipeline


def convert_weights(llama: Llama, folder: Path, weights: str = "float32") -> Path:
    """Write an OpenVINO folder of a Llama (model, tokenizer, detokenizer), unless it exists.

    Args:
        llama: the model.
        folder: where to.
        weights: format of the matrices, a key of `WEIGHTS`; without data to calibrate with, as in a GGUF file.

    Raises:
        UsageError: OpenVINO cannot convert the tokenizer.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer

    if (folder / "openvino_detokenizer.xml").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = _compress(LlamaGraph(llama).model(), weights)
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    try:
        parts = convert_tokenizer(llama.tokenizer, with_detokenizer=True)
    except Exception as error:  # OpenVINO raises many types
        raise UsageError(f"OpenVINO must be able to convert the tokenizer, but: {_reason(error)}") from error
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")
    return folder


def _compress(model: Any, weights: str) -> Any:
    mode = WEIGHTS[weights]
    if mode is None:
        return model
    import nncf

    group = {"group_size": GROUP, "ratio": 1.0, "all_layers": True} if weights == "int4" else {}
    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode[mode], **group)


def _pipeline(request: EngineRequest, target: Path, drafter: Path | None, mode: Mode) -> Any:
    import openvino_genai

    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[request.dtype],
        "KV_CACHE_PRECISION": PRECISIONS[request.dtype],
        "INFERENCE_NUM_THREADS": request.threads,
    }
    draft: dict[str, Any] = {"prompt_lookup": True} if mode is Mode.LOOKUP else {}
    if drafter:
        draft["draft_model"] = openvino_genai.draft_model(drafter, "CPU", **properties)
    scheduler = openvino_genai.SchedulerConfig()  # its max_num_seqs limits only the other, slower schedule
    tokenizer = openvino_genai.Tokenizer(target)
    return openvino_genai.ContinuousBatchingPipeline(target, tokenizer, scheduler, "CPU", **properties, **draft)


def _settings(request: EngineRequest, offset: int, mode: Mode) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = request.max_new_tokens
    settings.do_sample = request.temperature > 0
    if request.temperature > 0:
        settings.temperature, settings.top_p = request.temperature, request.top_p
        settings.rng_seed = request.seed + offset
    if request.temperature > 0 and request.top_k:
        settings.top_k = request.top_k
    if request.ends:
        settings.set_eos_token_id(request.ends[0])
        settings.stop_token_ids = set(request.ends)
    if mode is Mode.SPECULATIVE:
        settings.num_assistant_tokens = request.max_draft
    elif mode is Mode.LOOKUP:
        settings.num_assistant_tokens, settings.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
    return settings


def _tensor(ids: Sequence[int]) -> Any:
    import openvino

    return openvino.Tensor(np.array([ids], np.int64))


def _reason(error: Exception) -> str:
    """The last line that is not empty: OpenVINO puts places in its source first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class LlamaGraph:
    """Builds the OpenVINO graph of a Llama. Ids are (B, Q), hidden states (B, Q, W), heads (B, H, Q, E).

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
        """The whole model, which computes the logits of every position (B, Q, V)."""
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
        """Length of an axis as a tensor of one element."""
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
        queries = self._rotate(self._heads(hidden, f"{name}q_proj.weight", shape.heads))
        keys = self._rotate(self._heads(hidden, f"{name}k_proj.weight", shape.pairs))
        keys = self._with_past(keys, f"past_key_values.{layer}.keypresent.{layer}.key")
        values = self._heads(hidden, f"{name}v_proj.weight", shape.pairs)
        values = self._with_past(values, f"past_key_values.{layer}.valuepresent.{layer}.value")
        found = ops.scaled_dot_product_attention(
            queries,
            self._repeat_heads(keys),
            self._repeat_heads(values),
            self._mask,
            self._real(shape.head**-0.5),
            causal=False,
        )
        found = ops.transpose(found, self._whole([0, 2, 1, 3]))
        joined = ops.reshape(found, self._whole([0, 0, shape.heads * shape.head]), True)
        return self._linear(joined, f"{name}o_proj.weight")

    def _heads(self, hidden: Any, name: str, number: int) -> Any:
        split = self._ops.reshape(self._linear(hidden, name), self._whole([0, 0, number, self._llama.head]), True)
        return self._ops.transpose(split, self._whole([0, 2, 1, 3]))

    def _rotate(self, heads: Any) -> Any:
        ops, half = self._ops, self._llama.head // 2
        second, first = self._part(heads, half, FAR), self._part(heads, 0, half)
        turned = ops.concat([ops.multiply(second, self._real(-1.0, 4)), first], -1)
        return ops.add(ops.multiply(heads, self._cosine), ops.multiply(turned, self._sine))

    def _part(self, heads: Any, start: int, stop: int) -> Any:
        places = (self._whole([number]) for number in (start, stop, 1, LAST_AXIS))
        return self._ops.slice(heads, *places)

    def _with_past(self, new: Any, name: str) -> Any:
        """The cached keys or values followed by the new ones; the cache is set to both."""
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

    def _repeat_heads(self, heads: Any) -> Any:
        """Repeat every key-value head for each of its query heads."""
        ops, shape = self._ops, self._llama
        lengths = ops.shape_of(heads, "i64")
        front, back = (ops.gather(lengths, self._whole(axes), self._whole(0)) for axes in ([0, 1], [2, 3]))
        wanted = ops.concat([front, self._whole([shape.heads // shape.pairs]), back], 0)
        copies = ops.broadcast(ops.unsqueeze(heads, self._whole(2)), wanted, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(copies, self._whole([0, shape.heads, -1, shape.head]), True)
