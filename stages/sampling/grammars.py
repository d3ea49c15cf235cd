"""Grammars that a completion must follow, through `llguidance`, which is imported when the first one is compiled.

A grammar is a transform like any other: at each place it allows the tokens after which the text can still be completed,
and the end of the sequence where the text is complete. Where the grammar leaves no choice of bytes, llguidance allows
the tokenizer's own spelling of them alone.

Shapes: V target tokens.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stages.sampling.transforms import LogitTransform
from store.errors import ConfigError

MAX_CHARACTERS = 1 << 16
MAX_RULES = 500  # llguidance compiles rules recursively: a chain of 3,000 overflows a stack of 8 MiB
# Work that llguidance may do. Measured with a vocabulary of 50,257: an object of 64 optional properties needs 400 items
# in a row, an ambiguous grammar of sums 3,000 items for a mask, a JSON pattern 5,000 units of fuel. With these limits a
# mask takes at most about 40 ms; with llguidance's own, `x: "a" | x x | x x x | x x x x` takes a second for one.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 100_000,  # with llguidance's own, /(a{1000}){1000}/ takes seconds for one token
    "step_lexer_fuel": 50_000,
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
SLOW_SECONDS = 0.002  # of CPU for a mask, beyond which the row waits for it in turn with the others of its kind
FIRST_SECONDS, TOKEN_SECONDS = 2.0, 0.004  # of a CPU, for all masks of a row: in all, and more for each emitted token
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,16}"  # between the parts of JSON; by default a model may write it for ever


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as text: a JSON schema, or a context-free grammar in the notation of Lark or of llama.cpp (GBNF)."""

    kind: Literal["json_schema", "grammar"]
    text: str

    @classmethod
    def from_response_format(cls, value: Mapping[str, Any]) -> "GrammarSource | None":
        """Read the parameter `response_format` of OpenAI's interface, extended by `grammar`. None for plain text.
        Raises `ConfigError` if it has another form.

        >>> GrammarSource.from_response_format({"type": "json_object"})
        GrammarSource(kind='json_schema', text='{"type": "object"}')
        >>> GrammarSource.from_response_format({"type": "text"})
        """
        kind, body = value.get("type"), {name: inner for name, inner in value.items() if name != "type"}
        match kind, body:
            case "text", {**rest} if not rest:
                return None
            case "json_object", {**rest} if not rest:
                return cls("json_schema", json.dumps({"type": "object"}))
            case "json_schema", {"json_schema": {"schema": dict(schema)}, **rest} if not rest:
                return cls("json_schema", json.dumps(schema))
            case "grammar", {"grammar": str(text), **rest} if not rest:
                return cls("grammar", text)
        raise ConfigError(
            "response_format must be {'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': "
            f"{{...}}}} or {{'type': 'grammar', 'grammar': '...'}}, got {str(dict(value))[:200]}"
        )


class Grammar(LogitTransform):
    """Masks the tokens that a grammar does not allow after what was emitted. A row has one of its own, of `start`.

    Where it allows none, only the ends of the sequence are allowed. Those are places that are never reached, as the
    tokens before have probability 0, and all places after the parser gave up.

    Where masks take long, those after the emitted tokens are computed in a thread of the pool, if there is one, while
    other rows are decoded: a mask of a text in which anything may follow takes 20 ms for 49,152 tokens, and a pass of a
    small target 4.

    The parser gives up once for all: at a limit of its own (`LIMITS`), or when the masks of the row have taken too much
    time together, which is a budget as the deadline of a request is. The matcher, an `LLMatcher` at the beginning, is
    copied and stays there; the clock gives seconds of this thread's CPU time.
    """

    def __init__(
        self,
        matcher: Any,
        eos_ids: Collection[int],
        clock: Callable[[], float] = time.thread_time,
        pool: Executor | None = None,
    ) -> None:
        self._matcher, self._eos_ids, self._clock, self._pool = matcher.deep_copy(), sorted(eos_ids), clock, pool
        self._prepared: tuple[int, Future[bytes]] | None = None  # how many tokens were emitted, and the mask after them
        self._recent_seconds = 0.0  # of a mask, a mean in which the last ones count most
        self._consumed: list[int] = []  # by the matcher
        self._seconds = 0.0
        self._gave_up = False
        self._unknown_from = math.inf  # emitted tokens before the first place whose mask is not known

    def start(self) -> "Grammar":
        """Return the grammar at its beginning, if this one was never applied. May be called from any thread."""
        return Grammar(self._matcher, self._eos_ids, self._clock, self._pool)

    def has_failed(self, emitted: int) -> bool:
        """Whether the last of so many tokens was emitted without a mask, because the parser gave up."""
        return emitted > self._unknown_from

    @override
    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        prepared, self._prepared = self._prepared, None
        bits = prepared[1].result() if prepared else b""
        if not prepared or prepared[0] != len(emitted):
            bits = self._find_allowed(emitted)
        if self._gave_up or self._matcher.is_error():
            bits, self._gave_up = b"", True
            self._unknown_from = min(self._unknown_from, len(emitted))
        self._gave_up |= self._seconds > FIRST_SECONDS + TOKEN_SECONDS * len(emitted)
        allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
        if bits:  # of no bytes, `unpackbits` makes as many as are wanted, of whatever the memory holds
            unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(logits_V), bitorder="little")
            allowed_V = torch.from_numpy(unpacked).bool()
        if not allowed_V.any():
            allowed_V[self._eos_ids] = True
        logits_V.masked_fill_(~allowed_V.to(logits_V.device), -torch.inf)

    @property
    @override
    def is_slow(self) -> bool:
        return self._pool is not None and self._recent_seconds > SLOW_SECONDS

    @override
    def prepare(self, emitted: Sequence[int]) -> "Future[bytes] | None":
        if not self._prepared and self._pool and self.is_slow:
            self._prepared = len(emitted), self._pool.submit(self._find_allowed, emitted)
        return self._prepared[1] if self._prepared else None

    def _find_allowed(self, emitted: Sequence[int]) -> bytes:
        """Return a bit per token, those that are allowed after these; nothing if these are not allowed themselves, or
        after the parser gave up.
        """
        if self._gave_up:
            return b""
        began = self._clock()
        try:
            return self._compute_mask(emitted)
        finally:
            seconds = self._clock() - began
            self._seconds += seconds
            self._recent_seconds += (seconds - self._recent_seconds) / 4

    def _compute_mask(self, emitted: Sequence[int]) -> bytes:
        pairs = enumerate(zip(self._consumed, emitted, strict=False))
        shared = next((place for place, (old, new) in pairs if old != new), min(len(self._consumed), len(emitted)))
        self._matcher.rollback(len(self._consumed) - shared)
        new = list(emitted[shared:])
        taken = self._matcher.try_consume_tokens(new)
        self._consumed[shared:] = new[:taken]
        allowed: bytes = self._matcher.compute_bitmask() if taken == len(new) else b""
        return allowed


