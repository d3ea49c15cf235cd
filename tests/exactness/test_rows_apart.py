"""No request affects the output of another: a row emits in a batch exactly what it emits alone.

The models are small, random and in double precision, so that the order of summation decides nothing. Rows with any
sampling enter and leave at any time, by finishing or by being cancelled. The active entries of the n-gram cache do not
change: all rows share the cache, and its entries change the random numbers that a sampled text uses, not its
distribution.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import World, translation_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from token_trees import GivenTrees, make_tree

from stages.contract.blocks import SequenceState, TokenTree
from stages.decode import Decode
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import ThresholdStop
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.sampling.logprobs import TokenLogprobs
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import SeededRandomSource
from stages.sampling.transforms import LogitBias
from stages.verification.rules import TrieRule
from stages.verify import Verify
from stages.vocabulary.text_stream import StopStrings, TextStream

BYTES = dict(enumerate([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"bc", b"abc"]))  # the eighth token is the end
SPELLING = ((0,), (1,), (0, 1), (2,), (3,), (1, 4), (0, 1, 4), None, None)  # and a token that the model has beyond
END, KNOWN, PIECES = 7, 8, 5
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Request:
    """A request with the block of its arrival and the number of blocks after which its client leaves."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stops: tuple[str, ...] = ()
    remaining_tokens: int = 8
    logprobs: int | None = None
    arrives: int = 0
    leaves: int | None = None  # 0: before its first block; None: never


@dataclass
class Answer:
    """The output of a request, and the reason for its end."""

    text: TextStream[int]
    tokens: list[int] = field(default_factory=list)
    shown: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""


requests_of = st.lists(
    st.builds(
        Request,
        st.lists(st.integers(0, KNOWN - 1), min_size=1, max_size=6).map(tuple),
        st.sampled_from(
            [
                SamplingParams(),
                SamplingParams(),
                SamplingParams(1.0),
                SamplingParams(0.7, 0, 0.8),
                SamplingParams(1.4, 3),
            ]
        ),
        st.integers(0, 9),
        st.lists(st.sampled_from(["ab", "ca", "bb", "é", "bcab"]), max_size=2, unique=True).map(tuple),
        st.integers(1, 12),
        st.sampled_from([None, None, 0, 2]),
        st.integers(0, 5),
        st.sampled_from([None, None, None, 0, 1, 3]),
    ),
    min_size=2,
    max_size=6,
)


@cache
def model_of(seed: int, size: int, forward: str) -> LanguageModel:
    llama = new_llama(seed, vocab_size=size, num_key_value_heads=2, **SHAPE).double()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(3)  # every token of the context matters
    model = LanguageModel(llama, "tiny")
    if forward == "modules":
        model.forward_pass = ModuleForward(llama)
    model.reads_trees = model.forward_pass.reads_trees
    return model


def stages_of(forward: str, max_draft: int, *ends: int) -> tuple[Decode, Any, Verify]:
    trie, translate = translation_of(World(SPELLING, PIECES), ())
    drafter, target = model_of(1, PIECES, forward).share_weights(), model_of(0, len(SPELLING), forward).share_weights()
    assert isinstance(target.forward_pass, ModuleForward if forward == "modules" else PackedLlamaForward)
    head = AcceptanceHead(drafter.hidden_size, 0).requires_grad_(False)
    decode = Decode(
        drafter, head, ThresholdStop(0.8), SamplingParams(), range(PIECES), max_draft, None, probs_dtype=torch.float64
    )
    context = [pieces or () for pieces in SPELLING]
    rule = TrieRule(trie)
    return (
        decode,
        translate,
        Verify(target, rule, SamplingParams(), context, KNOWN, ends, None, torch.float64),
    )


def with_trees(stages: tuple[Decode, Any, Verify]) -> tuple[Any, Any, Verify]:
    """Return the stages with trees that depend on a row's text alone; after some texts the model drafts."""

    def tree_of(row: SequenceState) -> TokenTree | None:
        numbers = np.random.default_rng([len(row.tokens), *row.tokens[-2:]])

        def branches(depth: int) -> dict[int, Any]:
            tokens = numbers.permutation(END + 1)[: numbers.integers(0, 4)].tolist()
            return {token: branches(depth - 1) for token in tokens} if depth else {}

        found = branches(3)
        return make_tree(found) if found else None

    decode, translate, judge = stages
    return GivenTrees(decode, tree_of), translate, judge


