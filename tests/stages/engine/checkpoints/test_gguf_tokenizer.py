"""Tokenizers of GGUF files against the models' own, on texts of all kinds; what cannot be equal is refused."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from gguf_making import write
from places import ROOT
from tokenizers import Tokenizer

from stages.engine.checkpoints.gguf_tokenizer import make_tokenizer
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ModelError

FILES = ("tokenizer", "tokenizer_config")
OWN = ROOT.parent / "shared" / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Per tokenizer the name that llama.cpp's converter gives to its family.
FAMILIES = {
    "qwen2": "qwen2",
    "llama-2": "default",
    "deepseek-coder": "deepseek-coder",
    "llama-3": "llama-bpe",
    "mistral-v3": "default",
    "starcoder": "starcoder",
    "gpt-neox": "mpt",
    "falcon": "falcon",
    "gpt-2": "gpt-2",
    "llama-4": "llama4",
    "deepseek-llm": "deepseek-llm",
    "phi-3": "default",
    "mistral-v1": "default",
}
LARGE = ("llama-3", "llama-4", "deepseek-llm")
PARTS = (
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\u00a0", "\u3000", "\u2028", "\u200b", "\u2581",
       "\u2581\u2581"),
    *("hello", "Hello", "HELLO", "world", "It's", "DON'T", "we'll", "naïve", "cafe\u0301", "café",
       "e\u0323\u0301", "\u1e69"),
    *("s\u0307\u0323", "\u212b", "\u2126", "\u0340", "\u0301", "\uac00", "\u1112\u1161\u11ab",
       "Stra\u00dfe", "\ufb01n", "\u01c6"),
    *("日本語", "漢字かな", "中文。", "한국어", "สวัสดี", "ภาษาไทย", "हिन्दी", "\u095c", "বাংলা", "\u09df", "مرحبا",
       "\u0651\u064e", "שלום", "\ufb2a"),
    *("👍", "👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "☺\ufe0f", "\U00010400", "\U0001e922",
       "𝒳", "ⅷ", "²", "½", "٣", "१२"),
    *("0", "7", "42", "123", "2024", "12345678", "3.14159", "1,000,000", "0x1F", "1e-9", "-5"),
    *("def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) {", "}\n\n\n", "// comment", "a_b.c->d",
       "\\n", "{{}}", "#!/bin/sh"),
    *("<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]",
       "<|eot_id|>", "<|end|>"),
    *("<0x0A>", "<|begin_of_text|>", "<|eot|>", "<fim_prefix>", "<｜begin▁of▁sentence｜>", ">>TITLE<<",
       "<|user|>", "<|nothing|>"),
    *(".", "...", "!?", "--", "—", "“quoted”", "„so“", "(", ")", "$", "€", "%", "@user",
       "https://example.org/a?b=c&d", "\x00", "\x7f", "\ufeff"),
    *("ö", "õ", "ÿ", "À", "aaaaaaaa", "        ", "                ", "=========", "-----",
       "antidisestablishmentarianism", "ſ", "İ"),
)  # fmt: skip


def make_texts(count: int) -> list[str]:
    """Return texts of all kinds: first each part alone and after a space, then random ones joined with and without."""
    rng = random.Random(1)
    texts = dict.fromkeys(["", *(before + part for part in PARTS for before in ("", " ", "a"))])
    while len(texts) < count:
        parts = rng.choices(PARTS, k=rng.choice((2, 3, 5, 8, 13)))
        texts[rng.choice(("", " ")).join(parts)] = None
    return [*texts][:: max(1, len(texts) // count)]


def describe(name: str) -> dict[str, Any]:
    """Return the metadata of a tokenizer as llama.cpp's converter writes it."""
    if not OWN.is_dir():
        pytest.skip("the tokenizers of ../shared/tokenizers are not at hand")
    state, stated = (json.loads((OWN / name / f"{file}.json").read_text(encoding="utf-8")) for file in FILES)
    added = {token["content"]: token for token in state["added_tokens"]}
    ids = {**state["model"]["vocab"], **{content: token["id"] for content, token in added.items()}}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == [*range(len(tokens))]
    kinds = [NORMAL if token not in added else choose_kind(added[token]) for token in tokens]
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
    keys: dict[str, Any] = {f"{key}_token_id": ids[stated[role]] for key, role in roles.items() if role in stated}
    keys["add_bos_token"] = "TemplateProcessing" in str(state["post_processor"])
    if state["model"]["byte_fallback"]:
        kinds = [BYTE if re.fullmatch("<0x..>", token) else kind for token, kind in zip(tokens, kinds, strict=True)]
        kinds[keys["unknown_token_id"]] = UNKNOWN
        first = kinds.index(NORMAL)
        # SentencePiece writes scores in the order of ids, and the lowest for runs of spaces.
        scores = [-1e9 if re.fullmatch("\u2581{2,}", token) else float(first - n) for n, token in enumerate(tokens)]
        keys |= {"model": "llama", "scores": [score if kinds[n] == NORMAL else 0.0 for n, score in enumerate(scores)]}
    else:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
        tokens += [f"[PAD{len(tokens) + number}]" for number in range(3)]
        keys |= {"model": "gpt2", "merges": merges}
        kinds += [UNUSED] * 3
    keys |= {"pre": FAMILIES[name], "tokens": tokens, "token_type": kinds}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def choose_kind(added: dict[str, Any]) -> int:
    return CONTROL if added["special"] or re.fullmatch(r"</?s>|<[|｜].*[|｜]>", added["content"]) else USER_DEFINED


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in FAMILIES]
)
def test_ids_are_those_of_the_own_tokenizer(name: str):
    made, own = make_tokenizer(describe(name), name), Tokenizer.from_file(str(OWN / name / "tokenizer.json"))
    for text in make_texts(300):
        ids = own.encode(text).ids
        assert made.backend_tokenizer.encode(text).ids == ids, repr(text)
        assert made.backend_tokenizer.decode(ids, skip_special_tokens=False) == own.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_file_gives_the_ids_of_the_own_tokenizer(name: str, tmp_path: Path):
    made = load_tokenizer(str(write(tmp_path / "m.gguf", "llama", describe(name), {})))
    own, texts = load_tokenizer(str(OWN / name)), make_texts(3000)
    assert len(texts) == 3000
    ours, theirs = Vocabulary(made), Vocabulary(own)
    pairs = zip(range(theirs.size), ours.token_bytes, theirs.token_bytes, strict=False)
    # The converter marks names such as </s> as control tokens, whatever their own file says.
    assert {index for index, mine, own_bytes in pairs if mine != own_bytes} <= {*ours.specials.values()}
    for text in texts:
        ids = own(text)["input_ids"]
        assert made(text)["input_ids"] == ids, repr(text)
        assert made(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]
        assert made.decode(ids) == own.decode(ids)
        assert ours.encode(text) == theirs.encode(text)


