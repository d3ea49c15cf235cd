"""A million tokens in the default budget, with the times of docs/learning.md: `pytest -m sweep -n 0 -s FILE`."""

from time import perf_counter

import numpy as np
import pytest

from pipeline.config.sections import MemorySettings
from stages.memory.ngram_table import SLOT_BYTES, NgramTable

TOKENS, TEXT = 1_000_000, 100


@pytest.mark.sweep
def test_a_million_tokens_fit_the_default_budget():
    """Tokens with Zipf's frequencies have hardly a long context twice, so the table fills as fast as it can."""
    table, numbers = NgramTable(MemorySettings().budget_bytes), np.random.default_rng(0)
    texts = (numbers.zipf(1.3, (TOKENS // TEXT, TEXT)) % 30_000).tolist()
    sizes: list[int] = []
    for first in range(0, len(texts), len(texts) // 10):
        part = texts[first : first + len(texts) // 10]
        began = perf_counter()
        for text in part:
            table.learn(text, 1)
        learning = (perf_counter() - began) / len(part) / TEXT * 1e6
        began = perf_counter()
        for text in part[:200]:
            for place in range(8, TEXT):
                table.find(text[place - 8 : place])
        lookup = (perf_counter() - began) / 200 / (TEXT - 8) * 1e6
        sizes.append(sum(array.nbytes for array in table._arrays.values()))
        tokens = (first + len(part)) * TEXT
        print(f"{tokens:9,} tokens: {sizes[-1] / 2**20:5.1f} MiB, {len(table):9,} contexts, ", end="")
        print(f"learning {learning:.1f} and lookup {lookup:.1f} microseconds a token")
    full = [size for size in sizes if size == table.budget_bytes]
    assert len(full) > len(sizes) / 2, "the budget is reached"
    assert sizes[-len(full) :] == full, "and the size is the same from there on"
    assert table.budget_bytes <= MemorySettings().budget_bytes
    assert len(table) > 0.95 * table.budget_bytes / SLOT_BYTES
