"""What learns: the drafter's trainer, each target's head, and their schedules, as configured."""

from collections.abc import Callable, Sequence

from pipeline.assembly.costs import LAYER_OVERHEAD
from pipeline.assembly.models import DrafterModels, Models
from pipeline.assembly.stages import draftable
from pipeline.config.sections import LearnSettings
from pipeline.config.settings import Config
from stages.distill import Distill, NoDistiller
from stages.drafting.head import AcceptanceHead
from stages.examples.losses import LOSSES, expected_acceptance, greedy_agreement
from stages.quantisation.modules import mean_bytes
from stages.rules import MODES
from stages.training.closed_form.trainer import OutputLayerTrainer
from stages.training.drafter_trainer import DrafterTrainer
from stages.training.head_trainer import HeadTrainer
from stages.training.interval import UPDATE_INTERVALS
from stages.training.scheduler import InlineWorker, ThreadWorker, UpdateScheduler
from stages.training.update import TrainingConfig

# What one piece of one gradient step costs per weight of the drafter, in weights read by a target pass: measured on
# two CPU cores with targets of 12M (.45) and 100M (.76), the gate's share included.
TRAIN_SHARE = 0.45
BYTES = 4  # of their weights
HEAD_RATE = 5e-3  # of a head that begins with random weights
TRAINED_HEAD_RATE = 1e-4  # with more, a trained head's estimates become worse (benchmarks/notes/choosing.md)
CLOSED_FORM_SHARE = 1 / 3  # of a gradient step, by count of passes, not measured: an update is one forward pass


def make_distillers(
    config: Config,
    targets: Sequence[DrafterModels],
    heads: Sequence[AcceptanceHead],
    cost: float,
    yield_cpu: Callable[[], None] = lambda: None,
) -> Sequence[Distill | NoDistiller]:
    """One per target. Targets that share the drafter's weights share their learner.

    Args:
        config: all settings.
        targets: the drafter for each target.
        heads: of the targets.
        cost: see `piece_cost`.
        yield_cpu: called between the parts of an update.
    """
    if not config.learn.enabled:
        return [NoDistiller() for _ in targets]
    if config.learn.lora:
        learners = [_learner(config, [models], cost, yield_cpu) for models in targets]
    else:
        learners = [_learner(config, targets, cost, yield_cpu)] * len(targets)
    return [_distill(config, learner, head) for learner, head in zip(learners, heads, strict=True)]


def _distill(config: Config, learner: UpdateScheduler, head: AcceptanceHead) -> Distill:
    learn = config.learn
    rate = learn.head_rate or (TRAINED_HEAD_RATE if head.came_trained else HEAD_RATE)
    trained_head = HeadTrainer(head, config.seed, rate, learn.head_batch, learn.head_buffer)
    return Distill(learner, trained_head, interleaved=learn.head_schedule == "interleaved")


def _learner(
    config: Config, targets: Sequence[DrafterModels], cost: float, yield_cpu: Callable[[], None]
) -> UpdateScheduler:
    learn = config.learn
    training = TrainingConfig(
        rate=learn.rate,
        weight_decay=learn.weight_decay,
        steps=learn.steps,
        clip=learn.clip,
        replay=learn.replay_prompts,
        gate_window=learn.gate_window,
        gate_tolerance=learn.gate_tolerance,
        seed=config.seed,
    )
    measure = greedy_agreement if config.sampling.temperature == 0 else expected_acceptance
    allowed = {models.name: draftable(config.draft, models.pair) for models in targets}
    loss = LOSSES[learn.loss](learn)
    in_closed_form = learn.trains_output_layer
    trainer_type = OutputLayerTrainer if in_closed_form else DrafterTrainer
    trainer = trainer_type(targets[0].drafter, learn.loss, loss, measure, allowed, training, yield_cpu)
    gate_every = round(1 / learn.gate_share) if learn.gate_share else 1 << 62
    lag = 0 if learn.lora else learn.lag
    worker = ThreadWorker() if lag else InlineWorker()
    step_cost = cost * CLOSED_FORM_SHARE / learn.steps if in_closed_form else cost
    others_draft = set(config.draft.sources) != {"model"} and MODES[config.draft.mode].copies
    interval = UPDATE_INTERVALS[learn.spacing](learn, step_cost, config.batch, others_draft=others_draft)
    examples = max(learn.interval, learn.longest_interval) if in_closed_form else learn.interval
    samples = others_draft and not in_closed_form  # the closed form learns from every example
    return UpdateScheduler(trainer, interval, gate_every, examples, lag, worker, samples=samples)


def piece_cost(learn: LearnSettings, targets: Sequence[Models]) -> float:
    """What one piece costs in one gradient step, in target passes: as configured, or estimated from sizes. A pass over
    weights of few bits takes as much less time as it reads fewer bytes.
    """
    if learn.piece_cost is not None:
        return learn.piece_cost
    read = [mean_bytes(models.target.model, models.target.weights) / BYTES for models in targets]
    passes = [
        share * models.target.parameters + LAYER_OVERHEAD * models.target.layers
        for share, models in zip(read, targets, strict=True)
    ]
    return float(TRAIN_SHARE * targets[0].drafter.parameters / min(passes))
