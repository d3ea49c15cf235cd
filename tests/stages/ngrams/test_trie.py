"""The active trie against a plain dictionary of what is in it."""

import pytest
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


@given(pieces_lists)
def test_inserting_all_at_once_is_inserting_one_by_one(entries: list[tuple[int, ...]]):
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert_all((pieces, TOKEN_OF[pieces]) for pieces in entries)
    assert_holds(trie, set(entries))


def test_pieces_lead_to_one_token():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert((0, 1), 5)
    with pytest.raises(ValueError, match=r"pieces \(0, 1\) already lead to token 5, not 6"):
        trie.insert((0, 1), 6)


def test_a_failed_removal_leaves_the_trie_as_it_was():
    trie = Trie(TARGET_SIZE, DRAFTER_SIZE)
    trie.insert((0, 1), TOKEN_OF[0, 1])
    with pytest.raises(ValueError, match="lead to no token"):
        trie.remove((0, 2, 1))
    assert_holds(trie, {(0, 1)})
