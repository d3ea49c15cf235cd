"""The display of a run: a live panel in a terminal, messages of the log elsewhere."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from typing_extensions import override

from pipeline.reports.terminal import format_duration
from stages.vocabulary.text_stream import TextStream
from store.events import (
    Drifted,
    Event,
    Origin,
    PromptCompleted,
    PromptRejected,
    Recalled,
    TokenDecision,
    VersionPublished,
)
from store.query.rates import Acceptance

LOG = logging.getLogger("omnidraft.progress")

BARS = "▁▂▃▄▅▆▇█"
BUCKET = 5  # prompts per bar of the curve
LINE_SECONDS = 10.0  # between two messages of the log on progress
STYLES = {Origin.ACCEPTED: "green", Origin.RESIDUAL: "yellow", Origin.BONUS: "cyan"}


class Display:
    """Sees every event of a run, in order, and counts; a context manager around the run."""

    def __init__(self, clock: Callable[[], float], total: int | None = None) -> None:
        self._clock, self._began, self._total = clock, clock(), total
        self._earlier = 0  # prompts of earlier processes
        self._prompts = self._emitted = 0  # completed prompts, and their target tokens
        self._drafter = 0  # number of the drafter's updates in service
        self._drifts = 0  # that were acted upon
        self._rejected = 0  # source rows
        self._version: int | None = None  # newest published version, or None
        # acceptance per `BUCKET` prompts, None if nothing was judged, and whether a drift was acted upon in it
        self._curve: list[tuple[float | None, bool]] = []
        self._bucket: list[PromptCompleted] = []
        self._drifted = False
        self._first: list[PromptCompleted] = []
        self._recent: deque[PromptCompleted] = deque(maxlen=20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        match event:
            case PromptCompleted():
                self._complete(event)
            case Drifted() if event.acted_upon:
                self._drifts += 1
                self._drifted = True
            case VersionPublished():
                self._version = event.version
                if self._prompts == self._earlier:  # the baseline: measuring it is not a part of the stream
                    self._began = self._clock()
            case PromptRejected():
                self._rejected += 1

    def remember(self, prompt: PromptCompleted) -> None:
        """Count a prompt that was completed before the run was resumed, but not its tokens."""
        self._complete(prompt)
        self._emitted -= prompt.emitted
        self._earlier += 1

    def _complete(self, prompt: PromptCompleted) -> None:
        self._prompts += 1
        self._emitted += prompt.emitted
        self._drafter = prompt.drafter_version
        if len(self._first) < 20:
            self._first.append(prompt)
        self._recent.append(prompt)
        self._bucket.append(prompt)
        if len(self._bucket) == BUCKET:
            self._curve.append((Acceptance.sum_over(self._bucket).rate, self._drifted))
            self._bucket, self._drifted = [], False

    def _status(self) -> dict[str, Any]:
        """Return the numbers that are shown. The display's own thread calls this meanwhile."""
        now, first = Acceptance.sum_over(list(self._recent)), Acceptance.sum_over(list(self._first))
        spent, done = self._clock() - self._began, self._prompts - self._earlier
        return {
            "prompts": self._prompts,
            "total": self._total,
            # at the speed so far; None if their number or the speed is unknown
            "seconds_left": max(0, self._total - self._prompts) * spent / done if self._total and done else None,
            "tokens_per_second": self._emitted / spent if spent > 0 else 0.0,
            "acceptance": now.rate,
            "acceptance_interval": now.interval,
            "acceptance_judged": now.judged,
            "acceptance_first": first.rate,
            "drafter_version": self._drafter,
            "version": self._version,
            "drifts": self._drifts,
            "rejected_rows": self._rejected,
        }

    def _status_line(self) -> str:
        status = self._status()
        now, first = Acceptance.sum_over(list(self._recent)), status["acceptance_first"]
        parts = [f"{self._prompts} prompts" if self._total is None else f"{self._prompts}/{self._total} prompts"]
        if self._prompts:
            parts += [
                f"{status['tokens_per_second']:.0f} tokens/s",
                f"acceptance {now}, first 20 prompts {'-' if first is None else f'{first:.3f}'}",
                f"drafter {self._drafter}",
                f"version {'-' if self._version is None else self._version}",
                f"drifts {self._drifts}",
            ]
        if self._rejected:
            parts.append(f"rejected rows {self._rejected}")
        return ", ".join(parts)

    def _describe_left(self) -> str:
        """Describe the time that the other prompts take; empty if it is unknown."""
        left = self._status()["seconds_left"]
        return "" if left is None else f"{format_duration(left)} left"


