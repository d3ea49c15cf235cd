"""Events: frozen values without tensors that the log stores and readers use.

A *stream offset* is the number of a prompt in the stream, from 0. A *block* is one draft-verify round of one
prompt, numbered from 0 within its prompt. A *position* counts emitted target tokens of a completion from 0.
Seconds are wall-clock time. The log adds the run's name and the order of writing; stages know neither.
`drafter_version` and `head_version` count updates in service, not published versions.
"""

from dataclasses import dataclass
from enum import StrEnum


class Translation(StrEnum):
    """Translation of drafted pieces into a target token."""

    DIRECT = "direct"  # one piece, one token
    NGRAM = "ngram"  # two or more pieces merged into one token
    NONE = "none"  # the pieces name no active token, or there are none: a bonus, or a candidate of a tree


class Outcome(StrEnum):
    """Result of verification for a token. *Judged* means accepted or rejected.

    A *place* of a tree is the text, or a candidate that was accepted, with the candidates after it. One of them at most
    is accepted. If none is, the first has the outcome `REJECTED`, and with it the token that was drawn instead.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ALTERNATIVE = "alternative"  # another candidate of its place was accepted or carries the rejection
    UNJUDGED = "unjudged"  # after the first rejection of its block, or after a candidate that was not accepted
    UNTRANSLATABLE = "untranslatable"  # drafted pieces after the place where translation ended
    UNDRAFTED = "undrafted"  # nothing was proposed here: the bonus token of a block


class DraftSource(StrEnum):
    """The source of a block's draft."""

    MODEL = "model"
    LOOKUP = "lookup"  # copied from the sequence's own text
    MEMORY = "memory"  # a continuation that the target emitted before, in other sequences


class Action(StrEnum):
    """What a sequence does in a block."""

    NOTHING = "nothing"  # no draft
    COPIES = "copies"  # a tree of the own text and of the memory, if they know a continuation
    MODEL = "model"  # a draft of the drafter


class Origin(StrEnum):
    """The origin of an emitted token."""

    ACCEPTED = "accepted"
    RESIDUAL = "residual"  # sampled after a rejection
    BONUS = "bonus"  # sampled after everything proposed was accepted


@dataclass(frozen=True, slots=True)
class PromptReceived:
    """A prompt entered the stream."""

    offset: int
    prompt_id: str
    dataset: str
    line: int  # from 1, in the source
    text: str
    target: str | None = None  # the target that the source row names; None to let the router choose


@dataclass(frozen=True, slots=True)
class PromptRejected:
    """A source row that cannot become a prompt; the stream continues."""

    dataset: str
    line: int  # from 1, in the source
    reason: str


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """One proposed, emitted or dropped target token of a block.

    A proposed token is tested at each *level* of the trie: at the group of tokens under its first piece, then at each
    further piece or the end of the token. At level l the drafter's distribution gives the drafted option the
    probability `drafter_levels[l]`, the target's gives it `target_levels[l]`. With the random number `uniform` u the
    token is accepted if and only if u < prod_l min(1, target_levels[l] / drafter_levels[l]), computed in double
    precision on the float32 values stored here.

    A candidate of a tree of target tokens has one level, with the drafter's probability 1 and the target's probability
    p. The candidates c_1, ..., c_k after the same place, in the order of `index`, share the number u: c_j is accepted
    if and only if p(c_1) + ... + p(c_j-1) <= u < p(c_1) + ... + p(c_j), added from the left in double precision on the
    float32 values stored here. In a chain this is the rule above.
    """

    offset: int
    prompt_id: str
    dataset: str
    target: str
    block: int
    position: int  # of this token in the completion if everything before it is accepted; in a tree, on its path
    index: int  # within the block; in a tree, of the candidate
    pieces: tuple[int, ...]  # drafter tokens it was proposed as; empty for a bonus, a copy and an alternative
    translation: Translation
    proposed_id: int | None
    proposed_bytes: bytes | None
    outcome: Outcome
    emitted_id: int | None
    emitted_bytes: bytes | None
    origin: Origin | None
    drafter_levels: tuple[float, ...]
    target_levels: tuple[float, ...]
    uniform: float | None
    head_estimate: float | None  # P(all pieces up to and including this token's last are accepted)
    entropy: float | None  # of the drafter's distribution at the first piece, in nats
    drafter_version: int
    head_version: int
    cache_version: int
    drafter: DraftSource = DraftSource.MODEL  # of this candidate of a tree; otherwise of the block
    parent: int | None = None  # index of the candidate that this one follows, -1 for the text; None outside of trees
    context: int | None = None  # of a candidate: tokens before it that its source matched
    count: int | None = None  # of a candidate: how often its source saw it there
    chance: float | None = None  # of a candidate: its estimated probability, given that its parent is emitted
    # By the softmax of a model's logits at temperature 1, before all transforms of sampling. The target's are those of
    # rejected tokens. The drafter's are those of tokens with pieces: the product over the pieces, each counted as e^-10
    # at least, and the entropy at the first piece. Entropies are in nats.
    target_raw_probability: float | None = None  # of the proposed token
    emitted_raw_probability: float | None = None  # of the token that was emitted instead of it
    target_raw_entropy: float | None = None
    drafter_raw_probability: float | None = None
    drafter_raw_entropy: float | None = None


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One draft-verify round of one prompt. Seconds are the prompt's equal share of its batch."""

    offset: int
    dataset: str
    block: int
    rows: int  # prompts in the batch
    drafted: int  # pieces, and other candidates of a tree
    proposed: int  # target tokens
    judged: int
    accepted: int
    emitted: int  # target tokens, the residual or bonus token included
    seconds_decode: float
    seconds_translate: float
    seconds_verify: float
    drafter: DraftSource = DraftSource.MODEL  # of a tree, that of its first candidate
    candidates: int = 0  # of the tree, without those that are drafted pieces
    expected_tokens: float | None = None  # to be emitted, as predicted when the draft was chosen; None if it was not
    expected_seconds: float | None = None  # predicted share of the target's pass, in the unit of the costs
    action: Action | None = None  # None in runs that draft with the model alone
    propensity: float | None = None  # the chance with which the action was taken; 1 without exploration


