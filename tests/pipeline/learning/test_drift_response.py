"""Responses to a drift, and the choice of the version that is restored."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from event_making import make_drifted, make_updated
from soft_target_tables import store_tokens
from stored_states import store

from pipeline.learning.drift_response import TRIAL, Recall, ResetHead, VersionSource
from stages.contract.blocks import TrainingExample
from store.events import Recalled, Updated


class Trainer:
    """Weights are one number: the acceptance that they bring on every example."""

    def __init__(self, present: float) -> None:
        self.weights = torch.tensor([present])
        self.scored: list[list[int]] = []
        self.others_that_lose: list[str] = []
        self.later: torch.Tensor | None = None  # the acceptance of other weights after the drift

    @property
    def served(self) -> SimpleNamespace:
        return SimpleNamespace(trained_weights=[self.weights])

    def find_losers(self, weights: list[torch.Tensor], gaining: str) -> list[str]:
        return self.others_that_lose

    def measure_acceptance(
        self, weights: list[torch.Tensor] | None, examples: Sequence[TrainingExample]
    ) -> float | None:
        self.scored.append([example.offset for example in examples])
        later = self.later is not None and examples[-1].offset > 9
        return float(self.weights if weights is None else self.later if later else weights[0])

    def adopt(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights[0]


class Distill:
    """A double of the runner's stage, with the parts that a drift response uses."""

    def __init__(self, present: float) -> None:
        self.drafter = self
        self.trainer = Trainer(present)
        self.calls: list[str] = []
        self.held, self.drafter_version = 0, 1

    def reset_head(self) -> tuple[Updated, ...]:
        """An update was under way."""
        self.calls.append("restart")
        return (make_updated(offset=8, served=False),)


class Folders:
    """Versions that store their acceptance in a file, and the heads that were read."""

    def __init__(self, root: Path, rates: Sequence[float], distill: Distill) -> None:
        self.folders = []
        self._distill = distill
        for number, rate in enumerate(rates):
            folder = root / f"{number:06d}"
            folder.mkdir()
            (folder / "rate").write_text(str(rate))
            self.folders.append((number, folder))
        self.read_folders: list[str] = []

    def read(self, folder: Path) -> list[torch.Tensor]:
        self.read_folders.append(folder.name)
        return [torch.tensor([float((folder / "rate").read_text())])]

    def read_rest(self, folder: Path) -> None:
        self._distill.calls.append(f"head {folder.name}")


def recall_of(
    tmp_path: Path, present: float, rates: Sequence[float], margin: float = 0.02, most: int = 12
) -> tuple[Recall, Distill, Folders]:
    distill = Distill(present)
    versions = Folders(tmp_path, rates, distill)
    answer = Recall(distill, VersionSource(lambda: versions.folders, versions.read, versions.read_rest), margin, most)  # type: ignore[arg-type]
    for offset in range(10):
        assert list(answer.observe(example_of(offset))) == []
    return answer, distill, versions


def example_of(offset: int) -> TrainingExample:
    """A prompt of 20 tokens."""
    targets = store_tokens(*((position, {(0,): 0.7, (2,): 0.2}) for position in range(1, 21)))
    return TrainingExample(offset, "big", (1,) * 21, targets, (), ())


def respond_to(answer: Recall, changed_at: int = 6) -> Recalled:
    """Respond to a drift, and see the prompts that follow until the recall is decided."""
    dropped, *events = answer.respond(make_drifted(offset=9, changed_at=changed_at))
    assert isinstance(dropped, Updated)
    offsets = iter(range(10, 10 + TRIAL))
    while not events:
        events += answer.observe(example_of(next(offsets)))
    (event,) = events
    assert isinstance(event, Recalled)
    return event


def test_the_best_earlier_version_comes_back_with_its_head_after_the_restart(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.1, 0.7, 0.5])
    event = respond_to(answer)
    assert (event.offset, event.target, event.version) == (12, "big", 1), "three prompts prove that it is better"
    assert (event.candidates, event.prompts) == (3, 3)
    assert (event.acceptance_present, event.acceptance_best) == (pytest.approx(0.3), pytest.approx(0.7))
    assert float(distill.trainer.weights) == pytest.approx(0.7)
    assert distill.calls == ["restart", "head 000001"]


@pytest.mark.parametrize("rates", [[0.1, 0.2], [0.31, 0.315], [0.3]])
def test_the_present_stays_where_no_version_wins_by_the_margin(tmp_path: Path, rates: list[float]):
    answer, distill, _ = recall_of(tmp_path, 0.3, rates)
    event = respond_to(answer)
    assert (event.offset, event.version) == (9, None), "none is put on trial"
    assert event.acceptance_best == pytest.approx(max(rates))
    assert float(distill.trainer.weights) == pytest.approx(0.3)
    assert distill.calls == ["restart"], "its head begins again all the same"


