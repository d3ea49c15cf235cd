"""Real models: the pipeline emits what plain decoding of the same target emits, while the drafter learns.

Greedy decoding is compared with `generate` token for token, in float32.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config
from pipeline.models.catalog import MODELS_FOLDER
from pipeline.sources import corpus
from store.events import DraftSource, Event, Outcome, PromptReceived, TokenDecision, Updated

ROOT = Path(__file__).resolve().parents[2]
STARTERS = ROOT.parent / "shared" / "models"  # next to the repository while the built-in models are being made
PROMPTS, NEW_TOKENS = 16, 32
LEARNING = {
    "learn__enabled": True,
    "learn__spacing": "fixed",
    "learn__interval": 2,
    "learn__rate": 2e-4,
}
ALWAYS = {"draft__pause": False, "draft__costs": "estimated"}  # the same on every machine


def _first_that_exists(*folders: Path) -> str:
    for folder in folders:
        if (folder / "model.safetensors").is_file():
            return str(folder)
    pytest.skip(
        f"no weights in any of {', '.join(map(str, folders))}; make them with: python -m benchmarks.model_building"
    )


def config_of(**changes: Any) -> Config:
    """Settings of a test run; `section__key` stands for `section.key`."""
    return Config().with_overrides(
        {
            "targets": (_first_that_exists(MODELS_FOLDER / "target-7m", STARTERS / "target-16m"),),
            "drafter": _first_that_exists(MODELS_FOLDER / "drafter-1.6m", STARTERS / "drafter-1.6m"),
            "device": "cpu",
            "publish.enabled": False,
            "sampling.max_new_tokens": NEW_TOKENS,
            **{name.replace("__", "."): value for name, value in (ALWAYS | changes).items()},
        }
    )


@pytest.fixture(scope="module")
def prompts() -> list[PromptReceived]:
    passages = [passage for kind in ("docs", "code") for passage in corpus.stream(kind)[: PROMPTS // 2]]
    return [PromptReceived(n, passage.name, "builtin", n + 1, passage.prompt) for n, passage in enumerate(passages)]


@pytest.fixture(scope="module")
def plain(prompts: list[PromptReceived]) -> dict[int, list[int]]:
    """The tokens that `generate` emits for each prompt."""
    (models,) = load_models(config_of(), "", Path())

    def generate(text: str) -> list[int]:
        tokens = models.target_vocabulary.encode(text)
        ids_1T = torch.tensor([tokens])
        found = models.target.model.generate(
            input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        return found[0, len(tokens) :].tolist()

    return {prompt.offset: generate(prompt.text) for prompt in prompts}


def run(config: Config, prompts: Sequence[PromptReceived], folder: Path) -> tuple[list[Event], Models]:
    """Return all events of a run over freshly loaded models, and the models."""
    targets = load_models(config, "", folder)
    loop = build_loop(config, targets, folder)  # no registry, because the run has no versions
    return list(loop.run(iter(prompts))), targets[0]


def completions(events: Sequence[Event]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, TokenDecision) and event.emitted_id is not None:
            found[event.offset].append(event.emitted_id)
    return dict(found)


def decisions(events: Sequence[Event]) -> list[TokenDecision]:
    return [event for event in events if isinstance(event, TokenDecision)]


@pytest.mark.representatives("8")
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_is_plain_decoding_while_the_drafter_learns(batch: int, prompts, plain, tmp_path):
    events, _ = run(config_of(batch=batch, **LEARNING), prompts, tmp_path)
    assert completions(events) == plain
    served = [event for event in events if isinstance(event, Updated) and event.part == "drafter" and event.served]
    assert len(served) > 1, "the weights must have changed during the run"
    accepted = sum(event.outcome == "accepted" for event in decisions(events))
    assert accepted > PROMPTS, "drafts must have been accepted"


@pytest.mark.slow
@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"draft__mode": "match"},
        {"draft__mode": "tli"},
        {"draft__mode": "paper"},
        {"draft__max_draft": 0},
        {"draft__max_draft": 12, "draft__stop": "never"},
        {"draft__temperature": 1.0},
        {"cache__budget_bytes": 20_000},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_greedy_is_plain_decoding_however_it_is_drafted(changes: dict[str, Any], prompts, plain, tmp_path):
    chosen = prompts[::4]
    events, _ = run(config_of(batch=3, learn__enabled=False, **changes), chosen, tmp_path)
    assert completions(events) == {prompt.offset: plain[prompt.offset] for prompt in chosen}


@pytest.mark.representatives("changes1", "changes2")
@pytest.mark.parametrize(
    "changes", [{"batch": 1}, {"batch": 8, "learn__interval": 10}, {"draft__sources": ("own", "memory")}]
)
def test_greedy_is_plain_decoding_with_trees(changes: dict[str, Any], prompts, plain, tmp_path):
    repeated = [*prompts[::2], *prompts[::8]]  # texts that the memory knows verbatim
    chosen = [replace(prompt, offset=offset) for offset, prompt in enumerate(repeated)]
    config = config_of(draft__costs=0.3, **changes)  # costs that are the same on every machine
    events, _ = run(config, chosen, tmp_path)
    wanted = {prompt.offset: plain[prompt.line - 1] for prompt in chosen}
    assert completions(events) == wanted
    copied = [event for event in decisions(events) if event.drafter is not DraftSource.MODEL]
    accepted = {event.drafter for event in copied if event.outcome is Outcome.ACCEPTED}
    assert accepted == {DraftSource.LOOKUP, DraftSource.MEMORY}


SAMPLED = {"sampling__temperature": 1.0, "sampling__max_new_tokens": 16}


@pytest.mark.slow
def test_equal_seeds_give_equal_decisions_while_the_drafter_learns(prompts, tmp_path):
    config = config_of(batch=4, seed=5, **LEARNING, **SAMPLED)
    chosen = prompts[9:15]
    first, second = (decisions(run(config, chosen, tmp_path)[0]) for _ in range(2))
    assert first == second
    other = decisions(run(config.with_overrides({"seed": 6}), chosen, tmp_path)[0])
    assert completions(other) != completions(first)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"draft__max_draft": 0}, {"draft__mode": "match"}])
def test_sampled_tokens_are_among_those_that_the_transform_keeps(changes: dict[str, Any], prompts, tmp_path):
    config = config_of(seed=3, sampling__top_k=2, learn__enabled=False, **changes, **SAMPLED)
    chosen = prompts[10:14]
    events, models = run(config, chosen, tmp_path)
    for prompt in chosen:
        tokens, emitted = models.target_vocabulary.encode(prompt.text), completions(events)[prompt.offset]
        with torch.no_grad():
            logits_TV = models.target.model(torch.tensor([tokens + emitted])).logits[0, len(tokens) - 1 : -1]
        second_T = logits_TV.topk(2).values[:, 1]
        assert (logits_TV.gather(1, torch.tensor(emitted)[:, None])[:, 0] >= second_T - 1e-4).all()
