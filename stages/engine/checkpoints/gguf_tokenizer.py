"""Makes a tokenizer from the metadata of a GGUF file: the same ids as those of the model's own tokenizer.

A file holds the vocabulary, the kind of each token, the merges or scores, the ids of special tokens, the chat
template and the *name* of the family, which states how a text is cut before the merges are applied, and whether it is
normalised before. A file whose name is missing or unknown is refused.
"""

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from store.errors import ModelError

LOG = logging.getLogger("omnidraft.models")
# Kinds of tokens: plain text, the one for what has no token, never text, and text that is always one token.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"  # GGUF's names of all byte-level vocabularies, and of SentencePiece's BPE
_MARK = "\u2581"  # SentencePiece's space


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_BYTES, _WORDS = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words) for words in (False, True))
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
_QWEN_35 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(end)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters that DeepSeek's tokenizer lists: those with case, of an older Unicode.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# How texts are cut, by the names of families that are cut in this way.
_RULES: dict[str, list[Any]] = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de roberta-bpe exaone4 dolma": [_WORDS],
    "smollm starcoder refact command-r codeshell exaone minerva": [_DIGITS, _WORDS],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe": [
        _split(_LLAMA_3),
        _BYTES,
    ],
    "qwen2 stablelm2 deepseek-r1-qwen kormo megrez hunyuan solar-open": [_split(_QWEN_2), _BYTES],
    "qwen35": [_split(_QWEN_35), _BYTES],
    "gpt-4o llama4 kanana2 minimax-m2": [
        _split(_O200K_WORDS % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"}),
        _BYTES,
    ],
    "tekken": [_split(_O200K_WORDS % {"end": "", "digits": r"\p{N}"}), _BYTES],
    "falcon": [pre_tokenizers.Punctuation("contiguous"), _WORDS, _split("[0-9][0-9][0-9]")],
    "deepseek-coder": [
        *map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)),
        _DIGITS,
        _BYTES,
    ],
    "deepseek-llm": [
        _split("[\r\n]"),
        _split(rf"\s?[{_CASED}]+"),
        _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        _split(r"\s+$"),
        _split(_CJK),
        _DIGITS,
        _BYTES,
    ],
}
_RULE_OF = {name: rule for names, rule in _RULES.items() for name in names.split()}
# Whether these compose characters (NFC) is known: their tokenizer.json says it, of qwen35 and command-r the class in
# transformers. Of the others it is not, and the files do not say it.
_COMPOSED = {"qwen2", "qwen35", "mpt", "command-r"}
_AS_WRITTEN = {
    "gpt-2",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "llama4",
    "starcoder",
    "falcon",
    "deepseek-llm",
    "deepseek-coder",
}
# These add BOS by default.
_WITH_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
_WHOLE_FIRST = {*_WITH_BOS, "llama4", "tekken"}  # a text that is a token is that token, whatever the merges are
# Of nine tokenizers, the rule of their own family cuts at most 1.2% of the tokens (Qwen 2), GPT-2's 13% to 19% of those
# of Llama 3, Llama 4 and Qwen 2. Families that are nearly alike are not told apart.
_MOST_CUT = 0.03
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def make_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer that a GGUF file describes, with its chat template.

    Raises:
        ModelError: the file holds no tokenizer, or one that cannot be made exactly.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise _refuse(name, "hold a tokenizer, but has none")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise _refuse(name, f"have a byte-level or SentencePiece vocabulary ('gpt2' or 'llama'), but has {kind!r}")
    roles = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    special = {role: tokens[index] for role, index in roles.items() if index is not None and index < len(tokens)}
    make = _make_byte_level if kind == _BYTE_LEVEL else _make_sentencepiece
    backend = make({key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}, name)
    _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    bos, by_default = roles["bos_token"], kind == _SENTENCEPIECE or metadata.get("tokenizer.ggml.pre") in _WITH_BOS
    if bos is not None and "bos_token" in special and metadata.get("tokenizer.ggml.add_bos_token", by_default):
        _prepend_bos(backend, tokens[bos], bos, kind)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    template, start = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    made.chat_template = {"default": template, **named} if template and named else template
    return made


def _refuse(name: str, what: str) -> ModelError:
    return ModelError(f"{name} must {what}; name a Hugging Face folder of the same model, which has a tokenizer.json")