def row_of(request: Request, number: int) -> SequenceState:
    tokens = list(request.prompt)
    pieces = [piece for token in tokens for piece in SPELLING[token] or ()] or [0]
    rng = SeededRandomSource(request.seed, 0)
    row = SequenceState(number, f"{number}", "", "", tokens, len(tokens), pieces, rng, request.remaining_tokens)
    row.sampling = replace(request.sampling, logprobs=request.logprobs)
    row.stop_strings = StopStrings(BYTES.get, request.stops) if request.stops else None
    return row


def serve(stages: tuple[Decode, Any, Verify], requests: Sequence[Request]) -> list[Answer]:
    """Serve all requests by continuous batching, as the loop does."""
    decode, translate, judge = stages
    answers = [Answer(TextStream(BYTES.get, request.stops)) for request in requests]
    waiting, rows, time = list(range(len(requests))), [], 0
    while waiting or rows:
        for number in [number for number in waiting if requests[number].arrives <= time]:
            waiting.remove(number)
            rows.append(row_of(requests[number], number))
            for stage in stages:
                stage.admit(rows[-1])
        release(stages, rows, [row for row in rows if requests[row.offset].leaves == 0])
        awaited = [row.prepare_transforms() for row in rows]
        if not all(awaited):
            for verdict in judge(translate(decode(rows))):
                take(verdict, answers[verdict.proposal.draft.row.offset])
        release(stages, rows, [row for row in rows if row.finish or row.block == requests[row.offset].leaves])
        time += 1
    return answers


def release(stages: tuple[Decode, Any, Verify], rows: list[SequenceState], leaving: Sequence[SequenceState]) -> None:
    for row in leaving:
        last = rows.pop()
        if last is not row:
            rows[rows.index(row)] = last
        for stage in stages:
            stage.release(row)


def take(verdict: Any, answer: Answer) -> None:
    answer.tokens += verdict.emitted
    answer.shown += answer.text.push(verdict.emitted)
    answer.logprobs += verdict.logprobs
    answer.finish = verdict.proposal.draft.row.finish


def assert_alike(request: Request, batched: Answer, alone: Answer) -> None:
    left = not batched.finish
    count = len(batched.tokens) if left else len(alone.tokens)
    assert batched.tokens == alone.tokens[:count]
    if not left:
        assert (batched.finish, batched.shown) == (alone.finish, alone.shown)
        assert batched.text.stopped == (request.stops != () and alone.text.stopped)
    assert alone.shown.startswith(batched.shown)
    assert [one.token for one in batched.logprobs] == (batched.tokens if request.logprobs is not None else [])
    for one, other in zip(batched.logprobs, alone.logprobs, strict=False):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def check(
    requests: Sequence[Request], forward: str = "packed", max_draft: int = 3, *, trees: bool = False
) -> list[Answer]:
    stages = stages_of(forward, max_draft, END)
    if trees:
        stages = with_trees(stages)
    together = serve(stages, requests)
    for request, batched in zip(requests, together, strict=True):
        (alone,) = serve(stages, [replace(request, arrives=0, leaves=None)])
        assert_alike(request, batched, alone)
    return together


MANY = [
    Request((0, 1, 2), SamplingParams(), 1, remaining_tokens=12, logprobs=2),
    Request((0, 1, 2), SamplingParams(1.0), 1, ("ab",), 12),
    Request((3,), SamplingParams(0.7, 0, 0.8), 2, remaining_tokens=9, logprobs=0),
    Request((0, 1, 2), SamplingParams(1.0), 3, remaining_tokens=12, arrives=1, leaves=1),
    Request((5, 6), SamplingParams(1.4, 3), 4, ("é", "ca"), 12, arrives=2),
    Request((0, 1, 2), SamplingParams(), 5, remaining_tokens=3, arrives=3),
    Request((1,), SamplingParams(1.4), 0, ("bcab", "bb"), 12),
    Request((3, 1), SamplingParams(1.4), 20, ("bb", "aba"), 12),
]


