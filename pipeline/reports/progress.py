"""The display of a run: a live panel in a terminal, messages of the log elsewhere."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Self

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
from store.query.rates import Acceptance, describe_rarity

LOG = logging.getLogger("omnidraft.progress")

BARS = "▁▂▃▄▅▆▇█"
BUCKET = 5  # prompts per bar of the curve
LINE_SECONDS = 10.0  # between two messages of the log on progress
STYLES = {Origin.ACCEPTED: "green", Origin.RESIDUAL: "yellow", Origin.BONUS: "cyan"}


class ProgressCounters:
    """The counters that both displays show.

    Args:
        clock: returns the time in seconds.
        total: expected number of prompts, None if unknown.
    """

    def __init__(self, clock: Callable[[], float], total: int | None = None) -> None:
        self._clock, self._began, self.total = clock, clock(), total
        self._earlier = 0  # prompts of earlier processes
        self.prompts = self.emitted = 0  # completed prompts, and their target tokens
        self.drafter = 0  # number of the drafter's updates in service
        self.drifts = 0  # that were acted upon
        self.rejected = 0  # source rows
        self.version: int | None = None  # newest published version, or None
        self.dataset = ""
        # acceptance per `BUCKET` prompts, None if nothing was judged, and whether a drift was acted upon in it
        self.curve: list[tuple[float | None, bool]] = []
        self._bucket: list[PromptCompleted] = []
        self._drifted = False
        self._first: list[PromptCompleted] = []
        self._recent: deque[PromptCompleted] = deque(maxlen=20)

    def add(self, event: Event) -> None:
        """Add an event to the counters."""
        match event:
            case PromptCompleted():
                self._complete(event)
            case Drifted() if event.acted_upon:
                self.drifts += 1
                self._drifted = True
            case VersionPublished():
                self.version = event.version
                if self.prompts == self._earlier:  # the baseline: measuring it is not a part of the stream
                    self._began = self._clock()
            case PromptRejected():
                self.rejected += 1

    def remember(self, prompt: PromptCompleted) -> None:
        """Count a prompt of an earlier process, but not its tokens."""
        self._complete(prompt)
        self.emitted -= prompt.emitted
        self._earlier += 1

    def _complete(self, prompt: PromptCompleted) -> None:
        self.prompts += 1
        self.emitted += prompt.emitted
        self.drafter, self.dataset = prompt.drafter_version, prompt.dataset
        if len(self._first) < 20:
            self._first.append(prompt)
        self._recent.append(prompt)
        self._bucket.append(prompt)
        if len(self._bucket) == BUCKET:
            self.curve.append((Acceptance.sum_over(self._bucket).rate, self._drifted))
            self._bucket, self._drifted = [], False

    @property
    def acceptance_now(self) -> Acceptance:
        """That of the last 20 prompts."""
        return Acceptance.sum_over(list(self._recent))  # a copy: the display's own thread calls this meanwhile

    @property
    def acceptance_first(self) -> Acceptance:
        """That of the first 20 prompts."""
        return Acceptance.sum_over(list(self._first))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall time since the first prompt began."""
        spent = self._clock() - self._began
        return self.emitted / spent if spent > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the other prompts at the speed so far; None if their number or the speed is unknown."""
        done = self.prompts - self._earlier
        if self.total is None or not done:
            return None
        return max(0, self.total - self.prompts) * (self._clock() - self._began) / done


class Display(ABC):
    """Sees every event of a run, in order; a context manager around the run.

    Args:
        clock: returns the time in seconds.
        total: expected number of prompts, None if unknown.
    """

    def __init__(self, clock: Callable[[], float], total: int | None = None) -> None:
        self._clock, self._counters = clock, ProgressCounters(clock, total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def remember(self, prompt: PromptCompleted) -> None:
        """Count a prompt that was completed before the run was resumed."""
        self._counters.remember(prompt)

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show one event of the run."""


class PlainDisplay(Display):
    """Messages of the log, for a file or a pipe."""

    def __init__(self, clock: Callable[[], float], total: int | None = None) -> None:
        super().__init__(clock, total)
        self._due, self._has_reported = clock() + LINE_SECONDS, False

    @override
    def show(self, event: Event) -> None:
        """Log a message every 10 seconds, at the first completed prompt, and for every drift, recall and version."""
        self._counters.add(event)
        self._report_if_due(completed=isinstance(event, PromptCompleted))
        match event:
            case Drifted():
                LOG.info("%s", _drift_line(event), extra={"prompt": event.offset, "action": event.action})
            case Recalled():
                LOG.info("%s", _recall_line(event), extra={"prompt": event.offset, "version": event.version})
            case VersionPublished():
                version = {"prompt": event.offset, "version": event.version, "reason": event.reason}
                LOG.info("version %d, up to prompt %d (%s)", event.version, event.offset, event.reason, extra=version)

    def _report_if_due(self, *, completed: bool) -> None:
        now, is_first = self._clock(), completed and not self._has_reported
        if is_first or now >= self._due:
            left = _describe_left(self._counters)
            line = ", ".join([_status_line(self._counters), *([left] if left else [])])
            LOG.info("%s", line, extra=_status_fields(self._counters))
            self._due, self._has_reported = now + LINE_SECONDS, self._has_reported or completed


