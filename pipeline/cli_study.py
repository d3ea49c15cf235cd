"""`omnidraft study`: the ablations, each one command."""

import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import option, parsed
from pipeline.study_arms import STUDIES, Arm, Study, StudyName
from store.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from pipeline.study import Plan
    from pipeline.study_publish import StudyPublisher
    from pipeline.study_records import Record, StudyFile

PIPE_COLUMNS = 160  # wide enough that a table in a pipe is not folded
# What is compared is what the drafter learns: by itself, at fixed places, and with the same decisions on every machine.
USUAL = {
    "batch": 8,
    "threads": 1,
    "sampling.max_new_tokens": 48,
    "sampling.temperature": 0.0,
    "draft.lookup": False,
    "draft.only_where_paying": False,
    "draft.costs": "estimated",
    "learn.spacing": "fixed",
    "learn.lag": 0,
}
QUICK = {"source.limit": 16, "sampling.max_new_tokens": 24}
# The command's options and the settings that they override.
_OPTIONS = {
    "drafter": "drafter",
    "batch": "batch",
    "threads": "threads",
    "limit": "source.limit",
    "max_new_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "mlflow_uri": "publish.mlflow_uri",
}


SET = "Any other setting, for all arms, such as source.template; may be repeated."


def _given(words: str, *names: str, **more: Any) -> Any:
    """An option whose default is in its words."""
    return typer.Option(*names, help=words, show_default=False, **more)


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        help="Files or other sources, as for `replay`; drift needs two. [default: builtin:docs builtin:code]",
        metavar="[SOURCE]...",
        show_default=False,
    ),
]


