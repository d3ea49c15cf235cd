"""Cost as work grows, without models: what a block costs outside the forward passes, by active n-grams and vocabulary.

The stages are those of the pipeline. Vocabularies are made up: single pieces, and n-grams of which common first pieces
begin many, as in real ones. Laws are random.

Shapes: N positions, V target tokens, D drafter ids, W width.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from time import perf_counter
from typing import Any, cast

from pipeline.bench_scale_curves import Curve, Effort, Progress, Sampler, measured
from pipeline.config_sections import CacheSettings, LearnSettings
from stages.acceptance import TrieRule
from stages.baselines import settle
from stages.blocks import Draft, Proposal, Row, Verdict
from stages.decode import Decode
from stages.distributions import Sampling
from stages.draws import SeededDraws
from stages.eviction import Pieces
from stages.head import AcceptanceHead
from stages.language_model import LanguageModel
from stages.ngram_cache import EVICTIONS, Entry, NgramCache
from stages.pair import Pair
from stages.retokenize import random_laws
from stages.stopping import FixedLength
from stages.teach import PushDown
from stages.translate import Translate
from stages.trie import Trie, trie_of_direct_maps
from stages.verify import Verify

DRAFTED = 5  # pieces of a block
AGREED = 3  # proposed tokens of a block that the target agrees with
DRAFTER_SIZE = 32_000
LONGEST_NGRAM = 6
TEXTS = 64  # drafts over which one measurement of microseconds goes
BLOCKS = 4  # blocks over which one measurement of a whole block's work goes
# How much commoner the first tokens are as beginnings of others. So the group of an average n-gram has 162 members
# among 10,000 n-grams and 1,335 among 100,000; Llama-3 in Llama-2's pieces has 318 and 1,108.
SKEW = 5
WIDTH = 256  # of the hidden states that the acceptance head reads
TEMPERATURES = (1.0, 0.0)


@cache
def synthetic_pieces(direct: int, ngrams: int, seed: int = 0) -> tuple[Pieces, ...]:
    """Per target token its pieces: first the single ones, then n-grams, each of which lengthens a token before it."""
    random = Random(seed)
    known: list[Pieces] = [(piece,) for piece in range(direct)]
    taken = set(known)
    while len(known) < direct + ngrams:
        pieces = (*known[int(len(known) * random.random() ** SKEW)], random.randrange(direct))
        if len(pieces) <= LONGEST_NGRAM and pieces not in taken:
            taken.add(pieces)
            known.append(pieces)
    return tuple(known)


def synthetic_pair(target_size: int, drafter_size: int) -> Pair:
    """A target's vocabulary of which half is single pieces, as far as there are so many."""
    direct = min(target_size // 2, drafter_size)
    pieces = synthetic_pieces(direct, target_size - direct)
    return Pair(pieces, pieces, drafter_size, digest="", unspelt=0)


def cache_of(pair: Pair, ngrams: int, budget: float, device: Any) -> tuple[Trie, NgramCache]:
    """A trie of the direct maps and the first n-grams of a vocabulary, as many as the budget holds."""
    trie = trie_of_direct_maps(pair.pieces, len(pair.pieces), pair.drafter_size, device)
    held = NgramCache(trie, budget, EVICTIONS[CacheSettings().policy]())
    entries = [Entry(pieces, token, 1) for token, pieces in enumerate(pair.pieces) if pieces and len(pieces) > 1]
    held.fill(entries[:ngrams])
    return trie, held


def row_of(number: int) -> Row:
    """A row of two tokens, of which one is read."""
    return Row(number, "", "", "", [0, 0], 2, [0, 0], SeededDraws(0, number), DRAFTED + 1)


def cache_curve(
    entries: Sequence[int], effort: Effort, progress: Progress, device: Any = "cpu", drafter_size: int = DRAFTER_SIZE
) -> Curve:
    """Microseconds of one block's translation, levels and residuals by active n-grams, and what these take.

    Every draft is made of whole target tokens, the same drafts at every size. N-grams that are not active are
    translated piece by piece. Between blocks what was proposed is remembered, as if it were emitted.

    Args:
        entries: active n-grams.
        effort: how often.
        progress: see `measured`.
        device: of the laws.
        drafter_size: pieces of the drafter, all of which are target tokens too.
    """
    pieces = synthetic_pieces(drafter_size, max(entries))
    pair = Pair(pieces, pieces, drafter_size, digest="", unspelt=0)
    laws_KD = random_laws(DRAFTED, drafter_size, 0).to(device)
    laws_NV = random_laws(DRAFTED + 1, len(pieces), 1).to(device)
    drafts = [_spelt_draft(pair, laws_KD, number) for number in range(TEXTS)]
    samplers: dict[tuple[str, int], Sampler] = {}
    taken = {}
    for count in entries:
        progress(f"preparing {count:,} n-grams")
        trie, held = cache_of(pair, count, math.inf, device)
        translate, rule = Translate(trie, held, pair.pieces), TrieRule(trie)
        proposals = translate(drafts)
        work: dict[str, Callable[[int], object]] = {
            "translation": partial(_translate, translate, drafts),
            "levels": lambda place, rule=rule, made=proposals: rule.levels([made[place]], laws_NV, [0]),  # type: ignore[misc]
            "residuals of one token": partial(_residuals, rule, proposals, laws_NV[0]),
        }
        samplers |= {(name, count): partial(_each, call, TEXTS, 1e6, laws_NV.device) for name, call in work.items()}
        taken[count] = held.bytes
    lines = measured(samplers, effort, progress)
    return Curve("A block's translation by n-grams", "active n-grams", "µs", lines, {"cache, bytes": taken})


def _spelt_draft(pair: Pair, laws_KD: Any, number: int) -> Draft:
    random, spelt = Random(number), list[int]()
    while len(spelt) < DRAFTED:
        spelt += pair.pieces[random.randrange(len(pair.pieces))] or ()
    return Draft(row_of(number), tuple(spelt[:DRAFTED]), laws_KD, (), None, ())


def _translate(translate: Translate, drafts: Sequence[Draft], place: int) -> None:
    (proposal,) = translate([drafts[place]])
    translate.observe([Verdict(proposal, (), proposal.verifiable, 0, 0)])


def _residuals(rule: TrieRule, proposals: Sequence[Proposal], law_V: Any, place: int) -> None:
    """As if the first token were rejected at each of its levels."""
    for level in range(len(proposals[place].tokens[0].tests)):
        rule.residual(proposals[place], 0, level, law_V)


def _each(work: Callable[[int], object], count: int, scale: float, device: Any) -> float:
    """The mean of one piece of work over the numbers up to `count`, in seconds times `scale`."""
    settle(device)
    started = perf_counter()
    for number in range(count):
        work(number)
    settle(device)
    return scale * (perf_counter() - started) / count


class GivenLogits:
    """Stands where a model stands, and answers at once with logits that it was given.

    Attributes:
        logits_NV: what it says, from the first wanted place on.
    """

    max_length = 1 << 30

    def __init__(self, logits_NV: Any) -> None:
        self.logits_NV = logits_NV
        self.device, self.vocabulary_size = logits_NV.device, logits_NV.shape[1]
        self._hidden_1W = random_laws(1, WIDTH, 0).to(self.device)

    def admit(self, row: Row, tokens: Sequence[int]) -> None:
        """Nothing is kept of a row."""

    def release(self, row: Row) -> None:
        """Nothing was kept."""

    def roll_back(self, row: Row, length: int) -> None:
        """Nothing was read."""

    def length(self, row: Row) -> int:
        """All but the last token."""
        return len(row.tokens) - 1

    def restrict(self, ids: Collection[int]) -> None:
        """There is no output layer of which lines could be left out."""

    def mask_without(self, allowed: Collection[int]) -> Any:
        """See `LanguageModel`."""
        forbidden_V = self.logits_NV[0].isfinite()
        forbidden_V[sorted(allowed)] = False
        return forbidden_V

    def forward(self, rows: object, tokens: object, wanted: Sequence[int], *, hidden: bool = False) -> tuple[Any, Any]:
        """See `LanguageModel`."""
        return self.logits_NV[: sum(wanted)], self._hidden_1W


def random_logits(count: int, width: int, seed: int, device: Any) -> Any:
    """Finite logits of `count` random laws."""
    return random_laws(count, width, seed).log().to(device)


class DrafterSide:
    """Drafts one block over random logits: the law, the draw, entropy and head, five times."""

    def __init__(self, size: int, allowed: Collection[int], temperature: float, device: Any) -> None:
        self._model = GivenLogits(random_logits(1, size, 0, device))
        self._decode = Decode(
            cast(LanguageModel, self._model),
            AcceptanceHead(WIDTH, 0).to(device),
            FixedLength(),
            Sampling(temperature),
            allowed,
            DRAFTED,
            None,
        )

    def draft(self, number: int) -> Draft:
        """The draft of one row."""
        row = row_of(number)
        self._decode.admit(row)
        (draft,) = self._decode([row])
        self._decode.release(row)
        return draft


class TargetSide:
    """Translates, verifies and teaches one block over random logits that agree with `AGREED` proposed tokens."""

    def __init__(self, pair: Pair, temperature: float, device: Any) -> None:
        size, learn = len(pair.pieces), LearnSettings()
        trie, held = cache_of(pair, size, CacheSettings().budget_bytes, device)
        self._translate = Translate(trie, held, pair.pieces)
        self._model = GivenLogits(random_logits(DRAFTED + 1, size, 1, device))
        teach = PushDown(pair, learn.teacher_top, self._model.device, temperature=max(0.5, temperature))
        model, rule = cast(LanguageModel, self._model), TrieRule(trie)
        self._verify = Verify(model, rule, Sampling(temperature), pair.context, size, (), teach)
        allowed = {piece for pieces in pair.pieces for piece in pieces or ()}
        drafter = DrafterSide(pair.drafter_size, allowed, temperature, device)
        self._drafts = [drafter.draft(number) for number in range(BLOCKS)]
        self._logits = [self._agreeing(draft) for draft in self._drafts]

    def _agreeing(self, draft: Draft) -> Any:
        logits_NV = self._model.logits_NV.clone()
        (proposal,) = self._translate([draft])
        for place, token in enumerate(proposal.verifiable[:AGREED]):
            logits_NV[place, token] = logits_NV.max() + 10
        return logits_NV

    def block(self, number: int) -> Verdict:
        """All work of one block but the passes; a row of its own, for it grows."""
        draft = replace(self._drafts[number], row=row_of(number))
        self._model.logits_NV = self._logits[number]
        (verdict,) = self._verify(self._translate([draft]))
        return verdict


def vocabulary_curve(sizes: Sequence[int], effort: Effort, progress: Progress, device: Any = "cpu") -> Curve:
    """Milliseconds of one block outside the forward passes: what the target's vocabulary costs, and the drafter's.

    Args:
        sizes: of the vocabularies. Beside each size of the target's the drafter's has `DRAFTER_SIZE` pieces.
        effort: how often.
        progress: see `measured`.
        device: of the logits.
    """
    work: dict[tuple[str, int], Callable[[int], object]] = {}
    for temperature in TEMPERATURES:
        for size in sizes:
            progress(f"preparing a target vocabulary of {size:,}")
            side = TargetSide(synthetic_pair(size, DRAFTER_SIZE), temperature, device)
            work[f"target, temperature {temperature:g}", size] = side.block
    for temperature in TEMPERATURES:
        for size in sizes:
            work[f"drafter, temperature {temperature:g}", size] = DrafterSide(
                size, range(size), temperature, device
            ).draft
    samplers = {
        key: partial(_each, call, BLOCKS, 1e3, random_laws(1, 1, 0).to(device).device) for key, call in work.items()
    }
    lines = measured(samplers, effort, progress)
    return Curve("A block outside the forward passes", "ids of the vocabulary", "ms", lines)
