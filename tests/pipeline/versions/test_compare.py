"""Comparing versions: their names, the same prompts on both sides, paired metrics, and the files with them."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from published_pair import Published
from replaying import config_of
from tiny_pair import TinyPair
from typer.testing import CliRunner

from pipeline.assembly.models import load_models
from pipeline.assembly.probe import PLAIN
from pipeline.assembly.probe import prompts as probe_prompts
from pipeline.cli.versions import versions_group
from pipeline.config.settings import Config
from pipeline.run.rounds import Round
from pipeline.versions import compare as comparing
from pipeline.versions import sides as compare_build
from pipeline.versions.compare import (
    AS_PROBED,
    FIRST_PROMPTS,
    MIN_PROMPTS,
    Comparison,
    PairedMetric,
    PassageCounts,
    compare,
    compare_counts,
    describe_result,
    make_comparison_config,
    read_prompts,
    table_rows,
)
from pipeline.versions.sides import Side, describe_equal, find_common_target, open_sides, require_free
from store.errors import CorruptError, ModelError, SourceError, UsageError
from store.events import PromptReceived
from store.registry.registry import list_versions, promote
from store.registry.version_folder import open_version, seal

MODEL = "omnidraft-drafter"
COARSE = {"sampling.max_new_tokens": 12, "source.limit": 6, "device": "cpu"}


def passage(accepted: int, judged: int = 10, seconds: float = 1.0, tokens: int = 20) -> PassageCounts:
    return PassageCounts(tuple(range(tokens)), tokens // 2, tokens // 4, judged, accepted, seconds)


def compare_rates(first: list[PassageCounts], second: list[PassageCounts]) -> tuple[Any, ...]:
    """Both acceptance rates, the change, and the ends of its interval."""
    return astuple(compare_counts(first, second)["acceptance_rate"])


def test_a_rate_is_a_ratio_of_sums_over_prompts():
    first, second = [passage(1, 10), passage(9, 30)] * 4, [passage(5, 10), passage(9, 30)] * 4
    *rates, change, low, high = compare_rates(first, second)
    assert (rates, change) == ([0.25, 0.35], pytest.approx(0.1))
    assert low <= 0.1 <= high


def test_prompts_are_paired():
    """Prompts that differ much from each other, all changed alike: the interval is exact."""
    *_, low, high = compare_rates([passage(n % 10) for n in range(40)], [passage(n % 10 + 1) for n in range(40)])
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_interval_covers_a_difference_of_chance_and_narrows_with_prompts():
    def width(prompts: int) -> float:
        first, second = [passage(n * 7 % 5) for n in range(prompts)], [passage(n * 3 % 5) for n in range(prompts)]
        *_, low, high = compare_rates(first, second)
        assert low < 0 < high
        return high - low

    assert width(400) < 0.5 * width(50)


def test_speed_is_the_median_ratio_over_prompts():
    first, second = [passage(1)] * 5, [passage(1, seconds=0.5)] * 4 + [passage(1, seconds=100.0)]
    found = compare_counts(first, second)["tokens_per_second"]
    assert found.change == 2.0
    tokens = len(first[0].tokens)
    assert (found.first, found.second) == (tokens, 2 * tokens), "all three are medians over prompts"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([passage(0, 0)], [passage(1)], (None, 0.1, None, None, None)),  # nothing was judged
        ([passage(0, 0)] * 9 + [passage(2)], [passage(5)] * 10, (0.2, 0.5, 0.3, None, None)),  # of few prompts
        ([passage(1)] * (MIN_PROMPTS - 1), [passage(5)] * (MIN_PROMPTS - 1), (0.1, 0.5, 0.4, None, None)),
        ([passage(1)] * MIN_PROMPTS, [passage(5)] * MIN_PROMPTS, (0.1, 0.5, 0.4, 0.4, 0.4)),
    ],
)
def test_what_cannot_be_computed_is_none(first: list, second: list, expected: tuple[float | None, ...]):
    found = [None if value is None else round(value, 9) for value in compare_rates(first, second)]
    assert found == list(expected)


def test_accepted_tokens_are_of_the_blocks_that_the_model_drafted():
    assert compare_counts([passage(5)], [passage(10)])["mean_accepted_length"].first == 1.0
    assert compare_counts([passage(5)], [passage(10)])["block_efficiency"].first == 2.0


def make_comparison(metrics: dict[str, PairedMetric]) -> Comparison:
    prompts, settings = tuple(f"p{n}" for n in range(MIN_PROMPTS)), {"sampling": {"temperature": 1.0}}
    return Comparison(("#1", "#2"), (1, 2), settings, prompts, metrics, ((passage(1),) * MIN_PROMPTS,) * 2)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (PairedMetric(0.2, 0.5, 0.3, 0.1, 0.4), "#2 is better than #1: acceptance +0.300 (+0.100 to +0.400) on 8"),
        (PairedMetric(0.5, 0.2, -0.3, -0.4, -0.1), "#2 is worse than #1: acceptance -0.300 (-0.400 to -0.100)"),
        (
            PairedMetric(0.2, 0.3, 0.1, -0.1, 0.2),
            "No real difference between #1 and #2: acceptance +0.100 (-0.100 to +0.200)",
        ),
        (PairedMetric(None, 0.2, None, None, None), "Nothing was judged on one side on 8 prompts"),
        (PairedMetric(0.1, 0.2, 0.1, None, None), "Too little was judged on one side on 8 prompts"),
    ],
)
def test_a_sentence_states_no_more_than_the_interval(metric: PairedMetric, expected: str):
    comparison = make_comparison({"acceptance_rate": metric})
    assert describe_result(comparison).startswith(expected)
    assert len(table_rows(comparison)[0]) == 5


@pytest.fixture
def sides(published: Published, tmp_path: Path) -> tuple[Side, Side]:
    return open_sides(("baseline", str(published.newest)), published.uri, MODEL, tmp_path / "versions")


@pytest.mark.slow
def test_versions_are_named_by_number_alias_folder_or_baseline(published: Published, tmp_path: Path):
    promote(published.uri, MODEL, 2)
    newest = published.newest

    def numbers(first: str, second: str) -> list[int | None]:
        found = open_sides((first, second), published.uri, MODEL, tmp_path / f"{first}-{second}".replace("/", "_"))
        return [side.number for side in found]

    assert numbers("champion", "candidate") == [2, newest]
    assert numbers("baseline", "candidate") == [1, newest]
    assert numbers("2", "baseline") == [2, 1]
    assert numbers(str(published.folder(1)), "2") == [None, 2]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("1", "99"), ModelError, "must have a version 99"),
        (("1", "best"), ModelError, "its number or an alias .*candidate.*, got 'best'"),
        (("2", "2"), UsageError, "two different versions"),
        (("baseline", "baseline"), UsageError, "the baseline of the other version"),
        (("baseline", "1"), UsageError, "two different versions"),
        (("1", "²"), ModelError, "got '²'"),
    ],
)
def test_a_name_that_means_nothing_is_refused(
    published: Published, tmp_path: Path, names: tuple[str, str], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        open_sides(names, published.uri, MODEL, tmp_path / "versions")


def test_a_pruned_baseline_is_refused(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = list_versions(published.uri)[:-1]
    monkeypatch.setattr(compare_build, "list_versions", lambda uri, model: left)
    with pytest.raises(UsageError, match="the baseline was pruned: version 2 is the first that is left"):
        open_sides(("baseline", "candidate"), published.uri, MODEL, tmp_path / "versions")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("learn.lora_rank", "on both sides"),
        ("batch", "on both sides"),
        ("draft.sources", "try --as-served"),
        ("targets", "chosen by --target"),
    ],
)
def test_a_setting_that_a_comparison_fixes_is_refused(key: str, expected: str, tmp_path: Path):
    with pytest.raises(UsageError, match=expected):
        run_command("compare", "1", "2", "--runs", tmp_path, "--set", f"{key}=1")


def test_as_served_settings_may_be_chosen():
    require_free(["draft.sources", "dtype"], as_served=True)
    with pytest.raises(UsageError, match=r"learn\.lora_rank"):
        require_free(["learn.lora_rank"], as_served=True)


def test_no_side_learns_an_adapter_of_its_own(sides: tuple[Side, Side]):
    config = Config().with_overrides({"learn.lora_rank": 4})
    assert not make_comparison_config(config, target=None, sides=sides, as_served=True).learn.lora


def test_a_changed_version_is_refused(published: Published, tmp_path: Path):
    copy = shutil.copytree(published.folder(2), tmp_path / "copy")
    (copy / "head.safetensors").write_bytes(b"other")
    with pytest.raises(CorruptError, match=r"head\.safetensors was changed"):
        open_sides((str(copy), "1"), published.uri, MODEL, tmp_path / "versions")


def test_the_target_is_the_versions_own_unless_it_is_named(sides: tuple[Side, Side], tiny_pair: TinyPair):
    assert find_common_target(*sides) == str(tiny_pair.target)
    manifest = {**sides[1].manifest, "target": "another"}
    other = Side("#9", 9, sides[1].folder, manifest)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"made for .*target and #9 for another; choose one with --target"):
        make_comparison_config(Config(), target=None, sides=(sides[0], other), as_served=False)
    assert make_comparison_config(Config(), target="x", sides=(sides[0], other), as_served=False).targets == ("x",)


def test_the_default_prompts_are_the_probe_s(tiny_pair: TinyPair):
    prompts = read_prompts(Config(), None)
    assert sorted(prompts, key=lambda one: one.offset) == probe_prompts()
    assert len({one.dataset for one in prompts[:3]}) == 3, "a comparison that ends early has seen every kind"
    assert {key: PLAIN[key] for key in AS_PROBED} == AS_PROBED, "texts of which the probe is one have the same figures"
    assert len(read_prompts(Config().with_overrides({"source.limit": 4}), None)) == 4
    assert len(read_prompts(Config().with_overrides({"source.limit": 4}), str(tiny_pair.sums))) == 4


def test_a_probe_without_prompts_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    with pytest.raises(SourceError, match="a probe must hold prompts"):
        read_prompts(Config(), str(tmp_path / "empty.jsonl"))


def run(sides: tuple[Side, Side], scratch: Path, source: Path, as_served: bool = False, **settings: Any) -> Comparison:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    config = Config().with_overrides({**COARSE, **given})
    config = make_comparison_config(config, target=None, sides=sides, as_served=as_served)
    return compare(config, sides, read_prompts(config, str(source)), "", scratch, lambda done, text: None)


def test_a_learned_version_differs_from_its_baseline(sides: tuple[Side, Side], tmp_path: Path, tiny_pair: TinyPair):
    found = run(sides, tmp_path, tiny_pair.sums)
    assert len(found.prompts) == 6
    assert [one.tokens for one in found.passages[0]] == [one.tokens for one in found.passages[1]]
    acceptance = found.metrics["acceptance_rate"]
    assert acceptance.first is not None
    assert acceptance.second is not None
    assert acceptance.change == pytest.approx(acceptance.second - acceptance.first)
    assert acceptance.change != 0
    emitted, accepted = found.metrics["block_efficiency"], found.metrics["mean_accepted_length"]
    assert emitted.first is not None
    assert accepted.first is not None
    assert 0 <= emitted.first - accepted.first <= 1, "where nothing is looked up a pass gives one token besides"


@pytest.mark.slow
def test_a_version_against_itself_shows_no_change(published: Published, tmp_path: Path, tiny_pair: TinyPair):
    names = ("2", str(published.folder(2)))
    sides = open_sides(names, published.uri, MODEL, tmp_path / "versions")
    for temperature in (0.0, 1.0):
        found = run(sides, tmp_path, tiny_pair.sums, sampling__temperature=temperature)
        counts = [[(one.tokens, one.blocks, one.judged, one.accepted) for one in side] for side in found.passages]
        assert counts[0] == counts[1], "the draws were not the same on both sides"
        assert found.metrics["block_efficiency"].change == 0


def test_as_served_each_version_s_head_decides(sides: tuple[Side, Side], tmp_path: Path, tiny_pair: TinyPair):
    costs = {"draft__costs": 0.1}
    fixed = run(sides, tmp_path, tiny_pair.sums, **costs)
    served = run(sides, tmp_path, tiny_pair.sums, as_served=True, **costs)
    assert [one.tokens for one in served.passages[1]] == [one.tokens for one in fixed.passages[1]]
    assert [one.judged for one in served.passages[1]] != [one.judged for one in fixed.passages[1]]


def test_as_served_copied_blocks_are_not_the_model_s(sides: tuple[Side, Side], tmp_path: Path, tiny_pair: TinyPair):
    settings = {"draft__stop": "never", "draft__pause": False, "sampling__max_new_tokens": 48}
    settings |= {"draft__sources": ("own", "model"), "draft__costs": 0.1}  # measured ones vary with the load
    found = run(sides, tmp_path, tiny_pair.sums, as_served=True, **settings)
    mean = found.metrics["mean_accepted_length"]
    for passages, length in zip(found.passages, (mean.first, mean.second), strict=True):
        drafted = sum(one.model_blocks for one in passages)
        assert length == pytest.approx(sum(one.accepted for one in passages) / drafted)
        assert all(one.model_blocks <= one.blocks for one in passages)
        assert drafted < sum(one.blocks for one in passages), "nothing was copied"


@dataclass
class Arm:
    """An arm that emits given tokens and records the order of turns."""

    name: str
    turns: list[str]
    tokens: tuple[int, ...] = (1, 2, 3)
    models: Any = field(default_factory=SimpleNamespace)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        self.turns.append(f"{self.name}{prompts[0].offset}")
        return Round((self.tokens,), 1.0)


def with_arms(monkeypatch: pytest.MonkeyPatch, sides: tuple[Side, Side], tmp_path: Path, *arms: Arm) -> Comparison:
    monkeypatch.setattr(comparing, "make_arms", lambda *rest: arms)
    config = make_comparison_config(Config(), target="x", sides=sides, as_served=False)
    return compare(config, sides, probe_prompts()[:4], "", tmp_path, lambda done, text: None)


def test_the_sides_take_turns(monkeypatch: pytest.MonkeyPatch, sides: tuple[Side, Side], tmp_path: Path):
    turns: list[str] = []
    with_arms(monkeypatch, sides, tmp_path, Arm("A", turns), Arm("B", turns))
    assert turns == ["A4", "B4", "A0", "B0", "B1", "A1", "A2", "B2", "B3", "A3"]  # a warm-up comes first


def test_greedy_texts_that_differ_are_an_error(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[Side, Side], tmp_path: Path
):
    arms = Arm("A", []), Arm("B", [], (1, 2))
    with pytest.raises(CorruptError, match="must give the target's text, but that of prompt probe:docs:0 parts"):
        with_arms(monkeypatch, sides, tmp_path, *arms)


def test_differing_texts_are_judged_after_the_encoded_prompt(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[Side, Side], tmp_path: Path, tiny_pair: TinyPair
):
    """The prompt is in the target's chat template, if prompts are chat prompts."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}user: {{ message['content'] }}\n{% endfor %}answer:")
    chat = {"source.chat": True, "source.chat_template": template, "device": "cpu"}
    target, config = str(tiny_pair.target), Config().with_overrides(chat)
    config = make_comparison_config(config, target=target, sides=sides, as_served=False)
    (models,) = load_models(config_of(tiny_pair), "", tmp_path)
    arms = Arm("A", [], models=models), Arm("B", [], (1, 4, 3), models=models)
    read: list[list[int]] = []
    monkeypatch.setattr(comparing, "make_arms", lambda *rest: arms)
    monkeypatch.setattr(comparing, "logit_difference", lambda model, text, one, other: read.append(list(text)) or 0.0)
    with pytest.raises(CorruptError, match="parts at token 1; there the target's logits"):
        compare(config, sides, [PromptReceived(0, "p", "d", 1, "Ann")], "", tmp_path, lambda done, text: None)
    assert read == [[*models.target_vocabulary.encode("user: Ann\nanswer:")[1:], 1]], "the template has no begin token"


