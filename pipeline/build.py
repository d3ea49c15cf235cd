"""From a configuration to a pipeline that runs: the only family of files that constructs stages.

`build_models` loads, `build_stages` and `build_cache` make one target's stages, `build_learning` what learns;
here they become lanes of one loop.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from pipeline.admission import make_admission
from pipeline.answer import Answer, NoAnswer, Recall, Restart, Shelf
from pipeline.build_cache import NGRAM_FILE
from pipeline.build_learning import make_distills
from pipeline.build_models import Models
from pipeline.build_stages import HEAD_FILE, Drafting, make_drafting
from pipeline.clock import Clock
from pipeline.config import Config
from pipeline.config_sections import DriftSettings
from pipeline.dealing import Dealing
from pipeline.drift import DriftWatch, Rates
from pipeline.lane_stages import Stages
from pipeline.loop import Lane, Loop
from pipeline.probe import make_probe
from pipeline.publish import FolderPublisher, NoPublisher, Numbers, Origin
from pipeline.records import Recorder, Versions
from stages.distill import Distill, NoDistill
from stages.head import load_head, save_head
from stages.language_model import read_learning
from store.ngram_file import write_ngrams
from store.registry import Registry
from store.version_folder import open_version


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def build_loop(
    config: Config, fleet: Sequence[Models], registry: Registry, run_folder: Path, notice: Callable[[str], None]
) -> Loop:
    """The whole loop over loaded models, one lane per target."""
    dealing = Dealing.of(config)
    drafting = _drafting(config, fleet, dealing, notice)
    distills = make_distills(config, fleet, [one.head for one in drafting])
    numbers, clock, lanes = Numbers(), Clock(perf_counter), {}
    for models, stages, distill in zip(fleet, drafting, distills, strict=True):
        publisher = _publisher(config, models, stages, distill, registry, run_folder, numbers)
        lanes[models.name] = Lane(
            models.name,
            Stages(stages.decode, stages.translate, stages.verify, distill),
            make_admission(config, models),
            Recorder(models.name, models.target_words.bytes_of, models.target_words.decode, text=config.log.text),
            DriftWatch(drift_settings(config), Rates(_first_only(config))),
            _answer(config, models, stages, distill, publisher),
            publisher,
            clock,
        )
    return Loop(lanes, dealing, config.batch, clock)


def _drafting(
    config: Config, fleet: Sequence[Models], dealing: Dealing, notice: Callable[[str], None]
) -> list[Drafting]:
    """Per target its stages. One that is swapped in goes on with the n-grams of a target of the same vocabulary."""
    made: list[Drafting] = []
    by_words: dict[str, Drafting] = {}
    for models in fleet:
        kin = None if models.name in dealing.first else by_words.get(models.pair.digest)
        made.append(make_drafting(config, models, notice, kin))
        by_words.setdefault(models.pair.digest, made[-1])
    return made


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
    models: Models,
    stages: Drafting,
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
        lambda folder: load_head(stages.head, folder / HEAD_FILE),
    )
    return Recall(distill, shelf, config.drift.recall_margin, config.drift.recall_versions)


def _checked(folder: Path) -> Path:
    """The folder of a version that is as it was sealed. Raises CorruptError."""
    open_version(folder)
    return folder


def _publisher(
    config: Config,
    models: Models,
    stages: Drafting,
    distill: Distill | NoDistill,
    registry: Registry,
    run_folder: Path,
    numbers: Numbers,
) -> FolderPublisher | NoPublisher:
    if not config.publish.enabled:
        return NoPublisher()

    def write(folder: Path) -> None:
        models.drafter.save(folder, models.drafter_tokenizer)
        save_head(stages.head, folder / HEAD_FILE)
        ngrams = ((entry.pieces, entry.token, entry.count) for entry in stages.cache.entries())
        write_ngrams(folder / NGRAM_FILE, ngrams, models.pair.digest)

    def state() -> tuple[Versions, int]:
        return Versions(distill.drafter_version, distill.head_version, stages.cache.version), len(stages.cache)

    origin = Origin(config.publish.name, run_folder.name, models.name, config.drafter, models.pair.digest)
    probe = make_probe(config, models) if config.publish.probe else dict
    interval = config.publish.interval
    return FolderPublisher(run_folder, write, state, origin, registry, interval, numbers, _now, probe)
