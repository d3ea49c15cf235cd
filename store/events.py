"""What happened, in frozen values without tensors. The log keeps them; readers need nothing else.

A *stream offset* is the number of a prompt in the stream, from 0. A *block* is one draft-verify round of one
prompt, numbered from 0 within its prompt. A *position* counts emitted target tokens of a completion from 0.
Seconds are wall time. The log adds the run's name and the order of writing; stages know neither.
"""

from dataclasses import dataclass
from enum import StrEnum


class Translation(StrEnum):
    """How drafted pieces became a target token."""

    DIRECT = "direct"  # one piece, one token
    NGRAM = "ngram"  # two or more pieces merged into one token
    NONE = "none"  # the pieces name no active token


class Outcome(StrEnum):
    """What verification did with a proposed token. *Judged* means accepted or rejected."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNJUDGED = "unjudged"  # behind the first rejection of its block
    UNTRANSLATABLE = "untranslatable"  # drafted pieces behind a place where translation had to end
    UNDRAFTED = "undrafted"  # nothing was proposed here: the bonus token of a block


class Drafter(StrEnum):
    """Who drafted a block."""

    MODEL = "model"
    LOOKUP = "lookup"  # copied from the row's own text: every piece with probability 1


class Origin(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    RESIDUAL = "residual"  # drawn after a rejection
    BONUS = "bonus"  # drawn after everything proposed was accepted


@dataclass(frozen=True, slots=True)
class PromptReceived:
    """A prompt entered the stream."""

    offset: int
    prompt_id: str
    dataset: str
    line: int  # from 1, in the source
    text: str
    target: str | None = None  # the target that the row asks for; None where it is dealt


@dataclass(frozen=True, slots=True)
class PromptRejected:
    """A source row that cannot become a prompt; the stream goes on."""

    dataset: str
    line: int  # from 1, in the source
    reason: str


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """One proposed, emitted or dropped target token of a block.

    A proposed token is put to one test per *level* of the trie: the group of tokens under its first piece,
    then each further piece or the end of the token. At level l the drafter's law gave the drafted option
    `drafter_levels[l]`, the target's gives it `target_levels[l]`. With `uniform` u the token is accepted iff
    u < prod_l min(1, target_levels[l] / drafter_levels[l]), all in double precision on the float32 values kept here.
    """

    offset: int
    prompt_id: str
    dataset: str
    target: str
    block: int
    position: int  # of this token in the completion, were everything before it accepted
    index: int  # within the block
    pieces: tuple[int, ...]  # drafter tokens it was proposed as; empty for a bonus
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
    entropy: float | None  # of the drafter's law at the first piece, in nats
    drafter_version: int
    head_version: int
    cache_version: int
    drafter: Drafter = Drafter.MODEL  # of the block


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One draft-verify round of one prompt. Seconds are this row's equal share of the batch's."""

    offset: int
    dataset: str
    block: int
    rows: int  # prompts in the batch
    drafted: int  # pieces
    proposed: int  # target tokens
    judged: int
    accepted: int
    emitted: int  # target tokens, the residual or bonus token included
    seconds_decode: float
    seconds_translate: float
    seconds_verify: float
    drafter: Drafter = Drafter.MODEL


@dataclass(frozen=True, slots=True)
class PromptCompleted:
    """A completion is whole. `started` and `finished` are seconds since the run began.

    What lookups drafted is counted apart, so that acceptance stays that of the drafter model.
    """

    offset: int
    prompt_id: str
    dataset: str
    target: str
    prompt_text: str
    completion_text: str
    finish: str  # "stop" (end of sequence, or a stop string) or "length"; live: also "cancelled" and "deadline"
    prompt_tokens: int
    emitted: int
    blocks: int  # target forwards
    drafted: int  # pieces, by the model, as all counts to `first_accepted`
    judged: int
    accepted: int
    first_judged: int  # blocks whose first proposed token was judged
    first_accepted: int
    started: float
    finished: float
    drafter_version: int
    lookup_blocks: int = 0  # of `blocks`, those drafted by lookup
    lookup_drafted: int = 0
    lookup_judged: int = 0
    lookup_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """One learning step of the drafter or of the head, served or dropped.

    The ledger: `seconds` were spent; since the update before, the drafter then in service brought `tokens_gained`
    more accepted tokens than the drafter as loaded (the *floor*) would have: the difference of the two acceptances
    expected on the gate's window, times the tokens judged since.
    """

    offset: int  # of the last prompt it learned from
    target: str  # whose head or adapter; for weights that several targets share, the last prompt's
    part: str  # "drafter" or "head"
    loss_name: str
    loss: float
    positions: int
    acceptance_before: float | None  # expected, on the gate's held-out window; None for the head
    acceptance_after: float | None
    acceptance_floor: float | None  # of the drafter as loaded, on the same window
    tokens_gained: float | None  # None for the head and while nothing is held out
    served: bool
    reason: str  # why it was served or dropped
    seconds: float  # of computing
    waited: float  # seconds of them for which decoding stood still
    drafter_version: int  # after this step
    head_version: int


@dataclass(frozen=True, slots=True)
class Drifted:
    """The detector saw the acceptance rate change."""

    offset: int
    target: str
    dataset: str
    detector: str
    direction: str  # "fall" or "rise"
    changed_at: int  # offset of the prompt from which on the rate is another, found afterwards
    rate_before: float
    rate_after: float
    action: str  # "reset", "recall" or "none" as configured, "ignored" (a rise) or "cooldown"

    @property
    def acted_upon(self) -> bool:
        """Whether something was begun anew."""
        return self.action in ("reset", "recall")


@dataclass(frozen=True, slots=True)
class Recalled:
    """After a drift earlier versions were scored on the prompts since the change; the best may have been taken back."""

    offset: int
    target: str
    version: int | None  # the one now in service again; None when the present drafter stays
    candidates: int  # versions scored
    prompts: int  # that they were scored on
    acceptance_present: float  # expected, of the drafter in service
    acceptance_best: float  # of the best earlier version
    seconds: float


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """A drafter with its head and n-gram cache was written to the run's folder as one version."""

    offset: int
    version: int  # within the run, from 0; the first of each target is its floor: the drafter as loaded
    target: str
    parent: int | None  # the version before of the same target
    reason: str  # "floor", "interval", "drift" or "end"
    drafter_version: int
    head_version: int
    cache_version: int
    cache_entries: int
    acceptance: float | None  # accepted / judged of the target's prompts since the version before
    folder: str  # relative to the run's folder
    digest: str  # sha256 over the folder's files


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
