"""Soft targets as tests compare them: the lines of a table as values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.contract.blocks import SoftTarget, TopLogits, TopTokens
from stages.learn.examples.losses import TeacherBatch
from stages.learn.examples.soft_targets import SoftTargetTable, tabulate


def read_table(table: SoftTargetTable) -> tuple[SoftTarget, ...]:
    """The soft targets of a table, without its padding."""
    found = []
    for position, depth, ids, valid, group, direct, rest in zip(*table, strict=True):
        parts = (tuple(values[valid].tolist()) for values in (ids, group, direct))
        found.append(SoftTarget(int(position), int(depth), *parts, float(rest)))
    return tuple(found)


def compute_all(soft_targets: Sequence[SoftTarget | TopTokens | TopLogits]) -> tuple[SoftTarget, ...]:
    """The soft targets of an example or of a block, as training computes them."""
    return read_table(tabulate([one.spell(one) if isinstance(one, TopLogits) else one for one in soft_targets]))


def teacher_batch(soft_targets: Sequence[SoftTarget | TopTokens], emitted_N: Tensor | None = None) -> TeacherBatch:
    """Soft targets as losses read them."""
    table = tabulate(soft_targets)
    return TeacherBatch.from_table(table, torch.full((len(table.rest_N),), -1) if emitted_N is None else emitted_N)
