"""Exactness of token trees: for all proposals in target tokens, the emitted text has the target's distribution.

Every outcome of one row is enumerated through whole production stages, in double precision, over trees of all shapes:
first over given ones, then over those that `ChooseDraft` grows from the row's own text and from the memory while both
learn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
from enumeration import EXACT, Distribution, World, add_up, difference, true_distribution
from test_mixed_rows import MIXED, WARM, stop_at, text_of, wanted_distribution, world_of
from token_trees import GivenTrees, make_tree
from whole_stages import PROMPT, Stages, admit, advance, batch_distribution, emit, new_row, stages_of

from stages.choose import ChooseDraft
from stages.contract.blocks import SequenceState, TokenTree, Verdict
from stages.drafting.costs import Costs
from stages.drafting.sources import Exploration, SourceChooser
from stages.memory.calibration import own_cell
from stages.memory.text_memory import TextMemory, TreeLimits
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource, SeededRandomSource
from stages.vocabulary.text_stream import StopStrings
from store.events import Action, DraftSource, Outcome

VOCABULARY = range(7)  # of `world_of`; three of its tokens have mass after any text

Emitted = tuple[int, ...]
Pick = Callable[[World, Emitted], Sequence[int]]  # the candidates after a text


def random_numbers(world: World, emitted: Emitted) -> np.random.Generator:
    return np.random.default_rng([99, world.seed, *emitted])


def some(world: World, emitted: Emitted) -> Sequence[int]:
    """Up to three tokens, most of which the target never emits."""
    numbers = random_numbers(world, emitted)
    return numbers.choice(VOCABULARY, numbers.integers(0, 4), replace=False).tolist()


def one(world: World, emitted: Emitted) -> Sequence[int]:
    return [int(random_numbers(world, emitted).choice(possible(world, emitted)))]


def possible(world: World, emitted: Emitted) -> Sequence[int]:
    return world.target_distribution(emitted).nonzero()[:, 0].tolist()


def impossible(world: World, emitted: Emitted) -> Sequence[int]:
    return [token for token in VOCABULARY if token not in possible(world, emitted)][:2]


def all_mass(world: World, emitted: Emitted) -> Sequence[int]:
    """All tokens that the target may emit, and one among them that it never emits."""
    first, *others = possible(world, emitted)
    return [first, impossible(world, emitted)[0], *others]


def impossible_first(world: World, emitted: Emitted) -> Sequence[int]:
    return [*impossible(world, emitted)[:1], *possible(world, emitted)[:2]]


KINDS: Mapping[str, Pick] = {
    "some": some,
    "one": one,
    "impossible": impossible,
    "all mass": all_mass,
    "impossible first": impossible_first,
}


def grow(world: World, emitted: Emitted, pick: Pick, depth: int) -> dict[int, Any]:
    if not depth:
        return {}
    return {token: grow(world, (*emitted, token), pick, depth - 1) for token in pick(world, emitted)}


def trees_of(world: World, pick: Pick, depth: int = 2) -> Callable[[SequenceState], TokenTree | None]:
    """A function from a row to its tree, which depends on the emitted text alone."""

    def tree_of(row: SequenceState) -> TokenTree | None:
        branches = grow(world, tuple(row.tokens[len(PROMPT) :]), pick, depth)
        return make_tree(branches) if branches else None

    return tree_of


def given_trees(world: World, pick: Pick, depth: int = 2, **options: Any) -> Stages:
    decode, translate, judge = stages_of(world)
    return GivenTrees(decode, trees_of(world, pick, depth), **options), translate, judge


def check_logprobs(world: World, verdict: Verdict) -> None:
    """Check that each emitted token has the target's log probability after all tokens before it."""
    row = verdict.proposal.draft.row
    begin = row.emitted - len(verdict.emitted)
    assert [one.token for one in verdict.logprobs] == list(verdict.emitted)
    for place, found in enumerate(verdict.logprobs):
        probs = World.target_distribution(world, tuple(row.tokens[len(PROMPT) : len(PROMPT) + begin + place]))
        assert found.logprob == pytest.approx(float(probs[found.token].log()), abs=1e-5)
        assert found.top[0] == (int(probs.argmax()), pytest.approx(float(probs.max().log()), abs=1e-5))


