"""What the translation of one block costs, by the trie and in the paper's way, over real text and without models."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from pipeline.config_sections import CacheSettings
from stages.ngram_cache import EVICTIONS, NgramCache
from stages.pair import Pair
from stages.retokenize import RetokenizingTranslation, TextBlock, TrieTranslation, random_laws, text_blocks
from stages.trie import trie_of_direct_maps
from stages.vocabulary import Vocabulary
from store.errors import SourceError

CONTEXTS = (128, 512, 2048)
DRAFTED = 5
TARGET_STEP = 30e-3  # seconds of one pass of a large target, as in the paper's table of step times
CHARACTERS_OF_CONTEXT, CHARACTERS_PER_BLOCK = 40_000, 100  # more than the longest context and a block ever take
TRIE, PAPER = "trie", "re-tokenising"


@dataclass(frozen=True)
class Cost:
    """Seconds per block of one way at one context length.

    Attributes:
        way: `TRIE` or `PAPER`.
        context: target tokens before a block.
        blocks: how many were timed.
        median, high: over blocks; `high` is the 95th percentile.
    """

    way: str
    context: int
    blocks: int
    median: float
    high: float

    @property
    def share(self) -> float:
        """Of a target step."""
        return self.median / TARGET_STEP


@dataclass(frozen=True)
class TranslationReport:
    """The costs of both ways, and for information what comparing probabilities costs in verification."""

    target: str
    drafter: str
    target_size: int
    drafter_size: int
    costs: tuple[Cost, ...]
    levels: float  # median seconds of `TrieRule.levels` for one block

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self) | {"target_step": TARGET_STEP, "drafted": DRAFTED}


def long_text(prompts: Iterable[str], characters: int) -> str:
    """Prompts one after another until there are enough characters, or no more prompts."""
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
    """Both ways, with empty caches; the pipeline's has the default budget and policy."""
    settings = CacheSettings()
    trie = trie_of_direct_maps(pair.pieces, target.size, pair.drafter_size)
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
    """Time both ways on the same blocks.

    Args:
        target, drafter, pair: the vocabularies.
        text: long enough for the longest context and some blocks behind it.
        blocks: most blocks per context length.
        contexts: target tokens before a block.
        clock: seconds.

    Raises:
        SourceError: the text is too short for one block behind the longest context.
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
    laws_KD, laws_NV = random_laws(DRAFTED, drafter_size, 0), random_laws(DRAFTED + 1, target_size, 1)
    seconds = [_seconds(partial(ours.levels, block, laws_KD, laws_NV), clock) for block in blocks]
    return median(seconds)
