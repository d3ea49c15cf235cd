"""Servers over a tiny pair in this process: requests, listeners that record chunks, and the log of a run."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import Chunk, Finish, GenerationRequest, Usage
from pipeline.serve.run import ServerRun
from stages.sampling.params import SamplingParams
from store.events import Event
from store.query.log_reader import LogReader

HANG_SECONDS = 200.0  # seconds after which an engine counts as hanging
NEW_TOKENS = 24
SAMPLING_NAMES = {field.name for field in fields(SamplingParams)}
OFTEN = {"commit__seconds": 0.02}  # a commit after nearly every block

_numbers = itertools.count()


def serve_config(pair: TinyPair, **changes: Any) -> Config:
    """Settings of a quick server; `section__key` stands for `section.key`."""
    return config_of(pair, **{"batch": 3, "serve__learn": "off", **changes})


def texts(begin: int, end: int) -> list[str]:
    """Beginnings of sums."""
    return [text[:30] for text in sentences(begin, end)]


@dataclass
class RecordingListener:
    """A listener that records its chunks. It may block the engine's thread between two blocks, or fail.

    Attributes:
        hold: from this chunk on the listener blocks until `go` is set.
        fails: every call raises.
    """

    hold: int | None = None
    fails: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if chunk.finish:
            self.ended.set()
        if self.hold is not None and len(self.chunks) >= self.hold:
            self.reached.set()
            assert self.go.wait(HANG_SECONDS), "nobody let the engine continue"
        if self.fails:
            raise RuntimeError("this listener always fails")

    def end(self) -> "RecordingListener":
        """Wait for the finish."""
        assert self.ended.wait(HANG_SECONDS), f"no finish after {len(self.chunks)} chunks"
        return self

    @property
    def finishes(self) -> list[Finish]:
        """All that were received; there must be one, with the last chunk."""
        return [chunk.finish for chunk in self.chunks if chunk.finish]

    @property
    def finish(self) -> Finish:
        """Reason of the end, which the last chunk has."""
        (finish,) = self.end().finishes
        assert self.chunks[-1].finish is finish, "nothing follows a finish"
        return finish

    @property
    def text(self) -> str:
        """The whole completion."""
        return "".join(chunk.text for chunk in self.end().chunks)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the completion."""
        return tuple(token for chunk in self.end().chunks for token in chunk.tokens)

    @property
    def usage(self) -> Usage:
        """Counters of the whole completion."""
        (usage,) = [chunk.usage for chunk in self.end().chunks if chunk.usage]
        return usage


def make_request(engine: LiveEngine, text: str, **changes: Any) -> GenerationRequest:
    """Make a greedy request with an id of its own; its sampling parameters may be given by their names."""
    given = {name: changes.pop(name) for name in SAMPLING_NAMES & changes.keys()}
    sampling = replace(changes.pop("sampling", SamplingParams()), **{"max_tokens": NEW_TOKENS, **given})
    name = changes.pop("request_id", f"request-{next(_numbers)}")
    return GenerationRequest(name, engine.encode(text), sampling, **changes)


def submit_prompt(
    engine: LiveEngine, text: str, listener: RecordingListener | None = None, **changes: Any
) -> RecordingListener:
    recorder = listener or RecordingListener()
    engine.submit(make_request(engine, text, **changes), recorder)
    return recorder


def complete_all(engine: LiveEngine, prompts: Sequence[str], **changes: Any) -> list[RecordingListener]:
    """Submit all prompts at once and wait for their ends."""
    return [listener.end() for listener in [submit_prompt(engine, text, **changes) for text in prompts]]


@contextmanager
def run_server(
    config: Config,
    run: Path,
    *,
    resume: bool = False,
    keeps: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Iterator[ServerRun]:
    """Open a server's run without its HTTP side."""
    with ServerRun(config, run, on_event, resume=resume, keeps=keeps) as server:
        yield server


def wait_until(condition: Callable[[], bool], failure: str = "it did not happen") -> None:
    """Wait for a condition that another thread or process fulfils."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, failure
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not know it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@cache
def load_pair(pair: TinyPair) -> Models:
    """Load the pair for plain decoding."""
    (models,) = load_models(config_of(pair), "", Path())
    return models


def greedy_generate(pair: TinyPair, text: str, most: int = NEW_TOKENS) -> tuple[int, ...]:
    """Decode greedily with the target alone, without a drafter."""
    models = load_pair(pair)
    tokens = models.target_vocabulary.encode(text)
    ids_1T = torch.tensor([tokens])
    found = models.target.model.generate(
        input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=most
    )
    return tuple(found[0, len(tokens) :].tolist())


def select(run: Path, query: str) -> list[dict[str, Any]]:
    """Query the run's log, including partitions."""
    with LogReader([run]) as log:
        return log.select(query).to_pylist()


def assert_sound(run: Path) -> None:
    """Require that `omnidraft check` finds no fault."""
    with LogReader([run], skip_damaged=True) as log:
        found = log.check()
        assert log.damaged == []
    assert found.mismatches.to_pylist() == []
    assert found.miscounts.to_pylist() == []
