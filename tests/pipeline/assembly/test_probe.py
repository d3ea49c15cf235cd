"""The probe: fixed prompts, the expected acceptance of a drafter on them, and no effect on the run."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from replaying import config_of
from soft_target_tables import compute_all
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

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
    Probe,
    ProbeResult,
    ProbeScore,
    count_forwards,
    load_or_make_examples,
    load_or_make_scores,
)
from stages.sampling.params import SamplingParams
from store.events import PromptReceived, TokenDecision


@pytest.fixture
def config(tiny_pair: TinyPair) -> Config:  # noqa: F811
    return config_of(tiny_pair)


@pytest.fixture
def models(config: Config, tmp_path: Path) -> Models:
    (loaded,) = load_models(config, "", tmp_path)
    return loaded


@pytest.mark.parametrize("kind", ["docs", "code"])
def test_no_built_in_stream_yields_a_prompt_of_the_probe(kind: str):
    streamed = [passage.prompt for passage in corpus.stream(kind)]
    own = [text for name, text in PROMPTS if name == kind]
    assert len(own) == len(set(own)) == 12
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
    assert found["probe/acceptance"] == pytest.approx(expect(models, config, examples), abs=1e-9)
    assert found["probe/acceptance_docs"] == pytest.approx(expect(models, config, examples[:12]), abs=1e-9)
    assert found["probe/acceptance_code"] == pytest.approx(expect(models, config, examples[12:]), abs=1e-9)
    assert 0 < found["probe/acceptance_sampled"] < 1
    assert found["probe/acceptance_low"] < found["probe/acceptance"] < found["probe/acceptance_high"]
    assert 1 <= found["probe/tokens_per_forward"] < 6


def test_the_scores_are_those_of_each_prompt_in_order(config: Config, models: Models):
    found = make_probe(config, models)()
    assert len(found.scores) == len(PROMPTS)
    assert all(score.forwards >= score.tokens - score.greedy - 1 for score in found.scores)
    assert all(-(-score.tokens // 6) <= score.forwards <= score.tokens for score in found.scores)
    tokens, forwards = (sum(getattr(score, name) for score in found.scores) for name in ("tokens", "forwards"))
    assert found.metrics["probe/tokens_per_forward"] == tokens / forwards


def test_the_speed_is_that_of_the_measured_passes(config: Config, models: Models):
    """With batch 2: passes of 2 x 6 tokens, and of one piece for each of two rows."""
    costs = Costs(target=((2, 0.010), (12, 0.020)), drafter=((1, 0.001), (2, 0.002)))
    found = make_probe(config.with_overrides({"batch": 2}), models, costs)()
    tokens, pieces, forwards = (
        [getattr(score, name) for score in found.scores] for name in ("tokens", "pieces", "forwards")
    )
    assert found.plain_seconds == 0.005
    assert found.metrics["probe/plain_tokens_per_second"] == pytest.approx(200.0)
    expected = [
        forward * (0.020 + 5 * piece / token * 0.002) / 2
        for token, piece, forward in zip(tokens, pieces, forwards, strict=True)
    ]
    assert found.seconds == pytest.approx(expected)
    assert all(piece >= token for token, piece in zip(tokens, pieces, strict=True))
    assert found.metrics["probe/tokens_per_second"] == pytest.approx(sum(tokens) / sum(expected))
    assert found.metrics["probe/tokens_per_second_low"] < found.metrics["probe/tokens_per_second"]
    assert make_probe(config, models)().seconds == ()


def test_every_forward_emits_the_accepted_tokens_and_one_more():
    for text in product((False, True), repeat=9):
        rest, forwards = "".join("+" if predicted else "-" for predicted in text), 0
        while rest:
            rest, forwards = re.sub(r"^\+{0,3}.?", "", rest), forwards + 1
        assert count_forwards(text, 3) == forwards


def test_it_tells_drafters_apart_and_follows_the_one_in_service(config: Config, models: Models):
    probe = make_probe(config, models)
    before = probe()
    models.drafter.load_weights([torch.randn_like(weight) for weight in models.drafter.trained_weights])
    assert probe().metrics["probe/acceptance_sampled"] < before.metrics["probe/acceptance_sampled"]


@pytest.mark.slow
@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"learn__enabled": False},
        {"sampling__temperature": 1.0, "seed": 7, "batch": 3},
        {"draft__mode": "tli"},
        {"draft__max_draft": 1, "cache__policy": "off"},
    ],
)
def test_it_is_the_same_for_runs_of_other_settings(
    tiny_pair: TinyPair,  # noqa: F811
    config: Config,
    models: Models,
    changes: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    found = []
    for place, settings in enumerate((config_of(tiny_pair, **changes), config)):
        monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / f"cache-{place}"))  # each makes its own examples
        found.append(make_probe(settings, models)())
    assert found[0] == found[1] != ProbeResult()


def test_a_drafter_that_reads_less_leaves_the_examples_of_others_alone(config: Config, models: Models):
    limits, whole = models.drafter.model.config, models.drafter.max_length
    everything = [example.pieces for example in examples_of(config, models)]
    lengths = sorted(len(models.drafter_vocabulary.encode(prompt.text)) for prompt in prompts())
    limits.max_position_embeddings = models.drafter.max_length = 2 * lengths[3]
    ends = [example.pieces for example in examples_of(config, models)]
    assert sum(end != text for end, text in zip(ends, everything, strict=True)) >= len(lengths) // 2
    assert all(text[-len(end) :] == end for end, text in zip(ends, everything, strict=True))
    limits.max_position_embeddings = models.drafter.max_length = whole
    assert [example.pieces for example in examples_of(config, models)] == everything


def test_what_is_kept_on_disk_is_what_was_made(config: Config, models: Models):
    first = examples_of(config, models)
    again = examples_of(config, replace(models, name="another"))
    assert [compute_all(one.soft_targets) for one in again] == [compute_all(one.soft_targets) for one in first]
    assert {one.target for one in again} == {"another"}


def test_examples_are_made_once(config: Config, models: Models):
    made: list[int] = []

    def make() -> Sequence[TrainingExample]:
        made.append(1)
        return examples_of(config, models)

    for _ in range(2):
        load_or_make_examples(["a test", models.name], models.name, make)
    assert made == [1]


def test_a_drafter_as_loaded_is_scored_once(config: Config, models: Models, monkeypatch: pytest.MonkeyPatch):
    first = make_probe(config, models)()
    monkeypatch.setattr(Probe, "score", lambda *_: pytest.fail("scored again"))
    assert make_probe(config, models)() == first


def test_scores_of_other_weights_are_not_those_on_disk(config: Config, models: Models):
    first = make_probe(config, models)()
    with torch.no_grad():
        for weight in models.drafter.trained_weights:
            weight.add_(torch.randn_like(weight))  # as if another drafter had been loaded
    assert models.drafter.weight_changes == 0
    assert make_probe(config, models)().metrics != first.metrics


def test_examples_that_are_too_long_have_no_score_on_disk_either(
    config: Config, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path))
    examples = examples_of(config, models)
    scores = {one: ProbeScore(1.0, 0.5, 3, 4, 2) for one in examples[1::2]}
    for _ in range(2):
        assert load_or_make_scores(["some"], examples, lambda: scores) == scores
    assert load_or_make_scores(["none"], examples, dict) == load_or_make_scores(["none"], examples, dict) == {}


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
def test_a_run_decides_the_same_with_and_without_the_probe(tiny_pair: TinyPair, tmp_path: Path, monkeypatch):  # noqa: F811
    config = config_of(tiny_pair, sampling__temperature=0.7)
    runs = []
    for probed in (False, True):
        monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / f"cache-{probed}"))  # its examples are made in this run
        (models,) = load_models(config, "", tmp_path)
        runs.append(decisions(config, models, tmp_path / str(probed), probed=probed))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50


def test_prompts_that_do_not_fit_are_left_out(config: Config, models: Models, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path))
    lengths = sorted(len(models.target_vocabulary.encode(prompt.text)) for prompt in prompts())
    models.target.max_length = lengths[3] + TOKENS + 1
    assert 0 < len(examples_of(config, models)) <= 4
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "other"))
    models.target.max_length = TOKENS + 1
    assert make_probe(config, models)() == ProbeResult()
