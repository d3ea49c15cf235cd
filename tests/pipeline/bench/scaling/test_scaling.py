"""`omnidraft bench-scale`: what it measures, at which sizes, and what it reports. Speeds are not checked."""

import json
import math
import re
from pathlib import Path
from random import Random

import pytest
from click.testing import Result
from tiny_pair import TinyPair, tiny_pair, write_prompts
from typer import Typer
from typer.testing import CliRunner

from pipeline.assembly.models import Models, load_models
from pipeline.bench.scaling import scaling as bench_scaling
from pipeline.bench.scaling.block import (
    AGREED,
    DRAFTED,
    TargetSide,
    cache_curve,
    cache_of,
    row_of,
    synthetic_pair,
    synthetic_pieces,
    vocabulary_curve,
)
from pipeline.bench.scaling.curves import Curve, Effort, Line, Point, format_number, measure_lines
from pipeline.bench.scaling.scaling import FEWEST_PROMPTS, QUICK, context_curve, prompts_needed, with_context
from pipeline.cli.bench.parts import CURVES, bench_scale
from pipeline.config.settings import Config
from stages.contract.blocks import Draft
from stages.models.language_model import LanguageModel, load_model
from stages.tools.retokenize import random_distributions
from stages.translate import Translate
from store.errors import RunError, UsageError

__all__ = ["tiny_pair"]  # a fixture
ONCE = Effort(1, 1, 0.0)


def silent(text: str) -> None:
    pass


def test_points_are_measured_in_turn_and_each_round_begins_at_another_one():
    order: list[str] = []
    values = iter(range(100))

    def sampler(name: str):
        def sample() -> float:
            order.append(name)
            return next(values)

        return sample

    samplers = {("a", 1): sampler("a1"), ("a", 2): sampler("a2"), ("b", 1): sampler("b1")}
    lines = measure_lines(samplers, Effort(3, 3, 0.0), silent)
    assert order == ["a1", "a2", "b1", *["a1", "a2", "b1"], *["a2", "b1", "a1"], *["b1", "a1", "a2"]]
    assert [(line.name, [point.size for point in line.points]) for line in lines] == [("a", [1, 2]), ("b", [1])]
    assert lines[0].points[0] == Point.from_samples(1, [3, 8, 10])  # the untimed first round does not count
    assert Point.from_samples(1, [3, 8, 10]) == Point(1, 8, 5.5, 9, 3)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (3.5, 4), (100.0, 7)])
def test_rounds_end_when_their_time_is_over(seconds: float, rounds: int):
    now = [0.0]

    def sample() -> float:
        now[0] += 1.0  # every measurement takes a second
        return 1.0

    (line,) = measure_lines({("a", 1): sample}, Effort(2, 7, seconds), silent, lambda: now[0])
    assert line.points[0].repeats == rounds


def test_a_curve_describes_the_growth_of_its_lines():
    line = Line("plain", (Point(1, 20.0, 19, 21, 3), Point(8, 50.0, 49, 51, 3)))
    curve = Curve("Throughput", "prompts", "tokens/s", (line,), {"bytes": {1: 5, 8: 9}})
    assert curve.sentence == "plain: 20 tokens/s at 1, 50 at 8, 2.50 times as much."
    found = json.loads(json.dumps(curve.to_json()))
    assert found["lines"][0]["points"][1] == {"size": 8, "median": 50.0, "low": 49, "high": 51, "repeats": 3}
    assert found["also"] == {"bytes": {"1": 5, "8": 9}}


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (4.0, "4"), (12.35, "12.3"), (999.4, "999"), (12345.6, "12,346")]
)
def test_numbers_have_three_significant_digits(value: float, text: str):
    assert format_number(value) == text


def test_a_made_up_vocabulary_spells_every_token_once():
    pieces = synthetic_pieces(50, 400)
    assert len(set(pieces)) == len(pieces) == 450
    assert [len(cut) for cut in pieces[:50]] == [1] * 50
    assert all(cut[:-1] in pieces[:place] for place, cut in enumerate(pieces) if len(cut) > 1)
    assert max(len(cut) for cut in pieces) > 2