def refusal(**changed: Any) -> str:
    """Return how a small SentencePiece vocabulary with some keys changed is refused."""
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "\u2581", "a", "b", "ab", "\u2581ab"],
        "token_type": [UNKNOWN, *[NORMAL] * 5],
        "scores": [0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
        **changed,
    }
    with pytest.raises(ModelError) as error:
        make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m.gguf")
    assert "\n" not in str(error.value)
    assert "a Hugging Face folder of the same model" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": "gpt2", "merges": ["a b"]}, "but names none"),
        ({"model": "gpt2", "merges": ["a b"], "pre": "klingon"}, "but names 'klingon'"),
        ({"model": "gpt2", "merges": ["a b"], "pre": "default"}, "but names 'default'"),
        ({"model": None}, "hold a tokenizer, but has none"),
        ({"tokens": []}, "hold a tokenizer, but has none"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b", "b a"]}, "has none for 'ba'"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a c"]}, "has none for 'c'"),
        ({"model": "t5"}, "but has 't5'"),
        ({"model": "bert"}, "but has 'bert'"),
        ({"scores": None}, "has none or equal ones"),
        ({"scores": [-1000.0] * 6}, "has none or equal ones"),
        ({"precompiled_charsmap": [1, 2]}, "states precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "states remove_extra_whitespaces"),
    ],
)
def test_what_cannot_be_equal_is_refused(changed: dict[str, Any], reason: str):
    assert reason in refusal(**changed)


@pytest.mark.parametrize(("adds_space", "tokens"), [(True, [5, 0, 5]), (False, [4, 0, 5])])
def test_the_space_before_a_text_is_that_of_the_file(adds_space: bool, tokens: list[int]):
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "\u2581", "a", "b", "ab", "\u2581ab"],
        "token_type": [UNKNOWN, *[NORMAL] * 5],
        "scores": [0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
        "add_space_prefix": adds_space,
    }
    made = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m.gguf")
    assert made("ab? ab")["input_ids"] == tokens


def test_a_family_whose_normalisation_is_not_known_is_said(caplog):
    keys = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    for family, warned in (("smollm", True), ("gpt-2", False), ("qwen2", False)):
        caplog.clear()
        make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in {**keys, "pre": family}.items()}, "m.gguf")
        assert ("not known whether its tokenizer composes" in caplog.text) == warned


@pytest.mark.parametrize(("family", "warned"), [("starcoder", False), ("gpt-4o", True)])
def test_a_wrong_name_of_the_family_is_said(family: str, warned: bool, caplog):
    make_tokenizer({**describe("starcoder"), "tokenizer.ggml.pre": family}, "m.gguf")
    assert ("which would never give 9%" in caplog.text) == warned


def test_all_named_chat_templates_are_kept():
    keys = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a", "b", "ab"], "ggml.merges": ["a b"]}
    keys |= {"chat_template": "plain", "chat_template.tool_use": "tools", "chat_templates": ["default", "tool_use"]}
    made = make_tokenizer({f"tokenizer.{key}": value for key, value in keys.items()}, "m.gguf")
    assert made.get_chat_template() == "plain"
    assert made.get_chat_template(tools=[{}]) == "tools"


def test_a_role_beyond_the_vocabulary_is_left_out():
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
        "bos_token_id": 7,
        "add_bos_token": True,
    }
    made = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m.gguf")
    assert made.bos_token is None