def _make_byte_level(fields: Mapping[str, Any], name: str) -> Tokenizer:
    """Make the tokenizer of a byte-level vocabulary."""
    family = fields.get("pre")
    if family not in _RULE_OF:
        known = ", ".join(sorted(_RULE_OF))
        stated = f"names {family!r}" if family else "names none"
        raise _refuse(name, f"name a rule of splitting text that is known here ({known}), but {stated}")
    if family not in _COMPOSED | _AS_WRITTEN:
        LOG.warning(
            "%s is of the family %s, of which it is not known whether its tokenizer composes characters: letters "
            "with separate accents are read as they are written",
            name,
            family,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges") or []]
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    lacking = next((token for merge in merges for token in (*merge, "".join(merge)) if token not in vocabulary), None)
    if lacking is not None:
        raise _refuse(name, f"have a token for each of its merges, but has none for {lacking!r}")
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family in _WHOLE_FIRST))
    if family in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    rule = _RULE_OF[family]
    backend.pre_tokenizer = rule[0] if len(rule) == 1 else pre_tokenizers.Sequence(rule)
    share = _find_cut_share(backend.pre_tokenizer, fields)
    if share > _MOST_CUT:
        LOG.warning(
            "%s names the family %s, which would never give %.0f%% of its tokens: another one may be meant, and texts "
            "be read otherwise than by the model's own tokenizer",
            name,
            family,
            100 * share,
        )
    backend.decoder, backend.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    return backend


def _find_cut_share(rule: Any, fields: Mapping[str, Any]) -> float:
    """Return the share of the plain tokens, about 2,000 of them, that a rule cuts: no text becomes such a token."""
    tokens, alphabet = fields["tokens"], decoders.ByteLevel()
    kinds = fields.get("token_type") or [_NORMAL] * len(tokens)
    plain = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _NORMAL]
    texts = [alphabet.decode([token]) for token in plain[:: 1 + len(plain) // 2000]]
    whole = [text for text in texts if "\ufffd" not in text]  # else a part of a character
    return sum(len(rule.pre_tokenize_str(text)) > 1 for text in whole) / max(1, len(whole))


def _make_sentencepiece(fields: Mapping[str, Any], name: str) -> Tokenizer:
    """Make the tokenizer of a SentencePiece vocabulary of the kind BPE."""
    for field in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if fields.get(field):
            raise _refuse(name, f"leave texts as they are, as vocabularies of the kind BPE do, but states {field}")
    tokens, scores = fields["tokens"], fields.get("scores") or []
    kinds = fields.get("token_type") or [_NORMAL] * len(tokens)
    gemma = str(fields.get("general.architecture")).startswith("gemma")
    if gemma:  # runs of spaces are stored as spaces, and not the scores but the ids are in the order of the merges
        tokens = [_MARK * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-index for index in range(len(tokens))]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges") or []]
    normal = {score for score, kind in zip(scores, kinds, strict=False) if kind == _NORMAL}
    if not merges and len(normal) < 2:
        raise _refuse(name, "hold the order of its merges as scores of its tokens, but has none or equal ones")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = fields.get("unknown_token_id", kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None)
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            merges or _derive_merges(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = fields.get("add_space_prefix", not gemma)
    marks, strips = normalizers.Replace(" ", _MARK), [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), marks]) if adds_space else marks
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return backend


def _derive_merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that join to a token: that of the highest score first, then of the lowest ids."""
    pairs = [
        (-scores[index], index, vocabulary[token[:place]], vocabulary[token[place:]], token, place)
        for token, index in vocabulary.items()
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    return [(token[:place], token[place:]) for *_, token, place in sorted(pairs)]


def _add_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Mark the tokens that are matched before the merges: control tokens, and those that the file's author defined."""
    known, added = backend.get_vocab(with_added_tokens=False), dict(zip(tokens, kinds, strict=False))
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        found = [token for token, kind in added.items() if kind in wanted and token in known]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in found])


def _prepend_bos(backend: Tokenizer, bos: str, index: int, kind: str) -> None:
    template = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
    before = [processors.ByteLevel(trim_offsets=False)] if kind == _BYTE_LEVEL else []
    backend.post_processor = processors.Sequence([*before, template])
