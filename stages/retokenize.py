"""One block's translation over a known text, by the trie and in the paper's way, to compare what they cost.

The paper's way (algorithm 1, section on the n-gram cache) detokenises the target's whole context with what was
emitted and tokenises the text with the drafter's tokenizer, every block; the new pieces become the context and,
for a token without a direct map, its entry in the cache.

Shapes: N positions, V target tokens, K pieces of a draft, D drafter ids.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stages.acceptance import Levels, TrieRule
from stages.blocks import Draft, Proposal, Row, Verdict
from stages.draws import SeededDraws
from stages.ngram_cache import NgramCache
from stages.pair import Pair
from stages.translate import Translate
from stages.trie import Trie
from stages.vocabulary import Vocabulary


@dataclass(frozen=True)
class TextBlock:
    """A block as it would be if the drafter knew the text.

    Attributes:
        context: target ids before it.
        context_pieces: the same text, alone, as the drafter's tokenizer cuts it.
        draft: the next pieces of the text.
        emitted: the target tokens of the text that the draft reaches into, one at least.
    """

    context: tuple[int, ...]
    context_pieces: tuple[int, ...]
    draft: tuple[int, ...]
    emitted: tuple[int, ...]


def _begins(words: Vocabulary, ids: Sequence[int], size: int) -> list[int]:
    """Where each token begins in a text of `size` bytes; a space that the tokenizer puts first lies at -1."""
    lengths = [len(words.bytes_of(index) or b"") for index in ids]
    return list(accumulate(lengths, initial=size - sum(lengths)))


def text_blocks(
    target: Vocabulary, drafter: Vocabulary, text: str, *, context: int, drafted: int, most: int
) -> list[TextBlock]:
    """Consecutive blocks of a text, each behind `context` target tokens; fewer than `most` where the text ends.

    Args:
        target, drafter: the vocabularies.
        text: as written; both tokenizers must give back its bytes.
        context: target tokens before each block.
        drafted: pieces of each draft.
        most: blocks wanted.
    """
    tokens, pieces, size = target.encode_text(text), drafter.encode_text(text), len(text.encode())
    token_begins, piece_begins = _begins(target, tokens, size), _begins(drafter, pieces, size)
    blocks: list[TextBlock] = []
    place = context
    while len(blocks) < most:
        first = bisect_left(piece_begins, token_begins[place]) if place < len(tokens) else len(pieces)
        if first + drafted > len(pieces):
            break
        end = bisect_left(token_begins, piece_begins[first + drafted])
        emitted = tokens[place : max(end, place + 1)]
        before = tokens[place - context : place]
        context_pieces = drafter.encode_text(target.decode(before))
        draft = tuple(pieces[first : first + drafted])
        blocks.append(TextBlock(tuple(before), tuple(context_pieces), draft, tuple(emitted)))
        place += len(emitted)
    return blocks


class TrieTranslation:
    """What the pipeline does: walk the trie, remember emitted n-grams, append the emitted tokens' pieces.

    Args:
        pair: the two vocabularies.
        trie: holds the direct maps.
        cache: of n-grams, over that trie.
    """

    def __init__(self, pair: Pair, trie: Trie, cache: NgramCache) -> None:
        self._stage, self._trie, self._context = Translate(trie, cache, pair.pieces), trie, pair.context
        self._rule = TrieRule(trie)
        self._row = Row(0, "", "", "", [], 0, [], SeededDraws(0, 0), 0)

    def propose(self, pieces: Sequence[int]) -> Proposal:
        """Drafted pieces as target tokens."""
        return self._stage([Draft(self._row, tuple(pieces), torch.empty(0), (), None, ())])[0]

    def __call__(self, block: TextBlock) -> list[int]:
        """Translate a block to and fro; the drafter's pieces of what was emitted."""
        proposal = self.propose(block.draft)
        self._stage.observe([Verdict(proposal, (), block.emitted, 0, 0)])
        _ = self._trie.group_of_token_V  # so that what insertions put off is done
        return [piece for token in block.emitted for piece in self._context[token]]

    def levels(self, block: TextBlock, laws_KD: Tensor, laws_NV: Tensor) -> list[Levels]:
        """The probabilities that verification compares, under the given laws: K + 1 of the target or more."""
        draft = Draft(self._row, block.draft, laws_KD, (), None, ())
        return self._rule.levels(self._stage([draft]), laws_NV, [0])[0]


def random_laws(count: int, width: int, seed: int) -> Tensor:
    """Laws for measurements: `count` rows over `width` tokens."""
    logits_NV = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return (4 * logits_NV).softmax(-1)


class RetokenizingTranslation:
    """The paper's way. Where it leaves a choice, the cheaper one is taken.

    The text is made anew once per block, and token by token only in blocks that emit an n-gram not yet in the cache.

    Attributes:
        known: the cache: pieces to target token. Unbounded, as in the paper's main experiments.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, pair: Pair) -> None:
        self._target, self._drafter = target, drafter
        direct = {pieces[0]: token for token, pieces in enumerate(pair.pieces) if pieces and len(pieces) == 1}
        self._token_of_piece, self._has_piece = direct, set(direct.values())
        self.known: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()

    def propose(self, pieces: Sequence[int]) -> list[int | None]:
        """Drafted pieces as target tokens: from left to right the longest span in the cache, else the direct map."""
        proposed: list[int | None] = []
        start = 0
        while start < len(pieces):
            spans = (tuple(pieces[start:stop]) for stop in range(len(pieces), start + 1, -1))
            span = next((span for span in spans if span in self.known), None)
            proposed.append(self.known[span] if span else self._token_of_piece.get(pieces[start]))
            start += len(span) if span else 1
        return proposed

    def __call__(self, block: TextBlock) -> list[int]:
        """Translate a block to and fro; the drafter's pieces of the context and what was emitted."""
        self.propose(block.draft)
        context, pieces = list(block.context), list(block.context_pieces)
        unseen = set(block.emitted) - self._has_piece - self._seen
        for step in [(token,) for token in block.emitted] if unseen else [block.emitted]:
            context += step
            before, pieces = pieces, self._retokenized(context)
            if unseen.intersection(step):
                self._remember(step[0], before, pieces)
        return pieces

    def _retokenized(self, context: Sequence[int]) -> list[int]:
        return self._drafter.encode_text(self._target.decode(context))

    def _remember(self, token: int, before: Sequence[int], after: Sequence[int]) -> None:
        """The pieces that came with the token are its entry. A single one, or none, is no n-gram."""
        same = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(before))
        added = tuple(after[min(same, len(after)) :])
        self._seen.add(token)
        if len(added) > 1:
            self.known[added] = token
