"""An engine over stages that only count, so that many lives of it take no time; and what happens while it decodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loop_doubles import Clock as Seconds
from loop_doubles import StubAnswer, StubDecode, StubDistill, StubDrift, StubPublisher, StubTranslate, StubVerify

from pipeline.clock import Clock
from pipeline.coach import LocalCoach
from pipeline.lane_stages import Stages
from pipeline.loop import Lane, Loop
from pipeline.records import Recorder
from pipeline.serve_desk import Desk
from pipeline.serve_engine import LiveEngine, TellingVerify
from pipeline.serve_requests import Ask, Encoded
from stages.blocks import Proposal, Verdict
from store.events import Event

LONGEST = 1000


class StubWords:
    """Tokens are bytes."""

    name = "big"
    specials: Mapping[str, int] = {"<end>": 999}

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None


class StubLog:
    """Keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def append(self, event: Event) -> None:
        assert not self.closed
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class StubCommitter:
    """A commit between any two blocks; knows how much of the log each covered."""

    def __init__(self, log: StubLog) -> None:
        self._log = log
        self.commits: list[int] = []
        self.prompts = 0

    def is_due(self) -> bool:
        return True

    def completed(self) -> None:
        self.prompts += 1

    def commit(self, *, wait: bool = False) -> None:
        self.commits.append(len(self._log.events))


class StubConversation:
    """A conversation is the contents of its messages."""

    def encode_conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        return encode("".join(message["content"] for message in messages))


def encode(text: str) -> tuple[list[int], list[int]]:
    return list(text.encode()), list(text.encode())


class ScriptedVerify(StubVerify):
    """In the middle of each block something happens: what the script says, on the engine's thread."""

    def __init__(self, script: Sequence[Callable[[], None]]) -> None:
        super().__init__()
        self._script = list(script)

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        if self._script:
            self._script.pop(0)()
        return super().__call__(batch)


@dataclass
class StubEngine:
    """The engine, and what stands around it."""

    batch: int = 2
    waiting: int = 100
    offset: int = 0
    script: Sequence[Callable[[], None]] = ()
    now: Callable[[], float] = lambda: 0.0
    notes: list[str] = field(default_factory=list)
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = StubWords()
        self.log = StubLog()
        self.committer = StubCommitter(self.log)
        self.desk = Desk(words, LONGEST, self.waiting, 7, self.offset, text=True, now=self.now)
        self.decode, self.translate, self.verify = StubDecode(), StubTranslate(), ScriptedVerify(self.script)
        distill, clock = StubDistill(), Clock(Seconds())
        self.lane = Lane(
            "big",
            Stages(self.decode, self.translate, TellingVerify(self.verify, self.desk.told)),
            self.desk.row_of,
            Recorder("big", words.bytes_of, lambda tokens: bytes(tokens).decode()),
            LocalCoach(distill, StubDrift({}), StubAnswer(distill), StubPublisher()),
            clock,
        )
        loop = Loop({"big": self.lane}, lambda offset: "big", self.batch, clock)
        self.engine = LiveEngine(
            self.desk,
            loop,
            self.lane,
            encode,
            StubConversation(),
            words,
            (LONGEST - 1, LONGEST - 1),
            self.log,
            self.committer,
            None,
            self.seen.append,
            self.notes.append,
            1,
        )

    @property
    def rows(self) -> list[int]:
        """Rows that any stage still holds."""
        return [len(stage.order) for stage in (self.decode, self.translate, self.verify)]


def stub_ask(name: str = "ask", blocks: int = 3, **changes: Any) -> Ask:
    """An ask that takes so many blocks."""
    return Ask(name, Encoded("ab", (97, 98), (97, 98)), blocks, 0.0, **changes)
