"""The law of what whole stages emit: `Decode`, `Translate` and `Verify` over models with known laws."""

from collections import defaultdict
from dataclasses import replace

import torch
from doubles import TableModel, row_of
from enumeration import Law, World, every_outcome, rule_of, translation_of
from torch import Tensor

from stages.blocks import Row
from stages.decode import Decode
from stages.distributions import Sampling
from stages.draws import Draws
from stages.head import AcceptanceHead
from stages.stopping import ThresholdStop
from stages.teach import teach_nothing
from stages.translate import Translate
from stages.verify import Verify

PROMPT = (0, 1)  # in target tokens and in pieces
EXTRA = 2  # outputs that the target's model has beyond its tokenizer
Stages = tuple[Decode, Translate, Verify]


LOUD = 9.0  # the logit of what must be masked: it would win if nobody did


def _target_logits(world: World, tokens: tuple[int, ...]) -> Tensor:
    law = world.target_law(tokens[len(PROMPT) :])
    return torch.cat([law.log(), torch.full((EXTRA,), LOUD, dtype=torch.float64)])


def _drafter_logits(world: World, pieces: tuple[int, ...]) -> Tensor:
    logits = world.drafter_law(pieces[len(PROMPT) :]).log()
    logits[[piece for piece in range(world.drafter_size) if piece not in world.allowed]] = LOUD
    return logits


def stages_of(world: World) -> Stages:
    """Fresh stages over a world, in double precision."""
    size = len(world.spelling)
    wide = replace(world, spelling=world.spelling + (None,) * EXTRA)
    trie, translate = translation_of(wide, ())
    target = TableModel(lambda tokens: _target_logits(world, tokens), size + EXTRA)
    drafter = TableModel(lambda pieces: _drafter_logits(world, pieces), world.drafter_size)
    sampling = Sampling(temperature=1.0)
    decode = Decode(
        drafter,
        AcceptanceHead(drafter.hidden_size, world.seed).requires_grad_(False),
        ThresholdStop(0.32 if world.adaptive else 1.0),
        sampling,
        world.allowed,
        world.max_draft,
        None,
        torch.float64,
    )
    context = [spelt or () for spelt in wide.spelling]
    verify = Verify(target, rule_of(wide, trie), sampling, context, size, world.ends, teach_nothing, torch.float64)
    return decode, translate, verify


def new_row(draws: Draws, room: int, offset: int = 0, sampling: Sampling | None = None) -> Row:
    """A row at its prompt."""
    row = row_of(PROMPT, PROMPT, offset=offset, room=room, draws=draws)
    row.sampling = sampling
    return row


def run_block(stages: Stages, rows: list[Row]) -> list[int]:
    """One block of all rows, released when they are finished. Returns how many pieces each drafted."""
    decode, translate, verify = stages
    drafts = decode(rows)
    verdicts = verify(translate(drafts))
    translate.observe(verdicts)
    for row in [row for row in rows if row.finish]:
        last = rows.pop()
        if last is not row:
            rows[rows.index(row)] = last
        for stage in stages:
            stage.release(row)
    return [len(draft.pieces) for draft in drafts]


def stage_law(world: World, count: int, room: int, neighbours: int = 0) -> tuple[Law, set[int]]:
    """The law of the first `count` tokens of a row, beside others whose draws are fixed; and the drafts' lengths."""
    lengths: set[int] = set()

    def emitted(draws: Draws) -> tuple[int, ...]:
        stages, row = stages_of(world), new_row(draws, room)
        others = [row_of(PROMPT, PROMPT, offset=number + 1, room=number + 1) for number in range(neighbours)]
        rows = [*others, row]
        for stage in stages:
            for each in rows:
                stage.admit(each)
        while not row.finish and row.emitted < count:
            lengths.update(run_block(stages, rows))
        return tuple(row.tokens[row.prompt_length :])[:count]

    law: Law = defaultdict(float)
    for weight, tokens in every_outcome(emitted):
        law[tokens] += weight
    return law, lengths
