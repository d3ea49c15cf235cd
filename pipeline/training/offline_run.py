"""One training from logs: the texts of earlier runs become a drafter version, in a run of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeline.assembly.learner import VersionSink, make_learner
from pipeline.assembly.models import Models, load_models, settle_settings
from pipeline.assembly.probe import make_probe
from pipeline.assembly.stages import Drafting, make_drafting, make_teacher
from pipeline.assembly.training import GATE_EVERY, OFFLINE_WINDOW, make_distillers
from pipeline.config.settings import Config, load
from pipeline.learning.publisher import Numbers
from pipeline.run.context import EventSink, RunContext
from pipeline.run.folder import CONFIG, mlflow_of
from pipeline.run.mlflow_run import UNSENT_TIMEOUT
from pipeline.run.signals import stop_on_signals
from pipeline.training.logged_texts import RunTexts, TextEncoder, read_run_texts, split_by_prompt
from stages.contract.blocks import TrainingExample
from stages.distill import Distill
from stages.learn.examples.teacher_forcing import CompletedText, TeacherForcing
from stages.learn.training.offline import OfflineTraining
from stages.learn.training.probe import ProbeResult
from stages.ngrams.cache import count_text_ngrams
from store.errors import RunError
from store.events import Event
from store.files import json_bytes, write_whole
from store.log.manifest import RunKind
from store.log.run_log import Mirror
from store.query.summary import SUMMARY

# What differs from learning online: updates follow each other, and each text is read several times.
OFFLINE: Mapping[str, Any] = {
    "swaps": (),
    "run": None,
    "draft.costs": "estimated",  # nothing is decoded
    "learn.enabled": True,
    "learn.spacing": "fixed",
    "learn.interval": 16,
    "publish.enabled": True,
}


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of a training."""

    # texts, tokens: texts used, and the target tokens of their completions
    texts: int
    tokens: int
    left_out: Mapping[str, int]  # number of texts by the reason for which they were left out
    held_out: int  # number of the texts that only the gate saw
    # updates, served: updates that were computed, and those that the gate accepted
    updates: int
    served: int
    acceptance: Sequence[float]  # expected acceptance on the held-out texts: as loaded, then after each pass
    # teacher_seconds, training_seconds: wall time of the target's passes, and of all updates
    teacher_seconds: float
    training_seconds: float
    stopped: bool  # whether a signal ended the training early
    version: str | None  # folder of the published version, relative to the run's; None if nothing is published


def make_training_config(logs: Sequence[Path], overrides: Mapping[str, object], base: Config | None = None) -> Config:
    """Return the settings of a training: those of the first run, but for what an offline training does differently. The
    overrides, by dotted key, take precedence; with `base` it begins with those in place of the first run's.
    """
    missing = [folder for folder in logs if not (folder / CONFIG).is_file()]
    if missing:
        raise RunError(f"--from-log must name folders of runs, but {missing[0]} has no {CONFIG}")
    base = base or load(logs[0] / CONFIG)
    config = base.with_overrides({**OFFLINE, "sources": tuple(map(str, logs)), **overrides})
    if len(config.targets) != 1:
        raise RunError(
            f"a training must have one target, but {logs[0]} has {', '.join(config.targets)}; name one with --target"
        )
    return config


