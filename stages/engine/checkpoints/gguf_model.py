"""Makes models of `transformers` from GGUF files, with the weights that the file holds, dequantised.

Every tensor and every number that describes the computation must be used: a file that states something that is not
known here is refused.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from stages.engine.checkpoints.gguf_file import GgufFile
from stages.engine.quantisation.layouts import FILE_KINDS
from stages.engine.quantisation.modules import MappedEmbedding, MappedLinear, attach_groups
from stages.engine.quantisation.stored import StoredMatrix
from store.errors import ModelError


@dataclass(frozen=True)
class _Family:
    """How the files of one architecture are read."""

    model_type: str  # of `transformers`
    # further keys of the file, by the names of the configuration's fields
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration that the file leaves out
    permuted: bool = False  # the rows of queries and keys are in the order of rotated pairs
    offset_norms: bool = False  # 1 is added to the weights of the norms


_KNOWN = json.loads(Path(__file__).with_name("gguf_models.json").read_text(encoding="utf-8"))
_FAMILIES = {name: _Family(**known) for name, known in _KNOWN["architectures"].items()}
_COMMON: dict[str, str] = _KNOWN["common"]
_END_NAMES = frozenset(_KNOWN["end_tokens"].split())
# Keys that are read otherwise, or that the computation does not depend on.
_READ_ELSEWHERE = re.compile(
    r"attention\.(key|value)_length(_swa)?|rope\.(freq_base(_swa)?|dimension_count(_swa)?|scaling\..*|scale_linear)"
    r"|vocab_size|expert_count|expert_used_count|attention\.sliding_window_pattern|.*_id"
)
_PLAIN_KINDS = {"F32", "F16", "BF16"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def has_family(file: GgufFile) -> bool:
    """Check whether files of this architecture are read here and not by `transformers`."""
    return file.architecture in _FAMILIES


def require_reader(file: GgufFile) -> None:
    """Check that `transformers` reads every tensor of an architecture that is not read here.

    Its older reader, which leaves out tensors and keys that it does not know, is not used.
    """
    module = "transformers.integrations.gguf"
    if find_spec(module) and import_module(module).is_gguf_arch_supported(file.architecture):
        return
    raise ModelError(
        f"{file.path} must be of an architecture that is read exactly ({', '.join(_FAMILIES)}, or one that "
        f"transformers reads whole), but is of {file.architecture!r}; name a Hugging Face folder of the same model"
    )


def require_own_bits(file: GgufFile) -> None:
    """Check that every tensor holds plain numbers, or codes that can be multiplied as they are.

    Others would be numbers of 32 bits in memory, of up to 20 times their size in the file.
    """
    if not file.tensors:
        held = "only a vocabulary" if "tokenizer.ggml.tokens" in file.metadata else "no tensors"
        raise ModelError(f"{file.path} must hold weights, but has {held}; name the file of the whole model")
    foreign = Counter(each.name for each in file.tensors.values() if each.name not in FILE_KINDS | _PLAIN_KINDS)
    if foreign:
        counts = ", ".join(f"{count} in {kind}" for kind, count in foreign.most_common())
        known = ", ".join(sorted(FILE_KINDS | _PLAIN_KINDS))
        raise ModelError(
            f"{file.path} must hold weights in types that are computed with as they are ({known}), but of its "
            f"{len(file.tensors)} tensors it has {counts}; take a file of the same model in Q4_K_M or Q8_0"
        )


def load_gguf_model(
    file: GgufFile,
    dtype: torch.dtype,
    attention: str,
    *,
    codes: bool = False,
    maps: Callable[[Any], bool] | None = None,
) -> Any:
    """Make the model of a file, with all of its weights in one type. If `codes`, linear modules keep the codes of their
    weights too (`stages/engine/quantisation/modules.py`). `maps` tells whether the matrices of few bits of a model,
    given without weights, stay in the file; None: never.
    """
    config = make_config(file)
    config.name_or_path = str(file.path)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = made._from_config(config, dtype=dtype, attn_implementation=attention)
    expected = model.state_dict()
    sources = _find_sources(file, config, expected)
    if maps and maps(model):
        return _map_model(file, model, sources, expected)
    weights = _read_weights(file, config, sources, expected)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    model = made.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, attn_implementation=attention)
    if codes:
        attach_codes(file, model)
    return model


def _map_model(file: GgufFile, model: Any, sources: Mapping[str, list[str]], expected: Mapping[str, Tensor]) -> Any:
    """Give a model on torch's meta device its weights, in float32; its matrices of few bits stay in the file."""
    config, plain, mapped = model.config, dict(sources), dict[str, StoredMatrix]()
    for name, (source, *others) in sources.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and not others and isinstance(module, nn.Linear | nn.Embedding):
            tensor = file.tensors[source]
            stored = tensor.map_matrix(_order_rows(file, config, source, tensor.shape[0]))
            if stored is not None and stored.shape == expected[name].shape:
                mapped[name.removesuffix(".weight")] = stored
                del plain[name]
    weights = _read_weights(file, config, plain, expected)
    return place_weights(model, file.path, mapped, {name: weight.float() for name, weight in weights.items()})


