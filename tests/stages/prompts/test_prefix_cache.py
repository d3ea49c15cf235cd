"""The blocks of the prefix cache: which are found, which are evicted, and who may read them."""

import random

import pytest
import torch

from stages.prompts.prefix_cache import PrefixCache

BLOCK, WIDTH = 2, 4
SIZE = BLOCK * WIDTH * 4 * 2  # bytes of a block of two layers


def make_layers(tokens: list[int]) -> list[torch.Tensor]:
    """Keys and values in which every token's slot encodes the text before it."""
    prefixes = [float(hash(tuple(tokens[: end + 1])) % 100_003) for end in range(len(tokens))]
    layer_TW = torch.tensor(prefixes)[:, None].expand(-1, WIDTH)
    return [layer_TW, -layer_TW]


def count_found(cache: PrefixCache, tokens: list[int], scope: int = 0) -> int:
    """Count the tokens of a text that are found; their keys and values must be those of this text."""
    blocks = cache.find(scope, tokens)
    size = sum(len(block[0]) for block in blocks)
    for layer, want_TW in enumerate(make_layers(tokens)):
        own = [block[layer] for block in blocks]
        if own:
            assert torch.equal(torch.cat(own), want_TW[:size])
    return size


def test_the_longest_common_prefix_in_whole_blocks_is_found():
    cache = PrefixCache(1 << 20, BLOCK)
    cache.keep(0, text := [1, 2, 3, 4, 5], make_layers(text))
    assert count_found(cache, [1, 2, 3, 4, 5, 6]) == 4
    assert count_found(cache, [1, 2, 3, 9]) == 2
    assert count_found(cache, [3, 4, 1, 2]) == 0, "a block belongs to the text before it"
    assert count_found(cache, [1]) == 0
    assert cache.bytes == 2 * SIZE


def test_scopes_are_apart_unless_they_share():
    for shared in (False, True):
        cache = PrefixCache(1 << 20, BLOCK, shared=shared)
        cache.keep(1, text := [1, 2, 3, 4], make_layers(text))
        assert [count_found(cache, text, scope) for scope in (0, 1, 2)] == ([4, 4, 4] if shared else [0, 4, 0])


def test_the_least_recently_used_block_at_the_end_of_a_text_goes_first():
    cache = PrefixCache(4 * SIZE, BLOCK)
    cache.keep(0, one := [1, 2, 3, 4], make_layers(one))
    cache.keep(0, two := [5, 6, 7, 8], make_layers(two))
    count_found(cache, one)
    cache.keep(0, three := [9, 9], make_layers(three))
    assert [count_found(cache, text) for text in (one, two, three)] == [4, 2, 2]


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_it_stays_in_its_budget_and_never_finds_the_keys_of_another_text(blocks: int):
    draw = random.Random(blocks)
    cache, longest = PrefixCache(blocks * SIZE, BLOCK), 0
    for _ in range(400):
        text, scope = [draw.randint(0, 2) for _ in range(draw.randint(0, 9))], draw.randint(0, 1)
        longest = max(longest, count_found(cache, text, scope))
        cache.keep(scope, text, make_layers(text))
        assert cache.bytes <= blocks * SIZE
        assert count_found(cache, text, scope) == min(len(text) // BLOCK, blocks) * BLOCK, "the newest text is known"
    assert (longest > 0) == (blocks > 0)


def test_models_share_a_budget_but_no_blocks_and_one_can_be_cleared():
    cache, text = PrefixCache(3 * SIZE, BLOCK), [1, 2, 3, 4]
    other = cache.for_other_model(4)
    cache.keep(0, text, make_layers(text))
    assert other.find(0, text) == []
    other.keep(0, text, make_layers(text))  # one block of twice the size
    assert cache.bytes == other.bytes == 3 * SIZE
    assert (count_found(cache, text), len(other.find(0, text))) == (2, 1), "the end of the older text was evicted"
    other.clear()
    assert (count_found(cache, text), other.find(0, text), cache.bytes) == (2, [], SIZE)
