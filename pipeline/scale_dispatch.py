"""The stream of a run with several workers: prompts to whoever has room, and what they say of them back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from pipeline.learner_host import HostSetup
from pipeline.progress import Display
from pipeline.read_ahead import ReadAhead
from pipeline.scale_crew import Crew, State
from pipeline.scale_deal import Deal
from pipeline.scale_learner import Told
from pipeline.scale_messages import Lost, Message, Reported, Up
from pipeline.scale_worker import ForLearner, Report
from pipeline.tape import Tape
from stages.snapshot import Json
from store.committed import completed_prompts
from store.errors import RunError
from store.events import Event, PromptRejected
from store.partitions import LEARNER, close_partition, new_worker, partition_folder

WAIT = 0.5  # seconds between two looks at everything
IDLE_SECONDS = 2.0  # after which a worker with nothing to do is asked to commit
HALT_SECONDS = 20.0  # that workers have to commit when the run is stopped
DEATHS = 20  # of workers, one after another, with no prompt completed between them


class Dispatch:
    """Used by one thread.

    Args:
        crew: the workers and the learner.
        run_folder: of the run.
        batch: prompts that a worker decodes at the same time.
        deal: the prompts that are to be decoded before any new one.
        done: offsets that the logs of earlier workers hold.
        tape: counts what is taken of the sources.
        log: takes the source rows that are no prompts.
        host_of: the learner's setup, by what a worker knows of the target.
        display: sees what happens.
        known_by: what models every worker must have; None if that is still to be seen.

    Attributes:
        crew, known_by: as given, and as it is now.
    """

    def __init__(
        self,
        crew: Crew,
        run_folder: Path,
        batch: int,
        deal: Deal,
        done: set[int],
        tape: Tape,
        log: Callable[[PromptRejected], None],
        host_of: Callable[[ForLearner], HostSetup],
        display: Display,
        known_by: Json,
    ) -> None:
        self.crew, self._run_folder, self._batch, self._deal, self._done = crew, run_folder, batch, deal, done
        self._tape, self._log, self._host_of, self._display = tape, log, host_of, display
        self.known_by = known_by
        self._leaving: set[str] = set()
        self._shown: set[int] = set()  # completed prompts that are not in a log yet, and may come again
        self._asked: str | None = None  # the worker that says what the learner must know
        self._deaths = 0

    def run(self, events: ReadAhead, wanted: Callable[[], int], pause: Callable[[], bool]) -> None:
        """Everything that is left of the stream; at its end every worker has committed and is gone.

        Args:
            events: the sources, from where the tape stands.
            wanted: how many workers there are to be now.
            pause: called now and then; if it is true the stream is left where it is.

        Raises:
            SourceError: a source broke off.
            RunError: workers die one after another, or have different models.
        """
        while not pause():
            self._read(events)
            over = events.ended and not self._deal.to_decode
            self._staff(0 if over and self.crew.has_learner else wanted())
            for worker in self.crew.workers:
                self._serve(worker)
            if over and not self.crew.workers and not self.crew.learning:
                return
            for message in self.crew.wait(WAIT):
                self._take(message)

    def halt(self) -> None:
        """Leave the stream where it is: every worker commits what it has completed."""
        end = monotonic() + HALT_SECONDS
        for worker in self.crew.workers:
            if self.crew.state(worker) is State.UP:
                self.crew.leave(worker)
            else:
                self._remove(worker)
        while self.crew.workers and monotonic() < end:
            for message in self.crew.wait(WAIT):
                self._take(message)
        for worker in self.crew.workers:
            self._remove(worker)

    def _read(self, events: ReadAhead) -> None:
        """As many prompts as workers may soon ask for."""
        while self._deal.waiting < self._portion * (len(self.crew.workers) + 1):
            event = events.take()
            if event is None:
                return
            self._tape.count(event)
            if isinstance(event, PromptRejected):
                self._reject(event)
            elif event.offset not in self._done:
                self._deal.put(event)

    @property
    def _portion(self) -> int:
        return 2 * self._batch

    def _staff(self, wanted: int) -> None:
        staying = [worker for worker in self.crew.workers if worker not in self._leaving]
        self._leaving.update(staying[wanted:])
        for _ in range(len(staying), wanted):
            self.crew.hire(new_worker(self._run_folder))

    def _serve(self, worker: str) -> None:
        """Keep a worker busy, or see out one that is to leave."""
        leaving = worker in self._leaving
        if leaving and self.crew.state(worker) is State.STARTING:
            self._remove(worker)
            return
        while self.crew.has_room(worker):
            prompts = [] if leaving else self._deal.give(worker, self._share(worker))
            if leaving and not self._deal.open_at(worker):
                self.crew.leave(worker)
                return
            if not prompts and not self._must_go_on(worker):
                return
            self.crew.give(worker, prompts, more=not leaving and self._deal.waiting > 0)

    def _share(self, worker: str) -> int:
        """Prompts for a worker now: enough to be busy until it is asked again, fewer when few are left for all."""
        staying = len(self.crew.workers) - len(self._leaving)
        fair = -(-self._deal.waiting // (2 * staying))
        return max(0, min(self._portion, fair, self._batch + 2 * self._portion - self._deal.open_at(worker)))

    def _must_go_on(self, worker: str) -> bool:
        """Whether a worker without new prompts has something to decode or to commit."""
        since = self.crew.idle_since(worker)
        if since is None:
            return False
        return bool(self._deal.open_at(worker)) or (self._deal.holds(worker) and monotonic() - since > IDLE_SECONDS)

    def _take(self, message: Message) -> None:
        match message:
            case Up():
                self._welcome(message)
            case ForLearner():
                self.crew.begin_learning(self._host_of(message))
            case Reported():
                self._note(message.worker, message.report)
                if message.left:
                    self._remove(message.worker)
            case Lost(name=name) if name == LEARNER:
                self._display.note(f"the learner is gone ({message.reason}); it begins again from its last commit")
            case Lost():
                self._mourn(message)
            case Told():
                self._show(message.events)

    def _welcome(self, up: Up) -> None:
        if self.known_by is None:
            self.known_by = up.known_by
        if up.known_by != self.known_by:
            raise RunError(
                f"every worker must have the models that the run began with, but {up.worker} found other weights or "
                "another vocabulary under the same names; put the same files on every machine"
            )
        if self._asked is None:
            self._asked = up.worker
            self.crew.ask_for_learner(up.worker)

    def _note(self, worker: str, report: Report) -> None:
        self._deal.completed(worker, (prompt.offset for prompt in report.completed))
        self._deal.settled(worker, report.committed)
        self._deal.settled(worker, (offset for offset, _ in report.refused))
        self._shown.difference_update(report.committed)
        for _, refused in report.refused:
            self._reject(refused)
        self._show(prompt for prompt in report.completed if prompt.offset not in self._shown)
        self._shown.update(prompt.offset for prompt in report.completed if prompt.offset not in set(report.committed))
        if report.completed:
            self._deaths = 0

    def _mourn(self, lost: Lost) -> None:
        """A worker died: what it had committed counts, the rest is dealt again."""
        self._deaths += 1
        if self._deaths >= DEATHS:
            raise RunError(f"workers must live, but {DEATHS} died one after another; the last: {lost.reason}")
        if self._asked == lost.name and not self.crew.has_learner:
            self._asked = None
        again = self._forget(lost.name)
        self._display.note(f"{lost.name} is gone ({lost.reason}); {again} of its prompts are dealt again")

    def _remove(self, worker: str) -> None:
        self.crew.drop(worker)
        self._forget(worker)

    def _forget(self, worker: str) -> int:
        folder = partition_folder(self._run_folder, worker)
        close_partition(folder)
        self._leaving.discard(worker)
        return self._deal.lost(worker, {prompt.offset for prompt in completed_prompts(folder)})

    def _reject(self, event: PromptRejected) -> None:
        self._log(event)
        self._display.show(event)

    def _show(self, events: Iterator[Event] | tuple[Event, ...]) -> None:
        for event in events:
            self._display.show(event)
