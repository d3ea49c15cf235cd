"""Measures the costs of drafting and verifying on this machine, on synthetic sequences."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

from stages.contract.blocks import Candidate, Draft, SequenceState, TokenTree
from stages.decode import Decode
from stages.drafting.costs import Costs, make_monotone
from stages.engine.models.devices import synchronize
from stages.engine.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource
from stages.translate import Translate
from stages.verify import Verify
from store.events import DraftSource

CONTEXT = 64  # tokens in the cache of each sequence
REPEATS, MAX_SECONDS = 9, 0.5  # per measurement; after so many seconds three repeats are enough
COUNTS = (1, 2, 3, 5, 7, 9, 17)  # tokens per row of a target pass


def measure(target: LanguageModel, decode: Decode, translate: Translate, verify: Verify, batch: int) -> Costs:
    """Time target passes, drafts, and blocks of both, on sequences that are released afterwards.

    A draft takes longer after a target pass, which has replaced the drafter's weights in the processor's caches, than
    after another draft, and each token more has a distribution to be computed. So the cost of a piece, of a token's
    distribution, and of what surrounds passes and drafts, is measured on blocks; how the cost of a piece depends on the
    number of rows, on drafts alone.

    Args:
        target: without admitted sequences.
        decode: always drafts to its limit, at least one piece; without admitted sequences.
        translate, verify: the stages after it; `verify` without a reader of prompts.
        batch: maximum number of sequences in flight.
    """
    some = sorted({1, max(1, batch // 2), batch})
    passes = Costs(
        target=make_monotone(_target_curve(target, batch)),
        drafter=make_monotone([(rows, _draft_seconds(decode, rows)) for rows in some]),
    )
    return _with_surroundings(passes, _time_blocks(decode, translate, verify, batch), batch)


class _TimedBlock(NamedTuple):
    """A block: the pieces that every row drafted, the tokens that the target read, and the seconds."""

    pieces: int
    tokens: int
    seconds: float


def _with_surroundings(passes: Costs, blocks: Sequence[_TimedBlock], batch: int) -> Costs:
    """Return the costs of passes with those of what surrounds them, in blocks.

    A pass takes 1.0 and 0.25 for every token, of which its distribution takes 0.05 more after the first, a draft 0.2
    and 0.3 for every piece, and all else 0.5.

    >>> passes = Costs(target=((1, 1.25), (5, 2.25)), drafter=((1, 0.1),))
    >>> blocks = _TimedBlock(0, 1, 1.75), _TimedBlock(0, 5, 2.95), _TimedBlock(1, 2, 2.55), _TimedBlock(4, 5, 4.35)
    >>> costs = _with_surroundings(passes, blocks, 1)
    >>> [round(cost, 6) for cost in (costs.around, costs.per_draft, costs.drafting_cost(1), costs.verification_cost(5))]
    [0.5, 0.2, 0.3, 2.95]

    Args:
        passes: of the target's passes and of drafts alone.
        blocks: without a draft, with a tree, and with the shortest and the longest draft of the model.
        batch: number of rows.
    """
    plain, tree, shortest, longest = blocks
    around = max(0.0, plain.seconds - passes.verification_cost(plain.tokens))
    more = tree.seconds - passes.verification_cost(tree.tokens) - around
    per_token = max(0.0, more / (tree.tokens - batch))
    target = tuple((count, cost + per_token * (count - batch)) for count, cost in passes.target)
    costs = Costs(target, passes.drafter, around)
    drafts = [block.seconds - costs.verification_cost(block.tokens) for block in (shortest, longest)]
    pieces = longest.pieces - shortest.pieces
    alone = costs.drafting_cost(batch)
    piece = max((drafts[1] - drafts[0]) / pieces if pieces else 0.0, alone)  # not less than without the target
    drafter = tuple((rows, cost * piece / alone if alone else cost) for rows, cost in costs.drafter)
    return Costs(target, drafter, around, max(0.0, drafts[0] - shortest.pieces * piece))


def _time_blocks(decode: Decode, translate: Translate, verify: Verify, batch: int) -> list[_TimedBlock]:
    longest = decode.max_draft
    rows = [_make_sequence(number, verify.model, 2 * longest + 1) for number in range(batch)]
    for number, row in enumerate(rows):
        row.pieces = _make_sequence(number, decode.model, 2 * longest + 1).pieces
        verify.model.admit(row, row.tokens)
        decode.admit(row)
    begun = [(list(row.tokens), list(row.pieces)) for row in rows]

    chain = TokenTree(tuple(Candidate(3, place - 1, place, 0.5, DraftSource.MEMORY, 1, 1) for place in range(longest)))

    def run(length: int, tree: TokenTree | None = None) -> _TimedBlock:
        decode.max_draft = length or longest
        started = perf_counter()
        drafts = decode(rows, skipped=() if length else rows)
        proposals = translate([Draft.from_tree(row, tree, 1.0) for row in rows] if tree else drafts)
        verify(proposals)
        synchronize(verify.model.device)
        seconds = perf_counter() - started
        for row, (tokens, pieces) in zip(rows, begun, strict=True):
            row.tokens[:], row.pieces[:], row.finish, row.remaining_tokens = tokens, pieces, "", CONTEXT
            verify.model.roll_back(row, len(tokens) - 1)
        drawn = sum(len(proposal.draft.pieces) for proposal in proposals) // batch
        return _TimedBlock(drawn, sum(1 + len(proposal.verifiable) for proposal in proposals), seconds)

    found: list[list[_TimedBlock]] = []
    began = perf_counter()
    while len(found) <= REPEATS and (len(found) <= 3 or perf_counter() - began < MAX_SECONDS):
        found.append([run(0), run(0, chain), run(1), run(longest)])
    decode.max_draft = longest
    for row in rows:
        verify.model.release(row)
        decode.release(row)
    return [min(blocks, key=lambda block: block.seconds) for blocks in zip(*found, strict=True)]


def _target_curve(target: LanguageModel, batch: int) -> list[tuple[int, float]]:
    rows = [_make_sequence(number, target, max(COUNTS)) for number in range(batch)]
    for row in rows:
        target.admit(row, row.tokens)

    def read(count: int) -> None:
        target.forward(rows, [[3] * count] * batch, [count] * batch)
        synchronize(target.device)
        for row in rows:
            target.roll_back(row, len(row.tokens) - 1)

    seconds = _seconds_in_turn([partial(read, count) for count in COUNTS])
    curve = [(batch * count, own) for count, own in zip(COUNTS, seconds, strict=True)]
    for row in rows:
        target.release(row)
    return curve


def _draft_seconds(decode: Decode, batch: int) -> float:
    rows = [_make_sequence(number, decode.model, decode.max_draft) for number in range(batch)]
    for row in rows:
        decode.admit(row)
    (seconds,) = _seconds_in_turn([lambda: decode(rows)])
    for row in rows:
        decode.release(row)
    return seconds / decode.max_draft


def _make_sequence(number: int, model: LanguageModel, remaining: int) -> SequenceState:
    """Make a synthetic sequence that leaves `remaining` tokens of the model's context."""
    length = max(2, min(CONTEXT, model.max_length - remaining))
    ids = [3 + (7 * place + number) % max(1, model.vocabulary_size - 3) for place in range(length)]
    return SequenceState(number, "", "", "", ids, length, list(ids), SeededRandomSource(0, number), CONTEXT)


def _seconds_in_turn(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Return the seconds of the fastest of several calls of each run; other load of the machine can only add to them.

    They take turns, so that a machine that is slower for a while is slower for all of them: their ratios decide.
    """
    for run in runs:
        run()
    found: list[list[float]] = []
    began = perf_counter()
    while len(found) < REPEATS and (len(found) < 3 or perf_counter() - began < MAX_SECONDS * len(runs)):
        found.append([_time(run) for run in runs])
    return list(map(min, zip(*found, strict=True)))


def _time(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started
