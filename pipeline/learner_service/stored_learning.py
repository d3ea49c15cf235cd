"""What a run that is not running has learned in closed form: prompts are taken out, what other runs learned is added.

Both change the last commit of the run's learner, which is in the run itself or, of a server and of a run over several
machines, in the partition of its learner.
"""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from pipeline.config.settings import Config
from pipeline.learner_service.service import LearnerConfig, LearnerService
from pipeline.learning.local_learner import LocalLearner
from pipeline.reports.progress import PlainDisplay
from pipeline.run.committer import last_snapshot
from pipeline.run.folder import mlflow_of, resumed_config
from pipeline.run.replay import Replay
from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State
from stages.distill import read_sums
from stages.learn.training.closed_form import OutputLayerTrainer
from stages.learn.training.least_squares_sums import LeastSquaresSums
from store.errors import RunError, UsageError
from store.log.lock import RunLock
from store.log.manifest import has_manifest
from store.log.partitions import LEARNER, partition_folder

UNSENT_SECONDS = 10.0  # to wait for MLflow


def unlearn(run_folder: Path, chosen: Callable[[TrainingExample], bool]) -> int:
    """Take the prompts that `chosen` names out of what a run has learned, so that its weights are those of a run that
    never saw them. Those before the newest 256 are not found.

    Raises `UsageError` if the run learns by gradient, which cannot be undone, `RunError` if a process runs it or it
    cannot be resumed, and `CorruptError` if its checkpoint is not as it was written.
    """
    return _edit(run_folder, lambda learner: learner.forget(chosen))


def merge_learning(run_folder: Path, other: Path) -> int:
    """Add what another run has learned to a run, as if this one had learned from the prompts of both.

    Both can be resumed, and have the same drafter and the same targets. Raises as `unlearn`.
    """
    found, theirs = _read_config(run_folder), _read_config(other)
    same = (found.drafter, found.targets, found.vocabulary)
    if same != (theirs.drafter, theirs.targets, theirs.vocabulary):
        raise UsageError(f"{other} must have the drafter and the targets of {run_folder}, but it has others")
    sums, changed = _read_sums(other), list[OutputLayerTrainer]()

    def edit(learner: LocalLearner) -> int:
        trainer = learner.trainer
        if not isinstance(trainer, OutputLayerTrainer) or trainer in changed:  # targets share it
            return 0
        changed.append(trainer)
        trainer.merge(sums)
        return 1

    return _edit(run_folder, edit)


def _edit(run_folder: Path, edit: Callable[[LocalLearner], int]) -> int:
    config = _read_config(run_folder)
    if has_manifest(partition_folder(run_folder, LEARNER)):
        uri = config.publish.mlflow_uri or mlflow_of(str(run_folder))
        with RunLock(run_folder), LearnerService(LearnerConfig(config, run_folder, uri, (), 0.0, ())) as service:
            count = edit(service.learner)
            service.pause(UNSENT_SECONDS)
        return count
    with PlainDisplay(perf_counter) as display:
        return Replay(config, run_folder, resume=True).edit_learners(edit, display)


def _read_config(run_folder: Path) -> Config:
    config = resumed_config(run_folder, str(run_folder), {})
    if not (config.learn.enabled and config.learn.trains_output_layer):
        learn = config.learn.model_dump(include={"enabled", "method", "lora_rank"})
        raise UsageError(
            f"{run_folder} must learn in closed form (learn.method = 'least-squares'), but has {learn}; what gradient "
            "steps have learned cannot be taken apart"
        )
    return config


def _read_sums(run_folder: Path) -> LeastSquaresSums:
    state = last_snapshot(partition_folder(run_folder, LEARNER)) or last_snapshot(run_folder)
    if state is None:
        raise RunError(f"{run_folder} must have a checkpoint to read, but it is finished or has not begun")
    sums = read_sums(find_learner(state)["distill"])
    if sums is None:
        raise RunError(f"{run_folder} must have learned in closed form, but its checkpoint has no sums")
    return sums


def find_learner(state: State) -> State:
    """Return the learner's state in the checkpoint of a run, or of the partition of its learner."""
    if "loop" not in state:
        return state["learner"]
    first = next(iter(state["loop"]["runners"].values()))  # with several targets, all share the drafter's learner
    return first["learner"]