class GrammarCompiler:
    """Compiles grammars for one vocabulary (see `Vocabulary.token_bytes`, `spell`). May be called from any thread."""

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        spell: Callable[[bytes], Sequence[int] | None],
        eos_ids: Collection[int],
    ) -> None:
        self._token_bytes, self._spell, self._eos_ids = token_bytes, spell, sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._pool = ThreadPoolExecutor(1, "grammar-masks")  # releases Python's lock while it computes a mask

    def compile(self, source: GrammarSource) -> Grammar:
        """Compile a grammar. Takes milliseconds, up to a second for a large one. Raises `ConfigError` if the grammar is
        not valid or too complex, the target has no end of sequence, or the package is not installed.
        """
        try:
            import llguidance
        except ImportError:
            raise ConfigError("response_format needs llguidance: pip install 'omnidraft[grammar]'") from None
        if not self._eos_ids:
            raise ConfigError("response_format needs a target with an end of sequence, but this one has none")
        _check_size(source)
        try:
            if source.kind == "json_schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    source.text, defaults={"whitespace_pattern": JSON_SPACE}
                )
            else:
                grammar = llguidance.grammar_from(source.kind, source.text)
        except ValueError as error:
            raise _invalid_error(str(error)) from None
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._open_tokenizer(), grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # finds grammars without a text, and those that are too complex at once
        if matcher.is_error():
            raise _invalid_error(matcher.get_error())
        return Grammar(matcher, self._eos_ids, pool=self._pool)

    def _open_tokenizer(self) -> Any:
        """The vocabulary as llguidance reads it; made once, in about a second."""
        import llguidance

        with self._lock:
            if self._tokenizer is None:
                wrapper = llguidance.TokenizerWrapper(_Tokens(self._token_bytes, self._spell, self._eos_ids[0]))
                self._tokenizer = llguidance.LLTokenizer(
                    wrapper, n_vocab=len(self._token_bytes), eos_token=list(self._eos_ids)
                )
            return self._tokenizer


def _check_size(source: GrammarSource) -> None:
    if len(source.text) > MAX_CHARACTERS:
        raise _invalid_error(f"it has {len(source.text)} characters, at most {MAX_CHARACTERS} are possible")
    colons = source.text.count(":")  # every rule has one
    if source.kind == "grammar" and colons > MAX_RULES:
        raise _invalid_error(f"it has {colons} colons, at most {MAX_RULES} are possible")


# What llguidance says of grammars that refer to themselves in vain, and what it means.
_REASONS = {
    "NoExtensionBias": "no text follows it; a schema or rule must not refer to itself without anything more",
    "Schema intersection stack level exceeded": "a schema that refers to itself is combined with another in 'allOf', "
    "which cannot be followed; write out what both require",
}


def _invalid_error(reason: str) -> ConfigError:
    line = reason.partition("\n")[0]
    return ConfigError(f"response_format must have a valid grammar, but: {_REASONS.get(line, line)[:300]}")


class _Tokens:
    """A vocabulary with the attributes that llguidance reads."""

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        spell: Callable[[bytes], Sequence[int] | None],
        eos_token_id: int,
    ) -> None:
        self.tokens = [token or b"" for token in token_bytes]
        self.special_token_ids = [number for number, token in enumerate(token_bytes) if token is None]
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self._spell = spell

    def __call__(self, text: bytes | str) -> list[int]:
        """Spell a text. llguidance sends bytes, unless a first trial with bytes raised an error."""
        spelt = self._spell(text.encode() if isinstance(text, str) else text)
        if spelt is None:
            raise ValueError(f"the target's tokenizer must spell {text!r}, but cannot")
        return list(spelt)
