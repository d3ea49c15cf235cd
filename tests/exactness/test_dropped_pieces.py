"""Greedy pieces that the head finds hopeless are dropped, and the text keeps the target's distribution.

The drafter is greedy and the target samples, so that dropped pieces could bias the text.
"""

import pytest
import torch
from enumeration import EXACT, VOCABULARIES, Distribution, World, add_up, difference, true_distribution
from torch import Tensor
from whole_stages import new_row, run_block, stages_of

from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.head import AcceptanceHead, piece_features
from stages.drafting.selection import Selection
from stages.drafting.stopping import FixedLength
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource
from stages.verification.rules import MODES

COSTS = Costs(target=((1, 10.0), (11, 40.0)), drafter=((1, 1.0),))


class MoodyHead(AcceptanceHead):
    """An acceptance head that is sure that some pieces are accepted and that others are rejected."""

    def estimate(self, hidden_BW: Tensor, logits_BD: Tensor, pieces_B: Tensor, index: int) -> tuple[Tensor, Tensor]:
        features_BF = piece_features(hidden_BW, logits_BD, pieces_B, index)
        return features_BF, (8 * torch.sin(40 * features_BF.sum(-1))).sigmoid()


def distribution_with_dropping(world: World, count: int) -> tuple[Distribution, set[int]]:
    """The distribution of the first tokens, and the lengths of the drafts."""
    lengths: set[int] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        first, translate, verify = stages_of(world)
        greedy, most = SamplingParams(0.0), world.max_draft
        head = MoodyHead(first.model.hidden_size, 0)
        decode = Decode(first.model, head, FixedLength(), greedy, world.allowed, most, None, torch.float64)
        decode.selection = translate.selection = Selection(COSTS, translate._trie, MODES[world.mode].parse)
        stages, row = (decode, translate, verify), new_row(rng, 4, offset=1)
        for stage in stages:
            stage.admit(row)
        while not row.finish and row.emitted < count:
            lengths.update(run_block(stages, [row]))
        return tuple(row.tokens[row.prompt_length :])[:count]

    return add_up(run), lengths


@pytest.mark.parametrize("mode", ["trie", "match"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_text_has_the_targets_distribution_whatever_is_dropped(vocabulary: str, mode: str):
    seen: set[int] = set()
    for seed in range(6):
        world = World(VOCABULARIES[vocabulary], 4, mode=mode, max_draft=3, seed=seed, target_support=3)
        found, lengths = distribution_with_dropping(world, 2)
        seen |= lengths
        assert difference(found, true_distribution(world, 2)) < EXACT
    assert len(seen) > 1, "some pieces were dropped, others were not"
