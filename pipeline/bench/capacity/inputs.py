"""The measured values that a plan is computed from, each with its source, and the values of a run that replace them.

All were measured on two cores shared with other work. Times are processor time, which other work disturbs least.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from store.errors import RunError, UsageError
from store.log.manifest import MANIFEST, Manifest
from store.log.partitions import read_manifests
from store.query.log_reader import LogReader

BYTES = 4  # per parameter, in published versions and in weights sent to workers
STUDIED = "omnidraft bench-plan"
WEIGHTS = "model.safetensors"  # of the drafter, in a version's folder
_DECODING = """
SELECT count(*) AS prompts, (SELECT sum(seconds_decode + seconds_translate + seconds_verify) FROM blocks) AS seconds
FROM prompts
"""
SENT = "omnidraft bench-plan --registry-of, MLflow on SQLite"


def _measured_field(value: Any, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class CapacityInputs:
    """The measured values that a plan needs. Seconds are processor time.

    Attributes:
        drafter_parameters: number of parameters of the drafter.
        worker_prompts: prompts per second that one worker completes.
        example_bytes: size of a completed prompt sent to the learner.
        example_seconds: time of the learner per completed prompt, without an update.
        update_examples: fresh training examples per update.
        update_seconds, update_seconds_per_parameter: time of such an update, the gate included.
        handout_seconds, handout_seconds_per_parameter: time to commit an update and copy the weights.
        head_bytes: size of the head and all else sent along with the drafter's weights.
        version_bytes: size of a published version without the drafter's weights.
        version_seconds: time of MLflow per published version.
        points: points sent to MLflow per prompt.
        point_seconds: time of MLflow per point.
        log_bytes: size of the log per prompt, without the constant size of its parts.
        part_bytes: constant size of a part.
        parts: parts that one commit of a worker writes.
        manifest_bytes: size of the manifest per part.
        commit_seconds, commit_prompts: minimum seconds and maximum prompts between two commits of a worker.
        portion_seconds: longest time that prompts, training examples and weights wait for a worker's next work item.
        head_seconds: seconds after which a new head is sent to workers without an update of the drafter, and the
            drafter's weights with it.
        driver_seconds: time per prompt of the process that routes prompts to Ray workers.
        curve: pairs of (training examples since a change of traffic, acceptance rate after them).
    """

    drafter_parameters: float = _measured_field(1_598_400, "builtin:drafter-1.6m")
    worker_prompts: float = _measured_field(7.3, "docs/benchmarks.md, the main job: 300 prompts in 40.8 s on one core")
    example_bytes: float = _measured_field(55_800, "bench-plan gsm8k.parquet mbpp.parquet --limit 32 --delays 0")
    example_seconds: float = _measured_field(0.006, STUDIED)
    update_examples: float = _measured_field(4, "the setting learn.interval")
    update_seconds: float = _measured_field(0.064, STUDIED)
    update_seconds_per_parameter: float = _measured_field(1.08e-7, f"{STUDIED} with drafters of 1.6M and 7.3M")
    handout_seconds: float = _measured_field(0.0055, STUDIED)
    handout_seconds_per_parameter: float = _measured_field(3.0e-9, f"{STUDIED} with drafters of 1.6M and 7.3M")
    head_bytes: float = _measured_field(85_996, "head.safetensors of a version of the built-in drafter")
    version_bytes: float = _measured_field(354_000, "a version of the built-in drafter, without its weights")
    version_seconds: float = _measured_field(0.15, SENT)
    points: float = _measured_field(6.3, SENT)
    point_seconds: float = _measured_field(0.0003, SENT)
    log_bytes: float = _measured_field(
        1_364, "omnidraft plan --run over 64 prompts committed at once, without the learner's parts"
    )
    part_bytes: float = _measured_field(3_376, "the same prompts with a commit after each: 57 commits, 10.1 kB each")
    parts: float = _measured_field(3, "decisions, blocks, prompts")
    manifest_bytes: float = _measured_field(240, "docs/faults.md")
    commit_seconds: float = _measured_field(10.0, "the setting commit.seconds")
    commit_prompts: float = _measured_field(256, "the setting commit.prompts")
    portion_seconds: float = _measured_field(1.0, "WORK_SECONDS of pipeline/cluster/worker.py")
    head_seconds: float = _measured_field(5.0, "HEAD_SECONDS of pipeline/cluster/learner.py")
    driver_seconds: float = _measured_field(
        0.0006, "omnidraft replay --ray local --workers 1, 900 prompts more: processor time of its own process"
    )
    curve: tuple[tuple[float, float], ...] = _measured_field(
        ((0, 0.146), (16, 0.296), (48, 0.519), (80, 0.563), (112, 0.574), (144, 0.611)), STUDIED
    )

    @property
    def weights(self) -> float:
        """Bytes of new weights sent to one worker."""
        return BYTES * self.drafter_parameters + self.head_bytes

    @property
    def version(self) -> float:
        """Bytes of one published version."""
        return BYTES * self.drafter_parameters + self.version_bytes

    @property
    def update(self) -> float:
        """Seconds to compute an update, commit it and copy its weights."""
        per_parameter = self.update_seconds_per_parameter + self.handout_seconds_per_parameter
        return self.update_seconds + self.handout_seconds + per_parameter * self.drafter_parameters

    def with_numbers(self, given: Mapping[str, object]) -> "CapacityInputs":
        """A copy with the numbers in `given` in place of those of the same names.

        Raises:
            UsageError: a name is unknown, or a value is not a finite number from 0.
        """
        known = {one.name for one in fields(self) if isinstance(one.default, int | float)}
        numbers: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known or not isinstance(value, int | float) or not 0 <= value < inf:
                raise UsageError(f"--figure must be NAME=NUMBER of {', '.join(sorted(known))}; got {name}={value}")
            numbers[name] = float(value)
        return replace(self, **numbers)

    def sources(self) -> dict[str, str]:
        """The source of each value, by name."""
        return {one.name: one.metadata["source"] for one in fields(self)}


def inputs_of_run(run_folder: Path, known: CapacityInputs) -> dict[str, float]:
    """Values measured in a run, which replace those of the same names in `CapacityInputs`.

    Learning times are not among them, because the clock of a run includes the time that its learner slept.

    Args:
        run_folder: folder of a run with completed prompts in its log.
        known: values for what the run does not show.

    Raises:
        RunError: the folder holds no log, or no completed prompt.
    """
    with LogReader([run_folder]) as log:
        (decoded,) = log.select(_DECODING).to_pylist()
    if not decoded["prompts"] or not decoded["seconds"]:
        raise RunError(f"{run_folder} must hold completed prompts to plan by, but has none; see --run")
    found = {"worker_prompts": decoded["prompts"] / decoded["seconds"]}
    return found | _read_log(read_manifests(run_folder), decoded["prompts"], known) | _read_versions(run_folder)


def _read_log(manifests: Mapping[Path, Manifest], prompts: int, known: CapacityInputs) -> dict[str, float]:
    """Values of the log; assumes that every part has the known constant size."""
    sizes = [part.bytes for one in manifests.values() for parts in one.tables.values() for part in parts]
    lengths = sum((folder / MANIFEST).stat().st_size for folder in manifests)
    for_itself = min(known.part_bytes, *sizes)
    return {
        "log_bytes": (sum(sizes) - for_itself * len(sizes)) / prompts,
        "part_bytes": for_itself,
        "manifest_bytes": lengths / len(sizes),
    }


def _read_versions(run_folder: Path) -> dict[str, float]:
    """Values of the newest published version; empty if there is none."""
    weights = max(run_folder.glob(f"versions/[0-9]*/{WEIGHTS}"), default=None)
    if weights is None:
        return {}
    of_weights, files = weights.stat().st_size, [path for path in weights.parent.rglob("*") if path.is_file()]
    return {
        "drafter_parameters": of_weights / BYTES,
        "version_bytes": float(sum(path.stat().st_size for path in files) - of_weights),
    }
