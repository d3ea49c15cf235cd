"""Decode: the drafter proposes pieces after every row and records the distribution that each was drawn from.

Shapes: B rows, K pieces of a draft, N lines of all rows, D drafter ids, W hidden width, F head features.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import ENTROPY, AlternativePieces, Draft, SequenceState
from stages.contract.snapshot import State
from stages.contract.stage import Stage
from stages.drafting.costs import ReadPrompts
from stages.drafting.coupling import CoupledWalk, Coupling
from stages.drafting.head import AcceptanceHead
from stages.drafting.selection import Selection
from stages.drafting.sources import is_trial
from stages.drafting.stopping import StopRule
from stages.drafting.target_states import AGE_DECAY
from stages.engine.models.devices import synchronize
from stages.engine.models.language_model import LanguageModel
from stages.prompts.prompt_reader import PromptReader
from stages.sampling.distributions import entropy, find_peaks, to_probs
from stages.sampling.drawing import sample_rows
from stages.sampling.params import SamplingParams

LOG = logging.getLogger("omnidraft.drafting")

# How often the target's token is a piece that a race would draw next, by the piece's share of the rates of arrival.
# Measured with the shipped drafter at temperature 1: .11, .11, .21 and .21 for shares of .15, .2, .3 and .4.
SECOND_CHANCE = 0.6


@dataclass
class GrowingDrafts:
    """The drafts of a batch during drafting: lists per row, and one tensor per drafter pass."""

    rows: Sequence[SequenceState]  # the B rows of the batch
    # per row whether its pieces are no random draws but the likeliest ones or those that its noise decides, so that
    # their distributions are one-hot
    certain: Sequence[bool]
    # pieces, entropies, survival: per row, per piece
    pieces: list[list[int]]
    entropies: list[list[float]]
    survival: list[list[float]]
    active: list[Sequence[int]] = field(default_factory=list)  # per pass the numbers of the rows that drafted in it
    features_BF: list[Tensor] = field(default_factory=list)  # per pass, one line for each of these rows
    sampled: list[Sequence[int]] = field(default_factory=list)  # per pass those of these rows that draw
    draft_probs_BD: list[Tensor] = field(default_factory=list)  # per pass with such rows, one line for each of them
    # of rows whose drafts may become trees, per piece the next likeliest ones
    alternatives: dict[int, list[AlternativePieces]] = field(default_factory=dict)
    walks: dict[int, CoupledWalk] = field(default_factory=dict)  # of rows whose noise decides

    @classmethod
    def from_rows(cls, rows: Sequence[SequenceState], certain: Sequence[bool]) -> "GrowingDrafts":
        """Begin empty drafts. `certain`: as the attribute."""
        return cls(rows, certain, [[] for _ in rows], [[] for _ in rows], [[] for _ in rows])

    @property
    def lengths(self) -> list[int]:
        """The number of pieces of each row's draft."""
        return list(map(len, self.pieces))

    def add(self, active: Sequence[int], features_BF: Tensor, values: Sequence[tuple[float, float, float]]) -> None:
        """Append one piece to the draft of each active row."""
        for number, (piece, spread, estimate) in zip(active, values, strict=True):
            self.pieces[number].append(int(piece))
            self.entropies[number].append(spread)
            survival = self.survival[number]
            survival.append(estimate * (survival[-1] if survival else 1.0))
        self.active.append(active)
        self.features_BF.append(features_BF)

    def add_probs(self, sampled: Sequence[int], draft_probs_BD: Tensor) -> None:
        """Append the distributions that the last pieces of the rows that draw were drawn from."""
        if sampled:
            self.sampled.append(sampled)
            self.draft_probs_BD.append(draft_probs_BD)

    def freeze(
        self, drafter_size: int, dtype: torch.dtype, device: torch.device, droppable: Collection[int] = ()
    ) -> list[Draft]:
        """Return one draft per row, in the order of the rows. `droppable`: numbers of those that may be cut."""
        if not self.active:
            nothing_KD = torch.zeros(0, drafter_size, dtype=dtype, device=device)
            return [Draft(row, (), nothing_KD, (), None, ()) for row in self.rows]
        features_KF = _join_by_row(self.active, self.features_BF, len(self.rows))
        one_hot_KD = self._one_hot_probs(drafter_size, dtype, device)
        drawn_KD = _join_by_row(self.sampled, self.draft_probs_BD, len(self.rows)) if self.sampled else one_hot_KD
        both = zip(self.certain, one_hot_KD, drawn_KD, strict=True)
        draft_probs_KD = [one_hot if certain else drawn for certain, one_hot, drawn in both]
        columns = zip(self.rows, self.pieces, draft_probs_KD, self.entropies, features_KF, self.survival, strict=True)
        drafts = [
            Draft(row, tuple(pieces), distributions, tuple(entropies), features, tuple(survival))
            for row, pieces, distributions, entropies, features, survival in columns
        ]
        return [
            replace(draft, alternatives=tuple(self.alternatives.get(number, ())), droppable=number in droppable)
            for number, draft in enumerate(drafts)
        ]

    def _one_hot_probs(self, drafter_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return per row the distributions of its pieces, which have all mass; those of other rows are empty."""
        own = [pieces if certain else [] for pieces, certain in zip(self.pieces, self.certain, strict=True)]
        pieces_N1 = torch.tensor(list(chain(*own)), dtype=torch.long, device=device)[:, None]
        probs_ND = torch.zeros(len(pieces_N1), drafter_size, dtype=dtype, device=device).scatter_(1, pieces_N1, 1.0)
        return list(probs_ND.split(list(map(len, own))))


def _join_by_row(owners: Sequence[Sequence[int]], passes_BX: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return per row its lines of all passes, in order. `owners` has the number of the row of each line."""
    joined = list(chain(*owners))
    lengths = [joined.count(row) for row in range(rows)]
    lines_NX = torch.cat(list(passes_BX))
    if max(lengths) < len(joined):  # else they are all of one row
        order = sorted(range(len(joined)), key=joined.__getitem__)
        lines_NX = lines_NX[torch.tensor(order, device=lines_NX.device)]
    return list(lines_NX.split(lengths))


class Decode(Stage[SequenceState, Draft]):
    """Rows to drafts.

    A drafter with D = 6 pieces, of which piece 5 may not be drafted, and hidden width W = 8, proposes K = 3 pieces
    after a text of three. Each piece has the distribution that it was drawn from, and the F = W + 5 features that the
    acceptance head reads.

    >>> from stages.drafting.stopping import FixedLength
    >>> from stages.engine.models.huggingface import new_llama
    >>> from stages.sampling.random_source import SeededRandomSource
    >>> shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> drafter = LanguageModel(new_llama(0, vocab_size=6, **shape), "drafter")
    >>> head = AcceptanceHead(width=8, seed=0)
    >>> decode = Decode(drafter, head, FixedLength(), SamplingParams(1.0), allowed=range(5), max_draft=3, eos_id=None)
    >>> rng = SeededRandomSource(seed=0, offset=0)
    >>> row = SequenceState(0, "id", "dataset", "text", [0, 1], 2, [4, 2, 0], rng, remaining_tokens=9)
    >>> decode.admit(row)
    >>> (draft,) = decode([row])
    >>> len(draft.pieces), tuple(draft.draft_probs_KD.shape), tuple(draft.features_KF.shape)
    (3, (3, 6), (3, 13))
    >>> draft.draft_probs_KD.sum(-1).allclose(torch.ones(3)), draft.draft_probs_KD[:, 5].tolist()
    (True, [0.0, 0.0, 0.0])
    >>> len(draft.survival)  # the estimated probability that a piece and all before it are accepted
    3
    >>> row.pieces  # a draft changes nothing: only verification extends a row
    [4, 2, 0]

    Args:
        sampling: the transform of the drafter's logits; its result is the recorded distribution. The transform of a
            row takes precedence: acceptance is highest if the drafter samples as the target does.
        allowed: pieces that may be drafted: those that spell some target token.
        eos_id: the drafter's end of sequence, after which nothing is drafted, or None.
        state_logits: computes the term of the logits for the first piece after each of the target's states, (B, S) to
            (B, D), if the drafter reads them; the term is part of the recorded distribution.
    """

    # reads a row's text before its first draft; None, the default, reads it in one pass
    reader: PromptReader | None = None
    prompts = ReadPrompts()  # those that the model read in the last block
    # chooses later what of greedy drafts is verified; None, the default: all of it
    selection: Selection | None = None
    # whether the head has learned or will learn; else each of its estimates is replaced by the acceptance so far
    trusts_head = True
    coupling: Coupling  # draws the pieces of rows whose noise decides; not needed where no row has any
    acceptance: Callable[[], float] | None = None

    def __init__(
        self,
        model: LanguageModel,
        head: AcceptanceHead,
        stop_rule: StopRule,
        sampling: SamplingParams,
        allowed: Collection[int],
        max_draft: int,
        eos_id: int | None,
        probs_dtype: torch.dtype = torch.float32,
        state_logits: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        self.model, self.head, self.probs_dtype = model, head, probs_dtype
        self.max_draft = min(max_draft, model.max_length // 2)
        self._stop_rule, self._sampling, self._eos_id = stop_rule, sampling, eos_id
        self._state_logits = state_logits
        self._forbidden_D = model.mask_without(allowed)
        self._forbids = bool(self._forbidden_D.any())
        model.restrict(allowed)
        self._read: dict[SequenceState, list[int]] = {}
        self._agreed: dict[SequenceState, int] = {}  # how many of the read pieces are final
        self._begins: dict[SequenceState, int] = {}  # where in the row's pieces they begin
        self._empty_probs_KD = torch.zeros(0, model.vocabulary_size, dtype=probs_dtype, device=model.device)
        self._drawn: dict[SequenceState, int] = {}  # pieces of this block's drafts, dropped ones included
        self.unusable = 0  # number of drafts that ended because the drafter's distribution was NaN or infinite

    @override
    def admit(self, row: SequenceState) -> None:
        """Add a row. Its prompt is read before its first draft, which may never come."""
        self.model.admit(row, row.pieces, read=False)
        self._read[row], self._agreed[row], self._begins[row] = [], 0, 0

    @override
    def release(self, row: SequenceState) -> None:
        self.model.release(row)
        del self._read[row], self._agreed[row], self._begins[row]
        self._drawn.pop(row, None)

    @property
    def admitted_rows(self) -> Collection[SequenceState]:
        return self._read.keys()

    @override
    def state_dict(self, rows: Collection[SequenceState]) -> State:
        read = [
            (row, pieces, self._agreed[row], self._begins[row]) for row, pieces in self._read.items() if row in rows
        ]
        return {"model": self.model.state_dict(rows), "rows": read}

    @override
    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._read = {row: pieces for row, pieces, _, _ in state["rows"]}
        self._agreed = {row: agreed for row, _, agreed, _ in state["rows"]}
        self._begins = {row: begin for row, _, _, begin in state["rows"]}

    def count_drawn(self, draft: Draft) -> int:
        """Return the number of pieces that were drawn for a draft of the last block, dropped ones included."""
        return self._drawn.get(draft.row, len(draft.pieces))

    @property
    def speculates(self) -> bool:
        return self.max_draft > 0

    def has_read(self, row: SequenceState) -> bool:
        return bool(self._read[row])

    def empty_probs(self) -> Tensor:
        """Return the distributions of a draft without pieces (0, D)."""
        return self._empty_probs_KD

    @override
    @torch.inference_mode()
    def __call__(
        self,
        batch: Sequence[SequenceState],
        skipped: Collection[SequenceState] = (),
        *,
        whole: bool = False,
    ) -> list[Draft]:
        """Draft after each row until the stop rule, its remaining tokens or `max_draft` ends the draft.

        Args:
            skipped: rows that the model does not read in this block: their drafts are empty.
            whole: whether all pieces must be verified, because their labels are needed.
        """
        self.prompts = ReadPrompts()
        wanted = [(number, row) for number, row in enumerate(batch) if row not in skipped]
        if not wanted:
            self._drawn = {}
            return [Draft(row, (), self._empty_probs_KD, (), None, ()) for row in batch]
        certain = [row.noise is not None or (row.sampling or self._sampling).is_greedy for row in batch]
        growing = GrowingDrafts.from_rows(batch, certain)
        limits = [min(self.max_draft, row.remaining_tokens) for row in batch]
        going = [number for number, row in wanted if row.may_draft and limits[number]]
        fed = {number: self._unread(batch[number]) for number in going}
        if self.selection and going and self.selection.wants_alternatives(len(batch)):
            growing.alternatives = {number: [] for number in going if growing.certain[number]}
        growing.walks = {
            number: CoupledWalk(self.coupling, row.noise, row.emitted)
            for number, row in enumerate(batch)
            if row.noise and number in fed
        }
        state_terms = self._compute_state_terms(batch, going)
        while going:
            for number, pieces in fed.items():
                self._read[batch[number]].extend(pieces)
            given = [fed.get(number, ()) for number in range(len(batch))]
            logits_BD, hidden_BW = self.model.forward(batch, given, [int(bool(one)) for one in given], hidden=True)
            for line, number in enumerate(going):
                if number in state_terms:
                    logits_BD[line] += AGE_DECAY ** len(growing.pieces[number]) * state_terms[number]
            drafted = self._extend(growing, going, logits_BD, hidden_BW)
            drafts = [(number, growing.pieces[number]) for number in drafted]
            open_rows = [
                number for number, pieces in drafts if len(pieces) < limits[number] and pieces[-1] != self._eos_id
            ]
            going = sorted(self._stop_rule.select_rows(growing.survival, open_rows))
            fed = {number: growing.pieces[number][-1:] for number in going}
        self._drawn = dict(zip(batch, growing.lengths, strict=True))
        drops = self.selection is not None and self.selection.drops and not whole
        droppable = {
            number for number, row in enumerate(batch) if drops and growing.certain[number] and not is_trial(row)
        }
        return growing.freeze(len(self._forbidden_D), self.probs_dtype, self.model.device, droppable)

    def _compute_state_terms(self, batch: Sequence[SequenceState], going: Sequence[int]) -> dict[int, Tensor]:
        """Return what the target's state adds to the logits of the first piece, for rows that have a state (D,)."""
        states = {number: state for number in going if (state := batch[number].target_state) is not None}
        if self._state_logits is None or not states:
            return {}
        logits_ND = self._state_logits(torch.stack(list(states.values())))
        return {} if logits_ND is None else dict(zip(states, logits_ND, strict=True))

    def _unread(self, row: SequenceState) -> list[int]:
        """Roll the model back to the pieces that are part of the row, and return the unread ones (at least one)."""
        room = self.model.max_length - self.max_draft
        if len(row.pieces) - self._begins[row] > room:  # of a text that its context does not hold it reads the end
            self._begins[row], self._read[row], self._agreed[row] = len(row.pieces) - room // 2, [], 0
        if not self._read[row]:
            self._read_prompt(row)
        read, known, begin = self._read[row], self._agreed[row], self._begins[row]
        while known < len(read) and begin + known < len(row.pieces) - 1 and read[known] == row.pieces[begin + known]:
            known += 1
        self.model.roll_back(row, known)
        del read[known:]
        self._agreed[row] = known
        return row.pieces[begin + known :]

    def _read_prompt(self, row: SequenceState) -> None:
        """Read all but the last of a row's pieces; without a reader, and of the end of a long text, they are left to
        the pass of the draft.
        """
        before, began, reads = self.prompts, perf_counter(), self.reader is not None and not self._begins[row]
        if self.reader and reads:
            self.reader.read(row)
            self._read[row] = row.pieces[: self.model.length(row)]
            self._agreed[row] = len(self._read[row])
            synchronize(self.model.device)
        pieces, seconds = before.pieces + len(row.pieces), before.seconds + perf_counter() - began
        self.prompts = ReadPrompts(pieces, seconds, measured=before.measured and reads)

    def _extend(
        self, growing: GrowingDrafts, active: Sequence[int], logits_BD: Tensor, hidden_BW: Tensor
    ) -> Sequence[int]:
        """Draw one piece for every active row. Returns the rows with a finite distribution, whose drafts have grown."""
        if self._forbids:
            logits_BD = logits_BD.masked_fill_(self._forbidden_D, -torch.inf)
        pieces_B, entropies_B, draft_probs_SD = self._draw(growing, active, logits_BD)
        features_BF, estimates_B = self.head.estimate(hidden_BW, logits_BD, pieces_B, len(growing.active))
        if self.acceptance and not self.trusts_head:
            estimates_B = torch.full_like(estimates_B, self.acceptance())
        raw_entropies_B = features_BF[:, ENTROPY].double()  # shows what a greedy row's own entropy would hide
        columns = torch.stack([pieces_B.double(), entropies_B, estimates_B.double(), raw_entropies_B]).tolist()
        finite = [isfinite(own) and isfinite(raw) for _, own, _, raw in zip(*columns, strict=True)]
        values = list(zip(*columns[:3], strict=True))
        sampled = [number for number in active if not growing.certain[number]]
        if not all(finite):
            if not self.unusable:
                LOG.warning(
                    "the drafter's logits must be finite, got NaN or infinity: nothing is drafted where they are not, "
                    "and the text stays the target's; check the drafter's weights, or load it in a wider type"
                )
            self.unusable += finite.count(False)
            lines = [line for line, is_finite in enumerate(finite) if is_finite]
            kept = {active[line] for line in lines}
            draft_probs_SD = draft_probs_SD[[line for line, number in enumerate(sampled) if number in kept]]
            sampled = [number for number in sampled if number in kept]
            active, values = [active[line] for line in lines], [values[line] for line in lines]
            features_BF = features_BF[lines]
            logits_BD = logits_BD[lines]
        if active:
            growing.add(active, features_BF, values)
            growing.add_probs(sampled, draft_probs_SD)
            if growing.alternatives:
                self._keep_alternatives(growing, active, logits_BD)
        return active

    def _keep_alternatives(self, growing: GrowingDrafts, active: Sequence[int], logits_BD: Tensor) -> None:
        """Keep the next likeliest pieces after those that rows have just drafted; of coupled ones, those that `_walk`
        found next.
        """
        assert self.selection is not None
        if all(number in growing.walks for number in active):
            return
        probs_BO, pieces_BO = logits_BD.float().softmax(-1).topk(min(self.selection.most + 1, logits_BD.shape[1]))
        for number, probs, pieces in zip(active, probs_BO.tolist(), pieces_BO.tolist(), strict=True):
            if number in growing.alternatives and number not in growing.walks:
                drafted = growing.pieces[number][-1]
                own = [pair for pair in zip(pieces, probs, strict=True) if pair[0] != drafted and pair[1] > 0]
                growing.alternatives[number].append(tuple(own[: self.selection.most]))

    def _draw(self, growing: GrowingDrafts, active: Sequence[int], logits_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pieces (B,), the entropies of their distributions (B,), and the distributions of the S rows that
        draw (S, D).

        Other rows take the first of the largest logits, or what their noise decides. That is no random decision: it
        takes no random number.
        """
        sampled = [line for line, number in enumerate(active) if not growing.certain[number]]
        if len(sampled) < len(active):
            pieces_B, entropies_B = find_peaks(logits_BD), logits_BD.new_zeros(len(active), dtype=torch.float64)
            for line, number in enumerate(active):
                if number in growing.walks:
                    pieces_B[line], entropies_B[line] = self._walk(growing, number, logits_BD[line])
        if not sampled:
            return pieces_B, entropies_B, logits_BD[:0]
        rows = [growing.rows[active[line]] for line in sampled]
        samplings = [row.sampling or self._sampling for row in rows]
        lines_SD = logits_BD if len(sampled) == len(active) else logits_BD[sampled]
        draft_probs_SD = to_probs(lines_SD, samplings, self.probs_dtype)
        drawn_S, entropies_S = sample_rows(draft_probs_SD, [row.rng for row in rows]), entropy(draft_probs_SD).double()
        if len(sampled) == len(active):
            return drawn_S, entropies_S, draft_probs_SD
        pieces_B[sampled], entropies_B[sampled] = drawn_S, entropies_S
        return pieces_B, entropies_B, draft_probs_SD

    def _walk(self, growing: GrowingDrafts, number: int, logits_D: Tensor) -> tuple[int, float]:
        """Return the piece of a coupled row, and the entropy of its distribution. Keeps what would be drawn instead."""
        row, most = growing.rows[number], self.selection.most if self.selection else 0
        (probs_D,) = to_probs(logits_D[None], [row.sampling or self._sampling], self.probs_dtype)
        found = growing.walks[number].draw(probs_D, 1 + most) or [(0, 1.0)]  # if nothing is finite, any; it is dropped
        if number in growing.alternatives:
            others = tuple((piece, SECOND_CHANCE * share) for piece, share in found[1:])
            growing.alternatives[number].append(others)
        return found[0][0], float(entropy(probs_D))

    def report(self) -> None:
        """Log at the end of a run how many drafts ended at a distribution that was not finite."""
        if self.unusable:
            LOG.warning("%d drafts ended early: the drafter's logits were NaN or infinite", self.unusable)
