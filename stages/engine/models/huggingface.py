"""Loads and makes models and tokenizers of `transformers`."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from stages.engine.models.adapters import is_adapter_folder, merge_lora, read_base_model
from store.errors import ModelError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from huggingface_hub import ModelCard, snapshot_download, try_to_load_from_cache
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file
from yaml import YAMLError

from stages.engine.checkpoints.deferred_imports import OF_TRANSFORMERS, defer_compiler, defer_imports
from stages.engine.checkpoints.gguf_file import GgufFile, find_gguf, find_origin, read_gguf, require_hub
from stages.engine.checkpoints.gguf_model import (
    attach_codes,
    has_family,
    load_gguf_model,
    require_own_bits,
    require_reader,
)
from stages.engine.checkpoints.gguf_tokenizer import make_tokenizer
from stages.engine.checkpoints.mapped_checkpoint import map_checkpoint
from stages.engine.checkpoints.size_check import find_file, require_plausible_sizes
from stages.engine.checkpoints.tokenizer_probe import require_bounded_tokenizer
from stages.engine.models.load_errors import TOKENIZER_FILES, explain_errors, is_tiktoken, read_config

defer_compiler()
with defer_imports(*OF_TRANSFORMERS):
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

LOG = logging.getLogger("omnidraft.models")
SEAL = "manifest.json"  # in the folder of a published version
WEIGHT_FILES = ["model*.safetensors", "generation_config.json"]  # as `save_pretrained` names them

DTYPES: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}


# `from_pretrained` replaces torch's initialisers and default type for the whole process while it runs. Two at once,
# measured: both fail, and so does every later one. An adapter's base model is loaded inside. Held while
# modules are made.
MAKING_MODULES = RLock()


def load_causal_model(
    source: str,
    dtype: str,
    device: str,
    *,
    codes: bool = False,
    maps: Callable[[Any], bool] | None = None,
) -> Any:
    """Load a causal language model from a hub name, a folder or a GGUF file to a device.

    A folder may hold a LoRA adapter, which is merged, or a model of images and text, of which the text part is loaded.
    Models whose attention `torch` cannot compute as a whole get `attn_implementation="eager"`. Raises `ModelError` if
    no model was found, the hub cannot be reached, tensors are missing, unexpected or of another shape, or the model
    needs code or a package that is not here.

    Args:
        source: hub name, folder, GGUF file, or one of the names of `find_gguf`.
        dtype: key of `DTYPES`; `auto` is the type of the file, float32 for a quantised GGUF file.
        device: name of a device of torch.
        codes: whether linear modules of a quantised GGUF file, or of a folder that was converted from one, keep the
            codes of their weights.
        maps: whether the matrices of few bits stay in their files instead of being numbers of 32 bits, given the model
            without weights; only in float32 on the CPU. None: never.
    """
    with explain_errors("model", source), MAKING_MODULES:
        file = find_gguf(source)
        if file:
            model = _load_gguf(read_gguf(file), dtype, codes=codes, maps=maps if device == "cpu" else None)
        elif is_adapter_folder(source):
            base = read_base_model(source)
            model = merge_lora(load_causal_model(base, dtype, "cpu"), source)
        else:
            _require_reachable(source)
            model = _load_checkpoint(source, dtype, device, maps if device == "cpu" and dtype == "float32" else None)
            if codes and (origin := find_origin(source)):
                original = read_gguf(origin)
                if has_family(original):
                    attach_codes(original, model)  # those that differ from the weights are not used
        return model if str(model.device) == device else model.to(device)


def _load_gguf(file: GgufFile, dtype: str, *, codes: bool, maps: Callable[[Any], bool] | None) -> Any:
    require_own_bits(file)
    kinds = {tensor.float_type for tensor in file.tensors.values()}
    half = next((kind for kind in (torch.bfloat16, torch.float16) if kind in kinds), torch.float32)
    wanted = DTYPES[dtype] if dtype != "auto" else torch.float32 if None in kinds else half
    if has_family(file):
        maps = maps if wanted == torch.float32 else None
        return _with_attention(lambda kind: load_gguf_model(file, wanted, kind, codes=codes, maps=maps))
    require_reader(file)
    model = _load_whole(AutoModelForCausalLM, str(file.path.parent), gguf_file=file.path.name, dtype=wanted)
    for part in (model.config, model):  # the weights are plain tensors now
        for left in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            part.__dict__.pop(left, None)
    return model


def _load_checkpoint(source: str, dtype: str, device: str, maps: Callable[[Any], bool] | None) -> Any:
    config: Any = AutoConfig.from_pretrained(source, trust_remote_code=False)
    made: Any = AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        made = AutoModelForImageTextToText
    quantised = getattr(config, "quantization_config", None) or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
    known = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}  # which has a name for each number of bits there
    if quantised and str(getattr(method, "value", method)) not in known:  # transformers would ignore it
        raise ValueError(f"transformers {transformers_version} does not know this quantisation")
    placed = {"device_map": {"": device}} if quantised and device != "cpu" else {}
    composite = config.get_text_config() is not config
    require_plausible_sizes(source, config.to_dict(), lambda: made.from_config(config))
    if maps and not composite and not quantised and (model := _map_folder(source, config, maps)):
        return model
    # Other files of weights are pickles, which may run code.
    model = _load_whole(made, source, composite=composite, dtype=DTYPES[dtype], use_safetensors=True, **placed)
    return _take_text(model, source) if composite else model


def _map_folder(source: str, config: Any, maps: Callable[[Any], bool]) -> Any | None:
    """Map the matrices of 16 bits of a folder or a model of the hub, which is fetched; None where it must be read
    whole.
    """
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if made is None:
        return None
    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=WEIGHT_FILES))
    model = _with_attention(
        lambda kind: map_checkpoint(
            folder, lambda: made._from_config(config, attn_implementation=kind, dtype=torch.float32), maps
        )
    )
    if model is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _load_whole(made: Any, source: str, *, composite: bool = False, **options: Any) -> Any:
    """Load a checkpoint and check that each of its tensors has its place. A composite one holds more than a language
    model.
    """
    common = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False, **options}
    model, info = _with_attention(lambda kind: made.from_pretrained(source, attn_implementation=kind, **common))
    unexpected = sorted(info["unexpected_keys"])
    if composite and not hasattr(getattr(model, "model", model), "language_model"):  # a class for the text part alone
        unexpected = [name for name in unexpected if "language_model" in name]
    mismatched = [f"{name} {tuple(got)} for {tuple(wanted)}" for name, got, wanted in sorted(info["mismatched_keys"])]
    for problem, names in (
        ("lacks", sorted(info["missing_keys"])),
        ("has in excess", unexpected),
        ("has in another shape", mismatched),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{source!r} must hold the tensors of a {type(model).__name__} and no others, but {problem} "
                f"{len(names)}: {', '.join(names[:3])}{more}; fetch the model again, or save it with save_pretrained"
            )
    return model


def _with_attention(load: Callable[[str], Any]) -> Any:
    """Load with torch's own attention, or with the model's where that is not offered (gpt-oss, Gemma 2, BLOOM)."""
    try:
        return load("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load("eager")


@torch.inference_mode()
def _take_text(model: Any, source: str) -> Any:
    """Return the text part of a model of images and text as a plain model, or the model itself if there is none.

    The part is used only if its logits of a short text are those of the model.
    """
    LOG.warning("%s is a model of images and text; only its text part is used", source)
    config = model.config.get_text_config()
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    inner, head = getattr(getattr(model, "model", None), "language_model", None), getattr(model, "lm_head", None)
    if made is None or inner is None or head is None:
        return model
    with torch.device("meta"):
        text = made(config)
    if type(text.model) is not type(inner):
        return model
    text.model, text.lm_head, text.generation_config = inner, head, model.generation_config
    config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    ids = torch.arange(3, 19, device=model.device)[None] % config.vocab_size
    same = torch.allclose(text(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    return text.eval() if same else model


def load_tokenizer(source: str) -> Any:
    """Load a fast tokenizer from a hub name, a folder or a GGUF file. Raises `ModelError` if no tokenizer was found, it
    cannot be made into a fast one, or the hub cannot be reached.
    """
    with explain_errors("tokenizer", source):
        file = find_gguf(source)
        if file:
            return make_tokenizer(read_gguf(file).metadata, str(file))
        if is_adapter_folder(source) and not any((Path(source) / name).exists() for name in TOKENIZER_FILES):
            return load_tokenizer(read_base_model(source))
        _require_reachable(source)
        if is_foreign(source):
            require_bounded_tokenizer(find_tokenizer_file(source), source)
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False)
        _require_true_conversion(tokenizer, source)
        return _drop_tokens_without_output(tokenizer, source)


def is_foreign(source: str) -> bool:
    """Return whether a tokenizer may be of somebody else: of a model of a hub, or of a published version."""
    return not Path(source).is_dir() or (Path(source) / SEAL).is_file()


def find_tokenizer_file(source: str) -> Path:
    """Return the `tokenizer.json` of a folder, or of a model of the hub, which is fetched. It need not exist."""
    if Path(source).is_dir():
        return Path(source) / "tokenizer.json"
    cached = cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    return Path(cached or "no tokenizer.json")


def _drop_tokens_without_output(tokenizer: Any, source: str) -> Any:
    """Leave out added tokens whose ids are beyond the model's output layer: it can neither read nor emit them."""
    backend, width = getattr(tokenizer, "backend_tokenizer", None), _read_width(source)
    if backend is None or width is None or backend.get_vocab_size(with_added_tokens=True) <= width:
        return tokenizer
    beyond = [token for token, index in backend.get_vocab(with_added_tokens=False).items() if index >= width]
    if beyond:
        raise ModelError(
            f"{source!r} must have an output for each token of its tokenizer, but has {width:,} outputs and "
            f"{len(beyond):,} tokens without one, such as {beyond[0]!r}; name the folder whose tokenizer fits the model"
        )
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < width]
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if (getattr(tokenizer, f"{role}_id") or 0) >= width:
            setattr(tokenizer, role, None)
    tokenizer._tokenizer = type(backend).from_str(json.dumps(state))
    return tokenizer