def _status_line(counters: ProgressCounters) -> str:
    done = f"{counters.prompts} prompts" if counters.total is None else f"{counters.prompts}/{counters.total} prompts"
    parts = [done]
    if counters.prompts:
        parts += [
            f"{counters.tokens_per_second:.0f} tokens/s",
            f"acceptance {counters.acceptance_now}, first 20 prompts {_format_rate(counters.acceptance_first.rate)}",
            f"drafter {counters.drafter}",
            f"version {'-' if counters.version is None else counters.version}",
            f"drifts {counters.drifts}",
        ]
    if counters.rejected:
        parts.append(f"rejected rows {counters.rejected}")
    return ", ".join(parts)


def _describe_left(counters: ProgressCounters) -> str:
    """Describe the time that the other prompts take; empty if it is unknown."""
    left = counters.seconds_left
    return "" if left is None else f"{format_duration(left)} left"


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _status_fields(counters: ProgressCounters) -> dict[str, object]:
    """Return the numbers of a status line."""
    return {
        "prompts": counters.prompts,
        "total": counters.total,
        "seconds_left": counters.seconds_left,
        "tokens_per_second": counters.tokens_per_second,
        "acceptance": counters.acceptance_now.rate,
        "acceptance_interval": counters.acceptance_now.interval,
        "acceptance_judged": counters.acceptance_now.judged,
        "acceptance_first": counters.acceptance_first.rate,
        "drafter_version": counters.drafter,
        "version": counters.version,
        "drifts": counters.drifts,
        "rejected_rows": counters.rejected,
    }


SIGNALS = {  # what the rates of a drift are
    "drafted": "share of drafted tokens",
    "predicted": "share of tokens that the memory predicted",
    "learned": "share of tokens drafted from earlier prompts",
    "first": "acceptance of first tokens",
}


def _drift_line(event: Drifted) -> str:
    return f"prompt {event.offset} ({event.dataset}): drift, {_describe_change(event)}, {event.action}"


def _describe_change(event: Drifted) -> str:
    """Describe what the monitored signal did."""
    if event.signal == "frequency":
        return f"tokens {describe_rarity(event.rate_before, event.rate_after)} in earlier completions"
    return f"{SIGNALS.get(event.signal, 'acceptance')} {event.rate_before:.3f} -> {event.rate_after:.3f}"


def _recall_line(event: Recalled) -> str:
    rates = f"expected acceptance {event.acceptance_present:.3f}, best of {event.candidates} earlier ones "
    action = "the present drafter stays" if event.version is None else f"version {event.version} is restored"
    return f"prompt {event.offset}: {rates}{event.acceptance_best:.3f}, {action}"


class LiveDisplay(Display):
    """A panel that is redrawn a few times a second: progress, metrics, the acceptance curve, the text.

    The text is that of one prompt at a time: the first prompt that begins after the last shown one is complete.

    Args:
        console: a terminal.
        clock: returns the time in seconds.
        total: expected number of prompts, None if unknown.
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
        self._bar.update(self._task, completed=self._counters.prompts, dataset=prompt.dataset)

    @override
    def show(self, event: Event) -> None:
        """Record an event; the display's own thread draws it."""
        self._counters.add(event)
        match event:
            case TokenDecision() if event.origin is not None:
                self._write(event, event.origin)
            case PromptCompleted():
                if event.offset == self._followed:
                    self._text.append((self._stream.close() + "\n", ""))
                    self._followed = None
                self._bar.update(self._task, completed=self._counters.prompts, dataset=event.dataset)
            case Drifted():
                self._marks.append(_drift_line(event))
            case Recalled():
                self._marks.append(_recall_line(event))

    def _write(self, decision: TokenDecision, origin: Origin) -> None:
        if self._followed is None and decision.position == 0:
            self._followed = decision.offset
        if decision.offset == self._followed:
            self._text.append((_make_printable(self._stream.push([decision])), STYLES[origin]))

    def _draw_panel(self) -> Panel:
        self._bar.update(self._task, left=_describe_left(self._counters))
        lines: list[Text] = [Text(_status_line(self._counters)), self._draw_curve()]
        lines += [Text(f"▼ {mark}", style="red") for mark in list(self._marks)]
        return Panel(Group(self._bar, *lines, self._draw_text()), title="omnidraft replay", border_style="dim")

    def _draw_curve(self) -> Text:
        width = max(10, self._console.width - 18)
        text = Text("acceptance  ", style="bold")
        for rate, drifted in self._counters.curve[-width:]:
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