@dataclass(frozen=True, slots=True)
class PromptCompleted:
    """A completion has ended. `started` and `finished` are seconds since the run began.

    Copied drafts, from the sequence's own text and from the memory, are counted separately in `lookup_*`, so that
    acceptance is that of the drafter model.
    """

    offset: int
    prompt_id: str
    dataset: str
    target: str
    prompt_text: str
    completion_text: str
    finish: str  # "stop" (end of sequence, or a stop string) or "length"; live: also "cancelled", "deadline", "grammar"
    prompt_tokens: int
    emitted: int
    blocks: int  # target forwards
    drafted: int  # pieces; this and the counts up to `accepted` are of drafts by the model
    judged: int
    accepted: int
    started: float
    finished: float
    drafter_version: int
    lookup_blocks: int = 0  # of `blocks`, those with a copied draft
    lookup_drafted: int = 0  # pieces, and candidates of trees
    lookup_judged: int = 0  # accepted or rejected; alternatives of a tree are not counted
    lookup_accepted: int = 0
    own_accepted: int = 0  # of `lookup_accepted`, tokens copied from the sequence's own text
    predicted: int = 0  # of `emitted`, tokens that the memory held for the likeliest, whatever drafted them
    # key of the numbers that decided its tokens, each by place and token (store/noise.py): these are the `uniform`
    # of decisions that emit. None where numbers were drawn in the order of the tests.
    noise: int | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """One learning step of the drafter or of the head, served or dropped.

    The ledger of costs and gains: the step took `seconds`. Since the previous update the drafter in service gained
    `tokens_gained` accepted tokens over the baseline, the drafter as it was loaded: the difference of the two expected
    acceptances on the gate's window, times the tokens judged since the previous update.
    """

    offset: int  # of the last prompt it learned from
    target: str  # whose head or adapter; for weights that several targets share, the last prompt's
    part: str  # "drafter" or "head"
    loss_name: str
    loss: float
    positions: int  # that the step was trained on
    acceptance_before: float | None  # expected, in service, on the gate's held-out window; None for the head
    acceptance_after: float | None  # of the candidate, on the same window
    acceptance_baseline: float | None  # of the baseline, on the same window
    tokens_gained: float | None  # None for the head and while nothing is held out
    served: bool
    reason: str  # why it was served or dropped
    seconds: float  # to compute the step
    waited: float  # seconds of these for which decoding waited
    drafter_version: int  # updates in service after this step
    head_version: int


@dataclass(frozen=True, slots=True)
class Drifted:
    """The detector raised an alarm: the acceptance rate fell."""

    offset: int
    target: str
    dataset: str
    detector: str
    changed_at: int  # offset of the first prompt after the change, estimated afterwards
    rate_before: float
    rate_after: float
    action: str  # "reset", "recall" or "none" as configured, or "cooldown"
    description: str  # what happened and what follows, in one sentence

    @property
    def acted_upon(self) -> bool:
        """True if the drift was responded to with a reset or a recall."""
        return self.action in ("reset", "recall")


@dataclass(frozen=True, slots=True)
class Recalled:
    """After a drift, earlier versions were scored on the prompts since the change; the best one may be restored."""

    offset: int
    target: str
    version: int | None  # the restored version; None if the drafter in service stays
    candidates: int  # number of versions scored
    prompts: int  # number of prompts they were scored on
    acceptance_present: float  # expected, of the drafter in service
    acceptance_best: float  # of the best earlier version
    seconds: float


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """A drafter with its head and n-gram cache was written to the run's folder as one version."""

    offset: int
    version: int  # within the run, from 0; the first of each target is its baseline: the drafter as loaded
    target: str
    parent: int | None  # the previous version of the same target
    reason: str  # "baseline", "interval", "drift", "idle" or "end"
    drafter_version: int
    head_version: int
    cache_version: int
    cache_entries: int
    acceptance: float | None  # accepted / judged of the target's prompts since the previous version
    folder: str  # relative to the run's folder
    digest: str  # sha256 over the folder's files
    # On each prompt of the probe, which is the same for all versions: tokens of the target's greedy text, those of them
    # that the drafter predicts, the sum of their acceptance probabilities at temperature 1, and the target forwards
    # that greedy drafts would take. None if the probe was not measured.
    probe_tokens: tuple[int, ...] | None = None
    probe_greedy: tuple[int, ...] | None = None
    probe_sampled: tuple[float, ...] | None = None
    probe_forwards: tuple[int, ...] | None = None
    # At the costs of earlier runs on the machine: the seconds of each of these texts with such drafts, and those
    # of a token without drafts. None if there were none.
    probe_seconds: tuple[float, ...] | None = None
    probe_plain_seconds: float | None = None
    memory_tokens: int = 0  # that the memory has learned
    drafter_digest: str = ""  # as `digest`, over the drafter's own files: equal for equal drafters
    changes: str = ""  # what differs from the parent, and by how much, in words


Event = (
    PromptReceived
    | PromptRejected
    | TokenDecision
    | BlockDone
    | PromptCompleted
    | Updated
    | Drifted
    | Recalled
    | VersionPublished
)