def _read_width(source: str) -> int | None:
    """Return the number of outputs that a model's configuration states; None without one."""
    if not read_config(source):
        return None
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except Exception:  # the model, not the tokenizer, is what cannot be loaded then
        return None
    return getattr(config, "vocab_size", None)


def _require_reachable(source: str) -> None:
    """Check that a folder or a model of the hub is here, or the hub can be reached."""
    if not Path(source).exists() and not try_to_load_from_cache(source, "config.json"):
        require_hub()


def _require_true_conversion(tokenizer: Any, source: str) -> None:
    """Check a tokenizer that was converted from `tokenizer.model` against the original."""
    folder = Path(source)
    if not (folder / "tokenizer.model").exists() or (folder / "tokenizer.json").exists():
        return
    if is_tiktoken(folder):
        if tokenizer.eos_token is None:
            raise ModelError(
                f"{source!r} must have a tokenizer with special tokens, but its tokenizer.model of tiktoken's kind has "
                "none; name a folder of the same model with tokenizer.json"
            )
        return
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    if any(tokenizer(text, add_special_tokens=False)["input_ids"] != original.encode(text) for text in _PROBES):
        raise ModelError(
            f"{source!r} must have a tokenizer that can be converted exactly, but its tokenizer.model gives other ids "
            "than the conversion; name a folder of the same model with tokenizer.json, or set tokenizer_class"
        )


