"""The engine of `omnidraft serve`: the loop of every stream, over prompts that arrive while it runs.

One thread runs it. Between two blocks it ends what clients no longer want, admits what waits, and commits.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pipeline.committing import Committer
from pipeline.loop import Lane, Loop, UnfitPromptError
from pipeline.serve_desk import Desk
from pipeline.serve_requests import Ask, Encoded, Figures, Finish, Listener
from pipeline.whole_prompts import WholePrompts
from stages.blocks import Proposal, Row, Verdict
from stages.chat import Conversation, Ids
from stages.huggingface import set_threads
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.stage import Stage
from stages.vocabulary import Vocabulary
from store.errors import ConfigError
from store.events import Event, PromptCompleted
from store.log import RunLog

IDLE_SECONDS = 0.5  # between two looks around while nothing is asked


class TellingVerify:
    """Another verify stage, of whose verdicts somebody is told at once, before they are logged.

    Args:
        verify: the stage.
        tell: is given the verdicts of each block.
    """

    def __init__(self, verify: Stage[Proposal, Verdict], tell: Callable[[list[Verdict]], None]) -> None:
        self._verify, self._tell = verify, tell

    def admit(self, row: Row) -> None:
        """As the other."""
        self._verify.admit(row)

    def release(self, row: Row) -> None:
        """As the other."""
        self._verify.release(row)

    def save(self, keep: SnapshotWriter) -> Json:
        """As the other."""
        return self._verify.save(keep)

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """As the other."""
        self._verify.restore(saved, kept)

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        """As the other."""
        verdicts = self._verify(batch)
        self._tell(verdicts)
        return verdicts


class LearnerFigures(Protocol):
    """How far the learner is."""

    @property
    def lag(self) -> int:
        """Completed prompts that it has not looked at yet."""
        ...

    @property
    def dropped(self) -> int:
        """Completed prompts that it never will."""
        ...

    @property
    def published(self) -> int | None:
        """Number of the newest version."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        ...


class LiveEngine:
    """See `Engine` in pipeline/serve_requests.py.

    Args:
        desk: where asks arrive; the lane's rows and verdicts pass over it.
        loop, lane: the stages; one lane.
        encode: target ids and drafter pieces of a text, on any thread.
        conversation: alike, of messages.
        words: of the target.
        longest: target tokens, and drafter pieces, of a prompt.
        log: keeps whole prompts.
        committer: commits the log.
        learner: for the figures; None where nothing learns.
        see: is told every event as it happens.
        notice: is told what the user should know.
        threads: with which the models compute.
    """

    def __init__(
        self,
        desk: Desk,
        loop: Loop,
        lane: Lane,
        encode: Callable[[str], Ids],
        conversation: Conversation,
        words: Vocabulary,
        longest: tuple[int, int],
        log: RunLog,
        committer: Committer,
        learner: LearnerFigures | None,
        see: Callable[[Event], None],
        notice: Callable[[str], None],
        threads: int,
    ) -> None:
        self._desk, self._loop, self._lane, self._words = desk, loop, lane, words
        self._encode, self._conversation = encode, conversation
        self._longest, self._log, self._committer, self._learner = longest, log, committer, learner
        self._see, self._notice, self._threads = see, notice, threads
        self._names = {token: name for name, token in words.specials.items()}
        self._whole = WholePrompts()
        self._dirty = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to take asks."""
        self._thread.start()

    def encode(self, text: str) -> Encoded:
        """See `Engine`."""
        return self._fitting(text, *self._encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Encoded:
        """See `Engine`."""
        try:
            tokens, pieces = self._conversation.encode_conversation(messages)
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        return self._fitting(self._words.decode(tokens), tokens, pieces)

    def _fitting(self, text: str, tokens: Sequence[int], pieces: Sequence[int]) -> Encoded:
        for model, length, most in zip(("target", "drafter"), map(len, (tokens, pieces)), self._longest, strict=True):
            if not 0 < length <= most:
                raise UnfitPromptError(f"a prompt must have 1 to {most} of the {model}'s tokens, got {length}")
        return Encoded(text, tuple(tokens), tuple(pieces))

    def text_of(self, token: int) -> bytes:
        """See `Engine`."""
        return self._words.bytes_of(token) or self._names.get(token, "").encode()

    def submit(self, ask: Ask, listener: Listener) -> Callable[[], None]:
        """See `Engine`."""
        return self._desk.submit(ask, listener)

    def figures(self) -> Figures:
        """See `Engine`."""
        learner, coach = self._learner, self._lane.coach
        return Figures(
            model=self._words.name,
            ready=self._thread.is_alive() and not self._desk.closed,
            running=self._desk.running,
            waiting=self._desk.waiting,
            drafter_version=coach.drafter_version,
            head_version=coach.head_version,
            published_version=learner.published if learner else None,
            learner_lag=learner.lag if learner else 0,
            learner_dropped=learner.dropped if learner else 0,
            learner_alive=learner.alive if learner else None,
            max_length=self._longest[0] + 1,
        )

    def close(self, grace: float) -> None:
        """Take no more asks, let those in flight finish for so many seconds, end the others, and commit."""
        self._desk.close()
        self._thread.join(grace)
        self._desk.ask_all_to_leave()
        self._thread.join()
        self._log.close()

    def _work(self) -> None:
        """The engine's thread."""
        try:
            set_threads(self._threads)  # torch counts them for each thread apart
            self._take(self._loop.begin())
            while not (self._desk.closed and not self._desk.waiting):
                self._take(self._loop.until_idle(self._desk, self._between_blocks))
                self._between_blocks()
                self._desk.wait(IDLE_SECONDS)
            self._committer.commit(wait=True)
        except BaseException as error:
            self.failure = error
            self._notice(f"the engine stopped: {error!r}; what was committed stands")
        finally:
            self._desk.end_all(Finish.FAILED)

    def _between_blocks(self) -> bool:
        """What is to be done when no stage is in the middle of anything."""
        for offset, finish in self._desk.to_leave():
            self._take(self._lane.leave(offset, finish.value))
            self._desk.left(offset, finish)
        if self._dirty and self._committer.is_due():
            self._committer.commit()
            self._dirty = False
        return False

    def _take(self, events: Iterable[Event]) -> None:
        for event in self._whole(self._seen(events)):
            self._log.append(event)
            self._dirty = True
            if isinstance(event, PromptCompleted):
                self._committer.completed()

    def _seen(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self._see(event)
            yield event
