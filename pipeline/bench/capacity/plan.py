"""Capacity plan for many workers and one learner: sizes, shares of capacities, and the first bottleneck.

Rates, sizes and shares are computed from measured values; the delay of weights is simulated.
"""

from dataclasses import dataclass, replace
from math import inf

from pipeline.bench.capacity.inputs import CapacityInputs
from pipeline.bench.capacity.simulation import Flow, Staleness, acceptance_between_changes, simulate

DAY = 86_400.0  # seconds
DECODING = "decoding"
MOST_GROWTH = 60  # doublings of the traffic that are searched


@dataclass(frozen=True)
class Cluster:
    """The assumptions of a plan; none of them is measured.

    Attributes:
        prompts_per_day: prompts completed by all workers together.
        workers: number of decode workers.
        learner_cores: cores that the learner may use; may be a fraction.
        network: bytes per second of the link of one machine, and of that of the object store.
        publish_interval: prompts between two published versions.
        update_interval: prompts between two updates; the drafter is trained on the newest of them.
        changes_per_day: changes of traffic per day, each to a kind that the drafter does not know.
        waiting: length of the learner's queue in completed prompts.
        fan_out: machines that each machine forwards new weights to; None if the learner sends to all.
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
        """Prompts per second of all workers together."""
        return self.prompts_per_day / DAY

    @property
    def prompts_per_worker(self) -> float:
        """Prompts per second of one worker."""
        return self.prompts_per_second / self.workers


@dataclass(frozen=True)
class CapacityLoad:
    """The load of one resource.

    Attributes:
        name: name of the resource.
        share: used share of its capacity; the plan cannot work above 1.
        of: description of the capacity.
        remedy: change to make when it is full.
    """

    name: str
    share: float
    of: str
    remedy: str


@dataclass(frozen=True)
class CapacityPlan:
    """The plan of a cluster.

    Attributes:
        sizes: counts and bytes per day, by name.
        loads: loads of all resources, the fullest first.
        staleness: simulated delay of weights.
        acceptance: mean acceptance rate with that delay.
        acceptance_at_once: mean acceptance rate without delay and with every prompt used for training.
    """

    cluster: Cluster
    inputs: CapacityInputs
    sizes: dict[str, float]
    loads: tuple[CapacityLoad, ...]
    staleness: Staleness
    acceptance: float
    acceptance_at_once: float

    @property
    def bottleneck(self) -> CapacityLoad:
        """The resource that is full first. Decoding counts only if it is already full, because workers can be added."""
        return next(load for load in self.loads if load.name != DECODING or load.share > 1)


def plan(cluster: Cluster, inputs: CapacityInputs) -> CapacityPlan:
    """Plan a cluster from measured values; simulates the delay of weights."""
    flow = _flow(cluster, inputs)
    staleness = simulate(flow, flow.long_enough)
    stretch = cluster.prompts_per_day / max(cluster.changes_per_day, 1 / cluster.prompts_per_day)
    curve_is_late = (inputs.update_examples + 1) / 2  # half an interval of the updates with which it was measured
    late = max(0.0, staleness.prompts - curve_is_late)
    trained_on = min(1.0, inputs.update_examples / cluster.update_interval) * staleness.taught / staleness.posted
    loads = sorted(_loads(cluster, inputs), key=lambda load: load.share, reverse=True)
    return CapacityPlan(
        cluster,
        inputs,
        _sizes(cluster, inputs),
        tuple(loads),
        staleness,
        acceptance_between_changes(inputs.curve, stretch, trained_on, late),
        acceptance_between_changes(inputs.curve, stretch, 1.0, 0.0),
    )


def _flow(cluster: Cluster, inputs: CapacityInputs) -> Flow:
    """Input of the simulation. A worker sends and receives once per work item, hence twice `portion_seconds`."""
    copies = cluster.workers
    if cluster.fan_out:
        copies = cluster.fan_out * depth_of(cluster.workers, cluster.fan_out)
    sending = copies * inputs.weights / cluster.network
    return Flow(
        cluster.prompts_per_second,
        inputs.example_seconds / cluster.learner_cores,
        inputs.update / cluster.learner_cores,
        cluster.update_interval,
        2 * inputs.portion_seconds + sending,
        cluster.waiting,
    )


def depth_of(receivers: int, fan_out: int) -> int:
    """Depth of the broadcast tree in which each machine forwards weights to `fan_out` others until all have them."""
    depth, level, reached = 0, 1, 0
    while reached < receivers:
        depth, level = depth + 1, level * fan_out
        reached += level
    return depth


def learner_rate(cluster: Cluster, inputs: CapacityInputs) -> float:
    """Prompts per second that the learner can process."""
    seconds = inputs.example_seconds + inputs.update / cluster.update_interval
    return cluster.learner_cores / seconds if seconds else inf


def commits_per_worker(cluster: Cluster, inputs: CapacityInputs) -> float:
    """Commits per second of one worker: due after a time or a number of prompts, and never without a prompt."""
    own = cluster.prompts_per_worker
    return min(own, max(1 / inputs.commit_seconds, own / inputs.commit_prompts))


def _rates(cluster: Cluster, inputs: CapacityInputs) -> dict[str, float]:
    """Counts and bytes per second of the whole cluster, by name."""
    processed = min(cluster.prompts_per_second, learner_rate(cluster, inputs))
    updates = processed / cluster.update_interval
    handed_out = max(updates, min(processed / inputs.update_examples, 1 / inputs.head_seconds))
    commits = cluster.workers * commits_per_worker(cluster, inputs)
    return {
        "prompts": cluster.prompts_per_second,
        "bytes of training examples": cluster.prompts_per_second * inputs.example_bytes,
        "updates": updates,
        "weights sent by the learner": handed_out,
        "weights to workers": cluster.workers * min(handed_out, cluster.prompts_per_worker),
        "commits of workers": commits,
        "parts of the log": commits * inputs.parts,
        "versions": cluster.prompts_per_second / cluster.publish_interval,
        "points in MLflow": cluster.prompts_per_second * inputs.points,
    }


def _sizes(cluster: Cluster, inputs: CapacityInputs) -> dict[str, float]:
    """Counts and bytes per day, by name."""
    day = {name: rate * DAY for name, rate in _rates(cluster, inputs).items()}
    parts = day["parts of the log"]
    return {
        **day,
        "weights to workers, bytes": day["weights to workers"] * inputs.weights,
        "log, bytes": day["prompts"] * inputs.log_bytes + parts * inputs.part_bytes,
        "manifests at its end, bytes": parts * inputs.manifest_bytes,
        "versions, bytes": day["versions"] * inputs.version,
    }


def _loads(cluster: Cluster, inputs: CapacityInputs) -> list[CapacityLoad]:
    rates, workers = _rates(cluster, inputs), cluster.workers
    pace, link = learner_rate(cluster, inputs), f"a link of {cluster.network * 8 / 1e9:g} Gbit/s"
    sent = (
        rates["weights to workers"]
        if cluster.fan_out is None
        else cluster.fan_out * rates["weights sent by the learner"]
    )
    logged = _sizes(cluster, inputs)["log, bytes"] / DAY
    # A manifest is rewritten with every commit, and at the end of a day it names all parts of that day.
    manifests = rates["commits of workers"] * rates["parts of the log"] * DAY / workers * inputs.manifest_bytes
    return [
        CapacityLoad(
            DECODING,
            cluster.prompts_per_second / (workers * inputs.worker_prompts),
            f"{workers:,} workers at {inputs.worker_prompts:g} prompts/s",
            "more workers",
        ),
        CapacityLoad(
            "learning",
            cluster.prompts_per_second / pace,
            f"{cluster.learner_cores:g} {'core' if cluster.learner_cores == 1 else 'cores'}, {pace:,.3g} prompts/s",
            "more prompts between updates (--interval), more cores, or a GPU for the learner",
        ),
        CapacityLoad(
            "training examples to the learner",
            rates["bytes of training examples"] / cluster.network,
            link,
            "a smaller learn.teacher_top",
        ),
        CapacityLoad(
            "weights from the learner",
            sent * inputs.weights / cluster.network,
            link,
            "more prompts between updates (--interval), or machines that forward weights (--fan-out)",
        ),
        CapacityLoad(
            "versions to MLflow", rates["versions"] * inputs.version_seconds, "one sender", "a longer publish.interval"
        ),
        CapacityLoad(
            "points to MLflow",
            rates["points in MLflow"] * inputs.point_seconds,
            "one sender",
            "several runs in parallel, or publish.enabled = false",
        ),
        CapacityLoad("log", logged / cluster.network, link, "a longer commit.seconds"),
        CapacityLoad(
            "manifests, after a day",
            manifests / cluster.network,
            link,
            "a longer commit.seconds, or omnidraft compact",
        ),
        CapacityLoad(
            "routing prompts", rates["prompts"] * inputs.driver_seconds, "one core", "several runs in parallel"
        ),
    ]


def full_at(cluster: Cluster, inputs: CapacityInputs, name: str) -> float | None:
    """Prompts per day at which the named load is full with the same workers; None if it never is."""

    def share(prompts_per_day: float) -> float:
        loads = _loads(replace(cluster, prompts_per_day=prompts_per_day), inputs)
        return next(load.share for load in loads if load.name == name)

    low, high = cluster.prompts_per_day / 2.0**MOST_GROWTH, cluster.prompts_per_day * 2.0**MOST_GROWTH
    if share(high) < 1:
        return None
    for _ in range(4 * MOST_GROWTH):  # halves the distance on a logarithmic scale
        middle = (low * high) ** 0.5
        low, high = (low, middle) if share(middle) >= 1 else (middle, high)
    return high
