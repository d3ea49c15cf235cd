"""The coach of one target, as configured: drift watch, answer, distillation and versions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.answer import Answer, NoAnswer, Recall, Restart, Shelf
from pipeline.build_cache import NGRAM_FILE
from pipeline.build_models import DrafterModels
from pipeline.build_stages import HEAD_FILE
from pipeline.coach import LocalCoach
from pipeline.config import Config
from pipeline.config_sections import DriftSettings
from pipeline.drift import DriftWatch, Rates
from pipeline.publish import FolderPublisher, NoPublisher, Numbers, Origin
from pipeline.records import Versions
from stages.distill import Distill, NoDistill
from stages.head import AcceptanceHead, load_head, save_head
from stages.language_model import read_learning
from stages.ngram_cache import Cache
from store.ngram_file import write_ngrams
from store.registry import Registry
from store.version_folder import open_version


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Shelving:
    """Where the versions of a run go.

    Attributes:
        folder: the run's.
        registry: where they are registered.
        numbers: which all targets of the run share.
        probe: measures a version on what never changes, by name.
    """

    folder: Path
    registry: Registry
    numbers: Numbers
    probe: Callable[[], Mapping[str, float]]


def make_coach(
    config: Config,
    models: DrafterModels,
    head: AcceptanceHead,
    cache: Cache,
    distill: Distill | NoDistill,
    shelving: Shelving,
) -> LocalCoach:
    """The coach of one target.

    Args:
        config: all settings.
        models: the drafter that it teaches and publishes.
        head, cache: what is published with it.
        distill: learns them.
        shelving: where versions go.
    """
    publisher = _publisher(config, models, head, cache, distill, shelving)
    return LocalCoach(distill, make_watch(config), _answer(config, models, head, distill, publisher), publisher)


def make_watch(config: Config) -> DriftWatch:
    """What notices drifts."""
    return DriftWatch(drift_settings(config), Rates(_first_only(config)))


def _first_only(config: Config) -> bool:
    signal = config.drift.signal
    return signal == "first" or (signal == "auto" and config.draft.adapt and config.learn.enabled)


def drift_settings(config: Config) -> DriftSettings:
    """With the answer that can be given: without learning nothing adapts, without versions nothing can come back."""
    answer = config.drift.answer
    if not config.learn.enabled:
        answer = "none"
    elif answer == "recall" and not config.publish.enabled:
        answer = "reset"
    return config.drift.model_copy(update={"answer": answer})


def _answer(
    config: Config,
    models: DrafterModels,
    head: AcceptanceHead,
    distill: Distill | NoDistill,
    publisher: FolderPublisher | NoPublisher,
) -> Answer:
    """What a drift is answered with."""
    answer = drift_settings(config).answer
    if answer == "none" or isinstance(distill, NoDistill):
        return NoAnswer()
    if answer == "reset" or isinstance(publisher, NoPublisher):
        return Restart(distill.restart)
    shelf = Shelf(
        lambda: publisher.folders,
        lambda folder: read_learning(_checked(folder), models.drafter),
        lambda folder: load_head(head, folder / HEAD_FILE),
    )
    return Recall(distill, shelf, config.drift.recall_margin, config.drift.recall_versions)


def _checked(folder: Path) -> Path:
    """The folder of a version that is as it was sealed. Raises CorruptError."""
    open_version(folder)
    return folder


def _publisher(
    config: Config,
    models: DrafterModels,
    head: AcceptanceHead,
    cache: Cache,
    distill: Distill | NoDistill,
    shelving: Shelving,
) -> FolderPublisher | NoPublisher:
    if not config.publish.enabled:
        return NoPublisher()

    def write(folder: Path) -> None:
        models.drafter.save(folder, models.drafter_tokenizer)
        save_head(head, folder / HEAD_FILE)
        ngrams = ((entry.pieces, entry.token, entry.count) for entry in cache.entries())
        write_ngrams(folder / NGRAM_FILE, ngrams, models.pair.digest)

    def state() -> tuple[Versions, int]:
        return Versions(distill.drafter_version, distill.head_version, cache.version), len(cache)

    origin = Origin(config.publish.name, shelving.folder.name, models.name, config.drafter, models.pair.digest)
    return FolderPublisher(
        shelving.folder,
        write,
        state,
        origin,
        shelving.registry,
        config.publish.interval,
        shelving.numbers,
        _now,
        shelving.probe,
    )
