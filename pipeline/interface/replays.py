"""A replay from Python: the same run as `omnidraft replay`, with a typed result."""

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from pipeline.config.settings import Config
from pipeline.interface.arguments import (
    Name,
    Names,
    Settings,
    build_config,
    flatten_settings,
    model_settings,
    restored_threads,
    text_names,
)
from pipeline.interface.log import Log, open_log
from pipeline.interface.versions import PublishedVersion
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.reports.progress import PlainDisplay, make_display
from pipeline.reports.terminal import stderr_console
from pipeline.run.folder import is_unfinished, mlflow_of, open_new_run, open_run, resumed_config
from pipeline.run.replay import Replay
from store.errors import ConfigError, RunError
from store.log.run_log import Mirror


@dataclass(frozen=True)
class StreamMetrics:
    """Metrics of a whole stream, or of its prompts of one dataset or target. What nothing was measured for is None."""

    prompts: int  #: completed
    emitted_tokens: int  #: target tokens of their completions
    target_forwards: int  #: blocks, each one pass of the target for one prompt
    wall_seconds: float  #: while n prompts are in flight, each counts 1/n of the time
    tokens_per_second: float | None  #: emitted tokens per wall second
    acceptance_rate: float | None  #: accepted over judged tokens of what the drafter model proposed
    acceptance_interval: Sequence[float] | None  #: ends of its interval of 95%
    judged_tokens: int  #: number of tokens that the acceptance rate is over
    mean_accepted_length: float | None  #: accepted tokens per block that the drafter model drafted
    block_efficiency: float | None  #: emitted tokens per block, between 1 and the draft length plus 1
    lookup_share: float | None  #: share of the blocks that were drafted by copying earlier text
    lookup_acceptance_rate: float | None  #: accepted over judged tokens of those
    seconds: Mapping[str, float]  #: by stage: decode, translate, verify, learn

    @classmethod
    def from_summary(cls, values: Mapping[str, Any]) -> Self:
        """One group of `summary.json`."""
        return cls(**{one.name: values[one.name] for one in fields(cls)})


@dataclass(frozen=True)
class RunSummary:
    """The metrics of a run, computed from its committed log. `RUN/summary.json` holds the same and more."""

    totals: StreamMetrics  #: of the whole stream
    datasets: Mapping[str, StreamMetrics]  #: by name, in the order of the stream
    targets: Mapping[str, StreamMetrics]  #: by name, in the order of the stream
    #: detected falls of the acceptance rate, each with `offset`, `action`, `rate_before`, `rate_after`,
    #: `description`, `dataset` and `target`.
    drifts: Sequence[Mapping[str, Any]]
    #: published drafter versions, each with `version` (folder `RUN/versions/{version:06d}`), `offset`, `reason`,
    #: `dataset` and `target`.
    versions: Sequence[Mapping[str, Any]]
    rejected_rows: int  #: source rows that could not become prompts; `RUN/rejected.jsonl` has them with the reason

    @classmethod
    def from_summary(cls, values: Mapping[str, Any]) -> Self:
        """The summary of the values that `store.query.summary.summarize` returns."""
        totals, groups = values["totals"], (values["datasets"], values["targets"])
        datasets, targets = ({name: StreamMetrics.from_summary(one) for name, one in group.items()} for group in groups)
        drifts, versions = totals["drifts"], totals["versions"]
        return cls(StreamMetrics.from_summary(totals), datasets, targets, drifts, versions, values["rejected_rows"])


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay: the folder of its `run`, its `summary`, and the `mlflow_uri` of its versions."""

    run: Path  #: its folder, with the log, the versions and `summary.json`
    summary: RunSummary  #: its metrics
    mlflow_uri: str | None  #: the MLflow store that its versions were sent to; None if nothing was published

    def log(self) -> Log:
        """The run's log; see `open_log`."""
        return open_log(self.run)


