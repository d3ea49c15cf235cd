"""The probe: fixed prompts, the expected acceptance of a drafter on them, and no effect on the run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from replaying import config_of
from soft_target_tables import compute_all
from tiny_pair import TinyPair

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_models
from pipeline.assembly.probe import PROMPTS, TOKENS, examples_of, make_probe, prompts
from pipeline.assembly.stages import draftable
from pipeline.config.settings import Config
from pipeline.sources import corpus
from stages.contract.blocks import TrainingExample
from stages.drafting.costs import Costs
from stages.engine.models.generate import generate
from stages.learn.training.probe import (
    load_or_make_examples,
)
from stages.sampling.params import SamplingParams
from store.events import PromptReceived, TokenDecision


@pytest.fixture
def config(tiny_pair: TinyPair) -> Config:
    return config_of(tiny_pair)


@pytest.fixture
def models(config: Config, tmp_path: Path) -> Models:
    (loaded,) = load_models(config, "", tmp_path)
    return loaded


@pytest.mark.parametrize("kind", ["docs", "code", "rust"])
def test_no_built_in_stream_yields_a_prompt_of_the_probe(kind: str):
    streamed = [passage.prompt for passage in corpus.stream(kind)]
    own = [text for name, text in PROMPTS if name == kind]
    assert len(own) == len(set(own)) == 8
    assert [text for text in own for prompt in streamed if prompt.startswith(text) or text.startswith(prompt)] == []


@pytest.mark.slow
def test_the_examples_are_the_target_s_plain_greedy_text(config: Config, models: Models):
    encoded = [models.target_vocabulary.encode(prompt.text) for prompt in prompts()]
    examples = examples_of(config, models)
    assert [example.offset for example in examples] == list(range(len(PROMPTS)))
    for example, ids in zip(examples, encoded, strict=True):
        (greedy,) = generate(models.target.model, [ids], SamplingParams(0.0), TOKENS, models.target.eos_ids)
        text = [*models.drafter_vocabulary.encode(prompts()[example.offset].text)]
        for token in greedy:
            text += models.pair.context[token]
        assert example.pieces == tuple(text)


def expect(models: Models, config: Config, examples: Sequence[TrainingExample]) -> float:
    """The share of tokens whose pieces are all the drafter's likeliest, one text at a time by its own modules."""
    allowed = torch.tensor(sorted(draftable(config.draft, models.pair)))
    right = total = 0
    for example in examples:
        with torch.no_grad():
            logits_TD = models.drafter.model(torch.tensor([example.pieces])).logits[0]
        likeliest = [int(allowed[row[allowed].argmax()]) for row in logits_TD]
        tokens: list[bool] = []
        for one in compute_all(example.soft_targets):
            agrees = likeliest[one.position - 1] == example.pieces[one.position]
            if one.depth == 0:
                tokens.append(agrees)
            else:
                tokens[-1] = tokens[-1] and agrees
        right, total = right + sum(tokens), total + len(tokens)
    return right / total


def test_the_acceptance_is_the_share_of_tokens_that_the_drafter_predicts(config: Config, models: Models):
    examples, found = examples_of(config, models), make_probe(config, models)().metrics
    assert found["acceptance"] == pytest.approx(expect(models, config, examples), abs=1e-9)
    assert found["upon_docs"] == pytest.approx(expect(models, config, examples[:8]), abs=1e-9)
    assert found["upon_code"] == pytest.approx(expect(models, config, examples[8:16]), abs=1e-9)
    assert found["upon_rust"] == pytest.approx(expect(models, config, examples[16:]), abs=1e-9)
    assert 0 < found["under_sampling"] < 1
    assert found["acceptance_low"] < found["acceptance"] < found["acceptance_high"]
    assert 1 <= found["tokens_per_pass"] < 6


def test_the_speed_is_that_of_the_measured_passes(config: Config, models: Models):
    """With batch 2: passes of 2 x 6 tokens, and of one piece for each of two rows."""
    costs = Costs(target=((2, 0.010), (12, 0.020)), drafter=((1, 0.001), (2, 0.002)))
    found = make_probe(config.with_overrides({"batch": 2}), models, costs)()
    tokens, pieces, forwards = (
        [getattr(score, name) for score in found.scores] for name in ("tokens", "pieces", "forwards")
    )
    assert found.plain_seconds == 0.005
    assert found.metrics["modelled_tokens_per_second_plain"] == pytest.approx(200.0)
    expected = [
        forward * (0.020 + 5 * piece / token * 0.002) / 2
        for token, piece, forward in zip(tokens, pieces, forwards, strict=True)
    ]
    assert found.seconds == pytest.approx(expected)
    assert all(piece >= token for token, piece in zip(tokens, pieces, strict=True))
    assert found.metrics["modelled_tokens_per_second"] == pytest.approx(sum(tokens) / sum(expected))
    assert found.metrics["modelled_tokens_per_second_low"] < found.metrics["modelled_tokens_per_second"]
    assert make_probe(config, models)().seconds == ()


def test_it_tells_drafters_apart_and_follows_the_one_in_service(config: Config, models: Models):
    probe = make_probe(config, models)
    before = probe()
    models.drafter.load_weights([torch.randn_like(weight) for weight in models.drafter.trained_weights])
    assert probe().metrics["under_sampling"] < before.metrics["under_sampling"]


def test_shipped_examples_are_used_where_the_cache_has_none(
    config: Config, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key = ["shipped", models.name]
    made = examples_of(config, models)
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "shipped"))
    load_or_make_examples(key, models.name, lambda: made)
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "empty"))
    again = load_or_make_examples(key, models.name, lambda: pytest.fail("made again"), shipped=tmp_path / "shipped")
    assert [compute_all(one.soft_targets) for one in again] == [compute_all(one.soft_targets) for one in made]
    assert load_or_make_examples([*key, "other"], models.name, lambda: made, shipped=tmp_path / "shipped") is made


def decisions(config: Config, models: Models, folder: Path, *, probed: bool) -> list[TokenDecision]:
    loop = build_loop(config, [models], folder)
    torch.manual_seed(1)
    if probed:
        make_probe(config, models)()
    drawn = torch.rand(1)
    stream = (PromptReceived(n, f"p{n}", "sums", n + 1, f"Ann has {n} apples and") for n in range(12))
    found = [event for event in loop.run(stream) if isinstance(event, TokenDecision)]
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(1)), "the probe drew a random number"
    return found


@pytest.mark.slow
def test_a_run_decides_the_same_with_and_without_the_probe(tiny_pair: TinyPair, tmp_path: Path, monkeypatch):
    config = config_of(tiny_pair, sampling__temperature=0.7)
    runs = []
    for probed in (False, True):
        monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / f"cache-{probed}"))  # its examples are made in this run
        (models,) = load_models(config, "", tmp_path)
        runs.append(decisions(config, models, tmp_path / str(probed), probed=probed))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50