class PlainDisplay(Display):
    """Messages of the log, for a file or a pipe."""

    def __init__(self, clock: Callable[[], float], total: int | None = None) -> None:
        super().__init__(clock, total)
        self._due, self._has_reported = clock() + LINE_SECONDS, False

    @override
    def show(self, event: Event) -> None:
        """Log a message every 10 seconds, at the first completed prompt, and for every drift, recall and version."""
        super().show(event)
        now, completed = self._clock(), isinstance(event, PromptCompleted)
        if (completed and not self._has_reported) or now >= self._due:
            LOG.info("%s", ", ".join(filter(None, (self._status_line(), self._describe_left()))), extra=self._status())
            self._due, self._has_reported = now + LINE_SECONDS, self._has_reported or completed
        match event:
            case Drifted():
                LOG.info("%s", event.description, extra={"prompt": event.offset, "action": event.action})
            case Recalled():
                LOG.info("%s", _recall_line(event), extra={"prompt": event.offset, "version": event.version})
            case VersionPublished():
                version = {"prompt": event.offset, "version": event.version, "reason": event.reason}
                text = f"version {event.version}, up to prompt {event.offset} ({event.reason}): {event.changes}"
                LOG.info("%s", text, extra=version | {"changes": event.changes})


def _recall_line(event: Recalled) -> str:
    rates = f"expected acceptance {event.acceptance_present:.3f}, best of {event.candidates} earlier ones "
    action = "the present drafter stays" if event.version is None else f"version {event.version} is restored"
    return f"prompt {event.offset}: {rates}{event.acceptance_best:.3f}, {action}"


class LiveDisplay(Display):
    """A panel that is redrawn a few times a second: progress, metrics, the acceptance curve, the text.

    The text is that of one prompt at a time: the first prompt that begins after the last shown one is complete.
    """

    def __init__(self, console: Console, clock: Callable[[], float], total: int | None) -> None:
        super().__init__(clock, total)
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.fields[dataset]}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task("", total=total, dataset="", left="")
        self._text: deque[tuple[str, str]] = deque(maxlen=120)
        self._stream: TextStream[TokenDecision] = TextStream(lambda decision: decision.emitted_bytes)
        self._followed: int | None = None  # offset of the prompt whose text is shown
        self._marks: deque[str] = deque(maxlen=3)
        self._live = Live(console=console, refresh_per_second=6, get_renderable=self._draw_panel)

    @override
    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    @override
    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    @override
    def remember(self, prompt: PromptCompleted) -> None:
        super().remember(prompt)
        self._bar.update(self._task, completed=self._prompts, dataset=prompt.dataset)

    @override
    def show(self, event: Event) -> None:
        """Record an event; the display's own thread draws it."""
        super().show(event)
        match event:
            case TokenDecision() if event.origin is not None:
                self._write(event, event.origin)
            case PromptCompleted():
                if event.offset == self._followed:
                    self._text.append((self._stream.close() + "\n", ""))
                    self._followed = None
                self._bar.update(self._task, completed=self._prompts, dataset=event.dataset)
            case Drifted():
                self._marks.append(event.description)
            case Recalled():
                self._marks.append(_recall_line(event))

    def _write(self, decision: TokenDecision, origin: Origin) -> None:
        if self._followed is None and decision.position == 0:
            self._followed = decision.offset
        if decision.offset == self._followed:
            self._text.append((_make_printable(self._stream.push([decision])), STYLES[origin]))

    def _draw_panel(self) -> Panel:
        self._bar.update(self._task, left=self._describe_left())
        lines: list[Text] = [Text(self._status_line()), self._draw_curve()]
        lines += [Text(f"▼ {mark}", style="red") for mark in list(self._marks)]
        return Panel(Group(self._bar, *lines, self._draw_text()), title="omnidraft replay", border_style="dim")

    def _draw_curve(self) -> Text:
        width = max(10, self._console.width - 18)
        text = Text("acceptance  ", style="bold")
        for rate, drifted in self._curve[-width:]:
            bar = "·" if rate is None else BARS[min(int(rate * len(BARS)), len(BARS) - 1)]
            text.append("▼" if drifted else bar, style="red" if drifted else "green")
        return text

    def _draw_text(self) -> Text:
        """Return the last lines of the text, coloured by the origin of each token."""
        text = Text(overflow="fold")
        for part, style in list(self._text):
            text.append(part, style)
        wrapped = text.wrap(self._console, max(20, self._console.width - 4))
        return Text("\n").join([*wrapped[-4:], *[Text("")] * max(0, 4 - len(wrapped))])


def _make_printable(text: str) -> str:
    """Replace characters that would control the terminal."""
    plain = text.replace("\t", " ")
    return "".join(character if character.isprintable() or character == "\n" else "·" for character in plain)


def make_display(console: Console, clock: Callable[[], float], total: int | None) -> Display:
    """Make a live panel on a terminal, messages of the log elsewhere."""
    return LiveDisplay(console, clock, total) if console.is_terminal else PlainDisplay(clock, total)
