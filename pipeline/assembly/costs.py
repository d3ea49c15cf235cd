"""What a block costs, measured or estimated, and the rules that decide by it."""

from collections.abc import Callable

from pipeline.assembly.cost_probe import measure
from pipeline.assembly.models import Models
from pipeline.config.sections import DraftSettings
from stages.decode import Decode
from stages.drafting.costs import CostModel, Costs
from stages.drafting.tracked_costs import TrackedCosts
from stages.engine.models.devices import device_name
from stages.engine.models.language_model import LanguageModel
from stages.sampling.params import SamplingParams
from stages.translate import Translate
from stages.verify import Verify

FORMAT = 4  # of what is remembered: goes up when costs change without their key
LAYER_OVERHEAD = 2e5  # overhead of entering one layer, as a number of parameters
VERIFY_SHARE = 0.05  # what one more verified token adds to a target pass where memory is the bound
# On a CPU arithmetic soon is the bound: measured on two built-in pairs at batch 1 and 8.
CPU_VERIFY_SHARE, CPU_VERIFY_SHARE_PER_ROW = 0.06, 0.027
StagesMaker = Callable[[], tuple[Decode, Translate, Verify]]


def make_costs(
    draft: DraftSettings, params: SamplingParams, batch: int, models: Models, allowed: int, stages: StagesMaker
) -> tuple[CostModel, Costs | None]:
    """Costs of target passes and of drafting: as configured, measured on this machine, or estimated from sizes.

    They are measured when the run begins, because they depend on the machine's load, and recorded in its checkpoint: a
    run that resumes decides by them, on any machine.

    Args:
        draft, params, batch: of the run.
        models: one target with the drafter, no rows admitted.
        allowed: pieces that may be drafted.
        stages: makes the stages that are timed.

    Returns:
        the costs that decide, and those in seconds if they were measured.
    """
    if isinstance(draft.costs, float):
        return Costs(((batch, 1.0), (2 * batch, 1.0)), ((1, draft.costs),)), None
    if draft.costs == "estimated" or draft.max_draft == 0:
        estimated = estimate_costs(models, batch)
        return TrackedCosts(estimated) if draft.costs == "tracked" else estimated, None
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    key = [FORMAT, _signature(models.target), _signature(models.drafter), batch, allowed, sampling, draft.temperature]

    def run() -> list[list[list[float]]]:
        found = measure(models.target, *stages(), batch)
        curves = [[list(point) for point in curve] for curve in (found.target, found.drafter)]
        return [*curves, [[found.around, found.per_draft]]]

    *curves, ((around, per_draft),) = models.target.measurements.measure_once("costs", key, run)
    target, drafter = (tuple((int(place), float(cost)) for place, cost in curve) for curve in curves)
    costs = Costs(target, drafter, float(around), float(per_draft))
    return TrackedCosts(costs) if draft.costs == "tracked" else costs, costs


def _signature(model: LanguageModel) -> list[object]:
    """Return everything that the cost of a model depends on."""
    sizes = [model.parameters, model.layers, model.hidden_size, model.vocabulary_size]
    dtype = str(model.model.dtype)
    way = model.forward_pass.name.partition(",")[0], model.weights
    return [*sizes, dtype, model.adapter, *way, device_name(model.device)]


def estimate_costs(models: Models, batch: int) -> Costs:
    """From sizes, in target passes: the same on every machine."""
    sizes = [model.parameters + LAYER_OVERHEAD * model.layers for model in (models.drafter, models.target)]
    on_cpu = models.target.device.type == "cpu"
    share = CPU_VERIFY_SHARE + CPU_VERIFY_SHARE_PER_ROW * (batch - 1) if on_cpu else VERIFY_SHARE
    return Costs(((batch, 1.0), (2 * batch, 1.0 + share)), ((1, sizes[0] / sizes[1]),))


def describe(models: Models, costs: CostModel, batch: int) -> str:
    """Describe the choices made at the start and the measurements that support them, in one line."""
    plain, four = costs.verification_cost(batch), costs.verification_cost(5 * batch)
    return (
        f"target {models.name}: {models.target.forward_pass.name}; drafter: {models.drafter.forward_pass.name}; "
        f"in plain target passes, verifying 4 tokens more per row costs {four / plain - 1:.2f}, "
        f"drafting one for every row {costs.drafting_cost(batch) / plain:.2f}"
    )
