"""The engine of `omnidraft serve`, constructed: the stages of every run over live prompts, and a learner beside it."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from pipeline.build import make_recorder
from pipeline.build_coach import Shelving, make_coach
from pipeline.build_learning import piece_cost
from pipeline.build_models import Models
from pipeline.build_stages import Drafting, make_drafting
from pipeline.clock import Clock
from pipeline.coach import Coach
from pipeline.coach_remote import RemoteCoach
from pipeline.committing import Committer
from pipeline.config import Config
from pipeline.lane_stages import Stages
from pipeline.learner_host import HostSetup
from pipeline.learner_process import LearnerProcess
from pipeline.loop import Lane, Loop
from pipeline.probe import lessons_of
from pipeline.publish import Numbers
from pipeline.serve_desk import DATASET, Desk
from pipeline.serve_engine import LiveEngine, TellingVerify
from stages.baselines import threads
from stages.chat import ChatEncoder, Conversation, Ids, PlainConversation
from stages.distill import NoDistill
from stages.fingerprint import fingerprint
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.errors import ConfigError, RunError, UsageError
from store.events import Event
from store.log import RunLog
from store.manifest import read_manifest
from store.object_store_mirror import Mirror
from store.object_store_uri import uri_of
from store.partitions import partition_folders
from store.registry import NoRegistry


def learner_of(
    config: Config,
    models: Models,
    run_folder: Path,
    mirror: Mirror,
    uri: str,
    see: Callable[[Event], None],
    notice: Callable[[str], None],
) -> LearnerProcess | None:
    """The learner beside the server; None if nothing learns."""
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
    return LearnerProcess(setup, config.serve.learn_share, see, notice)


def build_engine(
    config: Config,
    models: Models,
    run_folder: Path,
    log: RunLog,
    kept: SnapshotReader | None,
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
        learner: beside it.
        see: is told every event as it happens.
        notice: is told what the user should know.
    """
    drafting = make_drafting(config, models, notice)
    longest = models.target.max_length - 1, models.drafter.max_length - 1
    offset = max(kept.state["offset"] if kept else 0, _behind_learner(run_folder))
    desk = Desk(
        models.target_words, models.target.max_length, config.serve.waiting, config.seed, offset, text=config.log.text
    )
    clock = Clock(perf_counter)
    lane = Lane(
        models.name,
        Stages(drafting.decode, drafting.translate, TellingVerify(drafting.verify, desk.told)),
        desk.row_of,
        make_recorder(config, models),
        _coach(config, models, drafting, run_folder, learner),
        clock,
    )
    loop = Loop({models.name: lane}, lambda offset: models.name, config.batch, clock)
    same = _fingerprints(models)
    if kept:
        loop.restore(kept.state["loop"], kept)

    def save(keep: SnapshotWriter) -> Json:
        return {"loop": loop.save(keep), "offset": desk.next_offset, "models": same}

    committer = Committer(config.commit, save, lambda: False, log, NoRegistry(), rows=False)

    def encode(text: str) -> Ids:
        return models.target_words.encode(text), models.drafter_words.encode(text)

    conversation, words = make_conversation(config, models, notice), models.target_words
    return LiveEngine(
        desk, loop, lane, encode, conversation, words, longest, log, committer, learner, see, notice, threads()
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


def _behind_learner(run_folder: Path) -> int:
    """The first offset that the learner has not named: it may have committed prompts that died with a server."""
    folders = partition_folders(run_folder)
    parts = [part for folder in folders for of_table in read_manifest(folder).tables.values() for part in of_table]
    return max((part.last_offset + 1 for part in parts), default=0)


def _coach(
    config: Config, models: Models, drafting: Drafting, run_folder: Path, learner: LearnerProcess | None
) -> Coach:
    if learner:
        return RemoteCoach(learner, models.drafter, drafting.head, adopts=config.serve.learn == "live")
    frozen = config.with_overrides({"publish.enabled": False})
    shelving = Shelving(run_folder, NoRegistry(), Numbers(), dict)
    return make_coach(frozen, models, drafting.head, drafting.cache, NoDistill(), shelving)


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
