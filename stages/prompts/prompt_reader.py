"""Reading of prompts into a model's cache: pass by pass, from the end of the longest prefix that is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stages.contract.blocks import SequenceState
from stages.engine.models.language_model import LanguageModel
from stages.prompts.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from torch import Tensor

UNREAD = 32  # most tokens of a prompt that are left to the row's first block


@dataclass(frozen=True)
class PrefixCounts:
    """What the prefix cache was good for."""

    # tokens, copied_tokens: of all prompts, and those of them whose keys and values were copied
    tokens: int = 0
    copied_tokens: int = 0
    copied_prompts: int = 0  # number of prompts with a prefix that was copied


class PromptReader:
    """Admits rows to a model and computes their prompts.

    The target reads each prompt at its admission, a drafter before the first draft, which may never come. It is read in
    passes that begin at multiples of `chunk`. The cache has blocks of `chunk` tokens from such passes, so that a row
    has the same keys and values bit for bit whether they were copied or computed. When the model's weights change, the
    cache is emptied.

    A `preamble` shorter than `chunk` is a pass of its own in every prompt that begins with it, and is computed once:
    the tokens of a chat template before the message are most of a short prompt.

    The target of a server (`live`) copies the longest prefix that the cache knows, whatever passes computed it: up to
    rounding, that is the same. It reads the rest part by part, in the passes that verify the drafts of other rows, so
    that these continue: while `SequenceState.reading` is set, a row drafts and emits nothing. Of a row with
    `prompt_logprobs` nothing is copied, because every place of its prompt is wanted. A row that may emit nothing
    finishes when its prompt is read.

    Args:
        model: its cached rows can be cut anywhere (`Forward.cuts_rows`).
        cache: known prefixes, None for none; unless `live`, its blocks have `chunk` tokens.
        live: whether prompts are read part by part, and completed texts are kept too; the weights never change.
        preamble: with which many prompts begin, in the model's ids; unless `live`, whose cache has smaller blocks.
        text: returns the ids of a row that the model reads; by default the target's.
    """

    def __init__(
        self,
        model: LanguageModel,
        chunk: int,
        cache: PrefixCache | None,
        *,
        live: bool = False,
        preamble: Sequence[int] = (),
        text: Callable[[SequenceState], list[int]] = lambda row: row.tokens,
    ) -> None:
        if cache is not None and not live and cache.block != chunk:
            raise ValueError(f"a prefix cache must have blocks of {chunk} tokens, those of a pass, got {cache.block}")
        self.model, self.cache, self.counts = model, cache, PrefixCounts()
        self._chunk, self._live, self._text, self._weight_changes = chunk, live, text, model.weight_changes
        self._reading: dict[SequenceState, None] = {}  # from the oldest one on
        self._preamble = list(preamble) if cache is not None and not live and len(preamble) < chunk else []
        self._of_preamble: list[Tensor] | None = None  # its keys and values

    def admit(self, row: SequenceState) -> None:
        """Add a row to the model and, unless `live`, read its prompt but the last token."""
        self.model.admit(row, self._text(row), read=False)
        self.read(row)

    def read(self, row: SequenceState) -> None:
        """Read the text but the last token of a row that was added to the model, or begin to, if `live`."""
        text = self._text(row)
        self.counts = replace(self.counts, tokens=self.counts.tokens + len(text))
        self._copy_prefix(row)
        if self._live:
            self._reading[row] = None
            self._set_reading(row)
            return
        self._begin_with_preamble(row)
        while unread := text[self.model.length(row) : -1]:
            self.model.extend(row, unread[: self._chunk - self.model.length(row) % self._chunk])
        self._keep(row)

    def _begin_with_preamble(self, row: SequenceState) -> None:
        """Copy or compute the preamble of a prompt that begins with it, unless more of the prompt was copied."""
        size = len(self._preamble)
        if not size or self.model.length(row) or self._text(row)[:-1][:size] != self._preamble:
            return
        if self._of_preamble is None:
            self.model.extend(row, self._preamble)
            self._of_preamble = [tensor.clone() for tensor in self.model.read_row(row)]
            return
        self.model.write_row(row, 0, self._of_preamble)
        self._count_copied(size, 1)

    def next_tokens(self) -> dict[SequenceState, Sequence[int]]:
        """Return what the next pass reads of the prompts that are being read: no more than `chunk` tokens together.

        Half of them are for the oldest row, so that no prompt waits for ever, and half for the one with the fewest
        tokens left, so that a short prompt does not wait for a long one. Equal prompts are read once: the others copy.
        """
        if not self._reading:
            return {}
        oldest, shortest = next(iter(self._reading)), min(self._reading, key=self._count_unread)
        if oldest is shortest:
            return {oldest: self._take(oldest, self._chunk)}
        half = (self._chunk + 1) // 2
        return {oldest: self._take(oldest, half), shortest: self._take(shortest, half)}

    def _take(self, row: SequenceState, most: int) -> Sequence[int]:
        begin, last = self.model.length(row), row.remaining_tokens > 0  # the last token is left to the first block
        return row.tokens[begin : begin + min(most, self._count_unread(row) - last)]

    def _count_unread(self, row: SequenceState) -> int:
        return len(row.tokens) - self.model.length(row)

    def after_pass(self) -> None:
        """Keep what a pass has read, and let rows whose prompts are nearly read take part in the next block."""
        for row in list(self._reading):
            self._keep(row)
        for row in list(self._reading):
            self._copy_prefix(row)
            self._set_reading(row)

    def _set_reading(self, row: SequenceState) -> None:
        left = UNREAD if row.prompt_logprobs is None else 1
        row.reading = self._count_unread(row) > (left if row.remaining_tokens else 0)
        if not row.reading:
            del self._reading[row]
            if not row.remaining_tokens:
                row.finish = "length"

    def release(self, row: SequenceState) -> None:
        """Remove a row; its text becomes a known prefix for the next turn of a conversation."""
        if self._live:
            self._keep(row)
        self._reading.pop(row, None)
        self.model.release(row)

    def _copy_prefix(self, row: SequenceState) -> None:
        """Copy the longest known prefix of a prompt without its last token, whose logits are wanted."""
        if self.cache is None or row.prompt_logprobs is not None:
            return
        if self.model.weight_changes != self._weight_changes:
            self._weight_changes, self._of_preamble = self.model.weight_changes, None
            self.cache.clear()
        begin = self.model.length(row)
        blocks = self.cache.find(row.scope, self._text(row)[:-1])
        copied = sum(block[0].shape[-2] for block in blocks) - begin
        if copied <= 0:
            return
        for number in range(begin // self.cache.block, len(blocks)):
            self.model.write_row(row, number * self.cache.block, blocks[number])
        self._count_copied(copied, begin == 0)
        if self._live:
            row.cached_tokens += copied

    def _count_copied(self, tokens: int, prompts: int) -> None:
        counts = self.counts
        copied_tokens, copied_prompts = counts.copied_tokens + tokens, counts.copied_prompts + prompts
        self.counts = replace(counts, copied_tokens=copied_tokens, copied_prompts=copied_prompts)

    def _keep(self, row: SequenceState) -> None:
        """Keep the prefixes of a row's text as far as it is read, unless the row is private."""
        if self.cache is not None and not row.private and self.model.length(row) >= self.cache.block:
            self.cache.keep(row.scope, self._text(row)[: self.model.length(row)], self.model.read_row(row))
