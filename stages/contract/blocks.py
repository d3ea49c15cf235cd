"""Values that stages pass to each other within one block. They may hold tensors and are not kept after the block.

Shapes: K pieces of a draft, D ids of the drafter's vocabulary, F features of the head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from stages.ngrams.trie import Node
from stages.sampling.logprobs import RawValues, TokenLogprobs
from stages.sampling.noise import Noise
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource
from stages.sampling.transforms import LogitTransform
from stages.vocabulary.text_stream import StopStrings
from store.events import Action, DraftSource, Origin, Outcome, Translation

if TYPE_CHECKING:
    from concurrent.futures import Future

Numbers = npt.NDArray[Any]

# Of the head's input at a piece, after the drafter's hidden state: how many columns there are, and two of them.
EXTRA_FEATURES = 5
OWN_LOG = -EXTRA_FEATURES  # the piece's log probability, -10 at least
ENTROPY = 1 - EXTRA_FEATURES  # entropy of the drafter's distribution, in nats


@dataclass(eq=False)
class SequenceState:
    """One prompt in flight. The loop owns it; only `Verify` writes to it, and the memory to `predicted`."""

    # offset, prompt_id, dataset, text: the prompt, as received
    offset: int
    prompt_id: str
    dataset: str
    text: str
    tokens: list[int]  # target ids of the prompt and of the emitted tokens
    prompt_length: int  # number of `tokens` that are the prompt
    # the same text in drafter ids: the prompt as the drafter tokenizes it, then each emitted token's pieces
    pieces: list[int]
    rng: RandomSource  # the prompt's random numbers
    remaining_tokens: int  # number of target tokens that may still be emitted
    block: int = 0  # number of the current block
    finish: str = ""  # "" while in flight, then "stop" or "length"; live: also "cancelled" and "deadline"
    private: bool = False  # its text is not stored: neither logged nor learned from nor written to a checkpoint
    # how this row is drawn from the target and the drafter, and the tokens that end it; None: as the stages draw
    sampling: SamplingParams | None = None
    stop_strings: StopStrings | None = None  # finds the strings at which the sequence ends; None if it has none
    # change the target's logits before the sampling transform, in this order
    transforms: tuple[LogitTransform, ...] = ()
    record_example: bool = True  # whether soft targets are recorded, unless the row is private
    scope: int = 0  # whose text it is, in the memory: rows of one scope never see text of another
    # the target's reduced hidden state at the last emitted token (S,); None before there is one, or if the
    # drafter does not read it
    target_state: Tensor | None = None
    reading: bool = False  # whether the target is still reading the prompt: until then nothing is drafted or emitted
    waiting: bool = False  # whether a transform is still computing what the next token needs: it sits out the block
    # log probabilities of the prompt's first token and of those whose place was read, with as many alternatives as
    # `logprobs`; None if they are not wanted
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0  # of the prompt, whose keys and values were copied from the prefix cache of a server
    # number of emitted tokens that the memory of completed texts held for the likeliest, whatever drafted them
    predicted: int = 0
    # decides every token, so that no draft changes the text; None for a greedy row, and where `rng` draws in the order
    # of what is tested
    noise: Noise | None = None
    hint: tuple[int, ...] = ()  # target ids that the text may repeat; the own text is searched as if they stood before

    @property
    def logprobs(self) -> int | None:
        """Alternatives wanted with each emitted token; as `SamplingParams.logprobs`."""
        return self.sampling.logprobs if self.sampling else None

    def find_ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end this row, given the target's own."""
        if self.sampling is None:
            return eos_ids
        stop_ids = frozenset(self.sampling.stop_token_ids)
        return stop_ids if self.sampling.ignore_eos else stop_ids | eos_ids

    @property
    def belongs_to_request(self) -> bool:
        """Whether it has wishes of a request, which ends with the process that answers it."""
        of_tokens = self.sampling and (self.sampling.ignore_eos or self.sampling.stop_token_ids)
        return bool(self.stop_strings or self.transforms or of_tokens or self.hint)

    @property
    def sits_out(self) -> bool:
        """Whether nothing is drafted or emitted in this block."""
        return self.reading or self.waiting

    @property
    def may_draft(self) -> bool:
        """Whether it may have drafts in this block: not where each place of a draft takes a transform long."""
        return not (self.sits_out or any(transform.is_slow for transform in self.transforms))

    def prepare_transforms(self) -> "Future[Any] | None":
        """Begin to compute what the transforms need for the next token. Called before each block, which the row sits
        out if it is not there. Returns what is to be awaited then.
        """
        futures = () if self.reading else (one.prepare(self.tokens[self.prompt_length :]) for one in self.transforms)
        awaited = next((future for future in futures if future and not future.done()), None)
        self.waiting = awaited is not None
        return awaited

    @property
    def collects_soft_targets(self) -> bool:
        """Whether the soft targets of this row are recorded."""
        return self.record_example and not self.private

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class Candidate:
    """A target token that is proposed after a row's text or after another candidate: a node of a `TokenTree`."""

    token: int  # the target token
    parent: int  # index of the candidate that it follows; -1 for the row's text
    depth: int  # number of candidates before it on its path
    chance: float  # estimated probability that it is emitted, given that its parent is
    source: DraftSource  # what proposed it
    context: int  # number of tokens before it that were known to the source
    count: int  # how often the source saw it there; 1 for the row's own text


