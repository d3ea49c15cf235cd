"""What learns: the drafter's trainer, each target's head, and their schedules, as configured."""

from collections.abc import Callable, Sequence

from pipeline.build_costs import LAYER_OVERHEAD
from pipeline.build_models import DrafterModels, Models
from pipeline.build_stages import draftable
from pipeline.config import Config
from stages.distill import Distill, NoDistill
from stages.drafter_trainer import DrafterTrainer
from stages.head import AcceptanceHead
from stages.head_trainer import HeadTrainer
from stages.learner import DrafterLearner
from stages.losses import (
    Loss,
    acceptance_loss,
    direct_loss,
    expected_acceptance,
    greedy_agreement,
    hybrid_loss,
    trie_loss,
)
from stages.spacing import FixedSpacing, PayingSpacing, Spacing
from stages.training import Training
from stages.worker import CallingThread, OwnThread

# What one piece of one gradient step costs per weight of the drafter, in weights read by a target pass: measured on
# two CPU cores with targets of 12M (.45) and 100M (.76), the gate's share included.
TRAIN_SHARE = 0.45


def _loss(config: Config) -> Loss:
    losses: dict[str, Loss] = {
        "trie": trie_loss,
        "direct": direct_loss,
        "hybrid": hybrid_loss(config.learn.ngram_weight),
        "acceptance": acceptance_loss(config.learn.acceptance_blend),
    }
    return losses[config.learn.loss]


def make_distills(
    config: Config,
    fleet: Sequence[DrafterModels],
    heads: Sequence[AcceptanceHead],
    cost: float,
    breathe: Callable[[], None] = lambda: None,
) -> Sequence[Distill | NoDistill]:
    """One per target. Targets that share the drafter's weights share their learner.

    Args:
        config: all settings.
        fleet: the drafter for each target.
        heads: of the targets.
        cost: see `piece_cost`.
        breathe: called between the parts of an update.
    """
    if not config.learn.enabled:
        return [NoDistill() for _ in fleet]
    if config.learn.lora:
        learners = [_learner(config, [models], cost, breathe) for models in fleet]
    else:
        learners = [_learner(config, fleet, cost, breathe)] * len(fleet)
    return [_distill(config, learner, head) for learner, head in zip(learners, heads, strict=True)]


def _distill(config: Config, learner: DrafterLearner, head: AcceptanceHead) -> Distill:
    learn = config.learn
    trained_head = HeadTrainer(head, config.seed, learn.head_rate, learn.head_batch, learn.head_buffer)
    return Distill(learner, trained_head, interleaved=learn.head_schedule == "interleaved")


def _learner(
    config: Config, fleet: Sequence[DrafterModels], cost: float, breathe: Callable[[], None]
) -> DrafterLearner:
    learn = config.learn
    training = Training(
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
    allowed = {models.name: draftable(config, models.pair) for models in fleet}
    trainer = DrafterTrainer(fleet[0].drafter, learn.loss, _loss(config), measure, allowed, training, breathe)
    gate_every = round(1 / learn.gate_share) if learn.gate_share else 1 << 62
    lag = 0 if learn.lora else learn.lag
    worker = OwnThread() if lag else CallingThread()
    return DrafterLearner(trainer, _spacing(config, cost), gate_every, learn.interval, lag, worker)


def _spacing(config: Config, cost: float) -> Spacing:
    learn = config.learn
    if learn.spacing == "fixed":
        return FixedSpacing(learn.interval)
    longest = max(learn.interval, learn.longest_interval)
    return PayingSpacing(learn.interval, longest, cost, learn.steps, learn.horizon, config.batch)


def piece_cost(config: Config, fleet: Sequence[Models]) -> float:
    """What one piece costs in one gradient step, in target passes: as configured, or estimated from sizes."""
    if config.learn.piece_cost is not None:
        return config.learn.piece_cost
    passes = [models.target.parameters + LAYER_OVERHEAD * models.target.layers for models in fleet]
    return TRAIN_SHARE * fleet[0].drafter.parameters / min(passes)
