"""Measures the inputs of a capacity plan on one machine: the cost of the learner, and the cost of delayed weights.

One stream is run repeatedly. New weights are applied a fixed number of prompts after they were computed, as if the
learner were far away, while the learner sees every prompt and makes the same number of updates. The results are
processor time and bytes, not wall-clock time, because other work on the machine disturbs them less.

MLflow is measured with the messages of a real run, sent again to an empty store on this machine.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, thread_time

from typing_extensions import override

from pipeline.assembly.admission import make_admission
from pipeline.assembly.loop import make_recorder
from pipeline.assembly.models import Models, load_only_target
from pipeline.assembly.stages import make_drafting
from pipeline.assembly.training import piece_cost
from pipeline.config.settings import Config
from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig, LearnerService
from pipeline.learning.remote_learner import LearnerConnection, RemoteLearner
from pipeline.loop import Loop, TargetRunner
from pipeline.loop_state import Clock
from pipeline.routing import TargetRouter
from pipeline.run.folder import SPOOL
from pipeline.stage_set import Stages
from pipeline.study.task import choose_prompts
from stages.training.weight_update import Weights, write_weights
from store.errors import RunError
from store.events import PromptCompleted, Updated
from store.outbox import Message, read_lines
from store.registry.registry import EXPERIMENT

SENT = ("start", "points", "publish")
WINDOW = 32  # prompts of one source per window


@dataclass
class LearnerCosts:
    """Costs of a learner in seconds of processor time and bytes, one entry per event.

    Attributes:
        examples: seconds to process a completed prompt without an update of the drafter; includes the head's step.
        updates: seconds to process a completed prompt that caused an update.
        commits: seconds to commit an update and copy its weights.
        posts: seconds to serialise a completed prompt, spent by the worker.
        example_bytes: size of a serialised completed prompt.
        weights_bytes: size of the weights sent to workers.
    """

    examples: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    posts: list[float] = field(default_factory=list)
    example_bytes: list[int] = field(default_factory=list)
    weights_bytes: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        """Number of prompts, updates and weights sent, and the means of all other entries."""
        means = {name: fmean(found) for name, found in vars(self).items() if found}
        return {"prompts": len(self.posts), "made": len(self.updates), "handed_out": len(self.commits), **means}


class DelayedConnection(LearnerConnection):
    """A connection to a learner in the same thread whose weights arrive a fixed number of prompts late.

    Args:
        host: the learner.
        delay: delay of weights in posted prompts.
        scratch: folder for a temporary file.
        costs: collects the learner's costs.
    """

    def __init__(self, host: LearnerService, delay: int, scratch: Path, costs: LearnerCosts) -> None:
        self._host, self._delay, self._file, self._costs = host, delay, scratch / "weights.safetensors", costs
        self._coming: deque[tuple[int, Weights]] = deque()
        self._posted = 0

    @override
    def post(self, finished: CompletedPrompt) -> None:
        began = thread_time()
        packed = pickle.dumps(finished)
        self._costs.posts.append(thread_time() - began)
        self._costs.example_bytes.append(len(packed))
        self._posted += 1
        self._learn(packed)

    def _learn(self, packed: bytes) -> None:
        began = thread_time()
        self._host.on_prompt_completed(pickle.loads(packed))
        seconds = thread_time() - began
        updated = any(isinstance(event, Updated) and event.part == "drafter" for event in self._host.drain_events())
        (self._costs.updates if updated else self._costs.examples).append(seconds)
        began = thread_time()
        weights = self._host.take_new_weights()
        if weights:
            write_weights(weights, self._file)
            self._costs.commits.append(thread_time() - began)
            self._costs.weights_bytes.append(self._file.stat().st_size)
            self._coming.append((self._posted + self._delay, weights))

    @override
    def take_new_weights(self) -> Weights | None:
        found = None
        while self._coming and self._coming[0][0] <= self._posted:
            found = self._coming.popleft()[1]
        return found


@dataclass(frozen=True)
class Window:
    """Counts over `WINDOW` consecutive prompts of one source.

    Attributes:
        dataset: name of the source.
        first: number of prompts of the source before this window.
        judged, accepted: proposed tokens of the drafter model, copied drafts excluded.
    """

    dataset: str
    first: int
    judged: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Accepted / judged; 0 if nothing was judged."""
        return self.accepted / self.judged if self.judged else 0.0


