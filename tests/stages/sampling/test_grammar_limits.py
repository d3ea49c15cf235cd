"""Grammars whose parsing takes ever more work end their row; the work is counted, not timed."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future

import pytest
import torch

from stages.sampling.grammars import FIRST_SECONDS, SLOW_SECONDS, Grammar, GrammarCompiler, GrammarSource

pytest.importorskip("llguidance")

END = 256
BYTES = [bytes([byte]) for byte in range(256)]
AMBIGUOUS = GrammarSource("grammar", 'start: x\nx: "a" | x x | x x x | x x x x')
OPTIONAL = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(600)}}
LETTERS = GrammarSource("grammar", "start: s\ns: /[a-z]/ s | /[a-z]/ s s | /[a-z]/")
HARMLESS = GrammarSource("grammar", 'start: e\ne: t | e "+" t\nt: /[0-9]+/ | "(" e ")"')


class CountingMatcher:
    """A matcher that counts the calls that take work."""

    def __init__(self, matcher: object) -> None:
        self.matcher, self.calls = matcher, 0

    def deep_copy(self) -> "CountingMatcher":
        return self

    def __getattr__(self, name: str) -> object:
        self.calls += name in {"compute_bitmask", "try_consume_tokens", "rollback"}
        return getattr(self.matcher, name)


def compile_source(source: GrammarSource) -> object:
    compiler = GrammarCompiler([*BYTES, None], list, [END])
    return compiler.compile(source)._matcher


def emit(transform: Grammar, text: Callable[[int], bytes], most: int) -> int:
    """Emit bytes until the transform allows the end alone. Returns how many were emitted."""
    emitted = list[int]()
    for place in range(most):
        logits_V = torch.zeros(END + 1)
        transform.apply(logits_V, emitted)
        (token,) = text(place)
        if logits_V[token] != 0:
            assert (logits_V == 0).nonzero().tolist() == [[END]]
            break
        emitted.append(token)
    return len(emitted)


def begin_object(place: int) -> bytes:
    text = json.dumps({f"p{n}": 1 for n in range(599)}).encode()
    return text[place : place + 1]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (AMBIGUOUS, lambda place: b"a"),
        (LETTERS, lambda place: b"abc"[place % 3 : place % 3 + 1]),
        (GrammarSource("json_schema", json.dumps(OPTIONAL)), begin_object),
    ],
    ids=["ambiguous", "right recursion", "optional properties"],
)
def test_a_row_ends_when_its_grammar_takes_too_much_work(source: GrammarSource, text: Callable[[int], bytes]):
    matcher = CountingMatcher(compile_source(source))
    transform = Grammar(matcher, [END], clock=lambda: 0.0)
    emitted = emit(transform, text, 400)
    assert emitted < 400
    assert transform.has_failed(emitted + 1), "the end that follows is no end of the text"
    assert not transform.has_failed(emitted), "the tokens before were allowed"
    before = matcher.calls
    assert emit(transform, text, 10) == 0
    assert matcher.calls == before, "a parser that gave up is not asked again"


def test_a_row_has_a_budget_of_time_for_its_masks_together():
    ticks = itertools.count()
    transform = Grammar(compile_source(HARMLESS), [END], clock=lambda: float(next(ticks)))  # a second a mask
    emitted = emit(transform, lambda place: b"1", 100)
    assert emitted == FIRST_SECONDS + 1
    assert transform.has_failed(emitted + 1)


def test_a_harmless_grammar_never_reaches_the_limits():
    transform = Grammar(compile_source(HARMLESS), [END], clock=lambda: 0.0)
    assert emit(transform, lambda place: b"(1+"[place % 3 : place % 3 + 1], 300) == 300
    assert not transform.has_failed(301)


class LaterPool(Executor):
    """Runs what was submitted when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., object], /, *arguments: object) -> Future[object]:
        future = Future[object]()
        self.jobs.append(lambda: future.set_result(function(*arguments)))
        return future


def test_slow_masks_are_computed_before_they_are_applied():
    matcher = CountingMatcher(compile_source(HARMLESS))
    pool, clock = LaterPool(), itertools.count(0, 2 * SLOW_SECONDS * 4).__next__
    grammar, text = Grammar(matcher, [END], clock, pool), b"1+(2"
    assert grammar.prepare([]) is None
    for place in range(len(text)):
        logits_V, wanted_V = torch.zeros(END + 1), torch.zeros(END + 1)
        if place:
            future = grammar.prepare([*text[:place]])
            assert future is grammar.prepare([*text[:place]])
            assert future
            assert not future.done()
            pool.jobs.pop()()
        calls = matcher.calls
        grammar.apply(logits_V, [*text[:place]])
        assert (matcher.calls == calls) == (place > 0)
        Grammar(compile_source(HARMLESS), [END]).apply(wanted_V, [*text[:place]])
        assert torch.equal(logits_V, wanted_V)
    assert not pool.jobs
