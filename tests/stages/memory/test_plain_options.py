"""Options: what several sources know about the same place, each token once, the most probable first."""

from plain_options import Option, OptionFinder, last_tokens
from plain_own_text import Match, SuffixIndex

from stages.memory.calibration import RANKS, Calibration, memory_cell, own_cell
from stages.memory.ngram_table import NgramTable
from store.events import DraftSource


def make_index(*tokens: int) -> SuffixIndex:
    index = SuffixIndex()
    index.read(list(tokens))
    return index


def make_table(*texts: list[int], scope: int = 0) -> NgramTable:
    table = NgramTable(1 << 16)
    for text in texts:
        table.learn(text, 1, scope)
    return table


def teach(calibration: Calibration, cell: int, chance: float) -> None:
    for number in range(500):
        calibration.observe(cell, hit=number % 10 < 10 * chance)


def find(finder: OptionFinder, index: SuffixIndex, *suffix: int, scope: int = 0) -> list[Option]:
    return finder.find(suffix, index, scope, at_end=True)


def test_the_own_text_gives_the_continuation_of_its_last_occurrence():
    calibration = Calibration()
    finder = OptionFinder(None, calibration, own=True)
    (option,) = find(finder, make_index(1, 2, 3, 4, 1, 2), 1, 2)
    cell = own_cell(2)
    assert option == Option(3, calibration.chance(cell), DraftSource.LOOKUP, 2, 1, cell, Match(2, 2))


def test_the_memory_gives_the_commonest_continuations_of_the_two_longest_contexts():
    calibration, table = Calibration(), make_table([9, 1, 5], [9, 1, 5], [9, 1, 6], [8, 1, 7])
    options = find(OptionFinder(table, calibration, own=True), make_index(9, 1), 9, 1)
    assert {(option.token, option.context, option.seen) for option in options} == {(5, 2, 2), (6, 2, 1), (7, 1, 1)}
    assert {option.source for option in options} == {DraftSource.MEMORY}
    assert {option.cell for option in options} == {
        memory_cell(2, 3, 2, 0), memory_cell(2, 3, 1, 1), memory_cell(1, 4, 1, 1)
    }  # fmt: skip
    assert all(option.chance == calibration.chance(option.cell) for option in options)


def test_no_more_continuations_of_a_context_are_options_than_have_cells():
    table = make_table(*([1, token] for token in range(2, 6)))
    assert len(find(OptionFinder(table, Calibration(), own=True), make_index(1), 1)) == RANKS


def test_a_token_that_several_sources_know_is_one_option_with_the_highest_chance():
    calibration, table, index = Calibration(), make_table([1, 2, 3]), make_index(1, 2, 3, 1, 2)
    teach(calibration, own_cell(2), 0.5)
    for memory, wanted in ((0.3, DraftSource.LOOKUP), (0.9, DraftSource.MEMORY)):
        teach(calibration, memory_cell(2, 1, 1, 0), memory)
        teach(calibration, memory_cell(1, 1, 1, 0), 0.1)
        (option,) = find(OptionFinder(table, calibration, own=True), index, 1, 2)
        assert (option.token, option.source) == (3, wanted)
        assert option.match == Match(2, 2), "the own text knows what follows, whichever source is better here"


def test_options_are_sorted_by_chance_and_equal_ones_by_token():
    calibration, table = Calibration(), make_table([1, 7], [1, 4], [1, 9])
    for rank, chance in enumerate((0.2, 0.5, 0.5)):
        teach(calibration, memory_cell(1, 3, 1, rank), chance)
    options = find(OptionFinder(table, calibration, own=True), make_index(1), 1)
    assert [option.chance for option in options] == sorted((option.chance for option in options), reverse=True)
    assert [option.token for option in options] == [4, 7, 9]  # 9 was the last and so the first by rank


def test_without_a_source_it_gives_no_options():
    table, index = make_table([1, 2, 3]), make_index(1, 2, 4, 1, 2)
    tokens = {}
    for own in (False, True):
        for known in (None, table):
            options = find(OptionFinder(known, Calibration(), own=own), index, 1, 2)
            tokens[own, known is not None] = {option.token for option in options}
    assert tokens == {(False, False): set(), (True, False): {4}, (False, True): {3}, (True, True): {3, 4}}


def test_only_contexts_of_the_row_s_scope_count():
    finder = OptionFinder(make_table([1, 2, 3], scope=5), Calibration(), own=True)
    assert find(finder, make_index(1, 2), 1, 2) == []
    assert len(find(finder, make_index(1, 2), 1, 2, scope=5)) == 1


def test_a_candidate_that_continues_a_match_counts_as_a_longer_one():
    text = [*range(20), 50, *range(12)]
    finder, index = OptionFinder(None, Calibration(), own=True), make_index(*text)
    (first,) = find(finder, index, *text[-8:])
    assert (first.token, first.context) == (12, 12), "measured beyond eight tokens"
    before = first
    for token in range(13, 16):
        (option,) = finder.find(tuple(range(token - 8, token)), index, 0, before, at_end=False)
        assert (option.token, option.context) == (token, token)
        before = option
    (elsewhere,) = finder.find((50,), index, 0, before, at_end=False)
    assert (elsewhere.token, elsewhere.context) == (0, 1), "another occurrence is no continuation"


def test_the_last_tokens_are_those_that_a_context_may_have():
    assert last_tokens(range(20)) == tuple(range(12, 20))
    assert last_tokens([1, 2]) == (1, 2)
