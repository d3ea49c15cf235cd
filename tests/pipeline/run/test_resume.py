"""A run that is stopped between any two blocks and resumed decides, learns and publishes as if never stopped."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import PLACES, constants
from event_making import make_drifted
from replaying import config_of
from safetensors import safe_open
from stored_states import store
from tiny_pair import TinyPair, TinyTrio, sentences

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from pipeline.config.settings import Config
from pipeline.loop import Loop
from pipeline.sources.position import SourcePosition
from stages.learn.training.closed_form import SUMS_FILE, OutputLayerTrainer
from stages.learn.training.least_squares_sums import LeastSquaresSums
from store.events import Drifted, Event, PromptCompleted, PromptReceived, Recalled, Updated

PROMPTS = 14
TIMES = ("seconds", "waited", "started", "finished", "seconds_decode", "seconds_translate", "seconds_verify")


def prompts() -> Iterator[PromptReceived]:
    """Sums, then texts of quite another form."""
    for offset, text in enumerate(sentences(600, 600 + PROMPTS)):
        text = text[:30] if offset < PROMPTS // 2 else text[:30].swapcase()[::-1]
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text)


def loop_of(config: Config, folder: Path) -> Loop:
    return build_loop(config, load_models(config, "", folder), folder)


def timeless(event: Event) -> Event:
    return replace(event, **{name: 0.0 for name in TIMES if hasattr(event, name)})


Prepare = Callable[[Loop], Callable[[Event], None]]  # of a loop; returns what is called with every event


def prepare_nothing(loop: Loop) -> Callable[[Event], None]:
    return lambda event: None


def in_one_go(config: Config, folder: Path, prepare: Prepare = prepare_nothing) -> list[Event]:
    loop, found = loop_of(config, folder), list[Event]()
    see = prepare(loop)
    for event in loop.run(prompts()):
        found.append(timeless(event))
        see(event)
    return found


def in_parts(config: Config, folder: Path, every: int, prepare: Prepare = prepare_nothing) -> tuple[list[Event], int]:
    """The events of a run that is stopped after every so many blocks, and how often it was. Nothing but the files of
    the snapshots goes from one part to the next."""
    events: list[Event] = []
    state: Any = None
    for part in range(1000):
        loop, position = loop_of(config, folder), SourcePosition(prompts())
        if state:
            loop.load_state_dict(state["loop"])
            for event in events:
                if isinstance(event, PromptCompleted):
                    loop.runners[event.target].learner.replay_history(event)
            position.skip(state["position"])
        blocks = iter(range(every))
        see = prepare(loop)
        for event in loop.run(position, lambda blocks=blocks: next(blocks, None) is None):
            events.append(timeless(event))
            see(event)
        state = store({"loop": loop.state_dict(), "position": position.state})
        if next(blocks, None) is not None:  # it ended before it was stopped
            return events, part
    raise AssertionError("it makes no progress")


def differences(whole: list[Event], parts: list[Event]) -> list[tuple[Event, Event]]:
    return [(one, other) for one, other in zip(whole, parts, strict=True) if one != other]


CASES: dict[str, dict[str, Any]] = {  # settings, and constants by their names in `PLACES`
    "greedy": {},
    "sampled": {"sampling__temperature": 1.0},
    "several rows": {"batch": 3, "sampling__temperature": 1.0},
    "a thread that learns": {"update_lag": 2, "batch": 2, "draft__exploration": 0.3},
    "always under way": {"update_lag": 3, "learn__interval": 1, "learn__spacing": "fixed"},
    "versions": {"publish__enabled": True, "publish__interval": 3},
    "drift": {
        "publish__enabled": True,
        "publish__interval": 2,
        "drift_threshold": 0.1,
        "drift_grace": 1,
        "drift_tolerance": 0.0,
        "drift_cooldown": 3,
        "recall_margin": 0.0,
        "sampling__temperature": 1.0,
    },
    "a small cache": {"cache__budget_bytes": 2000, "cache__policy": "lru", "sampling__temperature": 1.0},
    "a small cache by counts": {"cache__budget_bytes": 2000, "sampling__temperature": 1.0},
    "paused drafting": {"draft__pause": True, "draft__costs": 0.9},
    "bfloat16": {"dtype": "bfloat16", "batch": 2},
    "without learning": {"learn__enabled": False},
    "known prefixes": {"prompt_chunk": 2, "batch": 3, "sampling__temperature": 1.0},
    "least squares": {"learn__method": "least-squares", "draft__sources": ("model",)},
    "parts of answers": {
        "part_tokens": 4,
        "part_context": 8,
        "sampling__max_new_tokens": 24,
        "update_lag": 0,
        "learn__method": "least-squares",
        "learn__interval": 1,
    },
}


@contextmanager
def case_of(pair: TinyPair, case: str) -> Iterator[Config]:
    """The settings of a case, while its constants hold."""
    settings = {key: value for key, value in CASES[case].items() if key not in PLACES}
    with constants(**{key: value for key, value in CASES[case].items() if key in PLACES}):
        yield config_of(pair, **settings)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("case", CASES)
def test_it_makes_no_difference_where_a_run_was_stopped(tiny_pair: TinyPair, tmp_path: Path, case: str):
    with case_of(tiny_pair, case) as config:
        whole = in_one_go(config, tmp_path / "whole")
        parts, stops = in_parts(config, tmp_path / "parts", every=9)
    assert stops >= 4
    assert differences(whole, parts) == []


def test_an_answer_is_learned_from_before_its_end(tiny_pair: TinyPair, tmp_path: Path):
    with case_of(tiny_pair, "parts of answers") as config:
        events = in_one_go(config, tmp_path)
    first = next(place for place, event in enumerate(events) if isinstance(event, PromptCompleted))
    assert [event.part for event in events[:first] if isinstance(event, Updated)].count("drafter") >= 1


@pytest.mark.parametrize("costs", ["estimated", "tracked"])
def test_costs_continue_from_the_checkpoint(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: str
):
    """By a clock that counts its readings tracked costs differ from block to block, but not by where a run stopped."""
    for module in ("pipeline.assembly.loop", "stages.decode"):
        readings = count()
        monkeypatch.setattr(f"{module}.perf_counter", lambda readings=readings: float(next(readings)))
    config = config_of(tiny_pair, draft__costs=costs, draft__pause=True, batch=2)
    begun: list[float] = []

    def see_costs(loop: Loop) -> Callable[[Event], None]:
        (runner,) = loop.runners.values()
        begun.append(
            runner.stages.decode._costs.verification_cost(9) / runner.stages.decode._costs.verification_cost(2)
        )
        return lambda event: None

    whole = in_one_go(config, tmp_path / "whole", see_costs)
    parts, stops = in_parts(config, tmp_path / "parts", 6, see_costs)
    assert stops >= 5
    assert len(set(begun)) == (1 if costs == "estimated" else len(begun) - 1)
    assert differences(whole, parts) == []


FELL = 5  # the prompt at which the drafter in service is spoilt, and raises the alarm


class OneFall:
    """Alarms once."""

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        if prompt.offset != FELL:
            return None
        # In one short text, the spoilt drafter can be as good as the others.
        return make_drifted(offset=FELL, target=prompt.target, changed_at=FELL - 3, action="recall")


def spoil(loop: Loop) -> Callable[[Event], None]:
    """Spoil the drafter in service before the alarm, and check what is in service when a version came back."""
    (runner,) = loop.runners.values()
    runner.learner._drift = OneFall()
    trainer, folder = runner.learner.distill.drafter.trainer, runner.learner.publisher

    def see(event: Event) -> None:
        if isinstance(event, PromptCompleted) and event.offset == FELL:
            generator = torch.Generator().manual_seed(0)
            trainer.adopt([torch.randn(weight.shape, generator=generator) for weight in trainer.served.trained_weights])
        if isinstance(event, Recalled) and event.version is not None and isinstance(trainer, OutputLayerTrainer):
            with safe_open(dict(folder.folders)[event.version] / SUMS_FILE, framework="pt") as file:
                kept = LeastSquaresSums.from_state({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            assert torch.equal(trainer._sums.states_WW, kept.states_WW)
            assert torch.equal(trainer._sums.products_WD, kept.products_WD)

    return see


@pytest.mark.parametrize("method", ["gradient", "least-squares"])
@pytest.mark.constants(recall_margin=0.0, update_lag=2)
def test_a_recall_is_the_same_wherever_the_run_was_stopped(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    """Also for stops between the alarm and the prompt that proves the version; its sums come back bit for bit."""
    changes = {"publish__enabled": True, "publish__interval": 2}
    config = config_of(tiny_pair, **changes, draft__sources=("model",), learn__method=method)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", 24)
    whole = in_one_go(config, tmp_path / "whole", spoil)
    recalled = next(event for event in whole if isinstance(event, Recalled))
    assert recalled.version is not None
    assert recalled.offset == FELL + recalled.prompts > FELL
    parts, stops = in_parts(config, tmp_path / "parts", 20, spoil)
    assert stops >= 4
    assert differences(whole, parts) == []


def test_known_prefixes_change_no_bit(tiny_pair: TinyPair, tmp_path: Path):
    """Neither the decisions with their probabilities, nor what is learned of them."""
    with case_of(tiny_pair, "known prefixes") as config:
        loop = loop_of(config, tmp_path / "with")
        cached = [timeless(event) for event in loop.run(prompts())]
        without = in_one_go(config.with_overrides({"prompts.cache_bytes": 0}), tmp_path / "without")
    (runner,) = loop.runners.values()
    readers = runner.stages.verify.reader, runner.stages.decode._decode.reader
    assert min(reader.counts.copied_prompts for reader in readers) >= 4, "texts of equal names begin alike"
    assert [event for event in cached if isinstance(event, Updated) and event.served and event.part == "drafter"]
    assert differences(cached, without) == []


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "changes", [{}, {"learn__lora_rank": 4}, {"swaps": True}], ids=["shared", "adapters", "swapped"]
)
def test_several_targets_resume_too(tiny_trio: TinyTrio, tmp_path: Path, changes: dict[str, Any]):
    big, small = tiny_trio.targets
    targets = {"targets": (big, small)}
    if "swaps" in changes:
        changes, targets = {"swaps": (f"4={small}", f"9={big}")}, {"targets": (big,)}
    config = config_of(tiny_trio.pair, **targets, **changes, batch=2, sampling__temperature=1.0)
    whole = in_one_go(config, tmp_path / "whole")
    parts, stops = in_parts(config, tmp_path / "parts", every=8)
    assert stops >= 3
    assert differences(whole, parts) == []
