"""A plan for many workers and one learner: what grows with what, and what is full first.

Rates, sizes and shares are arithmetic over measured figures (pipeline/plan_figures.py); how late weights are is
simulated (pipeline/scale_simulation.py).
"""

from dataclasses import dataclass, replace
from math import inf

from pipeline.plan_figures import Figures
from pipeline.scale_simulation import Flow, Staleness, acceptance_between_changes, simulate

DAY = 86_400.0  # seconds
DECODING = "decoding"
MOST_GROWTH = 60  # doublings of the traffic that are looked at


@dataclass(frozen=True)
class Cluster:
    """What is planned for. None of it is measured: these are the plan's assumptions.

    Attributes:
        prompts_per_day: completed by all workers together.
        workers: that decode.
        learner_cores: of one core, or more, that the learner may use.
        network: bytes per second of the link of one machine, and of the object store's.
        publish_interval: prompts between two versions.
        update_interval: prompts between two updates; the drafter is trained on the newest of them.
        changes_per_day: of the kind of traffic, each to one that the drafter does not know.
        waiting: completed prompts that may wait for the learner.
        fan_out: machines to which one sends new weights, each of which sends on; None: the learner's sends to all.
    """

    prompts_per_day: float
    workers: int
    learner_cores: float
    network: float
    publish_interval: int
    update_interval: int
    changes_per_day: float
    waiting: int = 256
    fan_out: int | None = None

    @property
    def prompts_per_second(self) -> float:
        """Of all workers."""
        return self.prompts_per_day / DAY

    @property
    def prompts_per_worker(self) -> float:
        """Per second of one worker."""
        return self.prompts_per_second / self.workers


@dataclass(frozen=True)
class Load:
    """One thing that may be full.

    Attributes:
        name: what it is.
        share: of its capacity that is used; above 1 it cannot be done.
        of: the capacity.
        remedy: what to change when it is full.
    """

    name: str
    share: float
    of: str
    remedy: str


@dataclass(frozen=True)
class Plan:
    """What a cluster will do.

    Attributes:
        sizes: what comes in a day, by name.
        loads: all shares, the fullest first.
        staleness: how late weights are.
        acceptance: mean, with weights as late as they are.
        acceptance_at_once: mean, if every prompt taught and weights were never late.
    """

    cluster: Cluster
    figures: Figures
    sizes: dict[str, float]
    loads: tuple[Load, ...]
    staleness: Staleness
    acceptance: float
    acceptance_at_once: float

    @property
    def bottleneck(self) -> Load:
        """What is full first; decoding only where it is too much already, because workers are what one adds."""
        return next(load for load in self.loads if load.name != DECODING or load.share > 1)


def plan(cluster: Cluster, figures: Figures) -> Plan:
    """What this cluster will do, by these figures."""
    flow = _flow(cluster, figures)
    staleness = simulate(flow, flow.long_enough)
    stretch = cluster.prompts_per_day / max(cluster.changes_per_day, 1 / cluster.prompts_per_day)
    curve_is_late = (figures.update_lessons + 1) / 2  # by an update's interval, as it was measured
    late = max(0.0, staleness.prompts - curve_is_late)
    trained_on = min(1.0, figures.update_lessons / cluster.update_interval) * staleness.taught / staleness.posted
    loads = sorted(_loads(cluster, figures), key=lambda load: load.share, reverse=True)
    return Plan(
        cluster,
        figures,
        _sizes(cluster, figures),
        tuple(loads),
        staleness,
        acceptance_between_changes(figures.curve, stretch, trained_on, late),
        acceptance_between_changes(figures.curve, stretch, 1.0, 0.0),
    )


def _flow(cluster: Cluster, figures: Figures) -> Flow:
    """What is simulated. Both ways a worker looks up once per portion."""
    copies = cluster.workers
    if cluster.fan_out:
        copies = cluster.fan_out * depth_of(cluster.workers, cluster.fan_out)
    sending = copies * figures.weights / cluster.network
    return Flow(
        cluster.prompts_per_second,
        figures.lesson_seconds / cluster.learner_cores,
        figures.update / cluster.learner_cores,
        cluster.update_interval,
        2 * figures.portion_seconds + sending,
        cluster.waiting,
    )


def depth_of(receivers: int, fan_out: int) -> int:
    """Times that new weights are sent on, one after another, until all have them, each sending to `fan_out` others."""
    depth, level, reached = 0, 1, 0
    while reached < receivers:
        depth, level = depth + 1, level * fan_out
        reached += level
    return depth


def learner_pace(cluster: Cluster, figures: Figures) -> float:
    """Prompts per second that the learner can take in."""
    seconds = figures.lesson_seconds + figures.update / cluster.update_interval
    return cluster.learner_cores / seconds if seconds else inf


