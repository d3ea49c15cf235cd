"""Report on a target's and a drafter's vocabularies: their common tokens, and their coverage of a text."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.assembly.models import Models, load_vocabulary
from pipeline.config.settings import Config
from pipeline.reports.terminal import to_printable
from pipeline.sources.stream import open_sources, stream
from stages.vocabulary.pair import How, Pair, SpecialMapping, pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import SourceError
from store.events import PromptReceived
from store.files import write_whole

COMMONEST = 20  # n-grams that are listed
BANDS = ("2", "3", "4", "5-8", "9+")  # of numbers of pieces


def band_of(length: int) -> str:
    """Return the band of a number of pieces, 2 or more."""
    return "9+" if length > 8 else "5-8" if length > 4 else str(length)


def count_bands(lengths: Iterable[int]) -> dict[str, int]:
    """Count per band the tokens of several pieces, given the numbers of pieces of tokens."""
    counts = Counter(band_of(length) for length in lengths if length > 1)
    return {name: counts[name] for name in BANDS}


def silent(pair: Pair) -> int:
    """Count the target ids that can be spelt but are never proposed: unused, repeated or blocked ones."""
    return sum(1 for pieces in pair.pieces if not pieces) - pair.unspelt


@dataclass(frozen=True)
class Coverage:
    """Numbers of target tokens of a text, by the way in which the drafter can propose them."""

    tokens: int  # all tokens
    direct: int  # tokens of one piece
    ngrams: Mapping[str, int]  # tokens of several pieces, per band
    unspelt: int  # tokens without pieces


def coverage(pair: Pair, tokens: Iterable[int]) -> Coverage:
    """Count a text's target tokens. A token with the same bytes as another one counts with that one's pieces."""
    lengths = [len(pair.pieces[token] or pair.context[token]) for token in tokens]
    return Coverage(len(lengths), lengths.count(1), count_bands(lengths), lengths.count(0))


@dataclass(frozen=True)
class MappedSpecial:
    """A control token of the target and the pieces that it is mapped to, as ids and as to_readable text."""

    token: int
    name: str
    how: How
    pieces: tuple[int, ...]
    text: tuple[str, ...]


@dataclass(frozen=True)
class CommonNgram:
    """A target token of several pieces that is frequent in a text."""

    token: int
    text: str
    pieces: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class TextCoverage:
    """Coverage of one text, tokenized by the target, by a pair of vocabularies."""

    sources: tuple[str, ...]
    prompts: int
    characters: int
    drafter_tokens: int  # number of pieces of the same text, tokenized by the drafter
    whole: Coverage
    commonest: tuple[CommonNgram, ...]


@dataclass(frozen=True)
class PairReport:
    """A report on a pair of vocabularies by themselves."""

    target: str
    drafter: str
    # target_size, drafter_size: number of ids of the tokenizers
    target_size: int
    drafter_size: int
    direct: int  # number of target tokens that are one piece, special tokens of the same role or name included
    ngrams: Mapping[str, int]  # number of target tokens of several pieces, per band
    unspelt: int  # number of target tokens with bytes that the drafter cannot spell
    silent: int  # number of target ids that are never proposed: unused ones, duplicates, blocked special tokens
    digest: str
    specials: tuple[MappedSpecial, ...]


@dataclass(frozen=True)
class VocabularyReport(PairReport):
    """A report on a pair of vocabularies and on a text."""

    text: TextCoverage


def describe_pair(target: Vocabulary, drafter: Vocabulary, words: Pair) -> PairReport:
    """Make the report of a pair without a text."""
    return PairReport(
        target=target.name,
        drafter=drafter.name,
        target_size=target.size,
        drafter_size=drafter.size,
        direct=words.direct,
        ngrams=count_bands(len(pieces or ()) for pieces in words.pieces),
        unspelt=words.unspelt,
        silent=silent(words),
        digest=words.digest,
        specials=tuple(_describe_special(special, drafter) for special in words.specials),
    )


def describe_pairs(models: Iterable[Models]) -> list[PairReport]:
    """Make the reports of the pairs of loaded models."""
    return [describe_pair(one.target_vocabulary, one.drafter_vocabulary, one.pair) for one in models]


def write_pair_reports(path: Path, reports: Iterable[PairReport]) -> None:
    """Write the reports of all pairs of a run to a JSON file, for the dashboards."""
    write_whole(path, (json.dumps(list(map(asdict, reports)), indent=1) + "\n").encode())


def to_readable(spelt: bytes | None) -> str:
    """Format a token's bytes as one visible word: spaces as `▁`, line breaks and broken characters escaped."""
    return to_printable((spelt or b"").decode(errors="backslashreplace").replace(" ", "▁"))


def _describe_special(special: SpecialMapping, drafter: Vocabulary) -> MappedSpecial:
    names = {token: name for name, token in drafter.specials.items()}
    text = tuple(names.get(piece) or to_readable(drafter.bytes_of(piece)) for piece in special.pieces)
    return MappedSpecial(special.token, special.name, special.how, special.pieces, text)


def make_report(config: Config) -> VocabularyReport:
    """Make the report of the first target and the drafter on the text of the sources. No weights are read."""
    sources = open_sources(config.sources, config.source, seed=config.seed)
    texts = [event.text for event in stream(sources) if isinstance(event, PromptReceived)]
    if not texts:
        raise SourceError(f"The text must hold at least one prompt, but {', '.join(config.sources)} holds none.")
    with TemporaryDirectory() as fetched:
        target, drafter = (
            load_vocabulary(name, config.publish, Path(fetched)) for name in (config.targets[0], config.drafter)
        )
    words = pair(target, drafter, config.vocabulary.special)
    tokens = [token for text in texts for token in target.encode_text(text)]
    counts = Counter(token for token in tokens if len(words.pieces[token] or ()) > 1)
    commonest = [
        CommonNgram(
            token,
            to_readable(target.bytes_of(token)),
            tuple(to_readable(drafter.bytes_of(piece)) for piece in words.pieces[token] or ()),
            count,
        )
        for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:COMMONEST]
    ]
    coverage_of_text = TextCoverage(
        sources=config.sources,
        prompts=len(texts),
        characters=sum(map(len, texts)),
        drafter_tokens=sum(len(drafter.encode_text(text)) for text in texts),
        whole=coverage(words, tokens),
        commonest=tuple(commonest),
    )
    return VocabularyReport(**vars(describe_pair(target, drafter, words)), text=coverage_of_text)
