"""Responses to drift: reset the acceptance head, also restore an earlier version, or do nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from typing_extensions import override

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State
from stages.distill import Distill
from stages.learn.training.betting import SumTest
from stages.learn.training.update import Chooser
from store.events import Drifted, Event, Recalled

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES_KEPT = 32  # examples kept to choose a version by
TRIAL = 32  # prompts on which the chosen version must prove that it is better


class DriftResponse:
    """The interface of responses, called by the learner in stream order. This implementation does nothing."""

    def observe(self, example: TrainingExample) -> Iterable[Event]:
        """Receive a completed prompt, before it is learned from and before `respond` if it revealed a drift.

        Yields what was decided by it about an earlier drift.
        """
        return ()

    def respond(self, drifted: Drifted) -> Iterable[Event]:
        """Respond to a drop of the acceptance rate outside the cooldown."""
        return ()

    def end(self) -> Iterable[Event]:
        """Yields what is undecided about an earlier drift when the stream ends."""
        return ()

    def forget(self, chosen: Chooser) -> None:
        """Drop some of the received prompts."""

    def state_dict(self) -> State:
        return None

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""


class NoResponse(DriftResponse):
    """Only log the drift; the drafter continues to learn as before."""


class ResetHead(DriftResponse):
    """Reset the acceptance head and return to the shortest update interval.

    Args:
        restart: `Distiller.reset_head`. It discards an update that is running, and returns the event of that.
    """

    def __init__(self, restart: Callable[[], Iterable[Event]]) -> None:
        self._restart = restart

    @override
    def respond(self, drifted: Drifted) -> Iterator[Event]:
        yield from self._restart()


@dataclass(frozen=True)
class VersionSource:
    """Access to earlier versions of a target."""

    folders: Callable[[], Sequence[tuple[int, Path]]]  # number and folder of this target's versions, oldest first
    read: Callable[[Path], "list[Tensor]"]  # what `DrafterTrainer.adopt` takes, of a version's folder
    # puts what else a version holds into service: its head and, where it learns in closed form, its sums
    read_rest: Callable[[Path], None]


@dataclass
class _Trial:
    """A version that may be restored, while it is compared with the drafter in service on new prompts."""

    # number, weights: of the version
    number: int
    weights: "list[Tensor]"
    candidates: int  # number of versions that it was chosen from
    seconds: float  # of all scoring so far
    # prompts, tokens: on which the two were compared
    prompts: int = 0
    tokens: int = 0
    # present, best: tokens that are expected to be accepted, of the drafter in service and of the version
    present: float = 0.0
    best: float = 0.0
    evidence: SumTest = field(default_factory=SumTest)  # that the version is better


class Recall(DriftResponse):
    """Reset the head, then look for an earlier version that is better than the drafter in service.

    The best one on the prompts since the change is chosen, if it wins by a margin. These prompts raised the alarm
    because the drafter in service did badly on them, so they prove nothing: the version is restored with evidence of 20
    (`betting.py`) from the prompts that follow. Meanwhile no update is begun. The score is the gate's
    measure: the expected acceptance on the text that the target emitted.

    Args:
        margin: by how much the best must beat the drafter in service.
        most: maximum number of versions scored: the baseline and the newest.
    """

    def __init__(self, distill: Distill, versions: VersionSource, margin: float, most: int) -> None:
        self._distill, self._versions, self._margin, self._most = distill, versions, margin, most
        self._recent: deque[TrainingExample] = deque(maxlen=EXAMPLES_KEPT)
        self._trial: _Trial | None = None
        self._awaits_example = False  # there was none since the last drift

    @override
    def observe(self, example: TrainingExample) -> Iterator[Event]:
        """Keep the example for scoring, and compare the version that is on trial on it."""
        if not example.soft_targets:
            return
        kept = replace(example, labels=())  # the rest holds no tensors
        self._recent.append(kept)
        if self._awaits_example:
            self._await_example(False)
            yield from self._choose(kept.offset, kept.target, [kept])
            return
        if self._trial is None:
            return
        trial, started, trainer = self._trial, perf_counter(), self._distill.drafter.trainer
        tokens, present = kept.supervised_tokens, trainer.measure_acceptance(None, [kept])
        best = trainer.measure_acceptance(trial.weights, [kept])
        if present is not None and best is not None and tokens:
            trial.tokens, trial.present, trial.best = (
                trial.tokens + tokens,
                trial.present + present * tokens,
                trial.best + best * tokens,
            )
            trial.evidence.observe((best - present) * tokens, tokens)
        trial.prompts += 1
        trial.seconds += perf_counter() - started
        if trial.evidence.decisive:
            yield self._end_trial(example, taken=self._take(trial, example.target))
        elif trial.prompts == TRIAL:
            yield self._end_trial(example, taken=False)

    @override
    def end(self) -> Iterator[Event]:
        """End a trial: the drafter in service stays."""
        if self._trial is not None and self._recent:
            yield self._end_trial(self._recent[-1], taken=False)

    @override
    def forget(self, chosen: Chooser) -> None:
        kept = [example for example in self._recent if not chosen(example)]
        self._recent.clear()
        self._recent.extend(kept)

    @override
    def state_dict(self) -> State:
        trial = None
        if (one := self._trial) is not None:
            counts = one.candidates, one.seconds, one.prompts, one.tokens, one.present, one.best
            trial = {"number": one.number, "counts": counts, "evidence": one.evidence.state_dict()}
        return {"recent": list(self._recent), "trial": trial, "awaits_example": self._awaits_example}

    @override
    def load_state_dict(self, state: State) -> None:
        self._recent.extend(state["recent"])
        self._await_example(state["awaits_example"])
        if (trial := state["trial"]) is not None:
            weights = self._versions.read(dict(self._versions.folders())[trial["number"]])
            self._trial = _Trial(trial["number"], weights, *trial["counts"])
            self._trial.evidence.load_state_dict(trial["evidence"])
            self._distill.drafter.held += 1

    @override
    def respond(self, drifted: Drifted) -> Iterator[Event]:
        """Reset, then choose a version, with the next example if there was none since the change. The reset ends a
        running update, so the trainer is free to score versions. If the drafter has never changed, there is no choice.
        """
        yield from self._distill.reset_head()
        if self._trial is not None or self._distill.drafter_version == 0:
            return
        since = [example for example in self._recent if example.offset >= drifted.changed_at]
        self._await_example(not since)
        if since:
            yield from self._choose(drifted.offset, drifted.target, since)

    def _await_example(self, awaits: bool) -> None:
        """Begin or end to wait. Meanwhile no update is begun: it would run while versions are scored."""
        self._distill.drafter.held += awaits - self._awaits_example
        self._awaits_example = awaits

    def _choose(self, offset: int, target: str, since: Sequence[TrainingExample]) -> Iterator[Recalled]:
        """Put the best version on trial; yield that none is good enough."""
        folders = list(self._versions.folders())
        if len(folders) > self._most:
            folders = [folders[0], *folders[len(folders) - self._most + 1 :]]
        if not folders:
            return
        started = perf_counter()
        trainer = self._distill.drafter.trainer
        present = trainer.measure_acceptance(None, since) or 0.0
        measured = [(trainer.served.trained_weights, present)]
        scores = [(self._score(self._versions.read(folder), since, measured), number) for number, folder in folders]
        best, number = max(scores)  # of equals the newest
        if best > present + self._margin:
            weights = self._versions.read(dict(folders)[number])
            self._trial = _Trial(number, weights, len(folders), perf_counter() - started)
            self._distill.drafter.held += 1
            return
        yield Recalled(
            offset=offset,
            target=target,
            version=None,
            candidates=len(folders),
            prompts=len(since),
            acceptance_present=present,
            acceptance_best=best,
            seconds=perf_counter() - started,
        )

    def _score(
        self, weights: "list[Tensor]", since: Sequence[TrainingExample], measured: "list[tuple[list[Tensor], float]]"
    ) -> float:
        """Return the acceptance of a version's weights; of weights that were measured it is known, as of all versions
        between two updates of the drafter.
        """
        for known, score in measured:
            if all(one.equal(other) for one, other in zip(weights, known, strict=True)):
                return score
        score = self._distill.drafter.trainer.measure_acceptance(weights, since) or 0.0
        measured.append((weights, score))
        return score

    def _end_trial(self, example: TrainingExample, *, taken: bool) -> Recalled:
        trial, self._trial = self._trial, None
        assert trial is not None
        self._distill.drafter.held -= 1
        return Recalled(
            offset=example.offset,
            target=example.target,
            version=trial.number if taken else None,
            candidates=trial.candidates,
            prompts=trial.prompts,
            acceptance_present=trial.present / max(1, trial.tokens),
            acceptance_best=trial.best / max(1, trial.tokens),
            seconds=trial.seconds,
        )

    def _take(self, trial: _Trial, target: str) -> bool:
        """Restore a version, unless the acceptance of another target that shares the weights would drop."""
        trainer = self._distill.drafter.trainer
        if trainer.find_losers(trial.weights, target):
            return False
        trainer.adopt(trial.weights)
        self._versions.read_rest(dict(self._versions.folders())[trial.number])
        return True
