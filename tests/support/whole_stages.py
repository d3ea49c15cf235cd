"""The distribution that whole stages emit: `Decode`, `Translate`, `Verify` over models of known distributions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from doubles import TableModel, row_of
from enumeration import Distribution, World, add_up, every_outcome, rule_of, translation_of
from torch import Tensor

from stages.choose import ChooseDraft
from stages.contract.blocks import SequenceState, Verdict
from stages.decode import Decode
from stages.drafting.coupling import Coupling
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import ThresholdStop
from stages.drafting.target_states import StateProjection, TargetStates
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource, SeededRandomSource
from stages.translate import Translate
from stages.verify import Verify

PROMPT = (0, 1)  # in target tokens and in pieces
EXTRA = 2  # outputs that the target's model has beyond its tokenizer
Stages = tuple[Any, Translate, Verify]  # the first one is `Decode`, or a stage around it


LOUD = 9.0  # the logit of what must be masked: it would win if nobody did


def _target_logits(world: World, tokens: tuple[int, ...]) -> Tensor:
    distribution = world.target_distribution(tokens[len(PROMPT) :])
    return torch.cat([distribution.log(), torch.full((EXTRA,), LOUD, dtype=torch.float64)])


def _state_logits(world: World) -> Callable[[Tensor], Tensor]:
    """Weights that change the drafter's distributions a lot."""
    layer = TargetStates(["target"], world.drafter_size, torch.device("cpu")).requires_grad_(False)
    layer.weights[0].normal_(0, 0.03, generator=torch.Generator().manual_seed(world.seed))
    return partial(layer.compute_logits, "target")


def _drafter_logits(world: World, pieces: tuple[int, ...]) -> Tensor:
    logits = world.drafter_distribution(pieces[len(PROMPT) :]).log()
    logits[[piece for piece in range(world.drafter_size) if piece not in world.allowed]] = LOUD
    return logits


def stages_of(world: World, *, states: bool = False) -> Stages:
    """Fresh stages over a world, in its precision; with `states`, the drafter reads those of the target."""
    size = len(world.spelling)
    wide = replace(world, spelling=world.spelling + (None,) * EXTRA)
    trie, translate = translation_of(wide, ())
    target = TableModel(lambda tokens: _target_logits(world, tokens), size + EXTRA)
    drafter = TableModel(lambda pieces: _drafter_logits(world, pieces), world.drafter_size)
    sampling = SamplingParams(temperature=1.0)
    decode = Decode(
        drafter,
        AcceptanceHead(drafter.hidden_size, world.seed).requires_grad_(False),
        ThresholdStop(0.32 if world.adaptive else 1.0),
        sampling,
        world.allowed,
        world.max_draft,
        None,
        world.dtype,
        state_logits=_state_logits(world) if states else None,
    )
    decode.coupling = Coupling(trie, wide.spelling)
    context = [spelt or () for spelt in wide.spelling]
    project = StateProjection("target", target.hidden_size) if states else None
    verify = Verify(
        target,
        rule_of(wide, trie),
        sampling,
        context,
        size,
        world.ends,
        None,
        world.dtype,
        project=project,
    )
    return decode, translate, verify


def new_row(
    rng: RandomSource, remaining_tokens: int, offset: int = 0, sampling: SamplingParams | None = None
) -> SequenceState:
    """A row at its prompt."""
    row = row_of(PROMPT, PROMPT, offset=offset, remaining_tokens=remaining_tokens, rng=rng)
    row.sampling = sampling
    return row


def advance(stages: Stages, rows: list[SequenceState]) -> list[Verdict]:
    """One block of all rows, released when they are finished. Returns their verdicts."""
    decode, translate, verify = stages
    verdicts = verify(translate(decode(rows)))
    translate.observe(verdicts)
    if isinstance(decode, ChooseDraft):
        decode.observe(verdicts)
    for row in rows:
        assert verify.model.tokens_read(row) == row.tokens[:-1], "the last token is read with the next block"
    for row in [row for row in rows if row.finish]:
        last = rows.pop()
        if last is not row:
            rows[rows.index(row)] = last
        for stage in stages:
            stage.release(row)
    return verdicts


def admit(stages: Stages, rows: Sequence[SequenceState]) -> None:
    for row in rows:
        for stage in stages:
            stage.admit(row)


def emit(stages: Stages, rows: list[SequenceState], row: SequenceState, count: int) -> tuple[int, ...]:
    """Admit rows and run blocks until one of them has emitted so many tokens or is finished. Returns these."""
    admit(stages, rows)
    while not row.finish and row.emitted < count:
        advance(stages, rows)
    return tuple(row.tokens[row.prompt_length :])[:count]


def batch_distribution(
    make: Callable[[], Stages],
    settings: Sequence[tuple[Any, ...]],
    number: int,
    count: int,
    make_row: Callable[..., SequenceState] = new_row,
) -> Distribution:
    """The distribution of the first tokens of one row of a batch; the others draw fixed numbers and leave early.

    `settings`: per row the arguments of `make_row` after the offset.
    """

    def run(rng: RandomSource) -> tuple[int, ...]:
        rows = [
            make_row(rng, 4, n, *own) if n == number else make_row(SeededRandomSource(5, n), 1 + n, n, *own)
            for n, own in enumerate(settings)
        ]
        return emit(make(), rows, rows[number], count)

    return add_up(run)


def run_block(stages: Stages, rows: list[SequenceState]) -> list[int]:
    """One block of all rows, as `advance`. Returns how many pieces each drafted."""
    return [len(verdict.proposal.draft.pieces) for verdict in advance(stages, rows)]


def stage_distribution(
    world: World, count: int, remaining_tokens: int, neighbours: int = 0, *, states: bool = False
) -> tuple[Distribution, set[int]]:
    """The distribution of the first `count` tokens of a row, next to others with fixed random numbers; and the drafts'
    lengths.
    """
    lengths: set[int] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages, row = stages_of(world, states=states), new_row(rng, remaining_tokens)
        others = [
            row_of(PROMPT, PROMPT, offset=number + 1, remaining_tokens=number + 1) for number in range(neighbours)
        ]
        rows = [*others, row]
        admit(stages, rows)
        while not row.finish and row.emitted < count:
            lengths.update(run_block(stages, rows))
        return tuple(row.tokens[row.prompt_length :])[:count]

    distribution: Distribution = defaultdict(float)
    for weight, tokens in every_outcome(run, rounded=world.rounded):
        distribution[tokens] += weight
    return distribution, lengths