@dataclass(frozen=True)
class TokenTree:
    """Candidates in target tokens, in depth-first order: parents first, alternatives by descending chance.

    Candidates of one parent are distinct tokens. A chain is a tree in which every candidate has one child.

    >>> def candidate(token, parent, depth):
    ...     return Candidate(token, parent, depth, 0.5, DraftSource.MEMORY, 3, 1)
    >>> tree = TokenTree((candidate(5, -1, 0), candidate(6, 0, 1), candidate(7, 0, 1), candidate(8, -1, 0)))
    >>> tree.children(-1), tree.children(0), tree.children(1)
    ([0, 3], [1, 2], [])
    >>> tree.is_chain
    False
    """

    candidates: tuple[Candidate, ...]  # the nodes

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(candidate.token for candidate in self.candidates)

    @property
    def parents(self) -> tuple[int, ...]:
        return tuple(candidate.parent for candidate in self.candidates)

    @property
    def is_chain(self) -> bool:
        """Whether every candidate follows the one before it."""
        return self.parents == tuple(range(-1, len(self.candidates) - 1))

    def children(self, parent: int) -> list[int]:
        """Return the indices of the candidates after a candidate, or after the text for -1."""
        return [index for index, candidate in enumerate(self.candidates) if candidate.parent == parent]


AlternativePieces = tuple[tuple[int, float], ...]  # pieces that could replace one, with their probabilities


@dataclass(frozen=True)
class Draft:
    """Pieces that the drafter proposes after a row, with the distributions that they were drawn from."""

    row: SequenceState  # the row that the draft continues
    pieces: tuple[int, ...]  # K >= 0 drawn pieces
    draft_probs_KD: Tensor  # the distribution of each, after the sampling transform
    entropies: tuple[float, ...]  # entropy of each distribution, in nats
    features_KF: Tensor | None  # the head's input at each piece: the hidden state and `EXTRA_FEATURES` more columns
    # per piece the head's estimate that it and all before it are accepted; empty without a head
    survival: tuple[float, ...]
    source: DraftSource = DraftSource.MODEL  # origin of the draft; with a tree, that of its first candidate
    # candidates in target tokens, or None. Without pieces they are copies; with pieces, the first candidates are
    # the pieces' tokens, and the others their alternatives.
    tree: TokenTree | None = None
    # expected_tokens, expected_seconds: what the block was predicted to emit for the row, and the row's share of
    # the predicted time of the target's pass, in the unit of the costs; None if nothing was predicted
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    # action, propensity: what the row does in this block, and the chance with which that was chosen; None where
    # nothing is chosen
    action: Action | None = None
    propensity: float | None = None
    # per piece of a greedy draft the next likeliest pieces with their probabilities, in descending order; empty
    # where no alternatives are wanted
    alternatives: tuple[AlternativePieces, ...] = ()
    droppable: bool = False  # whether its last pieces may stay unverified: they are no random draws

    def cut(self, length: int) -> "Draft":
        """Return the draft without the pieces after the first `length`."""
        return replace(
            self,
            pieces=self.pieces[:length],
            draft_probs_KD=self.draft_probs_KD[:length],
            entropies=self.entropies[:length],
            features_KF=None if self.features_KF is None else self.features_KF[:length],
            survival=self.survival[:length],
            alternatives=self.alternatives[:length],
        )

    @classmethod
    def from_tree(cls, row: SequenceState, tree: TokenTree | None, expected_tokens: float) -> "Draft":
        """Return a draft without pieces, for a target that draws from its own distribution; with None, an empty one."""
        source = tree.candidates[0].source if tree else DraftSource.MEMORY
        return cls(row, (), torch.zeros(0, 0), (), None, (), source, tree, expected_tokens)


STOP = -1  # the option "the token ends at this node"


@dataclass(frozen=True)
class Test:
    """One level of the test of a proposed token: the drafted option at a node of the trie."""

    __test__ = False  # not a test case of pytest

    node: Node  # the node with the options: the root's groups, or a node's children and STOP
    option: int  # the drafted piece, or STOP
    position: int | None  # index of the draft's distribution that decided; None if the pieces ran out: STOP was certain
    # the node at which the same piece was just taken as STOP; its children are removed from the distribution
    excluded: Node | None = None


@dataclass(frozen=True)
class ProposedToken:
    """Consecutive pieces of a draft, translated."""

    token: int | None  # the target token of the pieces, or None: a gap, or a piece that begins no active token
    # start, stop: the range of the draft's pieces
    start: int
    stop: int
    tests: tuple[Test, ...]  # one test per level, outermost first

    @property
    def translation(self) -> Translation:
        """The kind of translation: a direct map, an n-gram, or none."""
        if self.token is None:
            return Translation.NONE
        return Translation.DIRECT if self.stop - self.start == 1 else Translation.NGRAM