class Seen:
    """The kinds of outcomes, the numbers of accepted candidates per block, and how often trees were cut."""

    def __init__(self) -> None:
        self.accepted: set[int] = set()
        self.outcomes: set[Outcome] = set()
        self.sources: set[tuple[DraftSource, ...]] = set()
        self.cut = 0

    def add(self, verdict: Verdict) -> None:
        if tree := verdict.proposal.draft.tree:
            self.accepted.add(verdict.accepted)
            self.outcomes |= {decision.outcome for decision in verdict.decisions}
            self.cut += len(verdict.decisions) < len(tree.candidates)


def distribution_of(
    world: World, make: Callable[[], Stages], count: int, remaining_tokens: int, sampling: SamplingParams | None = None
) -> tuple[Distribution, Seen]:
    """The distribution of a row's first `count` tokens."""
    seen = Seen()

    def run(rng: RandomSource) -> tuple[int, ...]:
        row, stages = new_row(rng, remaining_tokens, 0, sampling), make()
        row.sampling, rows = replace(sampling or SamplingParams(1.0), logprobs=1), [row]
        admit(stages, rows)
        while not row.finish and row.emitted < count:
            for verdict in advance(stages, rows):
                check_logprobs(world, verdict)
                seen.add(verdict)
        return tuple(row.tokens[row.prompt_length :])[:count]

    return add_up(run), seen


def assert_exact(distribution: Distribution, wanted: Distribution) -> None:
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(distribution, wanted) < EXACT


