"""What a run shows while it goes on: a live panel in a terminal, plain lines elsewhere."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from stages.text_stream import TextStream
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

BARS = "▁▂▃▄▅▆▇█"
BUCKET = 5  # prompts of one bar of the curve
LINE_EVERY = 25  # prompts between two plain lines
STYLES = {Origin.ACCEPTED: "green", Origin.RESIDUAL: "yellow", Origin.BONUS: "cyan"}


class Display(Protocol):
    """Sees every event of a run, in order; a context manager around the run."""

    def show(self, event: Event) -> None:
        """Take note of an event."""
        ...

    def remember(self, prompt: PromptCompleted) -> None:
        """A prompt that was completed before the run was gone on with."""
        ...

    def note(self, text: str) -> None:
        """Tell the user something that is no event."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Tally:
    """The figures that both displays show.

    Attributes:
        prompts, emitted: completed prompts, and their target tokens.
        drafter: number of the drafter's served updates.
        version: last published version, or None.
        drifts: acted-upon falls.
        rejected: source rows left out.
        curve: acceptance per `BUCKET` prompts, and whether a drift was acted upon in it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self.prompts = self.emitted = self.drafter = self.drifts = self.rejected = 0
        self.version: int | None = None
        self.dataset = ""
        self.curve: list[tuple[float, bool]] = []
        self._bucket: list[PromptCompleted] = []
        self._drifted = False
        self._first: list[PromptCompleted] = []
        self._recent: deque[PromptCompleted] = deque(maxlen=20)

    def add(self, event: Event) -> None:
        """Count an event."""
        match event:
            case PromptCompleted():
                self._complete(event)
            case Drifted() if event.acted_upon:
                self.drifts += 1
                self._drifted = True
            case VersionPublished():
                self.version = event.version
            case PromptRejected():
                self.rejected += 1

    def remember(self, prompt: PromptCompleted) -> None:
        """Count a prompt of before, but not as tokens of this process's time."""
        self._complete(prompt)
        self.emitted -= prompt.emitted

    def _complete(self, prompt: PromptCompleted) -> None:
        self.prompts += 1
        self.emitted += prompt.emitted
        self.drafter, self.dataset = prompt.drafter_version, prompt.dataset
        if len(self._first) < 20:
            self._first.append(prompt)
        self._recent.append(prompt)
        self._bucket.append(prompt)
        if len(self._bucket) == BUCKET:
            self.curve.append((_acceptance(self._bucket), self._drifted))
            self._bucket, self._drifted = [], False

    @property
    def acceptance_now(self) -> float:
        """Accepted over judged in the last 20 prompts."""
        return _acceptance(self._recent)

    @property
    def acceptance_first(self) -> float:
        """Accepted over judged in the first 20 prompts."""
        return _acceptance(self._first)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall time since the display began."""
        spent = self._clock() - self._began
        return self.emitted / spent if spent > 0 else 0.0


def _acceptance(changing: Iterable[PromptCompleted]) -> float:
    prompts = list(changing)  # at once: the display's own thread calls this while prompts complete
    judged = sum(prompt.judged for prompt in prompts)
    return sum(prompt.accepted for prompt in prompts) / judged if judged else 0.0


class PlainDisplay:
    """Lines for a log file or a pipe, on standard error."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._tally = console, Tally(clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def remember(self, prompt: PromptCompleted) -> None:
        """Without a line."""
        self._tally.remember(prompt)

    def note(self, text: str) -> None:
        """One line, however long."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, event: Event) -> None:
        """A line every so often, and for every drift, recall and version."""
        self._tally.add(event)
        match event:
            case PromptCompleted() if self._tally.prompts % LINE_EVERY == 0:
                self.note(_status(self._tally))
            case Drifted():
                self.note(_drift_line(event))
            case Recalled():
                self.note(_recall_line(event))
            case VersionPublished():
                self.note(f"prompt {event.offset}: version {event.version} ({event.reason})")


def _status(tally: Tally) -> str:
    version = "-" if tally.version is None else tally.version
    return (
        f"{tally.prompts} prompts, {tally.tokens_per_second:.0f} tokens/s, acceptance {tally.acceptance_now:.3f} "
        f"(first 20 prompts {tally.acceptance_first:.3f}), drafter {tally.drafter}, version {version}, "
        f"drifts {tally.drifts}" + (f", rejected rows {tally.rejected}" if tally.rejected else "")
    )


def _drift_line(event: Drifted) -> str:
    return (
        f"prompt {event.offset} ({event.dataset}): drift, acceptance {event.rate_before:.3f} -> "
        f"{event.rate_after:.3f}, {event.action}"
    )


def _recall_line(event: Recalled) -> str:
    rates = f"expected acceptance {event.acceptance_present:.3f}, best of {event.candidates} earlier ones "
    found = "the present drafter stays" if event.version is None else f"version {event.version} is taken back"
    return f"prompt {event.offset}: {rates}{event.acceptance_best:.3f}, {found}"


class LiveDisplay:
    """A panel that is drawn anew a few times a second: progress, figures, the acceptance curve, the text.

    The text is that of one prompt at a time: of several in a batch the one that began first after the last was done.

    Args:
        console: a terminal.
        clock: seconds.
        total: prompts expected, None if unknown.
    """

    def __init__(self, console: Console, clock: Callable[[], float], total: int | None) -> None:
        self._console, self._tally = console, Tally(clock)
        self._bar = Progress(
            TextColumn("[bold]{task.fields[dataset]}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("", total=total, dataset="")
        self._text: deque[tuple[str, str]] = deque(maxlen=120)
        self._stream: TextStream[TokenDecision] = TextStream(lambda decision: decision.emitted_bytes)
        self._followed: int | None = None  # offset of the prompt whose text is shown
        self._marks: deque[str] = deque(maxlen=3)
        self._live = Live(console=console, refresh_per_second=6, get_renderable=self._panel)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def remember(self, prompt: PromptCompleted) -> None:
        """Without a line."""
        self._tally.remember(prompt)
        self._bar.update(self._task, completed=self._tally.prompts, dataset=prompt.dataset)

    def note(self, text: str) -> None:
        """Above the panel."""
        self._console.print(text, markup=False, highlight=False)

    def show(self, event: Event) -> None:
        """Take note; drawing happens on the display's own thread."""
        self._tally.add(event)
        match event:
            case TokenDecision() if event.origin is not None:
                self._write(event, event.origin)
            case PromptCompleted():
                if event.offset == self._followed:
                    self._text.append((self._stream.close() + "\n", ""))
                    self._followed = None
                self._bar.update(self._task, completed=self._tally.prompts, dataset=event.dataset)
            case Drifted():
                self._marks.append(_drift_line(event))
            case Recalled():
                self._marks.append(_recall_line(event))

    def _write(self, decision: TokenDecision, origin: Origin) -> None:
        if self._followed is None and decision.position == 0:
            self._followed = decision.offset
        if decision.offset == self._followed:
            self._text.append((_printable(self._stream.push([decision])), STYLES[origin]))

    def _panel(self) -> Panel:
        lines: list[Text] = [Text(_status(self._tally)), self._curve()]
        lines += [Text(f"▼ {mark}", style="red") for mark in list(self._marks)]
        return Panel(Group(self._bar, *lines, self._tail()), title="omnidraft replay", border_style="dim")

    def _curve(self) -> Text:
        width = max(10, self._console.width - 18)
        text = Text("acceptance  ", style="bold")
        for rate, drifted in self._tally.curve[-width:]:
            bar = BARS[min(int(rate * len(BARS)), len(BARS) - 1)]
            text.append("▼" if drifted else bar, style="red" if drifted else "green")
        return text

    def _tail(self) -> Text:
        """The last lines of the text, coloured by where each token came from."""
        text = Text(overflow="fold")
        for part, style in list(self._text):
            text.append(part, style)
        wrapped = text.wrap(self._console, max(20, self._console.width - 4))
        return Text("\n").join([*wrapped[-4:], *[Text("")] * max(0, 4 - len(wrapped))])


def _printable(text: str) -> str:
    """The text without what would steer the terminal."""
    plain = text.replace("\t", " ")
    return "".join(character if character.isprintable() or character == "\n" else "·" for character in plain)


def make_display(console: Console, clock: Callable[[], float], total: int | None) -> Display:
    """A live panel on a terminal, plain lines elsewhere."""
    return LiveDisplay(console, clock, total) if console.is_terminal else PlainDisplay(console, clock)