@dataclass(frozen=True)
class Proposal:
    """A draft in the target's vocabulary. Only the last token may be None; pieces after it were dropped."""

    draft: Draft
    tokens: tuple[ProposedToken, ...]

    @property
    def verifiable(self) -> tuple[int, ...]:
        """The target ids that are fed to the target's forward pass."""
        if self.draft.tree:
            return self.draft.tree.tokens
        return tuple(proposed.token for proposed in self.tokens if proposed.token is not None)


@dataclass(frozen=True)
class Decision:
    """The outcome for one proposed token, or for the bonus. The tensor-free half of a verdict."""

    index: int
    proposed: ProposedToken | None  # the drafted token, also of a candidate that has alternatives
    outcome: Outcome
    emitted: int | None
    origin: Origin | None
    # drafter_levels, target_levels: probabilities of the option per level of its test. A candidate has one level.
    drafter_levels: tuple[float, ...] = ()
    target_levels: tuple[float, ...] = ()
    uniform: float | None = None
    passed_levels: int = 0  # levels accepted before the rejection; all of them on acceptance
    candidate: Candidate | None = None  # of a tree; `index` is its index there
    # of a candidate with pieces: what its levels would be without alternatives
    piece_levels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def token(self) -> int | None:
        """The proposed target token; None if there is none."""
        return self.candidate.token if self.candidate else self.proposed.token if self.proposed else None


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The target's likeliest tokens at N tokens of a text, K at each, spelt in the drafter's pieces.

    This is what examples store. The soft targets are computed from it when the example becomes part of a batch
    (`soft_targets.py`). A token has as many soft targets as pieces, and at least one; only one if it is
    not itself among the K.
    """

    positions: Numbers  # index of each token's first piece in the row's pieces (N,)
    levels: Numbers  # number of soft targets of each token (N,)
    own: Numbers  # the index of the token itself among the K; read where it has several soft targets (N,)
    probs: Numbers  # the target's probability of each of the K, in float32 (N, K)
    lengths: Numbers  # number of stored pieces of each of the K; 0 if it cannot be spelt (N, K)
    # the stored pieces, concatenated. Of each of the K no more are stored than the token itself has, but at least
    # two if there are two.
    pieces: Numbers


@dataclass(frozen=True, eq=False)
class TopLogits:
    """The target's largest logits at N tokens of a text, K at each: what a block stores.

    `spell` makes them `TopTokens`, for a whole text at once: per block it would take longer than the selection.
    """

    positions: Numbers  # index of each token's first piece in the row's pieces (N,)
    tokens: Numbers  # the target's token there (N,)
    ids: Numbers  # ids of the K largest logits, in descending order (N, K)
    logits: Numbers  # these logits, in float32 (N, K)
    sums: Numbers  # sum of the exponentials of all logits minus the largest, at the teacher's temperature (N, 1)
    spell: Callable[["TopLogits"], TopTokens] = field(repr=False)  # spells this value in the drafter's pieces


@dataclass(frozen=True)
class Verdict:
    """The decisions on a proposal, and the tokens that were appended to the row, up to the end of the sequence.

    `logprobs` has one entry per emitted token if the row requests them; a private row has no soft targets.
    `states` has the target's reduced hidden state at each emitted token (tokens, S) if the drafter reads them.
    `raw` has how likely the target itself found a rejected token, by the index of the decision; it is empty where
    decisions are not recorded.
    """

    proposal: Proposal
    decisions: tuple[Decision, ...]
    emitted: tuple[int, ...]
    judged: int
    accepted: int
    soft_targets: TopLogits | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()
    states: Tensor | None = field(default=None, repr=False)
    raw: Mapping[int, RawValues] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class AcceptanceLabel:
    """A label of one judged piece: its features and its probability of acceptance."""

    features_F: Tensor
    acceptance: float


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """A completed prompt as training data."""

    offset: int  # position of the prompt in the stream
    target: str  # name of the target that made the soft targets
    pieces: tuple[int, ...]  # the whole text in drafter ids
    soft_targets: TopTokens | None  # those of every emitted token; None if only the head learns from the prompt
    labels: tuple[AcceptanceLabel, ...]  # one per judged piece
    ngram_positions: Sequence[int]  # indices of the pieces that belong to accepted n-grams (for the `hybrid` loss)
    judged: int = 0  # number of proposed tokens that were judged
    states: Numbers | None = None  # the target's reduced hidden state at each emitted token, int8 (tokens, S), or None
    scope: int = 0  # whose text it is, as that of its sequence
    copied: int = 0  # number of emitted tokens of blocks whose draft was copied

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that have soft targets."""
        return len(self.soft_targets.positions) if self.soft_targets else 0
