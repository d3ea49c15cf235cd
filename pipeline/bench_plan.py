"""What a plan for many machines needs to know, measured on one: what a lesson costs, and what late weights cost.

One stream is run again and again; new weights come into service a fixed number of prompts after they were made. So a
worker sees a learner that is far away, while the learner sees every prompt and makes as many updates as ever. Processor
time and bytes are counted, not the clock: others on the machine disturb them less.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time

from pipeline.admission import make_admission
from pipeline.build import make_recorder
from pipeline.build_learning import piece_cost
from pipeline.build_models import Models, load_models
from pipeline.build_stages import make_drafting
from pipeline.clock import Clock
from pipeline.coach import Finished
from pipeline.coach_remote import RemoteCoach
from pipeline.config import Config
from pipeline.dealing import Dealing
from pipeline.lane_stages import Stages
from pipeline.learner_host import HostSetup, LearnerHost
from pipeline.loop import Lane, Loop
from pipeline.study_run import choose_prompts
from stages.weights import Weights, write_weights
from store.events import PromptCompleted, Updated
from store.registry import default_uri

WINDOW = 32  # prompts of a source that are counted together


@dataclass
class LearnerCosts:
    """What a learner used, in seconds of processor time and bytes, one entry per time.

    Attributes:
        lessons: taking in a completed prompt without an update of the drafter; the head's step is in it.
        updates: taking in one that made an update.
        commits: committing and copying what is handed out.
        posts: packing a completed prompt, by who decoded it.
        lesson_bytes: of a completed prompt on its way.
        weights_bytes: of what is handed out.
    """

    lessons: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    posts: list[float] = field(default_factory=list)
    lesson_bytes: list[int] = field(default_factory=list)
    weights_bytes: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        """How many updates, and the mean of everything else."""
        means = {name: fmean(found) for name, found in vars(self).items() if found}
        return {"prompts": len(self.posts), "made": len(self.updates), "handed_out": len(self.commits), **means}


class DelayedLink:
    """A `Link` to a learner in the same thread, whose weights arrive a fixed number of posted prompts late.

    Args:
        host: learns.
        delay: prompts.
        scratch: a folder for a file.
        costs: counted here.
    """

    def __init__(self, host: LearnerHost, delay: int, scratch: Path, costs: LearnerCosts) -> None:
        self._host, self._delay, self._file, self._costs = host, delay, scratch / "weights.safetensors", costs
        self._coming: deque[tuple[int, Weights]] = deque()
        self._posted = 0

    def post(self, finished: Finished) -> None:
        """See `Link`."""
        began = thread_time()
        packed = pickle.dumps(finished)
        self._costs.posts.append(thread_time() - began)
        self._costs.lesson_bytes.append(len(packed))
        self._posted += 1
        self._learn(packed)

    def _learn(self, packed: bytes) -> None:
        began = thread_time()
        self._host.completed(pickle.loads(packed))
        seconds = thread_time() - began
        updated = any(isinstance(event, Updated) and event.part == "drafter" for event in self._host.told())
        (self._costs.updates if updated else self._costs.lessons).append(seconds)
        began = thread_time()
        weights = self._host.news()
        if weights:
            write_weights(weights, self._file)
            self._costs.commits.append(thread_time() - began)
            self._costs.weights_bytes.append(self._file.stat().st_size)
            self._coming.append((self._posted + self._delay, weights))

    def news(self) -> Weights | None:
        """See `Link`."""
        found = None
        while self._coming and self._coming[0][0] <= self._posted:
            found = self._coming.popleft()[1]
        return found


@dataclass(frozen=True)
class Window:
    """Prompts of one source, counted together.

    Attributes:
        dataset: of the source.
        first: how many of its prompts came before.
        judged, accepted: proposed tokens of the model's drafts.
    """

    dataset: str
    first: int
    judged: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Accepted / judged."""
        return self.accepted / self.judged if self.judged else 0.0


@dataclass(frozen=True)
class Delayed:
    """One run of the stream.

    Attributes:
        delay: prompts by which weights came late; None for a drafter that never learned.
        seed: which prompts, and in which order.
        windows: of the stream, in order.
        costs: of the learner.
    """

    delay: int | None
    seed: int
    windows: tuple[Window, ...]
    costs: LearnerCosts

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        windows = [{**vars(window), "acceptance": round(window.acceptance, 4)} for window in self.windows]
        return {"delay": self.delay, "seed": self.seed, "windows": windows, "costs": self.costs.to_json()}


def run(config: Config, delays: Sequence[int | None], seeds: int, progress: Callable[[Delayed], None]) -> list[Delayed]:
    """Run the stream of every seed with every delay.

    Args:
        config: with one target; its seed is the first.
        delays: in prompts; None never learns.
        seeds: how many.
        progress: is given each run as it ends.

    Raises:
        OmnidraftError: see `load_models` and `choose_prompts`.
    """
    found = []
    for seed in range(config.seed, config.seed + seeds):
        for delay in delays:
            found.append(_run(config.with_overrides({"seed": seed}), delay))
            progress(found[-1])
    return found


def _run(config: Config, delay: int | None) -> Delayed:
    costs = LearnerCosts()
    with TemporaryDirectory() as name:
        scratch = Path(name)
        (models,) = load_models(config, config.publish.mlflow_uri or default_uri(Path("runs")), scratch)
        setup = HostSetup(config, scratch / "run", "", (), piece_cost(config, [models]), ())
        with LearnerHost(setup) as host:
            link = DelayedLink(host, delay or 0, scratch, costs)
            loop = _loop(config, models, link, adopts=delay is not None)
            prompts = iter(choose_prompts(config, None).chosen)
            completed = [event for event in loop.run(prompts) if isinstance(event, PromptCompleted)]
    return Delayed(delay, config.seed, tuple(windows_of(completed)), costs)


def windows_of(completed: Iterable[PromptCompleted]) -> list[Window]:
    """Completed prompts by source and by how many of its prompts came before, `WINDOW` of them together."""
    counts: dict[tuple[str, int], list[int]] = {}
    begins: dict[str, int] = {}
    for prompt in sorted(completed, key=lambda prompt: prompt.offset):
        first = begins.setdefault(prompt.dataset, prompt.offset)
        counted = counts.setdefault((prompt.dataset, (prompt.offset - first) // WINDOW * WINDOW), [0, 0])
        counted[0] += prompt.judged
        counted[1] += prompt.accepted
    return [Window(dataset, first, *counted) for (dataset, first), counted in counts.items()]


def _loop(config: Config, models: Models, link: DelayedLink, *, adopts: bool) -> Loop:
    drafting, clock = make_drafting(config, models, lambda told: None), Clock(perf_counter)
    lane = Lane(
        models.name,
        Stages(drafting.decode, drafting.translate, drafting.verify),
        make_admission(config, models),
        make_recorder(config, models),
        RemoteCoach(link, models.drafter, drafting.head, adopts=adopts),
        clock,
    )
    return Loop({models.name: lane}, Dealing.of(config), config.batch, clock)
