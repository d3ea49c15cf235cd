"""What learns: the drafter's trainer, each target's head, and their schedules, as configured."""

from collections.abc import Sequence

from pipeline.assembly.models import DrafterModels, Models
from pipeline.assembly.stages import draftable
from pipeline.config.settings import Config
from pipeline.sources.corpus import read_usual_texts
from stages.distill import Distill, Distiller
from stages.drafting.head import AcceptanceHead
from stages.engine.quantisation.modules import mean_bytes
from stages.learn.examples.losses import LOSSES, expected_acceptance, greedy_agreement
from stages.learn.training.closed_form import OutputLayerTrainer
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.head_trainer import HeadTrainer
from stages.learn.training.interval import BreakEvenInterval, UpdateInterval
from stages.learn.training.scheduler import SAMPLED, InlineWorker, ThreadWorker, UpdateScheduler
from stages.learn.training.update import Pace, TrainingConfig

# What one piece of one gradient step costs per weight of the drafter, in weights read by a target pass: measured on
# two CPU cores with targets of 12M (.45) and 100M (.76), the gate's share included.
TRAIN_SHARE = 0.45
BYTES = 4  # of their weights
LAYER_OVERHEAD = 2e5  # overhead of entering one layer, as a number of parameters
HEAD_RATE = 5e-3  # of a head that begins with random weights
TRAINED_HEAD_RATE = 1e-4  # with more, a trained head's estimates become worse (benchmarks/notes/choosing.md)
HEAD_BATCH, HEAD_BUFFER = 256, 2048  # labels of a step, and those that are kept: of some 50 prompts
WEIGHT_DECAY, CLIP = 0.01, 1.0  # AdamW's, and the largest norm of a gradient
STEPS = 2  # gradient steps of an update
LAG = 4  # prompts between the start of an update in the background and its application
REPLAY = 256  # prompts of the replay buffer, a uniform sample of the stream
GATE_EVERY = 7  # of so many prompts one is held out for the gate
GATE_WINDOW, GATE_TOLERANCE = 12, 0.01  # held-out prompts of a target, and the fall of acceptance that passes the gate
# Updates of a training from logs follow each other, and each text is read several times.
OFFLINE_STEPS, OFFLINE_REPLAY, OFFLINE_WINDOW = 1, 0, 64
# Of a gradient step, for a piece that is read: .3 ms where a step takes .22, the gate and the solution included. But an
# update reads half as many pieces, once.
CLOSED_FORM_SHARE = 1.3
MOST_INTERVALS = 4  # of the shortest length, whose examples an update in closed form learns from; none is read again


def make_distillers(
    config: Config,
    targets: Sequence[DrafterModels],
    heads: Sequence[AcceptanceHead],
    cost: float,
    pace: Pace | None = None,
    *,
    background: bool = True,
    offline: bool = False,
    prompts: int = 0,
) -> Sequence[Distiller]:
    """One per target. Targets that share the drafter's weights share their learner.

    Args:
        cost: see `piece_cost`.
        pace: when updates may compute; None for any time.
        background: whether updates are computed on a thread of their own; those of adapters never are.
        offline: whether the updates are those of a training from logs.
        prompts: of the whole stream, as far as is known.
    """
    if not config.learn.enabled:
        return [Distiller() for _ in targets]
    learn, steps, pace = config.learn, OFFLINE_STEPS if offline else STEPS, pace or Pace()
    lag = LAG if background and not learn.lora else 0
    training = TrainingConfig(
        rate=learn.rate,
        weight_decay=WEIGHT_DECAY,
        steps=steps,
        clip=CLIP,
        replay=OFFLINE_REPLAY if offline else REPLAY,
        gate_window=OFFLINE_WINDOW if offline else GATE_WINDOW,
        gate_tolerance=GATE_TOLERANCE,
        seed=config.seed,
    )
    in_closed_form = learn.trains_output_layer
    step_cost = cost * CLOSED_FORM_SHARE / steps if in_closed_form else cost
    examples = learn.interval * (MOST_INTERVALS if in_closed_form else 1)

    def make_scheduler(sharing: Sequence[DrafterModels]) -> UpdateScheduler:
        trainer = _make_trainer(config, sharing, training, pace)
        interval = UpdateInterval(learn.interval)
        if learn.spacing == "paying":
            own = prompts * len(sharing) // len(targets)
            interval = BreakEvenInterval(learn.interval, steps, step_cost, config.batch, prompts=own)
        worker = ThreadWorker() if lag else InlineWorker()
        sampled = SAMPLED if background else 1  # the loop of another process asks for no prompt
        return UpdateScheduler(trainer, interval, GATE_EVERY, examples, lag, worker, pace, sampled)

    def make_distill(scheduler: UpdateScheduler, head: AcceptanceHead) -> Distill:
        rate = TRAINED_HEAD_RATE if head.came_trained else HEAD_RATE
        return Distill(scheduler, HeadTrainer(head, config.seed, rate, HEAD_BATCH, HEAD_BUFFER))

    own = [make_scheduler([models]) for models in targets] if learn.lora else [make_scheduler(targets)] * len(targets)
    return list(map(make_distill, own, heads))


def _make_trainer(
    config: Config, sharing: Sequence[DrafterModels], training: TrainingConfig, pace: Pace
) -> DrafterTrainer:
    """Make what trains the weights that some targets share."""
    learn, drafter, vocabulary = config.learn, sharing[0].drafter, sharing[0].drafter_vocabulary
    measure = greedy_agreement if config.sampling.temperature == 0 else expected_acceptance
    allowed = {models.name: draftable(config.draft, models.pair) for models in sharing}
    arguments = drafter, learn.loss, LOSSES[learn.loss], measure, allowed, training, pace.yield_cpu
    if not learn.trains_output_layer:
        return DrafterTrainer(*arguments)

    def read_usual() -> list[list[int]]:
        return [vocabulary.encode(text)[: drafter.max_length] for text in read_usual_texts()]

    return OutputLayerTrainer(*arguments, usual=read_usual)


def piece_cost(costs: str | float, targets: Sequence[Models]) -> float:
    """What one piece costs in one gradient step, in target passes. A pass over weights of few bits takes as much less
    time as it reads fewer bytes.

    Args:
        costs: the setting `draft.costs`; what is no number is estimated from sizes here.
    """
    if isinstance(costs, float):
        return TRAIN_SHARE * costs
    read = [mean_bytes(models.target.model, models.target.weights) / BYTES for models in targets]
    passes = [
        share * models.target.parameters + LAYER_OVERHEAD * models.target.layers
        for share, models in zip(read, targets, strict=True)
    ]
    return float(TRAIN_SHARE * targets[0].drafter.parameters / min(passes))