def place_weights(model: Any, files: Path, mapped: dict[str, StoredMatrix], weights: dict[str, Tensor]) -> Any:
    """Give a model on torch's meta device its weights in float32, by name, and matrices of files, by module. `files` is
    the file, or their folder.
    """
    model.files = files
    config, embedding = model.config, "model.embed_tokens"
    if config.tie_word_embeddings and embedding in mapped:
        mapped["lm_head"] = mapped[embedding]
    for path, stored in mapped.items():
        module = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            made: nn.Module = MappedLinear(stored, weights.pop(f"{path}.bias", None))
        else:
            made = MappedEmbedding(stored, getattr(module, "scalar_embed_scale", 1.0))
        model.set_submodule(path, made)
    model.load_state_dict(weights, strict=False, assign=True)
    if config.tie_word_embeddings and embedding not in mapped:
        model.lm_head.weight = model.get_input_embeddings().weight
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model._init_weights(module.to_empty(device="cpu", recurse=False))
    return model.requires_grad_(False).eval()


def attach_codes(file: GgufFile, model: Any) -> None:
    """Attach the codes of every linear module whose weight has groups in the file that it was made from."""
    config = model.config
    embedding = "model.embed_tokens.weight"
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        tied = name == "lm_head" and config.tie_word_embeddings
        (source, *others) = _source_names(file, config, embedding if tied else f"{name}.weight")
        tensor = None if others else file.tensors.get(source)
        stored = None if tensor is None else tensor.map_matrix(_order_rows(file, config, source, tensor.shape[0]))
        if stored is not None and stored.has_codes:
            attach_groups(linear, stored)


def make_config(file: GgufFile) -> Any:
    """Make the configuration of `transformers` for a file."""
    family, prefix = _FAMILIES[file.architecture], f"{file.architecture}."
    keys, fixed, model_type = {**_COMMON, **family.keys}, dict(family.fixed), family.model_type
    if model_type == "llama" and file.field("expert_count"):
        model_type, keys = (
            "mixtral",
            {**keys, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        )
    stated = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    unknown = sorted(key for key in stated - keys.keys() if not _READ_ELSEWHERE.fullmatch(key))
    if unknown:
        raise ModelError(
            f"{file.path} must describe its computation in keys that are known here, but has {', '.join(unknown[:5])} "
            f"of the architecture {file.architecture}; name a Hugging Face folder of the same model"
        )
    values = {name: file.field(key) for key, name in keys.items() if file.field(key) is not None}
    lacking = [key for key in _COMMON if key not in stated and key != "attention.head_count_kv"]
    if lacking:
        raise ModelError(f"{file.path} must state {prefix}{lacking[0]}, but does not; convert the model again")
    head = file.field("attention.key_length") or values["hidden_size"] // values["num_attention_heads"]
    values |= {"head_dim": head, "vocab_size": file.tensors["token_embd.weight"].shape[0], **fixed}
    values |= {"tie_word_embeddings": "output.weight" not in file.tensors, **_token_ids(file)}
    if any(name.endswith(".attn_q.bias") for name in file.tensors) and model_type in ("llama", "granite"):
        values["attention_bias"] = True
    values |= _scales(file, values) | _rope(file, head)
    return AutoConfig.for_model(model_type, **values)


def _scales(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of Gemma's queries, which the files leave out: only the largest models differ in it."""
    largest = {"gemma2": 46, "gemma3": 62}.get(file.architecture)
    if largest is None:
        return {}
    per_head = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if values["num_hidden_layers"] == largest else values["head_dim"]}


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """Return the ids of BOS and padding, and all that end a reply: those that the file names, and control tokens."""
    named = {
        key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "padding", "eos", "eot", "eom")
    }
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens", ()), file.metadata.get("tokenizer.ggml.token_type", ())
    ends = {named[key] for key in ("eos", "eot", "eom") if named[key] is not None}
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == 3}
    if "<|return|>" in control:  # gpt-oss: <|end|> ends a message of several in one reply
        control.pop("<|end|>", None)
    ends |= {control[name] for name in _END_NAMES & control.keys()}
    return {"bos_token_id": named["bos"], "pad_token_id": named["padding"], "eos_token_id": sorted(ends) or None}


def _rope(file: GgufFile, head: int) -> dict[str, Any]:
    turned, longest = file.field("rope.dimension_count", head), file.field("context_length")
    if file.field("attention.value_length", head) != head or (turned != head and file.architecture != "phi3"):
        raise ModelError(
            f"{file.path} must have heads of one width that are turned whole, but has keys of {head}, values of "
            f"{file.field('attention.value_length', head)} and turns {turned}; name a Hugging Face folder of this model"
        )
    parameters = {"rope_theta": file.field("rope.freq_base", 10000.0), **_rope_scaling(file, head, longest)}
    if turned != head:
        parameters["partial_rotary_factor"] = turned / head
    if file.architecture == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": file.field("rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": sliding}}
    original = parameters.get("original_max_position_embeddings")
    outer = {"original_max_position_embeddings": original} if file.architecture == "phi3" and original else {}
    return {"rope_parameters": parameters, **outer}


