"""Measures the work of a block outside the forward passes, by active n-grams and vocabulary size, without models.

The stages are those of the pipeline. Vocabularies are synthetic: single pieces, and n-grams of which many begin with
the same common pieces, as in real vocabularies. Distributions are random.

Shapes: N positions, V target tokens, D drafter ids, W width.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from pipeline.bench.scaling.curves import Curve, Effort, Progress, Sampler, measure_lines
from pipeline.config.sections import CacheSettings, LearnSettings
from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.decode import Decode
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import FixedLength
from stages.examples.teacher import TrieTeacher
from stages.models.devices import synchronize
from stages.ngrams.cache import Entry, NgramCache
from stages.ngrams.eviction import EVICTIONS
from stages.ngrams.trie import Trie, build_direct_trie
from stages.rules import TrieRule
from stages.sampling.distributions import Sampling
from stages.sampling.random_source import SeededRandomSource
from stages.tools.retokenize import random_distributions
from stages.translate import Translate
from stages.verify import Verify
from stages.vocabulary.pair import Pair
from stages.vocabulary.spelling import Pieces

if TYPE_CHECKING:
    from stages.models.language_model import LanguageModel

DRAFTED = 5  # pieces of a block
AGREED = 3  # proposed tokens of a block that the target accepts
DRAFTER_SIZE = 32_000
LONGEST_NGRAM = 6
TEXTS = 64  # drafts per measurement in microseconds
BLOCKS = 4  # blocks per measurement of a whole block
# Exponent that makes the first tokens more common as beginnings of n-grams. With 5 the group of an average n-gram has
# 162 members among 10,000 n-grams and 1,335 among 100,000; Llama-3 in Llama-2's pieces has 318 and 1,108.
SKEW = 5
WIDTH = 256  # width of the hidden states that the acceptance head reads
TEMPERATURES = (1.0, 0.0)


@cache
def synthetic_pieces(direct: int, ngrams: int, seed: int = 0) -> tuple[Pieces, ...]:
    """Pieces of every target token: first single pieces, then n-grams, each of which extends an earlier token."""
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
    """A synthetic pair in which half of the target tokens are single pieces, if there are enough pieces."""
    direct = min(target_size // 2, drafter_size)
    pieces = synthetic_pieces(direct, target_size - direct)
    return Pair(pieces, pieces, drafter_size, digest="", unspelt=0)


def cache_of(pair: Pair, ngrams: int, budget: float, device: Any) -> tuple[Trie, NgramCache]:
    """A trie with the direct maps and the first `ngrams` n-grams of a vocabulary, within the budget in bytes."""
    trie = build_direct_trie(pair.pieces, len(pair.pieces), pair.drafter_size, device)
    held = NgramCache(trie, budget, EVICTIONS[CacheSettings().policy]())
    entries = [Entry(pieces, token, 1) for token, pieces in enumerate(pair.pieces) if pieces and len(pieces) > 1]
    held.fill(entries[:ngrams])
    return trie, held


def row_of(number: int) -> SequenceState:
    """A row of two tokens, of which one is in the key-value cache."""
    return SequenceState(number, "", "", "", [0, 0], 2, [0, 0], SeededRandomSource(0, number), DRAFTED + 1)


def cache_curve(
    entries: Sequence[int], effort: Effort, progress: Progress, device: Any = "cpu", drafter_size: int = DRAFTER_SIZE
) -> Curve:
    """Measure microseconds of one block's translation, levels and residuals, and bytes of the cache, by active n-grams.

    Every draft consists of whole target tokens; the drafts are the same at every size. N-grams that are not active are
    translated piece by piece. After each block its proposal is passed to `observe`, as if it were emitted.

    Args:
        entries: numbers of active n-grams.
        effort: number of rounds.
        progress: as for `measure_lines`.
        device: device of the distributions.
        drafter_size: number of pieces, all of which are target tokens too.
    """
    pieces = synthetic_pieces(drafter_size, max(entries))
    pair = Pair(pieces, pieces, drafter_size, digest="", unspelt=0)
    draft_probs_KD = random_distributions(DRAFTED, drafter_size, 0).to(device)
    target_probs_NV = random_distributions(DRAFTED + 1, len(pieces), 1).to(device)
    drafts = [_spelt_draft(pair, draft_probs_KD, number) for number in range(TEXTS)]
    samplers: dict[tuple[str, int], Sampler] = {}
    taken = {}
    for count in entries:
        progress(f"preparing {count:,} n-grams")
        trie, held = cache_of(pair, count, math.inf, device)
        translate, rule = Translate(trie, held, pair.pieces), TrieRule(trie)
        proposals = translate(drafts)
        work: dict[str, Callable[[int], object]] = {
            "translation": partial(_translate, translate, drafts),
            "levels": lambda place, rule=rule, made=proposals: rule.levels([made[place]], target_probs_NV, [0]),  # type: ignore[misc]
            "residuals of one token": partial(_residuals, rule, proposals, target_probs_NV[0]),
        }
        samplers |= {
            (name, count): partial(_each, call, TEXTS, 1e6, target_probs_NV.device) for name, call in work.items()
        }
        taken[count] = held.bytes
    lines = measure_lines(samplers, effort, progress)
    return Curve("A block's translation by n-grams", "active n-grams", "µs", lines, {"cache, bytes": taken})


def _spelt_draft(pair: Pair, draft_probs_KD: Any, number: int) -> Draft:
    random, spelt = Random(number), list[int]()
    while len(spelt) < DRAFTED:
        spelt += pair.pieces[random.randrange(len(pair.pieces))] or ()
    return Draft(row_of(number), tuple(spelt[:DRAFTED]), draft_probs_KD, (), None, ())


def _translate(translate: Translate, drafts: Sequence[Draft], place: int) -> None:
    (proposal,) = translate([drafts[place]])
    translate.observe([Verdict(proposal, (), proposal.verifiable, 0, 0)])


def _residuals(rule: TrieRule, proposals: Sequence[Proposal], target_probs_V: Any, place: int) -> None:
    """Compute the residuals of a rejection of the first token at each of its levels."""
    for level in range(len(proposals[place].tokens[0].tests)):
        rule.residual(proposals[place], 0, level, target_probs_V)


def _each(work: Callable[[int], object], count: int, scale: float, device: Any) -> float:
    """Mean time of `work(number)` over the numbers below `count`, in seconds times `scale`."""
    synchronize(device)
    started = perf_counter()
    for number in range(count):
        work(number)
    synchronize(device)
    return scale * (perf_counter() - started) / count


class GivenLogits:
    """Replaces a `LanguageModel` and returns given logits without any computation.

    Attributes:
        logits_NV: logits that are returned, from the first wanted position on.
    """

    max_length = 1 << 30

    def __init__(self, logits_NV: Any) -> None:
        self.logits_NV = logits_NV
        self.device, self.vocabulary_size = logits_NV.device, logits_NV.shape[1]
        self._hidden_1W = random_distributions(1, WIDTH, 0).to(self.device)

    def admit(self, row: SequenceState, tokens: Sequence[int], *, read: bool = True) -> None:
        """Do nothing: no state is kept per row."""

    def release(self, row: SequenceState) -> None:
        """Do nothing: no state is kept per row."""

    def roll_back(self, row: SequenceState, length: int) -> None:
        """Do nothing: there is no key-value cache."""

    def length(self, row: SequenceState) -> int:
        """Length of the text without its last token."""
        return len(row.tokens) - 1

    def restrict(self, ids: Collection[int]) -> None:
        """Do nothing: there is no output layer to restrict."""

    def mask_without(self, allowed: Collection[int]) -> Any:
        """Mask over the vocabulary (V,), true for finite logits outside `allowed`."""
        forbidden_V = self.logits_NV[0].isfinite()
        forbidden_V[sorted(allowed)] = False
        return forbidden_V

    def forward(
        self, rows: object, tokens: object, wanted: Sequence[int], *, hidden: bool = False, parents: object = None
    ) -> tuple[Any, Any]:
        """The given logits (N, V) for all wanted positions, and one hidden state (1, W)."""
        return self.logits_NV[: sum(wanted)], self._hidden_1W


def random_logits(count: int, width: int, seed: int, device: Any) -> Any:
    """Finite logits (count, width) of random distributions."""
    return random_distributions(count, width, seed).log().to(device)


class DrafterSide:
    """Drafts one block over random logits: distribution, draw, entropy and head for each of five pieces."""

    def __init__(self, size: int, allowed: Collection[int], temperature: float, device: Any) -> None:
        self._model = GivenLogits(random_logits(1, size, 0, device))
        self._decode = Decode(
            cast("LanguageModel", self._model),
            AcceptanceHead(WIDTH, 0).to(device),
            FixedLength(),
            Sampling(temperature),
            allowed,
            DRAFTED,
            None,
        )

    def draft(self, number: int) -> Draft:
        """Draft one block of the row `number`."""
        row = row_of(number)
        self._decode.admit(row)
        (draft,) = self._decode([row])
        self._decode.release(row)
        return draft


class TargetSide:
    """Translates and verifies one block and collects its soft targets, over logits that accept `AGREED` tokens."""

    def __init__(self, pair: Pair, temperature: float, device: Any) -> None:
        size, learn = len(pair.pieces), LearnSettings()
        trie, held = cache_of(pair, size, CacheSettings().budget_bytes, device)
        self._translate = Translate(trie, held, pair.pieces)
        self._model = GivenLogits(random_logits(DRAFTED + 1, size, 1, device))
        teach = TrieTeacher(pair, learn.teacher_top, self._model.device, temperature=max(0.5, temperature))
        model, rule = cast("LanguageModel", self._model), TrieRule(trie)
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
        """Do all work of one block except the forward passes, on a new row, because rows grow."""
        draft = replace(self._drafts[number], row=row_of(number))
        self._model.logits_NV = self._logits[number]
        (verdict,) = self._verify(self._translate([draft]))
        return verdict


def vocabulary_curve(sizes: Sequence[int], effort: Effort, progress: Progress, device: Any = "cpu") -> Curve:
    """Measure milliseconds of one block outside the forward passes, by vocabulary size of the target and the drafter.

    Args:
        sizes: vocabulary sizes. With each size of the target's vocabulary the drafter has `DRAFTER_SIZE` pieces.
        effort: number of rounds.
        progress: as for `measure_lines`.
        device: device of the logits.
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
        key: partial(_each, call, BLOCKS, 1e3, random_distributions(1, 1, 0).to(device).device)
        for key, call in work.items()
    }
    lines = measure_lines(samplers, effort, progress)
    return Curve("A block outside the forward passes", "vocabulary size", "ms", lines)