def study(
    name: Annotated[StudyName, typer.Argument(help="What is compared.", metavar="STUDY")],
    sources: Sources = None,
    targets: Annotated[list[str] | None, _given("Target model; may be repeated: a table for each.", "--target")] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    seeds: Annotated[int | None, _given("Seeds per arm. [default: 3]", min=1)] = None,
    arms: Annotated[str | None, _given("Only these arms, with semicolons between.")] = None,
    alternate: Annotated[int | None, _given("drift: segments A B A B of so many prompts.", min=5)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, few and short prompts: a trial.")] = False,
    batch: Annotated[int | None, _given("Prompts decoded at the same time. [default: 8]", min=1)] = None,
    max_new_tokens: Annotated[int | None, _given("Most target tokens in one completion. [default: 48]")] = None,
    temperature: Annotated[float | None, option("sampling.temperature")] = None,
    limit: Annotated[int | None, option("source.limit")] = None,
    where: Annotated[list[str] | None, option("source.where")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET, metavar="KEY=VALUE")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each in a process of its own.")] = 1,
    threads: Annotated[int | None, _given("CPU threads of each run. [default: 1]", min=1)] = None,
    out: Annotated[Path | None, _given("Kept runs, to go on with. [default: runs/study-STUDY.json]")] = None,
    markdown: Annotated[Path | None, _given("Write the tables there as well.")] = None,
    no_publish: Annotated[bool, typer.Option("--no-publish", help="No runs in MLflow.")] = False,
    mlflow_uri: Annotated[str | None, option("publish.mlflow_uri")] = None,
) -> None:
    """Compare ways to learn, to stop drafting, to answer drift, or to bound the n-gram cache.

    **losses**: no learning, the n-gram cache alone, and every loss. **head**: fixed draft lengths, threshold, cost
    rule. **drift**: detectors and answers where the stream changes. **cache**: budgets and eviction.

    Every arm sees the same prompts and draws of each seed; arms take turns. Finished runs are kept in a file, and the
    same command goes on with what is missing. Beside our figures stand the paper's, as ratios between arms.
    """
    given = {key: value for key, value in locals().items() if key in _OPTIONS and value is not None}
    overrides: dict[str, Any] = {**USUAL, **(QUICK if quick else {}), **parsed(settings or [])}
    overrides |= {_OPTIONS[key]: value for key, value in given.items()}
    overrides |= {"sources": tuple(sources)} if sources else {}
    overrides |= {"source.where": tuple(where)} if where else {}
    _check_file(markdown)
    plan = _plan(STUDIES[name], overrides, targets, arms, seeds or (1 if quick else 3), alternate)
    _study(plan, out or Path("runs", f"study-{name}.json"), jobs, markdown, publish=not no_publish)


def _check_file(markdown: Path | None) -> None:
    if markdown is not None and not markdown.absolute().parent.is_dir():
        raise UsageError(f"--markdown must name a file in a folder that exists, got '{markdown}'")


def _plan(
    chosen: Study,
    overrides: Mapping[str, Any],
    targets: list[str] | None,
    arms: str | None,
    seeds: int,
    segment: int | None,
) -> "Plan":
    from pipeline.config import Config
    from pipeline.study import Plan

    chosen.check({key: value for key, value in overrides.items() if key not in USUAL})
    config = Config().with_overrides(overrides)
    return Plan(chosen, _arms(chosen, arms), config, tuple(targets or config.targets), seeds, segment)


def _arms(chosen: Study, text: str | None) -> tuple[Arm, ...]:
    """The named arms in the study's order; all of them for None."""
    if text is None:
        return chosen.arms
    known = [arm.name for arm in chosen.arms]
    names = [part.strip() for part in text.split(";")]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are: {'; '.join(known)}"
            raise UsageError(f"--arms must name arms of the study '{chosen.name}', got '{name}'; {hint}")
    return tuple(arm for arm in chosen.arms if arm.name in names)


def _study(plan: "Plan", path: Path, jobs: int, page: Path | None, *, publish: bool) -> None:
    from rich.console import Console

    from pipeline.study import run
    from pipeline.study_records import StudyFile
    from pipeline.study_report import figures, markdown, print_report
    from pipeline.study_sheets import results_of

    told, file = Console(stderr=True), StudyFile(path, plan.shared())
    try:
        with _watching(told, plan, file, _publisher(plan, path) if publish else None) as watch:
            run(plan, file, jobs, watch)
    except KeyboardInterrupt:
        told.print(f"stopped; finished runs are in {path}, and the same command goes on", markup=False, highlight=False)
        raise typer.Exit(130) from None
    results = results_of(plan, list(file.records.values()))
    file.write(figures(results))
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    print_report(console, plan, results)
    if page is not None:
        page.write_text(markdown(plan, results, _command(), time.strftime("%Y-%m-%d")), encoding="utf-8")


def _command() -> str:
    """What was typed, without the places of the files that it writes."""
    typed = shlex.join(["omnidraft", *sys.argv[1:]])
    return re.sub(r" --(out|markdown)[ =]('[^']*'|\S+)", "", typed)


def _publisher(plan: "Plan", path: Path) -> "StudyPublisher":
    from pipeline.study_publish import StudyPublisher
    from store.registry import default_uri

    uri = plan.config.publish.mlflow_uri or default_uri(Path("runs"))
    return StudyPublisher(uri, plan, path.with_name(f"{path.name}-unsent"))


class Watch:
    """A bar with the remaining time, and a line per finished run, on standard error."""

    def __init__(
        self, progress: "Progress", plan: "Plan", file: "StudyFile", publisher: "StudyPublisher | None"
    ) -> None:
        self._progress, self._publisher = progress, publisher
        self._total = len(plan.order())
        self._left = sum(key not in file.records for key in plan.order())
        self._began, self._finished = time.perf_counter(), 0
        self._task = progress.add_task("", total=self._total, completed=self._total - self._left, prompts=0)
        self._prompts = 0

    def passed(self) -> None:
        """Count a prompt of the run that goes on."""
        self._prompts += 1
        self._progress.update(self._task, prompts=self._prompts)

    def done(self, record: "Record") -> None:
        """Print the run's line, then send it to MLflow: no run is under way in this process."""
        from pipeline.study_figures import last_fifth

        self._finished, self._prompts = self._finished + 1, 0
        self._left -= 1
        self._progress.update(self._task, advance=1, prompts=0)
        rate = last_fifth(record).acceptance
        remaining = (time.perf_counter() - self._began) / self._finished * self._left
        self._tell(
            f"{self._total - self._left} of {self._total}: {record.key.target}, seed {record.key.seed}, "
            f"{record.key.arm}: last fifth {'–' if rate is None else f'{rate:.3f}'}, {record.seconds:.0f} s; "
            f"about {_duration(remaining)} left"
        )
        if self._publisher is not None and not self._publisher.send(record):
            self._tell("MLflow did not take this run; it is sent when the command is run again")

    def _tell(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@contextmanager
def _watching(
    console: "Console", plan: "Plan", file: "StudyFile", publisher: "StudyPublisher | None"
) -> Iterator[Watch]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if publisher is not None:
        publisher.send_left_over()
    columns = (
        TextColumn(f"study {plan.study.name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs, {task.fields[prompts]} prompts of the next"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Watch(progress, plan, file, publisher)