def _rope_scaling(file: GgufFile, head: int, longest: int) -> dict[str, Any]:
    kind, factor = file.field("rope.scaling.type", "none"), file.field("rope.scaling.factor", 1.0)
    original = file.field("rope.scaling.original_context_length", longest)
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head)
    if "rope_factors_long.weight" in file.tensors:
        long, short = (file.tensors[name].dequantise().float().tolist() for name in _ROPE_TENSORS[1:])
        scaled = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "factor": longest / original}
        attention = file.field("rope.scaling.attn_factor")
        return (
            scaled
            | {"original_max_position_embeddings": original}
            | ({"attention_factor": attention} if attention else {})
        )
    if kind == "linear" or file.field("rope.scale_linear"):
        return {"rope_type": "linear", "factor": file.field("rope.scale_linear", factor)}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "none":
        raise ModelError(
            f"{file.path} must scale its positions in a way that is known (none, linear, yarn), but has {kind!r}; name "
            "a Hugging Face folder of this model"
        )
    return {"rope_type": "default"}


def _llama3_scaling(file: GgufFile, head: int) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling that give the divisors of the frequencies that the file holds."""
    divisors = file.tensors["rope_freqs.weight"].dequantise().float()
    theta, factor = file.field("rope.freq_base", 10000.0), float(divisors.max())
    wave_lengths = 2 * torch.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    for original in (1 << power for power in range(10, 20)):
        smooth = ((original / wave_lengths - 1) / 3).clamp(0, 1)
        if divisors.shape == smooth.shape and torch.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            scaling = {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
            return scaling | {"original_max_position_embeddings": original}
    raise ModelError(
        f"{file.path} must scale its frequencies as Llama 3 does, but its rope_freqs.weight holds other divisors; name "
        "a Hugging Face folder of this model"
    )


def _find_sources(file: GgufFile, config: Any, expected: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors in the file of which each weight of a model is made."""
    sources = {name: _source_names(file, config, name) for name in expected}
    if config.tie_word_embeddings:
        sources.pop("lm_head.weight", None)
    missing = sorted({source for names in sources.values() for source in names if source not in file.tensors})
    used = {source for names in sources.values() for source in names}
    unknown = sorted(file.tensors.keys() - used - set(_ROPE_TENSORS))
    for problem, names in (("lacks", missing), ("has in excess", unknown)):
        if names:
            raise ModelError(
                f"{file.path} must hold the tensors of a {config.model_type} and no others, but {problem} {len(names)}"
                f": {', '.join(names[:3])}; fetch it again, or name a Hugging Face folder of this model"
            )
    return sources


def _read_weights(
    file: GgufFile, config: Any, sources: Mapping[str, list[str]], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    weights = {name: _convert(file, config, names) for name, names in sources.items()}
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ModelError(
                f"{file.path} must hold {', '.join(sources[name])} of shape {tuple(expected[name].shape)}, but has "
                f"{tuple(weight.shape)}; fetch it again"
            )
    return weights


def _source_names(file: GgufFile, config: Any, name: str) -> list[str]:
    """Return the names in the file of the tensors of which a weight is made."""
    experts = re.fullmatch(r"model\.layers\.(\d+)\..*experts\.(gate_up|down)_proj", name)
    if experts:
        parts = ("gate", "up") if experts[2] == "gate_up" else ("down",)
        return [f"blk.{experts[1]}.ffn_{part}_exps.weight" for part in parts]
    return [_name_map(file.architecture, config.num_hidden_layers)(name) or f"?.{name}"]


@cache
def _name_map(architecture: str, layers: int) -> Callable[[str], str | None]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return partial(get_tensor_name_map(number, layers).get_name, try_suffixes=(".weight", ".bias"))


def _convert(file: GgufFile, config: Any, sources: list[str]) -> Tensor:
    """Dequantise one weight and undo what was changed when the file was written."""
    family, parts = _FAMILIES[file.architecture], [file.tensors[source].dequantise() for source in sources]
    weight = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    order = _order_rows(file, config, sources[0], len(weight))
    if order is not None:
        return weight[order]
    if family.offset_norms and sources[0].endswith("norm.weight"):
        return weight.float() - 1
    part = sources[0].split(".")[-2]
    return weight.unsqueeze(0) if part == "ffn_gate_inp_shexp" and weight.dim() == 1 else weight


def _order_rows(file: GgufFile, config: Any, source: str, rows: int) -> Tensor | None:
    """Return which row of a tensor of the file is which row of the weight; None if they are in the same order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None)}
    part = source.split(".")[-2]
    if not _FAMILIES[file.architecture].permuted or part not in heads:
        return None
    number = heads[part] or config.num_attention_heads
    return torch.arange(rows).reshape(number, rows // number // 2, 2).transpose(1, 2).reshape(-1)