@dataclass(frozen=True)
class DelayedRun:
    """One run of the stream with delayed weights.

    Attributes:
        delay: delay of weights in prompts; None if weights were never applied.
        seed: seed that chose and ordered the prompts.
        windows: windows of the stream, in order.
        costs: costs of the learner.
    """

    delay: int | None
    seed: int
    windows: tuple[Window, ...]
    costs: LearnerCosts

    def to_json(self) -> dict[str, object]:
        """The run as JSON values."""
        windows = [{**vars(window), "acceptance": round(window.acceptance, 4)} for window in self.windows]
        return {"delay": self.delay, "seed": self.seed, "windows": windows, "costs": self.costs.to_json()}


def run(
    config: Config, delays: Sequence[int | None], seeds: int, progress: Callable[[DelayedRun], None]
) -> list[DelayedRun]:
    """Run the stream of every seed with every delay.

    Args:
        config: settings with one target; its seed is the first.
        delays: delays of weights in prompts; None never applies them.
        seeds: number of seeds.
        progress: called with each finished run.

    Raises:
        OmnidraftError: as `load_models` and `choose_prompts`.
    """
    found = []
    for seed in range(config.seed, config.seed + seeds):
        for delay in delays:
            found.append(_run(config.with_overrides({"seed": seed}), delay))
            progress(found[-1])
    return found


def _run(config: Config, delay: int | None) -> DelayedRun:
    costs = LearnerCosts()
    with TemporaryDirectory() as name:
        scratch = Path(name)
        models = load_only_target(config, scratch)
        setup = LearnerConfig(config, scratch / "run", "", (), piece_cost(config.learn, [models]), ())
        with LearnerService(setup) as host:
            connection = DelayedConnection(host, delay or 0, scratch, costs)
            loop = _loop(config, models, connection, adopts=delay is not None)
            prompts = iter(choose_prompts(config, None).chosen)
            completed = [event for event in loop.run(prompts) if isinstance(event, PromptCompleted)]
    return DelayedRun(delay, config.seed, tuple(windows_of(completed)), costs)


def windows_of(completed: Iterable[PromptCompleted]) -> list[Window]:
    """Sum the counts of completed prompts over windows of `WINDOW` prompts of one source."""
    counts: dict[tuple[str, int], list[int]] = {}
    begins: dict[str, int] = {}
    for prompt in sorted(completed, key=lambda prompt: prompt.offset):
        first = begins.setdefault(prompt.dataset, prompt.offset)
        counted = counts.setdefault((prompt.dataset, (prompt.offset - first) // WINDOW * WINDOW), [0, 0])
        counted[0] += prompt.judged
        counted[1] += prompt.accepted
    return [Window(dataset, first, *counted) for (dataset, first), counted in counts.items()]


def _loop(config: Config, models: Models, connection: DelayedConnection, *, adopts: bool) -> Loop:
    drafting, clock = make_drafting(config, models), Clock(perf_counter)
    runner = TargetRunner(
        models.name,
        Stages(drafting.decode, drafting.translate, drafting.verify),
        make_admission(config, models),
        make_recorder(models, text=config.log.text),
        RemoteLearner(connection, models.drafter, drafting.head, adopts=adopts),
        clock,
    )
    return Loop({models.name: runner}, TargetRouter.from_config(config), config.batch, clock)


def registry_costs(run_folder: Path) -> dict[str, float]:
    """Measure MLflow: seconds of processor time per published version and per point, and points per prompt.

    MLflow runs on SQLite in the sending thread. A server over HTTP takes longer, in another process.

    Args:
        run_folder: folder of a run that published versions; must not have been moved.

    Raises:
        RunError: the run published no version.
    """
    from store.registry.mlflow_sender import Sender

    spool = run_folder / SPOOL
    messages = [line for line in read_lines(spool) if isinstance(line, Message) and line.kind in SENT]
    if not any(message.kind == "publish" for message in messages):
        raise RunError(f"{run_folder} must hold versions that were sent to MLflow, but has none; see --registry-of")
    seconds: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as scratch:
        sender = Sender(f"sqlite:///{scratch}/mlflow.db", EXPERIMENT, None, {}, run_folder.resolve())
        for message in messages:
            began = process_time()
            sender.deliver(message.kind, [message.body])
            seconds[message.kind].append(process_time() - began)
    points = [point for message in messages if message.kind == "points" for point in message.body["points"]]
    return {
        "version_seconds": fmean(seconds["publish"]),
        "point_seconds": sum(seconds["points"]) / len(points),
        "points": len(points) / len({step for _, _, step, _ in points}),
    }
