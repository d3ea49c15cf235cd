"""Makes a tokenizer from the metadata of a GGUF file: the same ids as those of the model's own tokenizer.

A file holds the vocabulary, the kind of each token, the merges or scores, the ids of special tokens, the chat
template and the *name* of the family, which states how a text is cut before the merges are applied, and whether it is
normalised before. A file whose name is missing or unknown is refused.
"""

import json
import logging
from collections.abc import Mapping
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from store.errors import ModelError

LOG = logging.getLogger("omnidraft.models")
# Kinds of tokens: plain text, the one for what has no token, never text, and text that is always one token.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"  # GGUF's names of all byte-level vocabularies, and of SentencePiece's BPE
_MARK = "\u2581"  # SentencePiece's space


_CUTS = {
    "words": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "digits": pre_tokenizers.Digits(individual_digits=True),
    "punctuation": pre_tokenizers.Punctuation("contiguous"),
}
_FAMILIES = json.loads(Path(__file__).with_name("gguf_tokenizers.json").read_text(encoding="utf-8"))
_RULE_OF = {name: rule["cuts"] for rule in _FAMILIES["rules"] for name in rule["families"].split()}
# Whether these compose characters (NFC) is known: their tokenizer.json says it, of qwen35 and command-r the class in
# transformers. Of the others it is not, and the files do not say it.
_COMPOSED, _AS_WRITTEN = (_FAMILIES[key].split() for key in ("composed", "as_written"))
_WITH_BOS = _FAMILIES["adds_bos"].split()  # by default
_WHOLE_FIRST = _FAMILIES["whole_first"].split()  # a text that is a token is that token, whatever the merges are
# Of nine tokenizers, the rule of their own family cuts at most 1.2% of the tokens (Qwen 2), GPT-2's 13% to 19% of those
# of Llama 3, Llama 4 and Qwen 2. Families that are nearly alike are not told apart.
_MOST_CUT = 0.03
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def make_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer that a GGUF file describes, with its chat template. Raises `ModelError` if the file holds no
    tokenizer, or one that cannot be made exactly.
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
    vars(backend)["__deepcopy__"] = lambda _: backend  # else the library copies it, in as much time as the rest takes
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    del vars(backend)["__deepcopy__"]
    template, start = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    made.chat_template = {"default": template, **named} if template and named else template
    return made


def _refuse(name: str, what: str) -> ModelError:
    return ModelError(f"{name} must {what}; name a Hugging Face folder of the same model, which has a tokenizer.json")


def _make_byte_level(fields: Mapping[str, Any], name: str) -> Tokenizer:
    family = fields.get("pre")
    if family not in _RULE_OF:
        known = ", ".join(sorted(_RULE_OF))
        stated = f"names {family!r}" if family else "names none"
        raise _refuse(name, f"name a rule of splitting text that is known here ({known}), but {stated}")
    if family not in (*_COMPOSED, *_AS_WRITTEN):
        LOG.warning(
            "%s is of the family %s, of which it is not known whether its tokenizer composes characters: letters "
            "with separate accents are read as they are written",
            name,
            family,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges") or []]
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    needed = chain(chain.from_iterable(merges), map("".join, merges))
    lacking = next(filterfalse(vocabulary.__contains__, needed), None)
    if lacking is not None:
        raise _refuse(name, f"have a token for each of its merges, but has none for {lacking!r}")
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family in _WHOLE_FIRST))
    if family in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    rule = [_CUTS.get(cut) or pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in _RULE_OF[family]]
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
    added = dict(zip(tokens, kinds, strict=False))
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        found = [token for token, kind in added.items() if kind in wanted and backend.token_to_id(token) is not None]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in found])


def _prepend_bos(backend: Tokenizer, bos: str, index: int, kind: str) -> None:
    template = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
    before = [processors.ByteLevel(trim_offsets=False)] if kind == _BYTE_LEVEL else []
    backend.post_processor = processors.Sequence([*before, template])
