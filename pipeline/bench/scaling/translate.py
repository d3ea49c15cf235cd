"""Measures the translation of one block, along the trie and by the paper's method, over real text without models."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from pipeline.config.sections import CacheSettings
from stages.ngrams.cache import NgramCache
from stages.ngrams.eviction import EVICTIONS
from stages.ngrams.trie import build_direct_trie
from stages.tools.retokenize import (
    RetokenizingTranslation,
    TextBlock,
    TrieTranslation,
    random_distributions,
    text_blocks,
)
from stages.vocabulary.pair import Pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import SourceError

CONTEXTS = (128, 512, 2048)
DRAFTED = 5
TARGET_STEP = 30e-3  # seconds of one forward pass of a large target, from the paper's table of step times
CHARACTERS_OF_CONTEXT, CHARACTERS_PER_BLOCK = 40_000, 100  # upper bounds of the longest context and of a block
TRIE, PAPER = "trie", "re-tokenising"


@dataclass(frozen=True)
class Cost:
    """Seconds per block of one method at one context length.

    Attributes:
        way: the method, `TRIE` or `PAPER`.
        context: target tokens before a block.
        blocks: number of timed blocks.
        median, high: median and 95th percentile over blocks, in seconds.
    """

    way: str
    context: int
    blocks: int
    median: float
    high: float

    @property
    def share(self) -> float:
        """Median as a share of a target step."""
        return self.median / TARGET_STEP


@dataclass(frozen=True)
class TranslationReport:
    """Costs of both methods, and for comparison the time to compute levels in verification.

    Attributes:
        target, drafter: names of the tokenizers.
        target_size, drafter_size: vocabulary sizes.
        costs: one entry per method and context length.
        levels: median seconds of `TrieRule.levels` for one block.
    """

    target: str
    drafter: str
    target_size: int
    drafter_size: int
    costs: tuple[Cost, ...]
    levels: float

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self) | {"target_step": TARGET_STEP, "drafted": DRAFTED}


def long_text(prompts: Iterable[str], characters: int) -> str:
    """Concatenate prompts until there are enough characters, or no more prompts."""
    taken: list[str] = []
    size = 0
    for prompt in prompts:
        taken.append(prompt)
        size += len(prompt) + 2
        if size >= characters:
            break
    return "\n\n".join(taken)


def translations(
    target: Vocabulary, drafter: Vocabulary, pair: Pair
) -> tuple[TrieTranslation, RetokenizingTranslation]:
    """Both methods with empty caches. The pipeline's cache has the default budget and eviction rule."""
    settings = CacheSettings()
    trie = build_direct_trie(pair.pieces, target.size, pair.drafter_size)
    cache = NgramCache(trie, settings.budget_bytes, EVICTIONS[settings.policy]())
    return TrieTranslation(pair, trie, cache), RetokenizingTranslation(target, drafter, pair)


def measure(
    target: Vocabulary,
    drafter: Vocabulary,
    pair: Pair,
    text: str,
    blocks: int,
    contexts: Sequence[int] = CONTEXTS,
    clock: Callable[[], float] = perf_counter,
) -> TranslationReport:
    """Time both methods on the same blocks.

    Args:
        target, drafter, pair: the vocabularies.
        text: a text longer than the longest context and some blocks.
        blocks: maximum number of blocks per context length.
        contexts: context lengths in target tokens.
        clock: returns seconds.

    Raises:
        SourceError: the text is too short for one block after the longest context.
    """
    costs: list[Cost] = []
    ours, papers = translations(target, drafter, pair)
    for context in contexts:
        found = text_blocks(target, drafter, text, context=context, drafted=DRAFTED, most=blocks)
        if not found:
            raise SourceError(
                f"The text must hold more than {context} tokens of {target.name}, got {len(text):,} characters; "
                "name a longer one with --text."
            )
        ours, papers = translations(target, drafter, pair)
        costs += [_cost(TRIE, context, found, ours, clock), _cost(PAPER, context, found, papers, clock)]
    levels = _seconds_of_levels(ours, found, target.size, drafter.size, clock)
    return TranslationReport(target.name, drafter.name, target.size, drafter.size, tuple(costs), levels)


def _cost(
    way: str,
    context: int,
    blocks: Sequence[TextBlock],
    translate: Callable[[TextBlock], list[int]],
    clock: Callable[[], float],
) -> Cost:
    seconds = [_seconds(partial(translate, block), clock) for block in blocks]
    high = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    return Cost(way, context, len(blocks), median(seconds), high)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    work()
    return clock() - begun


def _seconds_of_levels(
    ours: TrieTranslation, blocks: Sequence[TextBlock], target_size: int, drafter_size: int, clock: Callable[[], float]
) -> float:
    draft_probs_KD, target_probs_NV = (
        random_distributions(DRAFTED, drafter_size, 0),
        random_distributions(DRAFTED + 1, target_size, 1),
    )
    seconds = [_seconds(partial(ours.levels, block, draft_probs_KD, target_probs_NV), clock) for block in blocks]
    return median(seconds)