def commits_per_worker(cluster: Cluster, figures: Figures) -> float:
    """Per second: after so many seconds or prompts, whichever is first, and never without a prompt."""
    own = cluster.prompts_per_worker
    return min(own, max(1 / figures.commit_seconds, own / figures.commit_prompts))


def _rates(cluster: Cluster, figures: Figures) -> dict[str, float]:
    """Per second, of the whole cluster."""
    taught = min(cluster.prompts_per_second, learner_pace(cluster, figures))
    updates = taught / cluster.update_interval
    handed_out = max(updates, min(taught / figures.update_lessons, 1 / figures.head_seconds))
    commits = cluster.workers * commits_per_worker(cluster, figures)
    return {
        "prompts": cluster.prompts_per_second,
        "lesson bytes to the learner": cluster.prompts_per_second * figures.lesson_bytes,
        "updates": updates,
        "weights handed out": handed_out,
        "weights to workers": cluster.workers * min(handed_out, cluster.prompts_per_worker),
        "commits of workers": commits,
        "parts of the log": commits * figures.parts,
        "versions": cluster.prompts_per_second / cluster.publish_interval,
        "points in MLflow": cluster.prompts_per_second * figures.points,
    }


def _sizes(cluster: Cluster, figures: Figures) -> dict[str, float]:
    """In a day."""
    day = {name: rate * DAY for name, rate in _rates(cluster, figures).items()}
    parts = day["parts of the log"]
    return {
        **day,
        "weights to workers, bytes": day["weights to workers"] * figures.weights,
        "log, bytes": day["prompts"] * figures.log_bytes + parts * figures.part_bytes,
        "manifests at its end, bytes": parts * figures.manifest_bytes,
        "versions, bytes": day["versions"] * figures.version,
    }


def _loads(cluster: Cluster, figures: Figures) -> list[Load]:
    rates, workers = _rates(cluster, figures), cluster.workers
    pace, link = learner_pace(cluster, figures), f"a link of {cluster.network * 8 / 1e9:g} Gbit/s"
    sent = rates["weights to workers"] if cluster.fan_out is None else cluster.fan_out * rates["weights handed out"]
    logged = _sizes(cluster, figures)["log, bytes"] / DAY
    # A manifest is written anew with every commit, and by the end of a day it names all parts of that day.
    manifests = rates["commits of workers"] * rates["parts of the log"] * DAY / workers * figures.manifest_bytes
    return [
        Load(
            DECODING,
            cluster.prompts_per_second / (workers * figures.worker_prompts),
            f"{workers:,} workers at {figures.worker_prompts:g} prompts/s",
            "more workers",
        ),
        Load(
            "learning",
            cluster.prompts_per_second / pace,
            f"{cluster.learner_cores:g} {'core' if cluster.learner_cores == 1 else 'cores'}, {pace:,.3g} prompts/s",
            "more prompts between updates (--interval), more cores, or a GPU for the learner",
        ),
        Load(
            "lessons to the learner",
            rates["lesson bytes to the learner"] / cluster.network,
            link,
            "a smaller learn.teacher_top",
        ),
        Load(
            "weights from the learner",
            sent * figures.weights / cluster.network,
            link,
            "more prompts between updates (--interval), or machines that pass weights on (--fan-out)",
        ),
        Load(
            "versions to MLflow", rates["versions"] * figures.version_seconds, "one sender", "a longer publish.interval"
        ),
        Load(
            "points to MLflow",
            rates["points in MLflow"] * figures.point_seconds,
            "one sender",
            "several runs side by side, or publish.enabled = false",
        ),
        Load("log", logged / cluster.network, link, "a longer commit.seconds"),
        Load(
            "manifests, after a day",
            manifests / cluster.network,
            link,
            "a longer commit.seconds, or omnidraft compact",
        ),
        Load("dealing prompts", rates["prompts"] * figures.driver_seconds, "one core", "several runs side by side"),
    ]


def full_at(cluster: Cluster, figures: Figures, name: str) -> float | None:
    """Prompts a day, by the same workers, at which a load of that name is full; None if that never comes."""

    def share(prompts_per_day: float) -> float:
        loads = _loads(replace(cluster, prompts_per_day=prompts_per_day), figures)
        return next(load.share for load in loads if load.name == name)

    low, high = cluster.prompts_per_day / 2**MOST_GROWTH, cluster.prompts_per_day * 2**MOST_GROWTH
    if share(high) < 1:
        return None
    for _ in range(4 * MOST_GROWTH):  # halves the distance on a logarithmic scale
        middle = (low * high) ** 0.5
        low, high = (low, middle) if share(middle) >= 1 else (middle, high)
    return high
