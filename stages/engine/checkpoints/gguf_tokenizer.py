"""Makes a fast tokenizer from the metadata of a GGUF file.

The file holds the vocabulary, the kind of each token, the merges or scores, the ids of special tokens, the chat
template and the *name* of the rule that splits text before the merges are applied; the rules are those of `llama.cpp`.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from store.errors import ModelError

LOG = logging.getLogger("omnidraft.models")
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens: never text, and text that is always one token
_BYTE_LEVEL = "gpt2"  # GGUF's name of all byte-level vocabularies

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(end)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-3": _LLAMA_3,
    "qwen-2": _LLAMA_3.replace("{1,3}", ""),
    "gpt-4o": _O200K_WORDS % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"},
    "tekken": _O200K_WORDS % {"end": "", "digits": r"\p{N}"},
}
# Names of rules in GGUF files, by the rule that they name.
_RULES = {
    "gpt-2": "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de roberta-bpe exaone4 dolma",
    "digits": "smollm starcoder refact command-r codeshell exaone minerva",
    "llama-3": "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    "qwen-2": "qwen2 stablelm2 deepseek-r1-qwen kormo megrez hunyuan solar-open",
    "gpt-4o": "gpt-4o llama4 kanana2 minimax-m2",
    "tekken": "tekken",
}
_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}
# The rules of these take a text that is a token as that token, whatever the merges are, and add BOS by default.
_WHOLE_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def make_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer that a GGUF file describes, with its chat template.

    Raises:
        ModelError: the file holds no tokenizer, or one that cannot be made exactly.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelError(f"{name} must hold a tokenizer, but has none; convert the model again with its tokenizer")
    roles = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    special = {role: tokens[index] for role, index in roles.items() if index is not None and index < len(tokens)}
    backend = _byte_level(metadata, name) if kind == _BYTE_LEVEL else _other_kind(metadata, kind, name)
    _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    bos, by_default = roles["bos_token"], kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_FIRST
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", by_default):
        _prepend_bos(backend, tokens[bos], bos, kind)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    made.chat_template = metadata.get("tokenizer.chat_template")
    return made


def _byte_level(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """Make the tokenizer of a byte-level vocabulary."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        LOG.warning("%s does not name its rule of splitting text; that of GPT-2 is used", name)
        pre = "gpt-2"
    if pre not in _RULE_OF:
        known = ", ".join(sorted(_RULE_OF))
        raise ModelError(
            f"{name} must name a rule of splitting text that is known here, but names {pre!r}; known are {known}; name "
            "a Hugging Face folder of the same model, which has a tokenizer.json"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_FIRST or pre == "tekken"))
    backend.pre_tokenizer = _splitter(_RULE_OF[pre])
    backend.decoder, backend.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    return backend


def _splitter(rule: str) -> Any:
    """Return the pre-tokenizer of a rule."""
    if rule == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "digits":
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _other_kind(metadata: Mapping[str, Any], kind: str, name: str) -> Tokenizer:
    """Make the tokenizer of a SentencePiece vocabulary as `transformers` does."""
    module = "gguf" if find_spec("transformers.integrations.gguf") else "ggml"  # the second before transformers 5.23
    convert = import_module(f"transformers.integrations.{module}").convert_gguf_tokenizer
    fields = "tokens scores token_type merges add_space_prefix".split()
    described = {field: metadata[key] for field in fields if (key := f"tokenizer.ggml.{field}") in metadata}
    backend: Tokenizer
    try:
        backend, _ = convert(metadata["general.architecture"], {"tokenizer_type": kind, **described})
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{name} must have a byte-level or SentencePiece vocabulary, but has {kind!r} ({error}); name a Hugging "
            "Face folder of the same model, which has a tokenizer.json"
        ) from error
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not adds_space:
        backend.pre_tokenizer.prepend_scheme = "never"
    return backend


def _add_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Mark the tokens that are matched before the merges: control tokens, and those that the file's author defined."""
    by_kind = {
        wanted: [
            AddedToken(token, special=wanted == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted
        ]
        for wanted in (_CONTROL, _USER_DEFINED)
    }
    known = backend.get_vocab(with_added_tokens=False)
    backend.add_special_tokens([token for token in by_kind[_CONTROL] if token.content in known])
    backend.add_tokens([token for token in by_kind[_USER_DEFINED] if token.content in known])


def _prepend_bos(backend: Tokenizer, bos: str, index: int, kind: str) -> None:
    template = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
    before = [processors.ByteLevel(trim_offsets=False)] if kind == _BYTE_LEVEL else []
    backend.post_processor = processors.Sequence([*before, template])