def run_command(*arguments: object) -> str:
    """Run `omnidraft versions` and return its output."""
    done = CliRunner().invoke(versions_group, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_a_table_and_writes_json_and_mlflow(
    published: Published, tiny_pair: TinyPair, tmp_path: Path
):
    options = ("--runs", published.runs, "--probe", tiny_pair.sums, "--limit", 3, "--max-new-tokens", 12)
    printed = run_command("compare", "baseline", "candidate", *options, "--json", tmp_path / "metrics.json")
    assert "acceptance (accepted / judged)" in printed
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["numbers"] == [1, published.newest]
    assert written["settings"]["sources"] == [str(tiny_pair.sums)]
    assert len(written["prompts"]) == 3
    (run,) = MlflowClient(published.uri).search_runs(["1"], "tags.kind = 'comparison'", max_results=1)
    assert run.data.metrics["acceptance_rate/change"] == pytest.approx(written["figures"]["acceptance_rate"]["change"])


def test_equal_drafters_are_answered_without_decoding(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What differs beside the weights is said, and is compared only as served."""
    copies = [tmp_path / name for name in ("one", "other")]
    for folder in copies:
        shutil.copytree(published.folder(2), folder)
    manifest = open_version(copies[0])
    (copies[1] / "head.safetensors").write_bytes(b"another head")
    seal(copies[1], {**manifest, "counters": Counter(manifest["counters"]) + Counter(head=3)})
    monkeypatch.setattr(comparing, "compare", lambda *_: pytest.fail("equal drafters were replayed"))
    printed = run_command("compare", *copies, "--runs", published.runs)
    assert printed.startswith("equal drafters: ")
    assert "have the same weights; " in printed
    assert "has head +3 updates. --as-served" in " ".join(printed.split())
    assert describe_equal(*(Side("", None, one, open_version(one)) for one in copies), as_served=True) == ""
    whole = json.loads(run_command("compare", "2", published.folder(2), "--runs", published.runs, "--json", "-"))
    assert whole["equal"].startswith("equal versions: ")


def test_a_comparison_ends_when_the_difference_is_sure(
    sides: tuple[Side, Side], tmp_path: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
):
    shown = list[tuple[int, str]]()
    config = Config().with_overrides(COARSE | {"source.limit": 10, "sampling.max_new_tokens": 4})
    config = make_comparison_config(config, target=None, sides=sides, as_served=False)
    prompts = read_prompts(config, str(tiny_pair.sums))
    for sure in (True, False):
        monkeypatch.setattr(comparing, "is_sure", lambda change, sure=sure: sure)
        done = compare(config, sides, prompts, "", tmp_path, lambda *one: shown.append(one))
        assert len(done.prompts) == (MIN_PROMPTS if sure else 10)
    texts = dict(reversed(shown))
    assert texts[FIRST_PROMPTS - 1] == ""
    assert texts[FIRST_PROMPTS].startswith("acceptance ")


@pytest.mark.parametrize(
    ("low", "high", "sure"),
    [(0.01, 0.4, True), (-0.4, -0.01, True), (-0.1, 0.1, False), (-0.01, 0.015, True), (None, None, False)],
)
def test_an_interval_is_sure_of_a_difference_or_of_none_that_matters(low: Any, high: Any, sure: bool):
    assert comparing.is_sure(PairedMetric(0.2, 0.2, 0.0, low, high)) == sure


def test_the_champion_is_a_drafter_by_name(published: Published, tiny_pair: TinyPair, tmp_path: Path):
    promote(published.uri, MODEL, 2)
    named = config_of(tiny_pair, drafter=f"models:/{MODEL}@champion")
    (models,) = load_models(named, published.uri, tmp_path)
    assert models.drafter_folder is not None
    assert open_version(models.drafter_folder) == open_version(published.folder(2))


def test_a_limit_that_was_typed_counts(published: Published, tiny_pair: TinyPair, tmp_path: Path):
    options = ("--runs", published.runs, "--probe", tiny_pair.sums, "--no-publish", "--max-new-tokens", 4)
    more = ("--set", "source.limit=2", "--set", "sampling.max_new_tokens=9", "--json", tmp_path / "metrics.json")
    printed = run_command("compare", "1", "2", *options, *more)
    assert "Too few prompts for an interval: 2, and it takes 8 or more." in " ".join(printed.split())
    assert "MLflow" not in printed
    settings = json.loads((tmp_path / "metrics.json").read_text())["settings"]
    assert settings["sampling"]["max_new_tokens"] == 4


def test_a_json_file_that_cannot_be_written_is_reported(
    published: Published, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = Path.write_text

    def full(path: Path, *rest: Any, **more: Any) -> int:
        if path.name == "metrics.json":
            raise OSError(ENOSPC, "No space left on device")
        return write(path, *rest, **more)

    monkeypatch.setattr(Path, "write_text", full)
    options = ("--runs", published.runs, "--probe", tiny_pair.sums, "--limit", 1, "--max-new-tokens", 4)
    with pytest.raises(UsageError, match="could not be written: No space left"):
        run_command("compare", "1", "2", *options, "--json", tmp_path / "metrics.json")


def test_an_impossible_json_file_is_reported_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(UsageError, match="--json must name a file"):
        run_command("compare", "1", "2", "--runs", tmp_path, "--json", tmp_path / "none" / "x.json")
