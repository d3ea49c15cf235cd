"""An engine over stages that only count, so that many runs take no time, and scripts that act while it decodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from loop_doubles import Clock as Seconds
from loop_doubles import StubDecode, StubDistill, StubDrift, StubDriftResponse, StubPublisher, StubTranslate, StubVerify

from pipeline.learning.local_learner import LocalLearner
from pipeline.loop import Clock, Loop, Stages, TargetRunner
from pipeline.recorder import Recorder
from pipeline.run.context import EventSink
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import EncodedPrompt, GenerationRequest
from pipeline.serve.request_queue import RequestQueue
from stages.contract.blocks import Proposal, Verdict
from stages.sampling.params import SamplingParams
from store.events import Event

MAX_LENGTH = 1000


class StubVocabulary:
    """A vocabulary whose tokens are bytes."""

    name = "big"
    specials: Mapping[str, int] = {"<end>": 999}

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None


class StubLog:
    """A log that keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def append(self, event: Event) -> None:
        assert not self.closed
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class StubCommitter:
    """A committer that commits between any two blocks and records how many events each commit covered."""

    def __init__(self, log: StubLog) -> None:
        self._log = log
        self.commits: list[int] = []

    def is_due(self) -> bool:
        return True

    def commit(self, *, wait: bool = False) -> None:
        self.commits.append(len(self._log.events))


class ScriptedVerify(StubVerify):
    """A verify stage that calls the next function of a script in the middle of each block, on the engine's thread."""

    def __init__(self, script: Sequence[Callable[[], None]]) -> None:
        super().__init__()
        self._script = list(script)

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        if self._script:
            self._script.pop(0)()
        return super().__call__(batch)


@dataclass
class StubEngine:
    """An engine with its queue, its stages and its log."""

    batch: int = 2
    waiting: int = 100
    offset: int = 0
    script: Sequence[Callable[[], None]] = ()
    clock: Callable[[], float] = lambda: 0.0
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        vocabulary = StubVocabulary()
        self.log = StubLog()
        self.committer = StubCommitter(self.log)
        self.queue = RequestQueue(vocabulary, MAX_LENGTH, self.waiting, 7, self.offset, log_text=True, clock=self.clock)
        self.decode, self.translate, self.verify = StubDecode(), StubTranslate(), ScriptedVerify(self.script)
        distill, clock = StubDistill(), Clock(Seconds())
        self.runner = TargetRunner(
            "big",
            Stages(self.decode, self.translate, self.verify),
            self.queue.prepare_sequence,
            Recorder("big", vocabulary.bytes_of, lambda tokens: bytes(tokens).decode()),
            LocalLearner(distill, StubDrift({}), StubDriftResponse(distill), StubPublisher()),
            clock,
            self.queue.on_verdicts,
        )
        loop = Loop({"big": self.runner}, lambda offset: "big", self.batch, clock)
        models = SimpleNamespace(target_vocabulary=vocabulary, target=SimpleNamespace(max_length=MAX_LENGTH))
        self.engine = LiveEngine(
            models,
            None,
            self.queue,
            loop,
            self.runner,
            EventSink(self.log, show=self.seen.append, whole=True),
            self.committer,
            None,
            1,
        )

    @property
    def rows(self) -> list[int]:
        """Numbers of rows that the stages still hold."""
        return [len(stage.order) for stage in (self.decode, self.translate, self.verify)]


def stub_request(
    name: str = "request", blocks: int = 3, sampling: Mapping[str, Any] = {}, **changes: Any
) -> GenerationRequest:
    """Make a request that takes so many blocks."""
    return GenerationRequest(
        name, EncodedPrompt("ab", (97, 98), (97, 98)), SamplingParams(max_tokens=blocks, **sampling), **changes
    )
