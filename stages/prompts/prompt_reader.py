"""Reading of prompts into the target's cache: pass by pass, from the end of the longest prefix that is known."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.contract.blocks import SequenceState
from stages.models.language_model import LanguageModel
from stages.prompts.prefix_cache import PrefixCache

UNREAD = 32  # most tokens of a prompt that are left to the row's first block


@dataclass(frozen=True)
class PrefixCounts:
    """What the prefix cache was good for.

    Attributes:
        tokens, copied_tokens: of all prompts, and those of them whose keys and values were copied.
        copied_prompts: number of prompts with a prefix that was copied.
    """

    tokens: int = 0
    copied_tokens: int = 0
    copied_prompts: int = 0


class PromptReader:
    """Admits rows to the target and computes their prompts.

    A replay reads each prompt at its admission, in passes that begin at multiples of `chunk`. Its cache has blocks of
    `chunk` tokens from such passes, so that a row has the same keys and values bit for bit whether they were copied or
    computed. A server (`live`) copies the longest prefix that the cache knows, whatever passes computed it: up to
    rounding, that is the same.

    Args:
        model: the target; its cached rows can be cut anywhere (`Forward.cuts_rows`).
        chunk: maximum number of tokens of a pass.
        cache: known prefixes, None for none; in a replay its blocks have `chunk` tokens.
        live: whether completed texts are kept, too, and the last tokens of a prompt are left to the first block.
    """

    def __init__(self, model: LanguageModel, chunk: int, cache: PrefixCache | None, *, live: bool = False) -> None:
        if cache is not None and not live and cache.block != chunk:
            raise ValueError(f"a replay's prefix cache must have blocks of {chunk} tokens, got {cache.block}")
        self.model, self.cache, self.counts = model, cache, PrefixCounts()
        self._chunk, self._live = chunk, live

    def admit(self, row: SequenceState) -> None:
        """Add a row to the model and read its prompt but the last token, or but the last few."""
        self.model.admit(row, row.tokens, read=False)
        self._copy_prefix(row)
        last = UNREAD if self._live else 1
        while (unread := len(row.tokens) - self.model.length(row)) > last:
            self.model.extend(row, self._next_tokens(row, unread))
        self._keep(row)

    def _next_tokens(self, row: SequenceState, unread: int) -> Sequence[int]:
        begin = self.model.length(row)
        return row.tokens[begin : begin + min(self._chunk, unread - 1)]

    def release(self, row: SequenceState) -> None:
        """Remove a row; its text becomes a known prefix for the next turn of a conversation."""
        if self._live:
            self._keep(row)
        self.model.release(row)

    def _copy_prefix(self, row: SequenceState) -> None:
        """Copy the longest known prefix of a prompt without its last token, whose logits are wanted."""
        if self.cache is None:
            return
        blocks = self.cache.find(row.scope, row.tokens[:-1])
        for number, tensors in enumerate(blocks):
            self.model.write_row(row, number * self.cache.block, tensors)
        before, copied = self.counts, len(blocks) * self.cache.block
        self.counts = PrefixCounts(
            before.tokens + len(row.tokens), before.copied_tokens + copied, before.copied_prompts + bool(blocks)
        )

    def _keep(self, row: SequenceState) -> None:
        """Keep the prefixes of a row's text as far as it is read, unless the row is private."""
        if self.cache is not None and not row.private and self.model.length(row) >= self.cache.block:
            self.cache.keep(row.scope, row.tokens[: self.model.length(row)], self.model.read_row(row))