def test_half_a_made_up_vocabulary_is_single_pieces_if_there_are_so_many():
    assert sum(len(cut or ()) == 1 for cut in synthetic_pair(600, 1000).pieces) == 300
    assert sum(len(cut or ()) == 1 for cut in synthetic_pair(600, 100).pieces) == 100
    assert synthetic_pair(600, 100).drafter_size == 100


def test_more_ngrams_translate_a_text_to_fewer_tokens():
    pair, counts = synthetic_pair(2000, 200), []
    cuts = [cut for cut in Random(0).sample(pair.pieces, 100) if cut]
    drafts = [Draft(row_of(0), cut, random_distributions(len(cut), 200, 0), (), None, ()) for cut in cuts]
    for number in (0, 100, 1000):
        trie, held = cache_of(pair, number, math.inf, "cpu")
        assert len(held) == number
        counts.append(sum(len(proposal.tokens) for proposal in Translate(trie, held, pair.pieces)(drafts)))
    assert counts[0] == sum(map(len, cuts))
    assert counts[0] > counts[1] > counts[2]


def test_the_curve_over_ngrams_has_every_size_and_its_bytes():
    curve = cache_curve((0, 50, 300), ONCE, silent, drafter_size=100)
    assert [line.name for line in curve.lines] == ["translation", "levels", "residuals of one token"]
    assert all([point.size for point in line.points] == [0, 50, 300] for line in curve.lines)
    taken = curve.also["cache, bytes"]
    assert taken[0] == 0
    assert 0 < 2 * taken[50] < taken[300]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_is_translated_verified_and_has_soft_targets(temperature: float):
    side = TargetSide(synthetic_pair(800, 300), temperature, "cpu")
    for number in range(4):
        verdict = side.block(number)
        proposed = len(verdict.proposal.verifiable)
        assert len(verdict.proposal.draft.pieces) == DRAFTED
        assert verdict.accepted >= min(AGREED, proposed)
        assert len(verdict.emitted) == verdict.accepted + 1
        assert sum(len(tokens.positions) for tokens in verdict.soft_targets) == len(verdict.emitted)
        assert side.block(number).emitted == verdict.emitted  # every repeat is the same work


def test_the_curve_over_vocabularies_has_both_sides_at_both_temperatures():
    curve = vocabulary_curve((400, 900), ONCE, silent)
    assert [line.name for line in curve.lines] == [
        f"{side}, temperature {temperature}" for side in ("target", "drafter") for temperature in (1, 0)
    ]
    assert all([point.size for point in line.points] == [400, 900] for line in curve.lines)
    assert all(point.median > 0 for line in curve.lines for point in line.points)


@pytest.fixture
def models(tiny_pair: TinyPair, tmp_path: Path) -> tuple[Config, Models]:
    given = {"targets": (str(tiny_pair.target),), "drafter": str(tiny_pair.drafter), "device": "cpu", "threads": 1}
    config = Config().with_overrides(given)
    return config, load_models(config, "", tmp_path)[0]


def logits_of(model: LanguageModel):
    row = row_of(0)
    row.tokens = [5, 6, 7, 8]
    model.admit(row, row.tokens)
    found = model.forward([row], [[8, 9]], [2])[0]
    model.release(row)
    return found


def test_a_model_is_lengthened_and_still_the_same(tiny_pair: TinyPair):
    model = load_model(str(tiny_pair.target), "float32", "cpu")
    longer = with_context(model, 5000, "float32", "fastest")
    assert (model.max_length, longer.max_length) == (1024, 5000)
    assert float((logits_of(model) - logits_of(longer)).abs().max()) < 1e-5
    row = row_of(0)
    row.tokens = [4] * 1200
    longer.admit(row, row.tokens)
    assert longer.length(row) == 1199


def test_a_model_that_is_long_or_cannot_be_lengthened_stays(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch):
    model = load_model(str(tiny_pair.target), "float32", "cpu")
    assert with_context(model, 1024, "float32", "fastest") is model
    monkeypatch.setattr(bench_scaling, "has_packed_forward", lambda model: False)
    assert with_context(model, 5000, "float32", "fastest") is model