@pytest.mark.representatives("packed")
@pytest.mark.parametrize("forward", ["packed", "modules"])
@settings(max_examples=60, deadline=None)
@given(requests=requests_of, max_draft=st.sampled_from([0, 1, 3]))
@example(requests=MANY, max_draft=3)
def test_a_row_emits_in_a_batch_what_it_emits_alone(forward: str, requests: list[Request], max_draft: int):
    check(requests, forward, max_draft)


@pytest.mark.slow
@pytest.mark.representatives("packed")
@pytest.mark.parametrize("forward", ["packed", "modules"])
@settings(max_examples=30, deadline=None)
@given(requests=requests_of)
@example(requests=MANY)
def test_a_row_with_trees_emits_in_a_batch_what_it_emits_alone(forward: str, requests: list[Request]):
    check(requests, forward, trees=True)


def test_the_requests_that_are_tried_end_in_every_way():
    answers = check(MANY)
    assert {answer.finish for answer in answers} == {"", "stop", "length"}
    assert any(answer.text.stopped for answer in answers)
    assert answers[0].tokens != answers[1].tokens, "one prompt, two samplings"
    assert answers[0].tokens[:3] == answers[5].tokens, "one prompt, one sampling"


class Awaited(LogitBias):
    """A transform that is awaited for two blocks at every third place."""

    is_slow = True

    def __init__(self) -> None:
        super().__init__([(4, 0.5)])
        self.calls = 0

    def prepare(self, emitted: Sequence[int]) -> Future[None] | None:
        self.calls += 1
        return Future() if len(emitted) % 3 == 0 and self.calls % 3 else None


@pytest.mark.parametrize("forward", ["packed", "modules"])
def test_rows_that_sit_out_blocks_change_no_text(forward: str, monkeypatch):
    """They draft nothing, and the others are decoded as without them."""
    make = row_of

    def make_biased(request: Request, number: int, transform: Callable[[], LogitBias]) -> SequenceState:
        row = make(request, number)
        row.transforms = (transform(),) if number % 2 else ()
        return row

    monkeypatch.setitem(globals(), "row_of", partial(make_biased, transform=lambda: LogitBias([(4, 0.5)])))
    drafted, plain = (serve(stages_of(forward, most, END), MANY) for most in (3, 0))
    monkeypatch.setitem(globals(), "row_of", partial(make_biased, transform=Awaited))
    for number, answer in enumerate(serve(stages_of(forward, 3, END), MANY)):
        wanted = plain[number] if number % 2 else drafted[number]
        assert (answer.tokens, answer.finish) == (wanted.tokens, wanted.finish)


# The suite can fail: each of these changes lets one row affect another; `tests/mutants` has more of them.


def _draws_are_shared(monkeypatch):
    shared = SeededRandomSource(0, 0)
    monkeypatch.setitem(globals(), "SeededRandomSource", lambda seed, offset: shared)


def _one_tail_for_all_stop_strings(monkeypatch):
    tails = [b""]
    shared = property(lambda ending: tails[-1], lambda ending, tail: tails.append(tail))
    monkeypatch.setattr(StopStrings, "_tail", shared, raising=False)


@pytest.mark.parametrize("mutate", [_draws_are_shared, _one_tail_for_all_stop_strings])
def test_a_leak_from_row_to_row_is_detected(mutate: Callable[[Any], None], monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(MANY)


@pytest.mark.parametrize("forward", ["packed", "modules"])
def test_trees_change_nothing_of_greedy_text(forward: str):
    """The kept path is therefore the same as what the row reads without a tree."""
    greedy = [Request(one.prompt, SamplingParams(), one.seed, one.stops, one.remaining_tokens, 0) for one in MANY]
    plain = serve(stages_of(forward, 0, END), greedy)
    for found, wanted in zip(serve(with_trees(stages_of(forward, 3, END)), greedy), plain, strict=True):
        assert found.tokens == wanted.tokens
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
