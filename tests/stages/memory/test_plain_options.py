"""Options: what several sources know about the same place, each token once, the most probable first."""

from plain_options import Option, OptionFinder
from plain_own_text import Match, SuffixIndex

from stages.memory.calibration import Calibration, memory_cell, own_cell
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


def test_the_memory_gives_the_commonest_continuations_of_the_two_longest_contexts():
    calibration, table = Calibration(), make_table([9, 1, 5], [9, 1, 5], [9, 1, 6], [8, 1, 7])
    options = find(OptionFinder(table, calibration, own=True), make_index(9, 1), 9, 1)
    assert {(option.token, option.context, option.seen) for option in options} == {(5, 2, 2), (6, 2, 1), (7, 1, 1)}
    assert {option.source for option in options} == {DraftSource.MEMORY}
    assert {option.cell for option in options} == {
        memory_cell(2, 3, 2, 0), memory_cell(2, 3, 1, 1), memory_cell(1, 4, 1, 1)
    }  # fmt: skip
    assert all(option.chance == calibration.chance(option.cell) for option in options)


def test_a_token_that_several_sources_know_is_one_option_with_the_highest_chance():
    calibration, table, index = Calibration(), make_table([1, 2, 3]), make_index(1, 2, 3, 1, 2)
    teach(calibration, own_cell(2), 0.5)
    for memory, wanted in ((0.3, DraftSource.LOOKUP), (0.9, DraftSource.MEMORY)):
        teach(calibration, memory_cell(2, 1, 1, 0), memory)
        teach(calibration, memory_cell(1, 1, 1, 0), 0.1)
        (option,) = find(OptionFinder(table, calibration, own=True), index, 1, 2)
        assert (option.token, option.source) == (3, wanted)
        assert option.match == Match(2, 2), "the own text knows what follows, whichever source is better here"


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