def test_a_model_is_measured_up_to_its_longest_context(models: tuple[Config, Models], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_scaling, "has_packed_forward", lambda model: False)
    curve = context_curve(*models, (16, 1019, 1020), ONCE, silent)
    assert [line.name for line in curve.lines] == ["target, 1 token", "target, 5 tokens", "drafter, 1 token"]
    assert all([point.size for point in line.points] == [16, 1019] for line in curve.lines)


def test_measuring_contexts_releases_every_row(models: tuple[Config, Models]):
    config, loaded = models
    context_curve(config, loaded, (8,), ONCE, silent)
    assert logits_of(loaded.target).shape[0] == 2  # refused if another row were admitted


def test_the_largest_batch_decides_how_many_prompts_are_needed():
    assert prompts_needed([1, 2]) == FEWEST_PROMPTS
    assert prompts_needed([1, 32, 8]) == 32


def run(*arguments: object) -> Result:
    app = Typer()
    app.command()(bench_scale)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def found(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """All curves of the tiny pair, with a file of results and a plot."""
    folder = tmp_path_factory.mktemp("scale")
    options = ["--threads", 1, "--device", "cpu", "--max-new-tokens", 8, "--set", "draft.relative_cost=0.1"]
    files = ["--json", folder / "scale.json", "--picture", folder / "scale.svg"]
    return run(tiny_pair.sums, *tiny_pair.options, *options, "--quick", *files), folder


@pytest.mark.slow
def test_the_command_measures_every_curve(found: tuple[Result, Path]):
    result, folder = found
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "scale.json").read_text())
    assert tuple(report["curves"]) == CURVES
    for name, curve in report["curves"].items():
        for line in curve["lines"]:
            assert [point["size"] for point in line["points"]] == list(QUICK[name].sizes)
            assert all(point["low"] <= point["median"] <= point["high"] for point in line["points"])
    assert [line["name"] for line in report["curves"]["batch"]["lines"]] == ["plain decoding", "speculation, frozen"]
    assert report["machine"]["threads"] == 1
    assert report["settings"]["sampling"]["max_new_tokens"] == 8


def test_the_command_prints_a_table_and_a_sentence_each(found: tuple[Result, Path]):
    result, folder = found
    assert len(re.findall(r": median \(quartiles\)", result.output)) == len(CURVES)
    words = " ".join(result.output.split())
    for curve in json.loads((folder / "scale.json").read_text())["curves"].values():
        assert curve["sentence"] in words


def test_the_command_draws_a_plot(found: tuple[Result, Path]):
    assert "<svg" in (found[1] / "scale.svg").read_text()


def test_a_single_curve_can_be_selected(tiny_pair: TinyPair, tmp_path: Path):
    result = run(*tiny_pair.options, "--quick", "--only", "cache", "--json", tmp_path / "cache.json", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "cache.json").read_text())["curves"]) == ["cache"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "batch,price"], r"--only must name curves, got 'price'; there are batch, context"),
        (["--json", "nowhere/scale.json"], r"--json must name a file in a folder that exists"),
        (["--picture", "scale.txt"], r"--picture must end in one of .png, .svg, .pdf, got 'scale.txt'"),
    ],
)
def test_impossible_options_are_refused(options: list[str], message: str):
    result = run(*options)
    assert isinstance(result.exception, UsageError)
    assert re.search(message, str(result.exception))


def test_too_few_prompts_are_refused(tiny_pair: TinyPair, tmp_path: Path):
    few = write_prompts(tmp_path / "few.jsonl", ["one prompt alone"])
    result = run(few, *tiny_pair.options, "--quick", "--only", "batch", "--threads", 1)
    assert "needs 4 prompts" in str(result.exception)


def test_a_plot_that_cannot_be_written_is_an_error(tiny_pair: TinyPair, tmp_path: Path):
    plot = tmp_path / "plot.png"
    plot.symlink_to(tmp_path / "gone" / "plot.png")
    result = run(*tiny_pair.options, "--quick", "--only", "cache", "--picture", plot, "--threads", 1)
    assert isinstance(result.exception, RunError)


def test_a_folder_cannot_be_the_plot(tiny_pair: TinyPair, tmp_path: Path):
    result = run(*tiny_pair.options, "--quick", "--only", "cache", "--picture", tmp_path, "--threads", 1)
    assert isinstance(result.exception, UsageError)
