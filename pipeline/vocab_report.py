"""What a target's and a drafter's vocabularies have in common, and how much of a text that covers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.build_models import locate
from pipeline.config import Config
from pipeline.source import open_sources, stream
from stages.huggingface import load_tokenizer
from stages.ngram_cache import EVICTIONS, NgramCache
from stages.pair import How, Pair, SpecialMapping, SpecialRule, pair
from stages.trie import trie_of_direct_maps
from stages.vocab_statistics import (
    CacheCoverage,
    Coverage,
    cache_coverage,
    commonest_ngrams,
    coverage,
    ngrams_by_length,
    silent,
)
from stages.vocabulary import Vocabulary
from store.errors import SourceError
from store.events import PromptReceived
from store.registry import default_uri

COMMONEST = 20


@dataclass(frozen=True)
class MappedSpecial:
    """A control token of the target and the pieces that stand for it, as ids and readably."""

    token: int
    name: str
    how: How
    pieces: tuple[int, ...]
    text: tuple[str, ...]


@dataclass(frozen=True)
class CommonNgram:
    """A target token of several pieces that a text often holds."""

    token: int
    text: str
    pieces: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class TextCoverage:
    """What the pair does for one text, as the target's tokenizer cuts it.

    Attributes:
        sources: where the text is from.
        prompts: how many texts there are.
        characters: in all of them.
        drafter_tokens: pieces of the same text as the drafter's tokenizer cuts it.
        whole: its tokens by how they can be proposed.
        cache: the n-gram cache on it.
        budget_bytes, policy: the cache's.
        commonest: n-grams.
    """

    sources: tuple[str, ...]
    prompts: int
    characters: int
    drafter_tokens: int
    whole: Coverage
    cache: CacheCoverage
    budget_bytes: int
    policy: str
    commonest: tuple[CommonNgram, ...]


@dataclass(frozen=True)
class VocabularyReport:
    """A pair of vocabularies.

    Attributes:
        target, drafter: names.
        target_size, drafter_size: ids that the tokenizers know.
        direct: target tokens that are one piece, special tokens of the same role or name included.
        ngrams: target tokens of several pieces, per band.
        unspelt: target tokens with bytes that the drafter cannot spell.
        silent: target ids that are never proposed: unused ones, repetitions of another token, blocked special tokens.
        digest: of the pair.
        specials: the map of special tokens.
        text: how much of a text is covered.
    """

    target: str
    drafter: str
    target_size: int
    drafter_size: int
    direct: int
    ngrams: Mapping[str, int]
    unspelt: int
    silent: int
    digest: str
    specials: tuple[MappedSpecial, ...]
    text: TextCoverage

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


def readable(spelt: bytes | None) -> str:
    """A token's bytes as one visible word: spaces as `▁`, line breaks and broken characters escaped."""
    text = (spelt or b"").decode(errors="backslashreplace").replace(" ", "▁")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _readable_special(special: SpecialMapping, drafter: Vocabulary) -> MappedSpecial:
    names = {token: name for name, token in drafter.specials.items()}
    text = tuple(names.get(piece) or readable(drafter.bytes_of(piece)) for piece in special.pieces)
    return MappedSpecial(special.token, special.name, special.how, special.pieces, text)


def load_pair(config: Config) -> tuple[Vocabulary, Vocabulary, Pair]:
    """The tokenizers of the configuration's first target and of its drafter, and how they are paired.

    No weights are read.

    Raises:
        ModelError, VocabularyError: as when models are loaded.
    """
    uri = config.publish.mlflow_uri or default_uri(Path("runs"))
    with TemporaryDirectory() as fetched:
        names = (config.targets[0], config.drafter)
        tokenizers = [load_tokenizer(locate(name, uri, Path(fetched))) for name in names]
    target, drafter = (Vocabulary(tokenizer, name) for tokenizer, name in zip(tokenizers, names, strict=True))
    rule = SpecialRule.of(config.vocabulary.special, config.vocabulary.special_names)
    return target, drafter, pair(target, drafter, rule)


def read_prompts(config: Config) -> list[str]:
    """The texts of the configuration's sources.

    Raises:
        SourceError: they cannot be read, or hold no prompt.
    """
    sources = open_sources(config.sources, config.source, seed=config.seed)
    texts = [event.text for event in stream(sources) if isinstance(event, PromptReceived)]
    if not texts:
        raise SourceError(f"The text must hold at least one prompt, but {', '.join(config.sources)} holds none.")
    return texts


def report(
    config: Config, target: Vocabulary, drafter: Vocabulary, words: Pair, texts: Sequence[str]
) -> VocabularyReport:
    """All figures of a pair on some texts.

    Args:
        config: names the sources, and the cache's budget and policy.
        target, drafter, words: the vocabularies and their pair.
        texts: what `read_prompts` gave.
    """
    return VocabularyReport(
        target=target.name,
        drafter=drafter.name,
        target_size=target.size,
        drafter_size=drafter.size,
        direct=words.direct,
        ngrams=ngrams_by_length(words),
        unspelt=words.unspelt,
        silent=silent(words),
        digest=words.digest,
        specials=tuple(_readable_special(special, drafter) for special in words.specials),
        text=_text_coverage(config, target, drafter, words, texts),
    )


def _text_coverage(
    config: Config, target: Vocabulary, drafter: Vocabulary, words: Pair, texts: Sequence[str]
) -> TextCoverage:
    tokens = [token for text in texts for token in target.encode_text(text)]
    trie = trie_of_direct_maps(words.pieces, target.size, words.drafter_size)
    cache = NgramCache(trie, config.cache.budget_bytes, EVICTIONS[config.cache.policy]())
    commonest = [
        CommonNgram(
            token,
            readable(target.bytes_of(token)),
            tuple(readable(drafter.bytes_of(piece)) for piece in words.pieces[token] or ()),
            count,
        )
        for token, count in commonest_ngrams(words, tokens, COMMONEST)
    ]
    return TextCoverage(
        sources=config.sources,
        prompts=len(texts),
        characters=sum(map(len, texts)),
        drafter_tokens=sum(len(drafter.encode_text(text)) for text in texts),
        whole=coverage(words, tokens),
        cache=cache_coverage(words, trie, cache, tokens),
        budget_bytes=config.cache.budget_bytes,
        policy=config.cache.policy,
        commonest=tuple(commonest),
    )
