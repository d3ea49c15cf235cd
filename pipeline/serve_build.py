"""The engine of `omnidraft serve`, constructed: the stages of every run over live prompts, and a learner beside it."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from pipeline.build import make_recorder
from pipeline.build_coach import make_watch
from pipeline.build_learning import piece_cost
from pipeline.build_models import Models
from pipeline.build_stages import make_drafting
from pipeline.clock import Clock
from pipeline.coach import Coach, WatchingCoach
from pipeline.coach_remote import RemoteCoach
from pipeline.committing import Committer
from pipeline.config import Config
from pipeline.lane_stages import Stages
from pipeline.learner_host import HostSetup, Past
from pipeline.learner_process import LearnerProcess
from pipeline.loop import Lane, Loop
from pipeline.probe import lessons_of
from pipeline.serve_desk import DATASET, Desk
from pipeline.serve_engine import LiveEngine, TellingVerify
from stages.baselines import threads
from stages.chat import ChatEncoder, Conversation, Ids, PlainConversation
from stages.fingerprint import fingerprint
from stages.head import AcceptanceHead
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.weights import put_into_service
from store.committed import completed_prompts
from store.errors import ConfigError, RunError, UsageError
from store.events import Event
from store.log import RunLog
from store.object_store_mirror import Mirror
from store.object_store_uri import uri_of
from store.registry import NoRegistry


def learner_of(
    config: Config,
    models: Models,
    run_folder: Path,
    mirror: Mirror,
    uri: str,
    past: Past | None,
    see: Callable[[Event], None],
    notice: Callable[[str], None],
) -> LearnerProcess | None:
    """The learner beside the server, which goes on from what there is; None if nothing learns."""
    if not config.learn.enabled:
        return None
    probed = config.publish.enabled and config.publish.probe
    setup = HostSetup(
        config,
        run_folder,
        uri,
        ((DATASET, "omnidraft serve"),),
        piece_cost(config, [models]),
        tuple(lessons_of(config, models)) if probed else (),
        uri_of(Path(mirror.name)),
    )
    return LearnerProcess(setup, config.serve.learn_share, see, notice, past.published if past else None)


def build_engine(
    config: Config,
    models: Models,
    run_folder: Path,
    log: RunLog,
    kept: SnapshotReader | None,
    past: Past | None,
    learner: LearnerProcess | None,
    see: Callable[[Event], None],
    notice: Callable[[str], None],
) -> LiveEngine:
    """The engine, ready to start.

    Args:
        config: all settings, of which the sampling is the default of requests.
        models: the target and the drafter.
        run_folder: of the run.
        log: of the run.
        kept: the checkpoint of an earlier server over the same run.
        past: what the learner beside that one had committed.
        learner: beside this one.
        see: is told every event as it happens.
        notice: is told what the user should know.
    """
    same = _fingerprints(models)  # before anything that was learned is in service
    drafting = make_drafting(config, models, notice)
    longest = models.target.max_length - 1, models.drafter.max_length - 1
    # The learner may have committed prompts that died with the server.
    offset = max(kept.state["offset"] if kept else 0, past.next_offset if past else 0)
    desk = _desk(config, models, learner, offset)
    clock = Clock(perf_counter)
    lane = Lane(
        models.name,
        Stages(drafting.decode, drafting.translate, TellingVerify(drafting.verify, desk.told)),
        desk.row_of,
        make_recorder(config, models),
        _coach(config, models, drafting.head, learner, kept, past),
        clock,
    )
    loop = Loop({models.name: lane}, lambda offset: models.name, config.batch, clock)
    if kept:
        loop.restore(kept.state["loop"], kept)
    if kept and not learner:
        for prompt in completed_prompts(run_folder):
            lane.coach.watch_again(prompt)

    def save(keep: SnapshotWriter) -> Json:
        return {"loop": loop.save(keep), "offset": desk.next_offset, "models": same}

    committer = Committer(config.commit, save, lambda: False, log, NoRegistry(), rows=False)

    def encode(text: str) -> Ids:
        return models.target_words.encode(text), models.drafter_words.encode(text)

    conversation, words = make_conversation(config, models, notice), models.target_words
    return LiveEngine(
        desk, loop, lane, encode, conversation, words, longest, log, committer, learner, see, notice, threads()
    )


def _desk(config: Config, models: Models, learner: LearnerProcess | None, offset: int) -> Desk:
    teaches = (lambda: learner.has_room) if learner else (lambda: False)
    return Desk(
        models.target_words,
        models.target.max_length,
        config.serve.waiting,
        config.seed,
        offset,
        text=config.log.text,
        teaches=teaches,
    )


def require_same(kept: SnapshotReader, models: Models, run_folder: Path) -> None:
    """Refuse a checkpoint that is not of a server with these models. Raises `RunError`."""
    if "offset" not in kept.state:
        raise RunError(
            f"{run_folder} must hold the run of a server, but holds a replay; go on with it by "
            f"`omnidraft replay --resume {run_folder}`"
        )
    if kept.state["models"] != _fingerprints(models):
        raise RunError(f"the server of {run_folder} must go on with the models that it began with, but has others")


def _fingerprints(models: Models) -> list[str]:
    return [fingerprint(models.target), fingerprint(models.drafter), models.pair.digest]


def _coach(
    config: Config,
    models: Models,
    head: AcceptanceHead,
    learner: LearnerProcess | None,
    kept: SnapshotReader | None,
    past: Past | None,
) -> Coach:
    """The coach, with what the learner had committed in service, if an earlier server served it or this one is to."""
    before = kept.state["loop"]["lanes"][models.name]["coach"]["versions"] if kept else (0, 0)
    versions = 0, 0
    if past and (config.serve.learn == "live" or any(before)):
        put_into_service(past.weights, models.drafter, head)
        versions = past.weights.drafter_version, past.weights.head_version
    if learner:
        return RemoteCoach(learner, models.drafter, head, *versions, adopts=config.serve.learn == "live")
    return WatchingCoach(make_watch(config), *versions)


def make_conversation(config: Config, models: Models, notice: Callable[[str], None]) -> Conversation:
    """How conversations become prompts: by the target's chat template, one that is given, or without any.

    Raises:
        ConfigError: the template that is given cannot be read or used.
    """
    words = models.target_words
    path = config.source.chat_template
    if path is None and not words.tokenizer.chat_template:
        notice(f"{words.name} has no chat template: of conversations it completes the contents, a blank line between")
        return PlainConversation(words, models.drafter_words)
    try:
        template = path.read_text(encoding="utf-8") if path else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"source.chat_template must be a readable Jinja file: {error}") from error
    return ChatEncoder(words, models.drafter_words, models.pair, template)


def serving_config(config: Config) -> Config:
    """The settings as a server uses them.

    Raises:
        UsageError: there are several targets.
    """
    if len(config.targets) != 1 or config.swaps:
        raise UsageError(f"a server serves one target, got {', '.join((*config.targets, *config.swaps))}")
    return config.with_overrides({"learn.enabled": config.learn.enabled and config.serve.learn != "off"})
