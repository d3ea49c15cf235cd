"""The command `python -m benchmarks.studies STUDY`: the ablations."""

import logging
import time
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import MOST_TOKENS
from benchmarks.studies.definitions import STUDIES, Study, StudyArm, StudyName
from pipeline.config.cli_options import argument, option, overrides_of, parse_settings, set_option
from pipeline.reports.terminal import format_duration, make_console
from store.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.studies.records import Record, StudyFile
    from benchmarks.studies.runner import StudyPlan

LOG = logging.getLogger("omnidraft.study")

PIPE_COLUMNS = 160  # wide enough that a table in a pipe is not folded
# Studies compare what the drafter learns: it is the only source, updates have fixed positions, and decisions are equal
# on every machine.
USUAL: Mapping[str, Any] = {
    "batch": 8,
    "threads": 1,
    "sampling.max_new_tokens": 48,
    "sampling.temperature": 0.0,
    "draft.sources": ("model",),
    "draft.pause": False,
    "draft.costs": "estimated",
    "learn.spacing": "fixed",
    "learn.method": "gradient",  # in closed form there is one loss
}
QUICK = {"source.limit": 16, "sampling.max_new_tokens": 24}
_SOURCES_HELP = "Prompt sources, as for `replay`; drift needs two. [default: builtin:docs builtin:code]"


def study(
    name: Annotated[StudyName, typer.Argument(help="Study to run.", metavar="STUDY")],
    sources: Annotated[list[str] | None, argument("sources", _SOURCES_HELP, "[SOURCE]...")] = None,
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="Target model; may be repeated, with a table for each.")
    ] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds per arm. [default: 3]", min=1)] = None,
    arms: Annotated[str | None, typer.Option(help="Arms to run, separated by semicolons. Default: all.")] = None,
    alternate: Annotated[
        int | None, typer.Option(help="Prompts per segment of a stream A B A B, in the study drift.", min=5)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A trial: one seed, few and short prompts.")] = False,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens", f"{MOST_TOKENS} [default: 48]")] = None,
    limit: Annotated[int | None, option("source.limit")] = None,
    where: Annotated[list[str] | None, option("source.where")] = None,
    settings: Annotated[
        list[str] | None, set_option("Any other setting of all arms, such as source.template; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in its own process.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="File of finished runs, to resume from. [default: runs/study-STUDY.json]")
    ] = None,
) -> None:
    """Compare losses, stop rules, responses to drift, sizes of the n-gram cache, sources of drafts, ways to learn.

    **losses**: no learning, the n-gram cache alone, and every loss. **head**: fixed draft lengths, threshold, cost
    rule. **drift**: detectors and responses at a change of the stream. **cache**: budgets and eviction rules.
    **sources**: no drafts, the own text, the memory as chains and trees, the drafter frozen and learning, and all.
    **learning**: no updates, gradient steps at fixed and paying intervals, least squares without and with the target's
    state.

    With equal seeds every arm sees the same prompts and random draws; arms take turns. Finished runs are saved in a
    file, and the same command resumes with the missing ones. Tables show the paper's ratios between arms next to ours.
    """
    overrides = {**USUAL} | (QUICK if quick else {}) | parse_settings(settings) | overrides_of(study, locals())
    plan = _plan(STUDIES[name], overrides, targets, arms, seeds or (1 if quick else 3), alternate)
    path = out or Path("runs", f"study-{name}.json")
    _study(plan, path, jobs)


def _plan(
    chosen: Study,
    overrides: Mapping[str, Any],
    targets: list[str] | None,
    arms: str | None,
    seeds: int,
    segment: int | None,
) -> "StudyPlan":
    from benchmarks.studies.runner import StudyPlan
    from pipeline.config.settings import Config

    chosen.check({key: value for key, value in overrides.items() if key not in USUAL})
    config = Config().with_overrides(overrides)
    return StudyPlan(chosen, _arms(chosen, arms), config, tuple(targets or config.targets), seeds, segment)


def _arms(chosen: Study, text: str | None) -> tuple[StudyArm, ...]:
    """The arms named in `text`, in the study's order; all of them for None.

    Raises:
        UsageError: a name is unknown.
    """
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


def _study(plan: "StudyPlan", path: Path, jobs: int) -> None:
    from benchmarks.studies.records import StudyFile
    from benchmarks.studies.report import print_report, results_json, results_of
    from benchmarks.studies.runner import run

    file = StudyFile(path, plan.shared_settings())
    try:
        run(plan, file, jobs, RunLogger(plan, file).finish_run)
    except KeyboardInterrupt:
        LOG.info("stopped; finished runs are in %s, and the same command resumes", path)
        raise typer.Exit(130) from None
    results = results_of(plan, list(file.records.values()))
    file.write(results_json(results))
    print_report(make_console(PIPE_COLUMNS), plan, results)


class RunLogger:
    """Logs one line per finished run, with the time that the others take."""

    def __init__(self, plan: "StudyPlan", file: "StudyFile") -> None:
        self._total = len(plan.order())
        self._left = sum(key not in file.records for key in plan.order())
        self._began, self._finished = time.perf_counter(), 0

    def finish_run(self, record: "Record") -> None:
        from benchmarks.studies.metrics import last_fifth

        self._finished, self._left = self._finished + 1, self._left - 1
        rate = last_fifth(record).acceptance
        remaining = (time.perf_counter() - self._began) / self._finished * self._left
        LOG.info(
            "%d of %d: %s, seed %d, %s: last fifth %s, %.0f s; about %s left",
            *(self._total - self._left, self._total, record.key.target, record.key.seed, record.key.arm),
            *("–" if rate is None else f"{rate:.3f}", record.seconds, format_duration(remaining)),
        )
