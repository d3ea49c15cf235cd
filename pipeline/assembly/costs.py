"""What a block costs when a run begins: as earlier runs on this machine found, or as sizes suggest."""

from dataclasses import astuple
from math import sqrt

from pipeline.assembly.models import Models
from pipeline.config.sections import DraftSettings
from stages.drafting.costs import CostModel, Costs, Curve
from stages.drafting.tracked_costs import TrackedCosts
from stages.engine.models.devices import device_name
from stages.engine.models.language_model import LanguageModel
from stages.engine.quantisation.modules import mean_bytes
from stages.sampling.params import SamplingParams

FORMAT = 5  # of what is remembered: goes up when costs change without their key
# Bytes that are read and operations, per second. On two cores of an Intel Xeon a pass takes 5.9 ms for one token with
# SmolLM2-135M in four bits, 49 with Qwen2.5-Coder-1.5B, and .9 and 5 more for each token more, a piece of a small
# drafter .5. What drafts of a small target cost is set to about half of that: what seems cheap is tried and so
# corrected, what seems dear is not tried.
CPU_RATES, GPU_RATES = (2e10, 6e11), (1e12, 4e13)
LAYER_SECONDS = 1e-5  # to enter a layer
AROUND_SECONDS, DRAFT_SECONDS = 5e-4, 2e-4  # around a pass; and of a draft of the model, whatever its length
DISPLACED = 0.25  # of the drafter, which the target's passes displace from the processor's caches


def make_costs(
    draft: DraftSettings, params: SamplingParams, batch: int, models: Models
) -> tuple[CostModel, Costs | None]:
    """Costs of target passes and of drafting: as configured, estimated from sizes, or remembered and tracked.

    What a run remembered when it began is in its checkpoint: a run that resumes reads the same. Returns the costs that
    decide, and those in seconds that earlier runs on this machine found, if there were any.
    """
    if isinstance(draft.costs, float):
        return Costs(((batch, 1.0), (2 * batch, 1.0)), ((1, draft.costs),)), None
    estimated = estimate_costs(models, batch)
    if draft.costs == "estimated":
        return estimated, None
    if draft.max_draft == 0:
        return TrackedCosts(estimated), None
    store = models.target.measurements
    key = [FORMAT, _signature(models.target), _signature(models.drafter), batch, params.temperature == 0]
    found = store.recall("costs", key)
    remembered = Costs.from_values(found) if found else None
    start = _blend(remembered, estimated) if remembered else estimated
    return TrackedCosts(start, lambda costs: store.remember("costs", key, astuple(costs))), remembered


def _signature(model: LanguageModel) -> list[object]:
    """Return everything that the cost of a model depends on."""
    sizes = [model.parameters, model.layers, model.hidden_size, model.vocabulary_size]
    bytes_each = mean_bytes(model.model, model.weights)
    way = model.forward_pass.name.partition(",")[0], model.weights
    return [*sizes, str(model.model.dtype), bytes_each, model.adapter, *way, device_name(model.device)]


def estimate_costs(models: Models, batch: int) -> Costs:
    """From sizes: the same on every machine, in seconds on one of today's. Only ratios count."""
    return Costs(
        tuple((tokens, _estimate_pass(models.target, tokens)) for tokens in (batch, 2 * batch)),
        tuple((rows, _estimate_pass(models.drafter, rows, DISPLACED)) for rows in sorted({1, batch})),
        AROUND_SECONDS,
        DRAFT_SECONDS,
    )


def _estimate_pass(model: LanguageModel, tokens: int, share: float = 1.0) -> float:
    """Return the seconds of a pass. `share`: of the weights, those that are not in the processor's caches."""
    memory, operations = CPU_RATES if model.device.type == "cpu" else GPU_RATES
    read, computed = share * mean_bytes(model.model, model.weights) / memory, 2 * tokens / operations
    return float(model.parameters * (read + computed) + LAYER_SECONDS * model.layers)


def _blend(remembered: Costs, estimated: Costs) -> Costs:
    """Return the remembered costs, halfway to the estimated ones in their ratios to the smallest pass.

    What the first blocks show is soon corrected. What seemed too expensive to be tried, because the machine was busy,
    becomes cheaper from run to run until it is tried.

    >>> found = Costs(((1, 0.04), (2, 0.04)), ((1, 0.16),))
    >>> _blend(found, Costs(((1, 1.0), (2, 2.0)), ((1, 0.25),))).drafter
    ((1, 0.04),)
    """
    scale = remembered.target[0][1] / estimated.target[0][1]

    def mean(own: float, other: float) -> float:
        return sqrt(own * scale * other)

    def mean_curve(own: Curve, other: Curve) -> Curve:
        return tuple((size, mean(cost, guess)) for (size, cost), (_, guess) in zip(own, other, strict=True))

    return Costs(
        mean_curve(remembered.target, estimated.target),
        mean_curve(remembered.drafter, estimated.drafter),
        mean(remembered.around, estimated.around),
        mean(remembered.per_draft, estimated.per_draft),
    )


def describe(models: Models, costs: CostModel, batch: int) -> str:
    """Describe the choices made at the start and the costs that support them, in one line."""
    plain, four = costs.verification_cost(batch), costs.verification_cost(5 * batch)
    return (
        f"target {models.name}: {models.target.forward_pass.name}; drafter: {models.drafter.forward_pass.name}; "
        f"in plain target passes, verifying 4 tokens more per row costs {four / plain - 1:.2f}, "
        f"drafting one for every row {costs.drafting_cost(batch) / plain:.2f}"
    )
