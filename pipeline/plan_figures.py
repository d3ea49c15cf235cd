"""What a plan is made of: figures that were measured, each with where from, and those of a run that take their place.

All were measured on two cores that other work shared, so times are processor time, which that disturbs least.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from store.errors import UsageError

BYTES = 4  # of one parameter, as versions and weights on their way are kept
STUDIED = "omnidraft bench-plan"
SENT = "omnidraft bench-plan --registry-of, MLflow on SQLite"


def _measured(value: Any, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Figures:
    """Everything measured that a plan needs.

    Attributes:
        drafter_parameters: of the drafter.
        worker_prompts: per second of one worker.
        lesson_bytes: of a completed prompt on its way to the learner.
        lesson_seconds: of the learner for one, without an update.
        update_lessons: fresh lessons of an update.
        update_seconds, update_seconds_per_parameter: of such an update, the gate's share included.
        handout_seconds, handout_seconds_per_parameter: of committing it and copying the weights.
        head_bytes: of what goes with the drafter's weights on their way.
        version_bytes: of a version beside the drafter's weights.
        version_seconds: of MLflow for one version.
        points: to MLflow per prompt.
        point_seconds: of MLflow for one.
        log_bytes: of the log per prompt, without what each part has for itself.
        part_bytes: of a part for itself.
        parts: that a worker's commit makes.
        manifest_bytes: per part.
        commit_seconds, commit_prompts: the shortest time between two commits of a worker, and the most prompts.
        portion_seconds: for which prompts, lessons and weights wait at most for a worker's next portion.
        head_seconds: after which a head alone is handed out again, and the drafter's weights with it.
        driver_seconds: of the process that deals prompts to Ray workers, per prompt.
        curve: lessons since a change of traffic, and the acceptance after them.
    """

    drafter_parameters: float = _measured(1_598_400, "builtin:drafter-1.6m")
    worker_prompts: float = _measured(7.3, "docs/benchmarks.md, the main job: 300 prompts in 40.8 s on one core")
    lesson_bytes: float = _measured(76_500, STUDIED)
    lesson_seconds: float = _measured(0.006, STUDIED)
    update_lessons: float = _measured(4, "the setting learn.interval")
    update_seconds: float = _measured(0.064, STUDIED)
    update_seconds_per_parameter: float = _measured(1.08e-7, f"{STUDIED} with drafters of 1.6M and 7.3M")
    handout_seconds: float = _measured(0.0055, STUDIED)
    handout_seconds_per_parameter: float = _measured(3.0e-9, f"{STUDIED} with drafters of 1.6M and 7.3M")
    head_bytes: float = _measured(85_996, "head.safetensors of a version of the built-in drafter")
    version_bytes: float = _measured(354_000, "a version of the built-in drafter, without its weights")
    version_seconds: float = _measured(0.15, SENT)
    points: float = _measured(6.3, SENT)
    point_seconds: float = _measured(0.0003, SENT)
    log_bytes: float = _measured(
        1_364, "omnidraft plan --run over 64 prompts committed at once, without the learner's parts"
    )
    part_bytes: float = _measured(3_376, "the same prompts with a commit after each: 57 commits, 10.1 kB each")
    parts: float = _measured(3, "decisions, blocks, prompts")
    manifest_bytes: float = _measured(240, "docs/faults.md")
    commit_seconds: float = _measured(10.0, "the setting commit.seconds")
    commit_prompts: float = _measured(256, "the setting commit.prompts")
    portion_seconds: float = _measured(1.0, "WORK_SECONDS of pipeline/scale_worker.py")
    head_seconds: float = _measured(5.0, "HEAD_SECONDS of pipeline/scale_learner.py")
    driver_seconds: float = _measured(
        0.0006, "omnidraft replay --ray local --workers 1, 900 prompts more: processor time of its own process"
    )
    curve: tuple[tuple[float, float], ...] = _measured(
        ((0, 0.146), (16, 0.296), (48, 0.519), (80, 0.563), (112, 0.574), (144, 0.611)), STUDIED
    )

    @property
    def weights(self) -> float:
        """Bytes of new weights on their way."""
        return BYTES * self.drafter_parameters + self.head_bytes

    @property
    def version(self) -> float:
        """Bytes of a version."""
        return BYTES * self.drafter_parameters + self.version_bytes

    @property
    def update(self) -> float:
        """Seconds of an update and of handing it out."""
        per_parameter = self.update_seconds_per_parameter + self.handout_seconds_per_parameter
        return self.update_seconds + self.handout_seconds + per_parameter * self.drafter_parameters

    def with_numbers(self, given: Mapping[str, object]) -> "Figures":
        """With other numbers in place of these, by name.

        Raises:
            UsageError: there is no number of that name, or one that is given is none.
        """
        known = {one.name for one in fields(self) if isinstance(one.default, int | float)}
        numbers: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known or not isinstance(value, int | float) or not 0 <= value < inf:
                raise UsageError(f"a figure must be NAME=NUMBER of {', '.join(sorted(known))}; got {name}={value}")
            numbers[name] = float(value)
        return replace(self, **numbers)

    def sources(self) -> dict[str, str]:
        """Where each figure is from."""
        return {one.name: one.metadata["source"] for one in fields(self)}