class LogTraining:
    """A training that is ready to start: logs are read and models are loaded; nothing has been written yet. The runs to
    learn from must have their texts in their logs. `run_folder` is new or empty; the training's log and versions go
    there. Of each run the `newest` prompts are used, all if it is None.
    """

    def __init__(
        self,
        config: Config,
        logs: Sequence[Path],
        run_folder: Path,
        *,
        newest: int | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self._run = RunContext(run_folder, RunKind.TRAINING, mirror)
        self._uri = config.publish.mlflow_uri or mlflow_of(self._run.name)
        with self._run.acquire(resume=False):
            self.config = settle_settings(config, self._uri)
            read = [read_run_texts(folder, newest) for folder in logs]
            if not any(texts.completions for texts in read):
                raise RunError(
                    f"the logs must hold prompts with their texts (log.text), but {', '.join(map(str, logs))} hold none"
                )
            (self._models,) = load_models(self.config, self._uri, run_folder.parent / ".fetched")
            self._texts, self._shared, self._left_out = encode_texts(self._models, read)
            self._train, self._held = split_by_prompt(self._texts, 1 / GATE_EVERY, OFFLINE_WINDOW)
        if not self._held or not self._train:
            reasons = "; ".join(f"{number} left out: {reason}" for reason, number in self._left_out.items())
            raise RunError(
                f"a training needs texts of two different prompts or more, got {len(self._texts)} texts"
                f"{f' ({reasons})' if reasons else ''}"
            )

    def run(self, passes: int, show: Callable[[str], None]) -> TrainingSummary:
        """Train, and publish the best drafter as a version. It passes over the texts `passes` times at most, and calls
        `show` with lines that describe the progress.
        """
        with self._run.open(self.config.to_json()), stop_on_signals() as stop:
            datasets = [(Path(folder).name, folder) for folder in self.config.sources]
            self._run.connect(self.config, self._uri, datasets)
            events = EventSink(self._run.log)
            summary = self._train_and_publish(passes, events, show, lambda: stop.requested)
            write_whole(self._run.folder / SUMMARY, json_bytes(_numbers_of(summary)))
            self._run.finish()
        self._run.disconnect(UNSENT_TIMEOUT)
        return summary

    def _train_and_publish(
        self, passes: int, events: EventSink, show: Callable[[str], None], stop: Callable[[], bool]
    ) -> TrainingSummary:
        drafting, measured = make_drafting(self.config, self._models), dict[str, float]()
        (distill,) = make_distillers(self.config, [self._models], [drafting.head], 0.0, background=False, offline=True)
        assert isinstance(distill, Distill)  # learn.enabled
        probe = make_probe(self.config, self._models)

        def measure() -> ProbeResult:
            found = probe()
            return replace(found, metrics={**found.metrics, **measured})

        sink = VersionSink(self._run.folder, Numbers(), measure)
        memory = drafting.decode.memory
        learner = make_learner(self.config, self._models, drafting.head, drafting.cache, distill, sink, memory)
        events.take(learner.publish_baseline())
        began = perf_counter()
        examples = sorted(self._make_examples(show, stop), key=lambda example: example.offset)
        made, chosen = perf_counter(), set(self._held)
        held = [example for example in examples if example.offset in chosen]
        train = [example for example in examples if example.offset not in chosen]
        if not held or not train:
            raise RunError("the training was stopped before the target had read the texts; begin it again")
        training = OfflineTraining(
            distill.drafter.trainer,
            held,
            passes=passes,
            update_examples=self.config.learn.interval,
            seed=self.config.seed,
        )
        counts = {"updates": 0, "served": 0}
        events.take(self._updates(training, train, counts, show, stop))
        measured["train/acceptance"] = training.best
        self._fill(drafting)
        published = list(learner.publisher.end(len(self._train)))
        events.take(published)
        return TrainingSummary(
            texts=len(self._texts),
            tokens=sum(len(text.emitted) for text in self._texts),
            left_out=self._left_out,
            held_out=len(held),
            **counts,
            acceptance=tuple(training.acceptances),
            teacher_seconds=made - began,
            training_seconds=perf_counter() - made,
            stopped=stop(),
            version=published[0].folder if published else None,
        )

    def _make_examples(self, show: Callable[[str], None], stop: Callable[[], bool]) -> Iterator[TrainingExample]:
        """Yield the examples of the texts, by the target's passes over them; an example has the index of its text."""
        models = self._models
        teacher = make_teacher(models, self.config.sampling.temperature)
        forcing = TeacherForcing(models.target, models.name, teacher, models.pair.context)
        for number, example in enumerate(forcing.make_examples(self._texts)):
            if stop():
                return
            show(f"the target reads the texts: {number + 1} of {len(self._texts)}")
            yield example

    def _updates(
        self,
        training: OfflineTraining,
        examples: Sequence[TrainingExample],
        counts: dict[str, int],
        show: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> Iterator[Event]:
        for update in training.train(examples, stop):
            counts["updates"] += 1
            counts["served"] += update.served
            show(
                f"pass {len(training.acceptances)}, {update.offset + 1} texts read, loss {update.loss:.3f}, "
                f"expected acceptance {training.acceptances[0]:.3f} as loaded, best pass {training.best:.3f}"
            )
            yield update

    def _fill(self, drafting: Drafting) -> None:
        """Add the n-grams of the completions to the cache, and the texts to the memory.

        Requests to a server stay out of the memory, which must not show the text of one client to another.
        """
        tokens = [token for text in self._texts for token in text.emitted]
        drafting.cache.fill(count_text_ngrams(tokens, self._models.pair.pieces))
        table = drafting.decode.memory.table
        if table is not None:
            for text in self._texts[: self._shared]:
                table.learn([*text.prompt, *text.emitted], len(text.prompt), 0)


def encode_texts(models: Models, runs: Sequence[RunTexts]) -> tuple[list[CompletedText], int, Mapping[str, int]]:
    """Put the texts of runs into a target's tokens. Returns the texts, numbered from 0, those of replays first; the
    number of those of replays; and the number of texts that were left out, by reason.
    """
    encoder, texts, shared = TextEncoder(models), list[CompletedText](), 0
    for run in sorted(runs, key=lambda run: run.served):
        found = encoder.encode_run(run, load(run.folder / CONFIG))
        texts += [
            CompletedText(number, text.prompt, text.prompt_pieces, text.emitted)
            for number, text in enumerate(found, len(texts))
        ]
        shared = shared if run.served else len(texts)
    return texts, shared, dict(encoder.left_out)


def _numbers_of(summary: TrainingSummary) -> dict[str, float]:
    return {
        "train/texts": summary.texts,
        "train/tokens": summary.tokens,
        "train/acceptance_as_loaded": summary.acceptance[0],
        "train/acceptance": max(summary.acceptance),
        "train/teacher_seconds": summary.teacher_seconds,
        "train/training_seconds": summary.training_seconds,
    }
