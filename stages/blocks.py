"""What passes between stages within one block. Live values: they may hold tensors and die with the block.

Shapes: K pieces of a draft, D ids of the drafter's vocabulary, F features of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stages.distributions import Sampling
from stages.draws import Draws
from stages.ending import Ending
from stages.logprobs import TokenLogprobs
from stages.trie import Node
from store.events import Origin, Outcome, Translation


@dataclass(eq=False)
class Row:
    """One prompt in flight. The loop owns it; `verify` appends to it and nothing else writes to it.

    Attributes:
        offset, prompt_id, dataset, text: the prompt, as received.
        tokens: target ids of the prompt and of what was emitted.
        prompt_length: how many of `tokens` are the prompt.
        pieces: the same text in drafter ids: the prompt as the drafter cuts it, then each emitted token's pieces.
        draws: the prompt's random numbers.
        room: how many more target tokens may be emitted.
        block: number of the current block.
        finish: "" while in flight, then "stop" or "length"; live: also "cancelled" and "deadline".
        private: its text may not be kept: neither logged nor learned from nor put into a checkpoint.
        sampling: the transform of this row's laws, the drafter's as well as the target's; None for that of the stages.
        ending: finds the stop strings at which the row ends; None if it has none.
        logprobs: alternatives wanted with each emitted token, 0 for the token's own log probability alone; None for
            nothing.
        taught: whether what the target says of it is kept as a lesson; never of a private row.
    """

    offset: int
    prompt_id: str
    dataset: str
    text: str
    tokens: list[int]
    prompt_length: int
    pieces: list[int]
    draws: Draws
    room: int
    block: int = 0
    finish: str = ""
    private: bool = False
    sampling: Sampling | None = None
    ending: Ending | None = None
    logprobs: int | None = None
    taught: bool = True

    @property
    def teaches(self) -> bool:
        """Whether it gives a lesson."""
        return self.taught and not self.private

    @property
    def emitted(self) -> int:
        """Target tokens emitted so far."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class Draft:
    """Pieces that the drafter proposes after a row, with the laws that they were drawn from.

    Attributes:
        row: whose continuation this is.
        pieces: K >= 0 drawn pieces.
        laws_KD: the law of each, after the sampling transform.
        entropies: of the laws, in nats.
        features_KF: what the head saw at each piece.
        survival: per piece the head's estimate that it and all before it are accepted; empty without a head.
    """

    row: Row
    pieces: tuple[int, ...]
    laws_KD: Tensor
    entropies: tuple[float, ...]
    features_KF: Tensor | None
    survival: tuple[float, ...]


STOP = -1  # the option "the token ends at this node"


@dataclass(frozen=True)
class Test:
    """One question put to the target: was this option drawn as the target would have drawn it?

    Attributes:
        node: whose options they are: the root's groups, or a node's children and STOP.
        option: the drafted piece, or STOP.
        law: index of the draft's law that decided; None where the pieces ran out: STOP was certain.
        excluded: the node at which the same piece was just taken as STOP; its children are removed from the law.
    """

    __test__ = False  # not a test case of pytest

    node: Node
    option: int
    law: int | None
    excluded: Node | None = None


@dataclass(frozen=True)
class ProposedToken:
    """Consecutive pieces of a draft, translated.

    Attributes:
        token: the target token that they name, or None: a gap, or a piece that begins no active token.
        start, stop: the range of the draft's pieces.
        tests: what the target is asked, outermost level first.
    """

    token: int | None
    start: int
    stop: int
    tests: tuple[Test, ...]

    @property
    def translation(self) -> Translation:
        """How the pieces became the token."""
        if self.token is None:
            return Translation.NONE
        return Translation.DIRECT if self.stop - self.start == 1 else Translation.NGRAM


@dataclass(frozen=True)
class Proposal:
    """A draft in the target's vocabulary. Only the last token may be None; pieces behind it were dropped."""

    draft: Draft
    tokens: tuple[ProposedToken, ...]

    @property
    def verifiable(self) -> tuple[int, ...]:
        """The target ids that the target's forward pass is fed."""
        return tuple(proposed.token for proposed in self.tokens if proposed.token is not None)


@dataclass(frozen=True)
class Decision:
    """The outcome for one proposed token, or for the bonus. The tensor-free half of a verdict."""

    index: int
    proposed: ProposedToken | None
    outcome: Outcome
    emitted: int | None
    origin: Origin | None
    drafter_levels: tuple[float, ...] = ()
    target_levels: tuple[float, ...] = ()
    uniform: float | None = None
    passed_levels: int = 0  # levels accepted before the rejection; all of them on acceptance


@dataclass(frozen=True)
class Teaching:
    """What the target's law says about one piece of the emitted text, kept short.

    Attributes:
        position: index in the row's pieces of the piece that this is about.
        depth: 0 where a token begins, else how many pieces of the token are already given.
        ids: the likeliest next pieces.
        group: target probability of each, all tokens below it summed (conditional at depth > 0).
        direct: of that, the part of the token that is exactly this one piece (0 at depth > 0).
        rest: the remaining probability: other pieces at depth 0, the end of the token deeper down.
    """

    position: int
    depth: int
    ids: tuple[int, ...]
    group: tuple[float, ...]
    direct: tuple[float, ...]
    rest: float


@dataclass(frozen=True)
class Branch:
    """What the target's law says along drafted pieces that were never emitted: behind the first rejection.

    Attributes:
        start: index in the row's pieces where the rejected token would have begun.
        pieces: the draft from there on, as far as the target read it.
        teachings: about places behind the rejected token, positions counted from the row's beginning.
    """

    start: int
    pieces: tuple[int, ...]
    teachings: tuple[Teaching, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a proposal. `emitted` is what was appended to the row, cut at its end.

    `logprobs` has one for each emitted token if the row asks for them; a private row is taught nothing.
    """

    proposal: Proposal
    decisions: tuple[Decision, ...]
    emitted: tuple[int, ...]
    judged: int
    accepted: int
    teachings: tuple[Teaching, ...] = field(default=(), repr=False)
    branch: Branch | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Label:
    """What the head learns from one judged piece: its features and the chance with which it was accepted."""

    features_F: Tensor
    acceptance: float


@dataclass(frozen=True, eq=False)
class Lesson:
    """A finished prompt as the learner sees it.

    Attributes:
        offset: of the prompt in the stream.
        target: whose laws it tells.
        pieces: the whole text in drafter ids.
        teachings: one or more per emitted token, in order.
        labels: one per judged piece.
        ngram_positions: indices of the pieces that belong to accepted n-grams (for the `hybrid` loss).
        judged: proposed tokens that were judged.
        branches: what was taught behind first rejections; empty unless asked for.
    """

    offset: int
    target: str
    pieces: tuple[int, ...]
    teachings: tuple[Teaching, ...]
    labels: tuple[Label, ...]
    ngram_positions: Sequence[int]
    judged: int = 0
    branches: tuple[Branch, ...] = ()
