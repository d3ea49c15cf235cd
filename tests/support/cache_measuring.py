"""Memory of tries and caches, measured object by object; and vocabularies to fill them with."""

from functools import cache
from sys import getsizeof

import pytest
from places import ROOT

from stages.ngrams.eviction import RANKS, Record
from stages.ngrams.trie import Node, Trie
from stages.vocabulary.spelling import Pieces

Spelling = tuple[Pieces | None, ...]
TOKENIZERS = ROOT.parent / "shared" / "tokenizers"  # next to the repository, where there is one
SHARED_INT = 256  # Python has one object for each int up to here


def own_bytes(number: int) -> int:
    return getsizeof(number) if number > SHARED_INT else 0


def nodes_below(node: Node) -> list[Node]:
    """All nodes below one."""
    return [each for child in node.children.values() for each in (child, *nodes_below(child))]


def trie_bytes(trie: Trie) -> int:
    """Every node, every table of children, every token, and the members of every inner node but the root."""
    total = 0
    for node in nodes_below(trie.root):
        total += getsizeof(node) + (0 if node.token is None else own_bytes(node.token))
        if node.children:
            total += getsizeof(node.children) + getsizeof(node.members)
    return total


def records_bytes(trie: Trie, policy: str) -> int:
    """Every record, and what their order needs: a ring for each rank and a table."""
    records = [record for record, _ in trie.records()]
    total = sum(map(getsizeof, records))
    rings = {RANKS[policy](record): Record(()) for record in records}
    return total + getsizeof(rings) - getsizeof({}) + sum(getsizeof(end) + own_bytes(n) for n, end in rings.items())


def trie_of_direct_maps(spelling: Spelling, drafter_size: int) -> Trie:
    trie = Trie(len(spelling), drafter_size)
    trie.insert_all((pieces, token) for token, pieces in enumerate(spelling) if pieces and len(pieces) == 1)
    return trie


@cache
def real_spelling() -> tuple[Spelling, int]:
    """Llama-3's tokens in Llama-2's pieces, and the number of those; skips where the tokenizers are not there."""
    if not (TOKENIZERS / "llama-3").is_dir():
        pytest.skip("needs the tokenizers of Llama-2 and Llama-3 in ../shared/tokenizers")
    from stages.engine.models.huggingface import load_tokenizer
    from stages.vocabulary.pair import pair
    from stages.vocabulary.tokenizer_view import Vocabulary

    target, drafter = (Vocabulary(load_tokenizer(str(TOKENIZERS / name)), name) for name in ("llama-3", "llama-2"))
    found = pair(target, drafter)
    return found.pieces, found.drafter_size
