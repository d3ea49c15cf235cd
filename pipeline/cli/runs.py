"""Which run a command means when none is named, and the commands that show a run."""

import logging
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import OmnidraftError, RunError

if TYPE_CHECKING:
    from pipeline.config.settings import Config
    from store.log.manifest import RunKind

LOG = logging.getLogger("omnidraft.cli")

LAST = Path("last")  # in place of a run's folder: the newest run that can be resumed


def newest_run(runs: Path) -> Path:
    """Return the run below a folder that committed last, of those with a completed prompt if there are some. Raises as
    `run_folders`.
    """
    from store.log.partitions import committed_at, named_parts
    from store.query.log_reader import run_folders

    def has_prompts(folder: Path) -> bool:
        try:
            return any(part.rows for _, part in named_parts(folder, "prompts"))
        except OmnidraftError:  # which the reader of this run reports
            return True

    newest, *others = sorted(run_folders(runs), key=committed_at, reverse=True)
    return next((folder for folder in (newest, *others) if has_prompts(folder)), newest)


def local_run(run: Path | None, runs: Path) -> Path:
    """Return the folder of the named or the newest run; of one on an object store what was fetched of it."""
    from store.object_store.mirror import local_copy

    return local_copy(run or newest_run(runs))


def last_unfinished(kinds: Collection["RunKind"], runs: Path) -> Path:
    """Return the newest run that can be resumed, of the kinds that the command resumes."""
    from pipeline.run.folder import CONFIG, is_unfinished
    from store.log.manifest import has_manifest, read_manifest
    from store.log.partitions import committed_at

    def begun_or_committed(folder: Path) -> float:
        return max(committed_at(folder), (folder / CONFIG).stat().st_mtime)

    for folder in sorted((path.parent for path in runs.glob(f"*/{CONFIG}")), key=begun_or_committed, reverse=True):
        if not is_unfinished(folder):
            continue
        kind = read_manifest(folder).kind if has_manifest(folder) else None
        if kind is None or kind in kinds:
            LOG.info("resuming %s", folder, extra={"run": str(folder)})
            return folder
    raise RunError(
        f"a run that can be resumed must be below {runs}, but there is none; name the folder of another with --resume"
    )


def write_store(mlflow_uri: str | None, runs: Path) -> str:
    """Write the option that names a store in a command, after a space: nothing for that of the default runs."""
    from pipeline.run.folder import RUNS

    if mlflow_uri:
        return f" --mlflow-uri {shlex.quote(mlflow_uri)}"
    return "" if runs == RUNS else f" --runs {shlex.quote(str(runs))}"


def list_next_commands(config: "Config", run: str, versions: int) -> list[str]:
    """List the commands that show a run that ended, given its name on a command line and its number of versions."""
    from pipeline.run.folder import RUNS
    from store.object_store.uri import uri_of

    named = f"--run {shlex.quote(run)}"
    commands = [f"omnidraft dashboard {named}", f"omnidraft sql {named} --recipe acceptance-over-time"]
    if versions:
        store = write_store(config.publish.mlflow_uri, RUNS if uri_of(Path(run)) else Path(run).parent)
        commands.append(f"omnidraft versions{store}")
        if versions > 1 and config.learn.enabled:
            name = shlex.quote(config.name_registered_model(config.targets[0]))
            own = f"{Path(run).absolute().name}/{versions - 1}"
            newest = shlex.quote(own if len(config.targets) == 1 else "candidate")
            commands.append(f"omnidraft versions compare baseline {newest}{store} --name {name}")
    return commands
