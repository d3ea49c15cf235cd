"""The active trie against a plain dictionary of what is in it."""

from sys import getsizeof

import pytest
import torch
from cache_measuring import nodes_below, trie_bytes
from hypothesis import given
from hypothesis import strategies as st

from stages.ngrams.trie import Node, Trie

TARGET_SIZE, DRAFTER_SIZE = 40, 3
every_pieces = [
    (a, *rest)
    for a in range(3)
    for rest in [(), *((b,) for b in range(3)), *((b, c) for b in range(3) for c in range(3))]
]
TOKEN_OF = {pieces: token for token, pieces in enumerate(every_pieces)}
pieces_lists = st.lists(st.sampled_from(every_pieces), max_size=25)


def walk(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], Node]:
    found = {path: node}
    for piece, child in node.children.items():
        found |= walk(child, (*path, piece))
    return found


def assert_holds(trie: Trie, held: set[tuple[int, ...]]) -> None:
    nodes = walk(trie.root)
    assert {path for path, node in nodes.items() if node.token is not None} == held
    assert all(nodes[path].token == TOKEN_OF[path] for path in held)
    needed = {pieces[:length] for pieces in held for length in range(len(pieces) + 1)} | {()}
    assert nodes.keys() == needed, "no prefix is missing, none is left over"
    for path, node in nodes.items():
        assert sorted(node.members) == sorted(TOKEN_OF[pieces] for pieces in held if pieces[: len(path)] == path)
    groups = [DRAFTER_SIZE] * TARGET_SIZE
    for pieces in held:
        groups[TOKEN_OF[pieces]] = pieces[0]
    assert trie.group_of_token_V.tolist() == groups


@given(pieces_lists)
def test_entries_come_and_go_like_members_of_a_set(toggled: list[tuple[int, ...]]):
    trie, held = Trie(TARGET_SIZE, DRAFTER_SIZE), set()
    for pieces in toggled:
        if pieces in held:
            trie.remove(pieces)
        else:
            trie.insert(pieces, TOKEN_OF[pieces])
        held ^= {pieces}
        assert_holds(trie, held)
        assert trie.bytes == trie_bytes(trie)
    assert trie.version == len(toggled)


@given(pieces_lists)
def test_inserting_all_at_once_is_inserting_one_by_one(entries: list[tuple[int, ...]]):
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert_all((pieces, TOKEN_OF[pieces]) for pieces in entries)
    assert_holds(trie, set(entries))


def test_inserting_the_same_again_changes_nothing():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    for _ in range(2):
        trie.insert((0, 1), TOKEN_OF[0, 1])
        assert trie.bytes == trie_bytes(trie)
    assert_holds(trie, {(0, 1)})


WIDE = {(0, *rest): 1000 + number for number, rest in enumerate([(), *((n,) for n in range(200))])}


@given(st.lists(st.sampled_from(sorted(WIDE)), max_size=400))
def test_bytes_are_those_of_the_objects_also_where_tables_grow_and_shrink(toggled: list[tuple[int, ...]]):
    trie, held = Trie(2000, 200), set()
    for pieces in toggled:
        if pieces in held:
            trie.remove(pieces)
        else:
            trie.insert(pieces, WIDE[pieces])
        held ^= {pieces}
        assert trie.bytes == trie_bytes(trie)


def test_a_table_takes_no_more_after_many_changes_than_when_filled_at_once():
    trie = Trie(2000, 200)
    for pieces in sorted(WIDE) * 2:
        trie.insert(pieces, WIDE[pieces])
        if len(pieces) == 2 and pieces[1] >= 5:
            trie.remove((0, pieces[1] - 3))
            trie.insert((0, pieces[1] - 3), WIDE[0, pieces[1] - 3])
    fresh = Trie(2000, 200)
    fresh.insert_all(WIDE.items())
    assert trie.bytes == fresh.bytes


def test_an_empty_trie_has_taken_nothing_whatever_was_in_it():
    trie = Trie(2000, 200)
    for change in (trie.insert, lambda pieces, _: trie.remove(pieces)):
        for pieces, token in WIDE.items():
            change(pieces, token)
    assert (trie.bytes, list(trie.root.children), trie.root.members) == (0, [], ())


def test_leaves_hold_no_table_and_no_list_of_members():
    trie = Trie(2000, 200)
    trie.insert_all(WIDE.items())
    inner, *leaves = nodes_below(trie.root)
    assert len({id(leaf.children) for leaf in leaves}) == 1
    assert trie.bytes - sum(getsizeof(n) for n in WIDE.values()) < 201 * getsizeof(inner) + 20_000


def test_the_table_of_groups_keeps_its_size_and_its_order():
    groups = Trie(TARGET_SIZE, DRAFTER_SIZE).root.children
    before = getsizeof(groups)
    for piece in (2, 0, 0):
        groups[piece] = Node()
    assert (list(groups), len(groups), bool(groups), groups.get(1)) == ([0, 2], 2, True, None)
    for piece in (0, 2, 2):
        del groups[piece]
    assert (list(groups), len(groups), bool(groups), getsizeof(groups)) == ([], 0, False, before)


def test_tokens_in_one_trie_are_not_in_another():
    first, second = (Trie(TARGET_SIZE, DRAFTER_SIZE) for _ in range(2))
    first.insert((0,), TOKEN_OF[0,])
    second.insert((0,), TOKEN_OF[0,])
    first.insert((0, 1), TOKEN_OF[0, 1])
    assert_holds(second, {(0,)})


def test_pieces_lead_to_one_token():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert((0, 1), 5)
    with pytest.raises(ValueError, match=r"pieces \(0, 1\) already lead to token 5, not 6"):
        trie.insert((0, 1), 6)


def test_what_is_not_there_cannot_be_removed():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert((0, 1), TOKEN_OF[0, 1])
    for pieces in ((0,), (2,), (0, 1, 2)):
        with pytest.raises(ValueError, match="lead to no token"):
            trie.remove(pieces)


def test_a_failed_removal_leaves_the_trie_as_it_was():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert((0, 1), TOKEN_OF[0, 1])
    with pytest.raises(ValueError, match="lead to no token"):
        trie.remove((0, 2, 1))
    assert_holds(trie, {(0, 1)})


def test_groups_lie_on_the_device_that_was_requested():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE, torch.device("meta"))
    assert trie.group_of_token_V.device.type == "meta"