_PROBES = ("The naïve café costs 123.45", "return x;\n\n\tdef f(a,  b): 日本 →", "don't 2024-01-31 <b>")


def new_llama(seed: int, **shape: Any) -> LlamaForCausalLM:
    """Make a Llama with random weights; `shape` is passed to `LlamaConfig`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**shape))


@contextmanager
def raise_write_errors(folder: Path) -> Iterator[None]:
    """Raise every error of writing to a folder as an OSError; safetensors and tokenizers have their own error types."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{folder} could not be written: {error}") from error


def read_licence(source: str) -> str | None:
    """Read the licence from the model card of a folder or a cached hub model, or from a GGUF file; None without one."""
    try:
        if file := find_gguf(source):
            licence = read_gguf(file).metadata.get("general.license")
            return str(licence) if licence else None
        card = find_file(source, "README.md")
        text = card.read_text(encoding="utf-8") if card else ""
        licence = ModelCard(text).data.to_dict().get("license") if text.startswith("---") else None
    except (OSError, ValueError, YAMLError, ModelError):  # no card, or no metadata in it
        return None
    return str(licence) if licence else None


@torch.inference_mode()
def logit_difference(model: Any, text: Sequence[int], one: int, other: int) -> float:
    """Return the difference of a model's logits of two tokens after a text; about 0 is a near tie."""
    ids_1T = torch.tensor([list(text)], device=model.device)
    logits_V = model(input_ids=ids_1T, use_cache=False).logits[0, -1].float()
    return float(logits_V[one] - logits_V[other])
