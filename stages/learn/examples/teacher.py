"""The teacher: the target's likeliest tokens at every emitted token.

It runs on the decoding thread in every block, so it only selects the largest logits. Their tokens are spelt in pieces
once per text (`builder.py`), and soft targets are computed from these where the example is trained on
(`soft_targets.py`).

The teacher has its own temperature. At 0 a distribution carries nothing about the second-best tokens; at 1 the best
token has too little weight, and a first piece that many tokens share outweighs a more probable token (measurements in
benchmarks/notes/losses.md; the paper does not state its choice).

Shapes: N positions, V target tokens, K likeliest tokens, C chunks of the vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import Decision, Numbers, Proposal, TopLogits, TopTokens
from stages.engine.compiled.lines.largest_logits import LargestLogits
from stages.vocabulary.pair import Pair

CHUNK = 32  # tokens; of a chunk the largest logit decides whether its tokens are compared


class _Spelling:
    """The pieces of every target token in flat arrays; none for a token that cannot be spelt."""

    def __init__(self, pair: Pair) -> None:
        pieces = [pieces or () for pieces in pair.pieces]
        self.lengths_V = np.fromiter(map(len, pieces), np.int16, len(pieces))
        self._starts_V = self.lengths_V.cumsum(dtype=np.int64) - self.lengths_V
        self._flat = np.fromiter((piece for own in pieces for piece in own), np.int32, int(self.lengths_V.sum()))

    def spell(self, ids: Numbers, limits: Numbers) -> tuple[Numbers, Numbers]:
        """Return how many pieces each token has, at most its limit, and these pieces, concatenated."""
        lengths = np.minimum(self.lengths_V[ids], limits.astype(np.int16))
        flat = lengths.ravel().astype(np.int64)
        places = np.arange(flat.sum()) + np.repeat(self._starts_V[ids.ravel()] - flat.cumsum() + flat, flat)
        return lengths, self._flat[places]


class TrieTeacher:
    """Selects the target's likeliest tokens, once per block, and spells them in the drafter's pieces.

    The pieces are 0 "snow", 1 "ball", 2 "the"; the target tokens are 0 "snow", 1 "snowball" (pieces 0, 1), 2 "the". The
    target emits "snowball" after one piece. The logits of its three tokens are stored, and spelt with the whole text.

    >>> from stages.contract.blocks import Draft, SequenceState
    >>> from stages.learn.examples.soft_targets import tabulate
    >>> from stages.sampling.random_source import SeededRandomSource
    >>> from store.events import Origin, Outcome
    >>> spelling = (0,), (0, 1), (2,)
    >>> pair = Pair(pieces=spelling, context=spelling, drafter_size=3, digest="", unspelt=0)
    >>> teacher = TrieTeacher(pair, top_k=3)
    >>> rng = SeededRandomSource(seed=0, offset=0)
    >>> row = SequenceState(0, "id", "dataset", "text", [2], 1, [2], rng, remaining_tokens=9)
    >>> proposal = Proposal(Draft(row, (), torch.zeros(0, 3), (), None, ()), ())  # nothing was drafted
    >>> decisions = (Decision(0, None, Outcome.UNDRAFTED, emitted=1, origin=Origin.BONUS),)
    >>> logits_NV = torch.tensor([[0.25, 0.40, 0.35]]).log()  # N = 1 position, V = 3
    >>> (logits,) = teacher([proposal], [decisions], logits_NV, starts=[0])
    >>> tokens = logits.spell(logits)
    >>> tokens.probs.astype(float).round(2).tolist(), tokens.lengths.tolist(), tokens.pieces.tolist()
    ([[0.4, 0.35, 0.25]], [[2, 1, 1]], [0, 1, 2, 0])

    Two soft targets are computed from them. Where the token begins, "snow" has the mass of both tokens that begin with
    it, 0.25 + 0.40; of that, 0.25 is the token "snow" itself. After "snow" the next piece is "ball" with
    0.40 / 0.65 = 0.62, and the rest, 0.38, is the end of the token.

    >>> table = tabulate(tokens)
    >>> table.positions_N.tolist(), table.depths_N.tolist(), table.ids_NT.tolist()
    ([1, 2], [0, 1], [[0, 2], [1, 0]])
    >>> table.group_NT.round(2).tolist(), table.direct_NT.round(2).tolist(), table.rest_N.round(2).tolist()
    ([[0.65, 0.35], [0.62, 0.0]], [[0.25, 0.35], [0.0, 0.0]], [0.0, 0.38])
    """

    def __init__(self, pair: Pair, top_k: int, *, temperature: float = 1.0) -> None:
        self.temperature, self._top_k = temperature, min(top_k, len(pair.pieces))
        self._context, self._spelling = pair.context, _Spelling(pair)
        self._find_largest = LargestLogits(self._top_k, temperature)

    @torch.inference_mode()
    def __call__(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[TopLogits]:
        """Select the largest logits at the emitted tokens of each sequence, before it is extended.

        Args:
            logits_NV: the target's, sequences concatenated. Line `starts[i] + j` is that of the j-th emitted token of
                sequence i.
        """
        texts = [tuple(one.emitted for one in decisions if one.emitted is not None) for decisions in outcomes]
        places = [start + number for start, text in zip(starts, texts, strict=False) for number in range(len(text))]
        ids_NK, values_NK, sums_N1 = self._find_top(logits_NV[:, : len(self._context)], places)
        selected, begin = [], 0
        for proposal, text in zip(batch, texts, strict=True):
            lines = slice(begin, begin := begin + len(text))
            position = len(proposal.draft.row.pieces)
            selected.append(self.keep(position, text, ids_NK[lines], values_NK[lines], sums_N1[lines]))
        return selected

    def keep(
        self, position: int, tokens: Sequence[int], ids_NK: Numbers, logits_NK: Numbers, sums_N1: Numbers
    ) -> TopLogits:
        """Return the supervision of emitted tokens whose largest logits are known.

        `position` is that of the first token's first piece in the row's pieces; the arrays are those of `TopLogits`.
        """
        starts = accumulate((len(self._context[token]) for token in tokens[:-1]), initial=position)
        return TopLogits(np.array(list(starts)), np.array(tokens), ids_NK, logits_NK, sums_N1, self._spell)

    def _find_top(self, logits_LV: Tensor, lines: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Return the ids of the largest logits of N lines, these logits, and the sum of all exponentials (see
        `TopLogits`).
        """
        if LargestLogits.reads(logits_LV):
            return self._find_largest(logits_LV, lines)
        logits_NV = logits_LV[list(lines)].float()
        if LargestLogits.reads(logits_NV):
            return self._find_largest(logits_NV, range(len(lines)))
        values_NK, ids_NK = largest_logits(logits_NV, self._top_k)
        sums_N1 = (logits_NV - values_NK[:, :1]).mul_(1 / self.temperature).exp_().sum(-1, keepdim=True)
        return ids_NK.int().cpu().numpy(), values_NK.cpu().numpy(), sums_N1.cpu().numpy()

    def _spell(self, top: TopLogits) -> TopTokens:
        """Return the tokens of logits, with their probabilities, in the drafter's pieces."""
        is_own_NK = top.ids == top.tokens[:, None]
        # Of a token that is not among the likeliest, what follows its first piece is not known from them.
        levels_N = np.where(is_own_NK.any(1), np.maximum(self._spelling.lengths_V[top.tokens], 1), 1)
        lengths_NK, pieces = self._spelling.spell(top.ids, np.maximum(levels_N, 2)[:, None])
        probs_NK = np.exp((top.logits - top.logits[:, :1]) / self.temperature, dtype=np.float32) / top.sums
        return TopTokens(top.positions, levels_N, is_own_NK.argmax(1), probs_NK, lengths_NK, pieces)


def largest_logits(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits and their ids, in descending order (N, K).

    As `topk`, in two thirds of the time: the largest are in the chunks whose maxima are largest.
    """
    rows, size = logits_NV.shape
    if size < 4 * count * CHUNK:
        return tuple(logits_NV.topk(count))  # type: ignore[return-value]
    padded_NV = torch.nn.functional.pad(logits_NV, (0, -size % CHUNK), value=-torch.inf) if size % CHUNK else logits_NV
    chunks_NCX = padded_NV.view(rows, -1, CHUNK)
    chosen_NK = chunks_NCX.amax(-1).topk(count).indices
    lines_N1 = torch.arange(rows, device=logits_NV.device)[:, None]
    values_NK, places_NK = chunks_NCX[lines_N1, chosen_NK].flatten(1).topk(count)
    return values_NK, chosen_NK.gather(1, places_NK // CHUNK) * CHUNK + places_NK % CHUNK
