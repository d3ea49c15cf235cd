"""Long streams: the memory of finished prompts is freed, and keys and values take as much as computed."""

import gc
import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from constants import constants
from replaying import config_of
from tiny_pair import TinyPair, sentences, tiny_pair

from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from pipeline.reports.progress import PlainDisplay
from pipeline.run.replay import Replay
from stages.contract.blocks import Draft, Proposal, SequenceState, TrainingExample, Verdict
from stages.engine.forward_pass.slot_forward import SlotForward
from store.events import Event, PromptCompleted, PromptReceived, TokenDecision

__all__ = ["tiny_pair"]  # a fixture
BATCH, NEW_TOKENS = 4, 8
STATUS = Path("/proc/self/status")
SHARE, MEBIBYTES = 0.05, 20  # what resident memory may grow by: the larger of the two
KEPT = (SequenceState, Draft, Proposal, Verdict, TrainingExample, torch.Tensor)


def resident_mebibytes() -> float:
    """Memory of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def alive() -> Counter[str]:
    """Count the live tensors and objects of blocks."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if issubclass(kind, KEPT))


class SamplingDisplay(PlainDisplay):
    """A display that takes a sample of the run at given prompts, and records the texts.

    Attributes:
        seen: samples of `look`, by completed prompts.
        prompts: the texts, by offset.
        emitted: target ids of every prompt.
    """

    def __init__(self, look: Any, at: range | tuple[int, ...]) -> None:
        super().__init__(perf_counter)
        self._look, self._at, self._done = look, at, 0
        self.seen: dict[int, Any] = {}
        self.prompts: dict[int, str] = {}
        self.emitted: dict[int, list[int]] = defaultdict(list)

    def show(self, event: Event) -> None:
        super().show(event)
        if isinstance(event, PromptReceived):
            self.prompts[event.offset] = event.text
        elif isinstance(event, TokenDecision) and event.emitted_id is not None:
            self.emitted[event.offset].append(event.emitted_id)
        elif isinstance(event, PromptCompleted):
            self._done += 1
            if self._done in self._at:
                self.seen[self._done] = self._look()


def soak_config(pair: TinyPair, folder: Path, prompts: int, **changes: Any) -> Config:
    """Log and learning on; every prompt is another text."""
    source = folder / "soak.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in sentences(1000, 1000 + prompts)))
    # Without siblings, whose keys and values a block adds to those of the text.
    fixed = {"sources": (str(source),), "batch": BATCH, "sampling__max_new_tokens": NEW_TOKENS, "draft__width": 1}
    return config_of(pair, **{**fixed, "learn__interval": 4, **changes})


def run(config: Config, folder: Path, display: SamplingDisplay) -> Models:
    """Run a whole replay and return its models."""
    replay = Replay(config, folder / "run", None)
    with display:
        summary = replay.run(display)
    assert summary["totals"]["prompts"] == len(display.prompts)
    assert summary["totals"]["ledger"]["update_seconds"] > 0
    (models,) = replay._models
    return models


def computed_bytes(models: Models, display: SamplingDisplay) -> dict[str, int]:
    """Keys and values of as many rows as ran at a time, each as long as the longest text could have become."""
    texts = {offset: models.target_vocabulary.encode(text) for offset, text in display.prompts.items()}
    target = max(map(len, texts.values())) + NEW_TOKENS
    begun = {offset: len(models.drafter_vocabulary.encode(text)) for offset, text in display.prompts.items()}
    read = max(
        begun[offset] + sum(len(models.pair.context[token]) for token in tokens)
        for offset, tokens in display.emitted.items()
    )
    drafter = max(read, max(begun.values()) + NEW_TOKENS)
    sizes = {"target": (models.target, target), "drafter": (models.drafter, drafter)}
    return {name: BATCH * longest * bytes_per_token(model) for name, (model, longest) in sizes.items()}


def bytes_per_token(model: Any) -> int:
    assert isinstance(model.forward_pass, SlotForward)
    return model.forward_pass.weights.bytes_per_token


def require_caches_as_computed(models: Models, display: SamplingDisplay) -> None:
    """Within a tenth; never less than the texts need."""
    for name, computed in computed_bytes(models, display).items():
        taken = getattr(models, name).forward_pass.cache_bytes
        assert 0.9 * computed <= taken <= 1.1 * computed, f"{name}: {taken / computed:.2f} times what was computed"


# What is kept of the past is full before the first look, no interval grows, and no thread is at work meanwhile.
SMALL = {"replay_prompts": 8, "head_buffer": 64, "gate_window": 4, "update_lag": 0}
SLACK = 100  # one object left of every prompt would be 200 more at the last look than at the first


@pytest.fixture(scope="module")
def short(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Models, SamplingDisplay]:
    """300 prompts."""
    folder = tmp_path_factory.mktemp("soak")
    display = SamplingDisplay(alive, (100, 200, 300))
    with constants(**SMALL):
        return run(soak_config(tiny_pair, folder, 300), folder, display), display


@pytest.mark.sweep
def test_nothing_of_finished_prompts_stays_alive(short: tuple[Models, SamplingDisplay]):
    _, display = short
    first = display.seen[100]
    assert first["Tensor"] > 50
    assert first["TrainingExample"] > 0
    for name in first:
        counts = [seen[name] for seen in display.seen.values()]
        assert max(counts) <= counts[0] + SLACK, f"{name}: {counts}"


def test_keys_and_values_take_what_they_must(short: tuple[Models, SamplingDisplay]):
    require_caches_as_computed(*short)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status to read the resident memory from")
def test_memory_is_flat_over_five_thousand_prompts(tiny_pair: TinyPair, tmp_path: Path):
    display = SamplingDisplay(resident_mebibytes, range(10, 5001, 10))
    models = run(soak_config(tiny_pair, tmp_path, 5000), tmp_path, display)
    # Of the 250 prompts up to each: what waits to be written to the log goes up and down.
    early, late = (median(display.seen[at] for at in range(end - 240, end + 1, 10)) for end in (1000, 5000))
    assert late - early <= max(SHARE * early, MEBIBYTES), f"{early:.0f} MiB after 1,000 prompts, {late:.0f} after 5,000"
    require_caches_as_computed(models, display)