def test_versions_are_scored_on_the_prompts_since_the_change_alone(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.1])
    respond_to(answer, changed_at=7)
    assert distill.trainer.scored == [[7, 8, 9], [7, 8, 9]]


def test_a_version_that_is_better_by_chance_alone_is_not_restored(tmp_path: Path):
    """The prompts since the change speak for it, those that follow do not."""
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.5])
    distill.trainer.later = torch.tensor([0.3])
    event = respond_to(answer)
    assert (event.version, event.prompts, event.offset) == (None, TRIAL, 9 + TRIAL)
    assert event.acceptance_best == pytest.approx(event.acceptance_present) == pytest.approx(0.3)
    assert (float(distill.trainer.weights), distill.calls) == (pytest.approx(0.3), ["restart"])
    assert distill.held == 0


def test_no_update_is_begun_while_a_version_is_on_trial(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.7])
    list(answer.respond(make_drifted(offset=9, changed_at=6)))
    assert distill.held == 1
    list(answer.respond(make_drifted(offset=9, changed_at=6)))  # the trial continues
    assert distill.held == 1
    for offset in (10, 11, 12):
        list(answer.observe(example_of(offset)))
    assert (distill.held, float(distill.trainer.weights)) == (0, pytest.approx(0.7))


def test_a_trial_continues_after_a_restart(tmp_path: Path):
    answer, distill, versions = recall_of(tmp_path, 0.3, [0.7])
    list(answer.respond(make_drifted(offset=9, changed_at=6)))
    assert list(answer.observe(example_of(10))) == []
    state = store(answer.state_dict())
    again = Distill(0.3)
    source = VersionSource(lambda: versions.folders, versions.read, versions.read_rest)
    resumed = Recall(again, source, 0.02, 12)  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    assert again.held == 1
    assert [*resumed.observe(example_of(11)), *answer.observe(example_of(11))] == []
    (event,), (other,) = resumed.observe(example_of(12)), answer.observe(example_of(12))
    assert replace(event, seconds=0.0) == replace(other, seconds=0.0)
    assert (event.version, event.prompts) == (0, 3)
    assert float(again.trainer.weights) == float(distill.trainer.weights) == pytest.approx(0.7)


def test_a_trial_that_the_end_of_the_stream_interrupts_is_logged(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.7])
    assert list(answer.end()) == [], "no version is on trial"
    list(answer.respond(make_drifted(offset=9, changed_at=6)))
    list(answer.observe(example_of(10)))
    (event,) = answer.end()
    assert (event.offset, event.target, event.version) == (10, "big", None)
    assert (event.candidates, event.prompts) == (1, 1)
    assert (event.acceptance_present, event.acceptance_best) == (pytest.approx(0.3), pytest.approx(0.7))
    assert (distill.held, float(distill.trainer.weights)) == (0, pytest.approx(0.3)), "the drafter in service stays"
    assert list(answer.end()) == []


def test_without_versions_or_prompts_to_score_on_it_is_a_restart(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [])
    assert [event.offset for event in answer.respond(make_drifted(offset=9, changed_at=6))] == [8]
    assert distill.calls == ["restart"]
    (tmp_path / "other").mkdir()
    answer, distill, _ = recall_of(tmp_path / "other", 0.3, [0.9])
    distill.drafter_version = 0
    assert [event.offset for event in answer.respond(make_drifted(offset=9, changed_at=6))] == [8]
    assert list(answer.observe(example_of(10))) == [], "a drafter that never changed"
    assert (distill.calls, distill.trainer.scored) == (["restart"], [])


def test_a_head_reset_restarts_and_reports_the_update_that_it_dropped():
    distill = Distill(0.3)
    (dropped,) = ResetHead(distill.reset_head).respond(make_drifted())
    assert (dropped.offset, dropped.served, distill.calls) == (8, False, ["restart"])


def test_a_version_under_which_another_target_would_lose_is_not_taken(tmp_path: Path):
    answer, distill, _ = recall_of(tmp_path, 0.3, [0.8])
    distill.trainer.others_that_lose = ["small"]
    event = respond_to(answer)
    assert (event.version, event.acceptance_best) == (None, pytest.approx(0.8))
    assert float(distill.trainer.weights) == pytest.approx(0.3)
    assert distill.calls == ["restart"]
