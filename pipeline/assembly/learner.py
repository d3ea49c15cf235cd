"""Builds the learner of one target: drift detection and response, distillation, versions."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.assembly.cache import NGRAM_FILE
from pipeline.assembly.models import DrafterModels
from pipeline.assembly.stages import HEAD_FILE
from pipeline.config.settings import Config
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.drift_response import DriftResponse, NoResponse, Recall, ResetHead, VersionSource
from pipeline.learning.local_learner import LocalLearner
from pipeline.learning.publisher import DrafterFiles, FolderPublisher, NoPublisher, Numbers, Origin
from stages.distill import Distill, Distiller
from stages.drafting.head import AcceptanceHead, load_head, save_head
from stages.drafting.target_states import TargetStates, read_version_weights
from stages.engine.models.language_model import LanguageModel
from stages.learn.training.closed_form import OutputLayerTrainer
from stages.learn.training.probe import ProbeResult
from stages.memory.text_memory import MEMORY_FILE, TextMemory, write_memory
from stages.ngrams.cache import NgramCache
from store.registry.ngram_file import write_ngrams
from store.registry.version_folder import Counters, open_version

RECALL_MARGIN = 0.02  # gain in expected acceptance from which an earlier version is restored
RECALL_VERSIONS = 12  # newest versions that are scored after a drift: each takes a pass over the kept examples


@dataclass(frozen=True)
class VersionSink:
    """Where the versions of a run go."""

    folder: Path  # the run's
    numbers: Numbers  # which all targets of the run share
    probe: Callable[[], ProbeResult]  # measures a version on what never changes


def make_learner(
    config: Config,
    models: DrafterModels,
    head: AcceptanceHead,
    cache: NgramCache,
    distill: Distiller,
    sink: VersionSink,
    memory: TextMemory | None = None,
) -> LocalLearner:
    """The learner of one target, with what is published with the drafter: head, cache, and the memory, which is None
    where the rows are decoded elsewhere.
    """
    publisher: FolderPublisher | NoPublisher = NoPublisher()
    if config.publish.enabled:
        write = _make_writer(models, head, cache, distill, memory if config.memory.publish else None)
        origin = Origin(
            config.name_registered_model(models.name), sink.folder.name, models.name, config.drafter, models.pair.digest
        )

        def count() -> Counters:
            table = memory.table if memory and config.memory.publish else None
            return {
                "drafter": distill.drafter_version,
                "head": distill.head_version,
                "cache": cache.version,
                "cache_entries": len(cache),
                "memory_tokens": 0 if table is None else table.learned_tokens,
            }

        publisher = FolderPublisher(
            sink.folder,
            write,
            count,
            origin,
            config.publish.interval,
            sink.numbers,
            lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
            sink.probe,
            lambda: distill.held_out_acceptance,
        )
    drift = config.drift_in_effect
    response = _make_response(drift.response, models.drafter, head, distill, publisher)
    return LocalLearner(distill, DriftMonitor(drift), response, publisher)


def _make_response(
    response: str,
    drafter: LanguageModel,
    head: AcceptanceHead,
    distill: Distiller,
    publisher: FolderPublisher | NoPublisher,
) -> DriftResponse:
    if response == "none" or not isinstance(distill, Distill):
        return NoResponse()
    if response == "reset" or isinstance(publisher, NoPublisher):
        return ResetHead(distill.reset_head)
    trainer = distill.drafter.trainer

    def read_rest(folder: Path) -> None:
        load_head(head, folder / HEAD_FILE)
        if isinstance(trainer, OutputLayerTrainer):
            trainer.read_sums(folder)

    def read_weights(folder: Path) -> Any:
        open_version(folder)  # raises CorruptError if it is not as it was sealed
        return read_version_weights(folder, drafter)

    versions = VersionSource(lambda: publisher.folders, read_weights, read_rest)
    return Recall(distill, versions, RECALL_MARGIN, RECALL_VERSIONS)


def _make_writer(
    models: DrafterModels,
    head: AcceptanceHead,
    cache: NgramCache,
    distill: Distiller,
    memory: TextMemory | None,
) -> Callable[[Path], None]:
    """Make what writes the files of a version into a folder."""

    def save_drafter(folder: Path) -> None:
        models.drafter.save(folder, models.drafter_tokenizer)
        if isinstance(models.drafter.extra, TargetStates):
            models.drafter.extra.write(folder)

    drafter_files = DrafterFiles(save_drafter, lambda: distill.drafter_version)

    def write(folder: Path) -> None:
        drafter_files.write(folder)
        save_head(head, folder / HEAD_FILE)
        ngrams = ((entry.pieces, entry.token, entry.count) for entry in cache.entries())
        write_ngrams(folder / NGRAM_FILE, ngrams, models.pair.digest)
        if memory is not None:
            write_memory(folder / MEMORY_FILE, memory, models.pair.digest)
        if isinstance(distill, Distill) and isinstance(trainer := distill.drafter.trainer, OutputLayerTrainer):
            distill.wait()  # an update that is being computed changes the sums
            trainer.write_sums(folder)

    return write
