"""The probe: fixed prompts, what a drafter is expected to reach on them, and that asking changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replaying import config_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline import corpus
from pipeline.build import build_loop
from pipeline.build_models import Models, load_models
from pipeline.build_stages import draftable
from pipeline.config import Config
from pipeline.probe import PROMPTS, TOKENS, lessons_of, make_probe, prompts
from stages.baselines import Request, plain
from stages.blocks import Lesson
from stages.distributions import Sampling
from stages.probe import kept_lessons
from store.events import PromptReceived, TokenDecision
from store.registry import NoRegistry


@pytest.fixture
def config(tiny_pair: TinyPair) -> Config:  # noqa: F811
    return config_of(tiny_pair, learn__lag=0)


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


def test_the_lessons_are_the_target_s_plain_greedy_text(config: Config, models: Models):
    encoded = [models.target_words.encode(prompt.text) for prompt in prompts()]
    request = Request(Sampling(0.0, 0, 1.0), TOKENS, models.target.ends, 0)
    lessons = lessons_of(config, models)
    assert [lesson.offset for lesson in lessons] == list(range(len(PROMPTS)))
    for lesson, ids in zip(lessons, encoded, strict=True):
        (greedy,) = plain(models.target.model, [ids], request)
        text = [*models.drafter_words.encode(prompts()[lesson.offset].text)]
        for token in greedy:
            text += models.pair.context[token]
        assert lesson.pieces == tuple(text)


def expected(models: Models, config: Config, lessons: Sequence[Lesson]) -> float:
    """The share of tokens whose pieces are all the drafter's likeliest, one text at a time by its own modules."""
    allowed = torch.tensor(sorted(draftable(config, models.pair)))
    right = total = 0
    for lesson in lessons:
        with torch.no_grad():
            logits_TD = models.drafter.model(torch.tensor([lesson.pieces])).logits[0]
        likeliest = [int(allowed[row[allowed].argmax()]) for row in logits_TD]
        tokens: list[bool] = []
        for one in lesson.teachings:
            agrees = likeliest[one.position - 1] == lesson.pieces[one.position]
            if one.depth == 0:
                tokens.append(agrees)
            else:
                tokens[-1] = tokens[-1] and agrees
        right, total = right + sum(tokens), total + len(tokens)
    return right / total


def test_the_acceptance_is_the_share_of_tokens_that_the_drafter_foretells(config: Config, models: Models):
    lessons, found = lessons_of(config, models), make_probe(config, models)()
    assert found["probe/acceptance"] == pytest.approx(expected(models, config, lessons), abs=1e-9)
    assert found["probe/acceptance_docs"] == pytest.approx(expected(models, config, lessons[:12]), abs=1e-9)
    assert found["probe/acceptance_code"] == pytest.approx(expected(models, config, lessons[12:]), abs=1e-9)
    assert 0 < found["probe/acceptance_sampled"] < 1


def test_it_tells_drafters_apart_and_follows_the_one_in_service(config: Config, models: Models):
    probe = make_probe(config, models)
    before = probe()
    models.drafter.serve([torch.randn_like(weight) for weight in models.drafter.learning])
    assert probe()["probe/acceptance_sampled"] < before["probe/acceptance_sampled"]


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
        monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / f"cache-{place}"))  # each makes its own lessons
        found.append(make_probe(settings, models)())
    assert found[0] == found[1] != {}


def test_a_drafter_that_reads_less_leaves_the_lessons_of_others_alone(config: Config, models: Models):
    everything, limits, whole = len(lessons_of(config, models)), models.drafter.model.config, models.drafter.max_length
    lengths = sorted(len(models.drafter_words.encode(prompt.text)) for prompt in prompts())
    limits.max_position_embeddings = models.drafter.max_length = lengths[3] + 1
    assert 0 < len(lessons_of(config, models)) < everything
    limits.max_position_embeddings = models.drafter.max_length = whole
    assert len(lessons_of(config, models)) == everything


def test_what_is_kept_on_disk_is_what_was_made(config: Config, models: Models):
    first = lessons_of(config, models)
    again = lessons_of(config, replace(models, name="another"))
    assert [one.teachings for one in again] == [one.teachings for one in first]
    assert {one.target for one in again} == {"another"}


def test_lessons_are_made_once(config: Config, models: Models):
    made: list[int] = []

    def make() -> Sequence[Lesson]:
        made.append(1)
        return lessons_of(config, models)

    for _ in range(2):
        kept_lessons(["a test", models.name], models.name, make)
    assert made == [1]


def decisions(config: Config, models: Models, folder: Path, *, probed: bool) -> list[TokenDecision]:
    loop = build_loop(config, [models], NoRegistry(), folder, lambda notice: None)
    torch.manual_seed(1)
    if probed:
        make_probe(config, models)()
    drawn = torch.rand(1)
    stream = (PromptReceived(n, f"p{n}", "sums", n + 1, f"Ann has {n} apples and") for n in range(12))
    found = [event for event in loop.run(stream) if isinstance(event, TokenDecision)]
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(1)), "the probe drew a random number"
    return found


def test_the_run_decides_as_if_it_had_not_been_asked(tiny_pair: TinyPair, tmp_path: Path, monkeypatch):  # noqa: F811
    config = config_of(tiny_pair, learn__lag=0, sampling__temperature=0.7)
    runs = []
    for probed in (False, True):
        monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / f"cache-{probed}"))  # its lessons are made in this run
        (models,) = load_models(config, "", tmp_path)
        runs.append(decisions(config, models, tmp_path / str(probed), probed=probed))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50


def test_prompts_that_do_not_fit_are_left_out(config: Config, models: Models, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path))
    lengths = sorted(len(models.target_words.encode(prompt.text)) for prompt in prompts())
    models.target.model.config.max_position_embeddings = lengths[3] + TOKENS + 1
    assert 0 < len(lessons_of(config, models)) <= 4
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "other"))
    models.target.model.config.max_position_embeddings = TOKENS + 1
    assert make_probe(config, models)() == {}