def replay(
    sources: Names | None = None,
    *,
    target: Names | None = None,
    drafter: Name | PublishedVersion | None = None,
    run: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    config: Settings | None = None,
    progress: bool = False,
    **settings: object,
) -> ReplayResult:
    """Replay prompt sources, one after another, as one stream: the drafter drafts, the target verifies, and
    the drafter is trained on every verdict.

    Blocks until the stream ends. Several replays may follow each other in one process. In the main thread, Ctrl-C and
    SIGTERM commit what was done and raise `KeyboardInterrupt`; elsewhere no signal handler is installed. The number of
    torch's threads is the same afterwards as before.

    Args:
        sources: files, `hf://...`, `builtin:docs` and the others of `omnidraft replay`; one or several. None: the
            built-in documentation, then the built-in code.
        target: target model, or several: a hub name, a folder or `builtin:NAME`.
        drafter: draft model: as the target, a version from `load_version`, or `models:/NAME/NUMBER`.
        run: folder of the run, which must be new or empty, or `s3://BUCKET/PATH`. None: a new folder below `runs`.
        resume: resume the unfinished run in this folder from its last commit. It has its own settings: only
            `publish={"mlflow_uri": ...}` may be given with it.
        config: settings that the other arguments override: a `Config`, a mapping such as `{"learn.rate": 0.002}`, or
            the path of a TOML file. None: the defaults.
        progress: show the run's progress on standard error. False: nothing is printed; messages go to the logger
            `omnidraft`.
        settings: any other setting by its name, those of a section as a mapping: `batch=8, sampling={"top_k": 20}`.

    Raises:
        ConfigError: a setting is unknown or its value impossible.
        SourceError: a source cannot be opened or broke off; what was done is committed.
        ModelError, VocabularyError: a model cannot be loaded or the pair cannot work together.
        RunError: the folder is not free, or holds nothing to resume.
        CorruptError: the checkpoint to resume from is not what was committed.
        OmnidraftError: the folder can no longer be written; the last commit holds.
        KeyboardInterrupt: see above.
    """
    overrides = model_settings(target, drafter) | flatten_settings(settings)
    if sources is not None:
        overrides["sources"] = text_names(sources)
    if run is not None:
        overrides["run"] = Path(run)
    chosen, run_folder, mirror = _open_run(resume, config, overrides)
    try:
        with restored_threads():
            summary = _run(chosen, run_folder, mirror, progress, resume=resume is not None)
    finally:
        gc.collect()  # objects of a run refer to each other, and a thread that trains ends with them
    if summary["stopped"]:
        interrupt = KeyboardInterrupt()
        interrupt.add_note(f"what was done is committed; resume it with replay(resume={mirror.name!r})")
        raise interrupt
    uri = (chosen.publish.mlflow_uri or mlflow_of(mirror.name)) if chosen.publish.enabled else None
    return ReplayResult(Path(mirror.name), RunSummary.from_summary(summary), uri)


def _open_run(
    resume: str | os.PathLike[str] | None, config: Settings | None, overrides: dict[str, object]
) -> tuple[Config, Path, Mirror]:
    if resume is None:
        chosen = build_config(config, overrides)
        return chosen, *open_new_run(chosen.run)
    if config is not None:
        raise ConfigError("a run resumes with the settings that it began with, got a config as well; leave it out")
    run_folder, mirror = open_run(Path(resume))
    chosen = resumed_config(run_folder, mirror.name, overrides)
    if not is_unfinished(run_folder):
        raise RunError(f"{mirror.name} must hold an unfinished run to resume, but it is finished; open_log reads it")
    return chosen, run_folder, mirror


def _run(config: Config, run_folder: Path, mirror: Mirror, progress: bool, *, resume: bool) -> dict[str, Any]:
    with write_log(LogLevel.INFO, as_json=False) if progress else nullcontext():
        replay = Replay(config, run_folder, resume=resume, mirror=mirror)
        expected = replay.total()
        shown = make_display(stderr_console(), perf_counter, expected) if progress else PlainDisplay(perf_counter)
        with shown as display:
            return replay.run(display)