@pytest.mark.representatives(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_trees_of_all_shapes_keep_the_targets_distribution(vocabulary: str, kind: str):
    outcomes = set()
    for seed in range(3):
        world = world_of(vocabulary, seed)
        distribution, seen = distribution_of(world, lambda w=world: given_trees(w, KINDS[kind]), 3, 4)
        assert_exact(distribution, true_distribution(world, 3))
        outcomes |= seen.outcomes
    assert (Outcome.ACCEPTED in outcomes) == (kind != "impossible")
    assert (Outcome.REJECTED in outcomes) == (kind != "all mass")


def test_trees_and_drafts_of_the_model_alternate_within_a_text():
    world = world_of("gaps", 1)
    for mode in ("trie", "match"):
        world = world_of("gaps", 1, mode=mode, seeded=False, cache_entries=1)
        sources: set[tuple[bool, ...]] = set()

        def run(rng: RandomSource, world: World = world, sources: set = sources) -> tuple[int, ...]:
            row, stages, drafted = new_row(rng, 5), given_trees(world, some), []
            rows = [row]
            admit(stages, rows)
            while not row.finish and row.emitted < 3:
                drafted += [verdict.proposal.draft.tree is not None for verdict in advance(stages, rows)]
            sources.add(tuple(drafted))
            return tuple(row.tokens[row.prompt_length :])[:3]

        assert_exact(add_up(run), true_distribution(world, 3))
        assert any(True in drafted and False in drafted for drafted in sources)


# The end of a row.


@pytest.mark.parametrize("remaining_tokens", [1, 2, 3])
def test_a_tree_that_is_deeper_than_the_remaining_tokens(remaining_tokens: int):
    world = world_of("nested", 4, target_support=2)
    for pick in (all_mass, impossible_first):
        distribution, seen = distribution_of(
            world,
            lambda pick=pick: given_trees(world, pick, depth=remaining_tokens + 1),
            remaining_tokens,
            remaining_tokens,
        )
        assert_exact(distribution, true_distribution(world, remaining_tokens))
        assert max(seen.accepted) == remaining_tokens
        assert seen.cut


def test_an_end_of_sequence_inside_a_path():
    world = world_of("nested", 4)
    ends = (possible(world, ())[0], possible(world, (possible(world, ())[1],))[1])
    world = world_of("nested", 4, ends=ends)
    distribution, seen = distribution_of(world, lambda: given_trees(world, all_mass, depth=3), 3, 5)
    wanted = true_distribution(world, 3)
    assert_exact(distribution, wanted)
    assert {len(tokens) for tokens in wanted} == {1, 2, 3}
    assert {1, 2, 3} <= seen.accepted
    assert seen.cut, "candidates after the end are dropped"


@pytest.mark.parametrize("sampling", [WARM, MIXED[2]])
def test_a_stop_string_that_is_completed_inside_a_path(sampling: SamplingParams):
    world = world_of("nested", 6)
    plainly = wanted_distribution(world, 3, sampling)
    first, second, _ = max(plainly, key=plainly.get)
    stops = [text_of((first, second)), text_of([min(tokens[0] for tokens in plainly if tokens[0] != first)])]
    ended: set[tuple[int, bool]] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        row, stages = new_row(rng, 3, 0, sampling), given_trees(world, all_mass, depth=3)
        row.stop_strings = StopStrings(lambda token: text_of([token]).encode(), stops)
        rows = [row]
        admit(stages, rows)
        while not row.finish:
            for verdict in advance(stages, rows):
                tree = verdict.proposal.draft.tree
                ended.add((row.emitted, row.finish == "stop" and len(verdict.decisions) < len(tree.candidates)))
        return tuple(row.tokens[row.prompt_length :])

    assert_exact(add_up(run), stop_at(plainly, stops))
    assert {(1, True), (2, True)} <= ended


# Batches.


@pytest.mark.parametrize("kind", ["some", "all mass", "impossible first"])
def test_every_row_has_the_distribution_that_it_requested(kind: str):
    world = world_of("nested", 3)
    for number, sampling in enumerate(MIXED):
        settings = [(one,) for one in MIXED]
        distribution = batch_distribution(lambda: given_trees(world, KINDS[kind]), settings, number, 2)
        assert_exact(distribution, wanted_distribution(world, 2, sampling))


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_tree_next_to_a_draft_of_the_model_and_an_empty_draft(order: tuple[int, ...]):
    """The rows' places are permuted: lines of logits are counted per row."""
    world = world_of("gaps", 2)
    by_tree, by_model = order.index(0), order.index(1)

    def run(rng: RandomSource, number: int) -> tuple[int, ...]:
        rows = [new_row(rng if n == number else SeededRandomSource(5, n), 3, n) for n in range(3)]
        trees, row = trees_of(world, all_mass), rows[number]
        decode, translate, judge = stages_of(world)
        stages = (
            GivenTrees(
                decode,
                lambda each: trees(each) if each.offset == by_tree else None,
                lambda each: each.offset == by_model,
            ),
            translate,
            judge,
        )
        admit(stages, rows)
        while not row.finish and row.emitted < 2:
            for verdict in advance(stages, rows):
                draft = verdict.proposal.draft
                found = bool(draft.tree), bool(draft.pieces)
                assert found == (draft.row.offset == by_tree, draft.row.offset == by_model)
        return tuple(row.tokens[row.prompt_length :])[:2]

    for number in range(3):
        assert_exact(add_up(lambda rng, n=number: run(rng, n)), true_distribution(world, 2))


def test_rows_of_one_batch_are_independent():
    world = world_of("nested", 3)

    def run(rng: RandomSource) -> tuple[int, ...]:
        rows, stages = [new_row(rng, 1, n, sampling) for n, sampling in enumerate(MIXED)], given_trees(world, some)
        admit(stages, rows)
        advance(stages, list(rows))
        return tuple(row.tokens[-1] for row in rows)

    single = [wanted_distribution(world, 1, sampling) for sampling in MIXED]
    joint = add_up(run)
    for tokens, weight in joint.items():
        assert weight == pytest.approx(
            prod(distribution[(token,)] for distribution, token in zip(single, tokens, strict=True)), abs=EXACT
        )


# Trees that the memory grows.

CHEAP = Costs(((1, 1.0), (2, 1.02)), ((1, 0.45),))


class Swaying(SourceChooser):
    """Changes its choice with the emitted tokens: a tree is used after every third one."""

    def __init__(self) -> None:
        super().__init__(CHEAP)
        self._emitted = 0

    def choose(self, candidates: int, expected: float, *, model: bool = True, more: float = 0.0) -> Action:
        if model and (not candidates or self._emitted % 3 > 0):
            return Action.MODEL
        return Action.COPIES if candidates else Action.NOTHING

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        super().observe(verdict, action, expected, drawn)
        self._emitted += len(verdict.emitted)


@cache
def texts_of(world: World, count: int = 4, length: int = 6) -> list[list[int]]:
    """Prompts with completions that were drawn from the target."""
    numbers, texts = np.random.default_rng(world.seed), []
    for _ in range(count):
        emitted: Emitted = ()
        while len(emitted) < length:
            emitted += (int(numbers.choice(VOCABULARY, p=world.target_distribution(emitted).numpy())),)
        texts.append([*PROMPT, *emitted])
    return texts


def build_choosing_stages(
    world: World, texts: Sequence[list[int]] = (), kind: type[ChooseDraft] = ChooseDraft, **options: Any
) -> Stages:
    """Stages over a memory that has learned these texts and has observed a few hits of its candidates."""
    decode, translate, judge = stages_of(world)
    memory = TextMemory(CHEAP, TreeLimits(6, 3, 3), world.ends, budget_bytes=1 << 16)
    for text in texts:
        memory.table.learn(text, len(PROMPT))
    for length in range(1, 9):
        memory.calibration.observe(own_cell(length), hit=True)
    return kind(decode, memory, Swaying(), CHEAP, **options), translate, judge


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_a_memory_that_learned_texts_keeps_the_targets_distribution(vocabulary: str, model: bool):
    world = world_of(vocabulary, 7)
    seen: set[DraftSource] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages = build_choosing_stages(world, texts_of(world), model=model)
        row = new_row(rng, 3)
        rows = [row]
        admit(stages, rows)
        while rows:
            seen.update(verdict.proposal.draft.source for verdict in advance(stages, rows))
        return tuple(row.tokens[row.prompt_length :])

    assert_exact(add_up(run), true_distribution(world, 3))
    assert DraftSource.MEMORY in seen
    assert (DraftSource.MODEL in seen) == model


def test_actions_that_are_drawn_keep_the_targets_distribution():
    """Every block draws its action: no draft, a tree or a draft of the model."""
    world = world_of("nested", 7)
    actions: set[Action | None] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        choose, translate, judge = build_choosing_stages(world, texts_of(world))
        choose._exploration = Exploration(1.0, 13, tuple(Action))  # nothing, then the model, then copies
        row = new_row(rng, 3)
        admit((choose, translate, judge), [row])
        rows = [row]
        while rows:
            actions.update(verdict.proposal.draft.action for verdict in advance((choose, translate, judge), rows))
        return tuple(row.tokens[row.prompt_length :])

    assert_exact(add_up(run), true_distribution(world, 3))
    assert actions == set(Action)


@pytest.mark.parametrize("private", [False, True])
def test_a_row_that_is_completed_in_between_is_learned_and_changes_no_distribution(private: bool):
    """Both rows are enumerated: the trees of the second depend on what the first one emitted."""
    world = world_of("nested", 8, target_support=2)
    trees: set[tuple[int, ...]] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages = build_choosing_stages(world, model=False)
        first = new_row(rng, 2)
        first.private = private
        emitted = emit(stages, [first], first, 2)
        assert (len(stages[0].memory.table) > 0) == (not private)
        second = new_row(rng, 2, 1)
        rows = [second]
        admit(stages, rows)
        while rows:
            (verdict,) = advance(stages, rows)
            tree = verdict.proposal.draft.tree
            trees.add(tree.tokens if tree else ())
        return emitted + tuple(second.tokens[second.prompt_length :])

    alone = true_distribution(world, 2)
    wanted = {left + right: chance * other for left, chance in alone.items() for right, other in alone.items()}
    assert_exact(add_up(run), wanted)
    assert () in trees
    assert (len(trees) > 3) == (not private)


@pytest.mark.slow
def test_rows_with_trees_enter_and_leave_while_a_row_is_enumerated():
    """A greedy row is completed and learned after the first block; a private row stays."""
    world = world_of("gaps", 5)
    learned: set[int] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        nonlocal learned
        stages = build_choosing_stages(world, texts_of(world))
        row = new_row(rng, 4)
        greedy = new_row(SeededRandomSource(5, 1), 1, 1, MIXED[0])
        private = new_row(SeededRandomSource(5, 2), 9, 2, MIXED[2])
        private.private = True
        rows = [greedy, private, row]
        admit(stages, rows)
        while not row.finish and row.emitted < 3:
            advance(stages, rows)
            learned |= {len(stages[0].memory.table)} if not row.finish else set()
        return tuple(row.tokens[row.prompt_length :])[:3]

    assert_exact(add_up(run), true_distribution(world, 3))
    assert len(learned) == 1, "the row of one token was learned after the first block, the private one never"


@pytest.mark.parametrize("sampling", MIXED)
def test_trees_of_the_memory_follow_a_row_s_own_sampling(sampling: SamplingParams):
    world = world_of("nested", 9)

    def run(rng: RandomSource) -> tuple[int, ...]:
        row = new_row(rng, 2, 0, sampling)
        return emit(build_choosing_stages(world, texts_of(world)), [row], row, 2)

    assert_exact(add_up(run), wanted_distribution(world, 2, sampling))
