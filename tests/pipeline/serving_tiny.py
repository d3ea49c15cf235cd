"""Servers over a tiny pair, in this process: asks, what their listeners are told, and what a run's log holds then."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.build_models import Models, load_models
from pipeline.config import Config
from pipeline.serve_engine import LiveEngine
from pipeline.serve_requests import Ask, Chunk, Finish, Usage
from pipeline.serve_run import Serving
from store.events import Event
from store.queries import LogReader

PATIENCE = 200.0  # seconds after which an engine hangs
NEW_TOKENS = 24
OFTEN = {"commit__seconds": 0.02, "commit__share": 1.0}  # a commit after nearly every block

_numbers = itertools.count()


def serve_config(pair: TinyPair, **changes: Any) -> Config:
    """Settings of a quick server; `section__key` stands for `section.key`."""
    return config_of(pair, **{"batch": 3, "serve__learn": "off", "serve__grace_seconds": 30.0, **changes})


def texts(begin: int, end: int) -> list[str]:
    """Beginnings of sums."""
    return [text[:30] for text in sentences(begin, end)]


@dataclass
class Told:
    """A listener, and all that it was told. It may hold the engine's thread between two blocks, or fail.

    Attributes:
        hold: from this chunk on the engine waits until `go` is set.
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
            assert self.go.wait(PATIENCE), "nobody let the engine go on"
        if self.fails:
            raise RuntimeError("this listener always fails")

    def end(self) -> "Told":
        """Wait for the finish."""
        assert self.ended.wait(PATIENCE), f"no finish after {len(self.chunks)} chunks"
        return self

    @property
    def finishes(self) -> list[Finish]:
        """All that were told; there must be one, with the last chunk."""
        return [chunk.finish for chunk in self.chunks if chunk.finish]

    @property
    def finish(self) -> Finish:
        """Why it ended."""
        (finish,) = self.end().finishes
        assert self.chunks[-1].finish is finish, "nothing follows a finish"
        return finish

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(chunk.text for chunk in self.end().chunks)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(token for chunk in self.end().chunks for token in chunk.tokens)

    @property
    def usage(self) -> Usage:
        """Of the whole completion."""
        (usage,) = [chunk.usage for chunk in self.end().chunks if chunk.usage]
        return usage


def ask_of(engine: LiveEngine, text: str, **changes: Any) -> Ask:
    """A greedy ask with a name of its own."""
    fields = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, **changes}
    return Ask(**{"name": f"ask-{next(_numbers)}", "prompt": engine.encode(text), **fields})


def asked(engine: LiveEngine, text: str, listener: Told | None = None, **changes: Any) -> Told:
    """Submit an ask; its listener."""
    told = listener or Told()
    engine.submit(ask_of(engine, text, **changes), told)
    return told


def served_all(engine: LiveEngine, prompts: Sequence[str], **changes: Any) -> list[Told]:
    """Ask for all of them at once, and wait until all have ended."""
    return [told.end() for told in [asked(engine, text, **changes) for text in prompts]]


@contextmanager
def serving(
    config: Config,
    run: Path,
    *,
    resume: bool = False,
    see: Callable[[Event], None] = lambda event: None,
    notes: list[str] | None = None,
) -> Iterator[Serving]:
    """A server's run without its HTTP side."""
    told = [] if notes is None else notes
    with Serving(config, run, see, told.append, resume=resume) as server:
        yield server


def until(condition: Callable[[], bool], what: str = "it did not happen") -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@cache
def models_of(pair: TinyPair) -> Models:
    """The pair as loaded, for plain decoding."""
    (models,) = load_models(config_of(pair), "", Path())
    return models


def plain(pair: TinyPair, text: str, most: int = NEW_TOKENS) -> tuple[int, ...]:
    """What plain greedy decoding of the target gives."""
    models = models_of(pair)
    tokens = models.target_words.encode(text)
    ids_1T = torch.tensor([tokens])
    found = models.target.model.generate(
        input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=most
    )
    return tuple(found[0, len(tokens) :].tolist())


def select(run: Path, query: str) -> list[dict[str, Any]]:
    """Rows of the run's log, partitions included."""
    with LogReader([run]) as log:
        return log.select(query).to_pylist()


def assert_sound(run: Path) -> None:
    """`omnidraft check` finds nothing."""
    with LogReader([run], skip_damaged=True) as log:
        found = log.check()
        assert log.damaged == []
    assert found.mismatches.to_pylist() == []
    assert found.miscounts.to_pylist() == []
