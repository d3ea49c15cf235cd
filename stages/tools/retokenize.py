"""Translates blocks of a known text by the trie and by the paper's method, to compare their costs.

The paper's method (algorithm 1, section on the n-gram cache) detokenises the target's whole context with the emitted
tokens and tokenises the text with the drafter's tokenizer, every block; the new pieces become the context and, for a
token without a direct map, its entry in the cache.

Shapes: N positions, V target tokens, K pieces of a draft, D drafter ids.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.rules import Levels, TrieRule
from stages.sampling.random_source import SeededRandomSource
from stages.translate import Translate
from stages.vocabulary.pair import Pair
from stages.vocabulary.tokenizer_view import Vocabulary


@dataclass(frozen=True)
class TextBlock:
    """A block of a drafter that predicts a given text.

    Attributes:
        context: target ids before the block.
        context_pieces: the same text in the drafter's pieces.
        draft: the next pieces of the text.
        emitted: the target tokens of the text that the draft covers at least in part; at least one.
    """

    context: tuple[int, ...]
    context_pieces: tuple[int, ...]
    draft: tuple[int, ...]
    emitted: tuple[int, ...]


def _find_begins(vocabulary: Vocabulary, ids: Sequence[int], size: int) -> list[int]:
    """Return the begin of each token in a text of `size` bytes; a space that the tokenizer adds in front is at -1."""
    lengths = [len(vocabulary.bytes_of(index) or b"") for index in ids]
    return list(accumulate(lengths, initial=size - sum(lengths)))


def text_blocks(
    target: Vocabulary, drafter: Vocabulary, text: str, *, context: int, drafted: int, most: int
) -> list[TextBlock]:
    """Divide a text into consecutive blocks, each after `context` target tokens; at most `most`.

    Args:
        target, drafter: the vocabularies.
        text: the text; both tokenizers must reproduce its bytes.
        context: target tokens before each block.
        drafted: pieces of each draft.
        most: maximum number of blocks.
    """
    tokens, pieces, size = target.encode_text(text), drafter.encode_text(text), len(text.encode())
    token_begins, piece_begins = _find_begins(target, tokens, size), _find_begins(drafter, pieces, size)
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
    """The pipeline's method: walk the trie, cache emitted n-grams, append the pieces of emitted tokens.

    Args:
        pair: the two vocabularies.
        trie: holds the direct maps.
        cache: of n-grams, over that trie.
    """

    def __init__(self, pair: Pair, trie: Trie, cache: NgramCache) -> None:
        self._stage, self._trie, self._context = Translate(trie, cache, pair.pieces), trie, pair.context
        self._rule = TrieRule(trie)
        self._row = SequenceState(0, "", "", "", [], 0, [], SeededRandomSource(0, 0), 0)

    def propose(self, pieces: Sequence[int]) -> Proposal:
        """Translate drafted pieces to target tokens."""
        return self._stage([Draft(self._row, tuple(pieces), torch.empty(0), (), None, ())])[0]

    def __call__(self, block: TextBlock) -> list[int]:
        """Translate a block in both directions; return the drafter's pieces of the emitted tokens."""
        proposal = self.propose(block.draft)
        self._stage.observe([Verdict(proposal, (), block.emitted, 0, 0)])
        _ = self._trie.group_of_token_V  # runs the work that insertions deferred
        return [piece for token in block.emitted for piece in self._context[token]]

    def levels(self, block: TextBlock, draft_probs_KD: Tensor, target_probs_NV: Tensor) -> list[Levels]:
        """Return the probabilities that verification compares. At least K + 1 distributions of the target."""
        draft = Draft(self._row, block.draft, draft_probs_KD, (), None, ())
        return self._rule.levels(self._stage([draft]), target_probs_NV, [0])[0]


def random_distributions(count: int, width: int, seed: int) -> Tensor:
    """Make random distributions for measurements: `count` rows over `width` tokens."""
    logits_NV = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return (4 * logits_NV).softmax(-1)


class RetokenizingTranslation:
    """The paper's method. Where it leaves a choice, the cheaper one is taken.

    The text is retokenised once per block, and token by token only in blocks that emit an n-gram not yet in the cache.

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
        """Translate drafted pieces, from left to right, by the longest span in the cache or else the direct map."""
        proposed: list[int | None] = []
        start = 0
        while start < len(pieces):
            spans = (tuple(pieces[start:stop]) for stop in range(len(pieces), start + 1, -1))
            span = next((span for span in spans if span in self.known), None)
            proposed.append(self.known[span] if span else self._token_of_piece.get(pieces[start]))
            start += len(span) if span else 1
        return proposed

    def __call__(self, block: TextBlock) -> list[int]:
        """Translate a block in both directions; return the drafter's pieces of the context and the emitted tokens."""
        self.propose(block.draft)
        context, pieces = list(block.context), list(block.context_pieces)
        unseen = set(block.emitted) - self._has_piece - self._seen
        for step in [(token,) for token in block.emitted] if unseen else [block.emitted]:
            context += step
            before, pieces = pieces, self._retokenize(context)
            if unseen.intersection(step):
                self._cache_ngram(step[0], before, pieces)
        return pieces

    def _retokenize(self, context: Sequence[int]) -> list[int]:
        return self._drafter.encode_text(self._target.decode(context))

    def _cache_ngram(self, token: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Cache the pieces that the token added. A single piece, or none, is no n-gram."""
        same = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(before))
        added = tuple(after[min(same, len(after)) :])
        self._seen.add(token)
        if len(added) > 1:
            self.known[added] = token
