"""`omnidraft bench` over tiny random models: what it runs, compares and reports. Not how fast anything is."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pipeline import zoo
from pipeline.bench import Mean, Spread, figures, mean, measure, same_law, spread
from pipeline.bench_arms import ArmName, Completion
from pipeline.cli_bench import ALL_ARMS, bench
from stages import huggingface
from stages.pretrain import Recipe
from store.errors import ConfigError, SourceError, UsageError
from store.events import PromptReceived

TEXTS = [
    f"The {size} box holds {n} red balls and {n + 3} blue ones, {n * 7} in all."
    for n in range(60)
    for size in ("big", "old")
]
SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS, WARM_UP, NEW_TOKENS = 3, 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny random models with different vocabularies, and a file of prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "target", zoo.SPLIT_THREE_DIGITS, words=420, width=32, seed=1)
    make_model(folder / "drafter", "", words=380, width=16, seed=2)
    lines = [json.dumps({"prompt": text}) for text in TEXTS[: PROMPTS + WARM_UP]]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make_model(folder: Path, split: str, words: int, width: int, seed: int) -> None:
    recipe = Recipe(steps=1, rows=1, length=8, peak_rate=1e-3)
    model = zoo.ZooModel(folder.name, "", words, split, {}, {}, recipe)
    folder.mkdir()
    zoo._train_tokenizer(model, TEXTS, folder / "bpe.json")
    special = {"bos_token": zoo.BOS, "eos_token": zoo.EOS, "pad_token": zoo.PAD, "unk_token": zoo.UNK}
    tokenizer = huggingface.wrap_tokenizer(folder / "bpe.json", **special)
    llama = huggingface.new_llama(
        seed,
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        max_position_embeddings=256,
        initializer_range=0.4,  # so that the largest logit is no near tie
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(folder: Path, *more: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    options = ["--target", folder / "target", "--drafter", folder / "drafter", "--device", "cpu", "--threads", 1]
    sizes = ["--prompts", PROMPTS, "--warm-up", WARM_UP, "--max-new-tokens", NEW_TOKENS]
    arguments = [folder / "prompts.jsonl", *options, *sizes, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[dict, str]:
    result = run(folder, "--json", str(folder / "greedy.json"))
    assert result.exit_code == 0, result.output
    return json.loads((folder / "greedy.json").read_text()), result.output


def test_every_arm_is_reported_with_medians_and_ratios(greedy: tuple[dict, str]) -> None:
    report, _ = greedy
    assert list(report["arms"]) == ALL_ARMS.split(",")
    for arm in report["arms"].values():
        for figure in (arm["tokens_per_second"], arm["ratio"]):
            assert 0 < figure["lower"] <= figure["median"] <= figure["upper"]
            assert figure["overall"] > 0
        assert len(arm["prompts"]) == PROMPTS
    assert report["arms"]["plain"]["ratio"] == {"median": 1.0, "lower": 1.0, "upper": 1.0, "overall": 1.0}


def test_all_arms_emit_the_same_greedy_tokens(greedy: tuple[dict, str]) -> None:
    report, _ = greedy
    assert {name: arm["differing"] for name, arm in report["arms"].items()} == dict.fromkeys(ALL_ARMS.split(","), 0)
    assert {arm["tokens"] for arm in report["arms"].values()} == {report["arms"]["plain"]["tokens"]}


def test_acceptance_is_reported_for_our_arms_alone(greedy: tuple[dict, str]) -> None:
    report, _ = greedy
    for name, arm in report["arms"].items():
        ours = name in ("frozen", "learning")
        assert (arm["block_efficiency"] is not None) == ours
        assert (arm["acceptance_rate"] is not None) == ours
    assert report["arms"]["frozen"]["learning_share"] == 0
    assert 0 < report["arms"]["learning"]["learning_share"] < 1


def test_the_table_names_arms_machine_and_settings(greedy: tuple[dict, str]) -> None:
    report, output = greedy
    for words in ("transformers generate", "assisted, k=5", "defaults", "omnidraft frozen", "omnidraft learning"):
        assert words in output
    for words in (report["machine"]["device"], f"torch {report['machine']['torch']}", "1 threads", "float32"):
        assert words in output


def test_sampling_reports_surprisal_in_place_of_differences(folder: Path) -> None:
    path = folder / "sampled.json"
    result = run(folder, "--temperature", "1", "--json", str(path), "--arms", "plain,assisted,assisted-defaults,frozen")
    assert result.exit_code == 0, result.output
    for arm in json.loads(path.read_text())["arms"].values():
        assert arm["differing"] is None
        assert arm["nats_per_token"]["value"] > 0
    assert "nats/token" in result.output


def test_without_plain_the_first_arm_is_the_reference(folder: Path) -> None:
    result = run(folder, "--arms", "learning,frozen", "--json", str(folder / "two.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "two.json").read_text())
    assert report["reference"] == "learning"
    assert report["arms"]["learning"]["ratio"]["median"] == 1


def test_bad_requests_are_refused_before_any_model_is_loaded(folder: Path) -> None:
    for more, kind, words in (
        (("--arms", "plain,frosen"), UsageError, "did you mean 'frozen'"),
        (("--json", str(folder / "no" / "file.json")), UsageError, "folder that exists"),
        (("--temperature", "-1"), ConfigError, "sampling.temperature"),
        ((str(folder / "promts.jsonl"),), SourceError, "Did you mean"),
    ):
        error = run(folder, *more, "--target", "does-not-exist").exception
        assert isinstance(error, kind)
        assert words in str(error)


def test_too_few_prompts_are_refused(folder: Path) -> None:
    error = run(folder, "--prompts", "50").exception
    assert isinstance(error, SourceError)
    assert "54 prompts" in str(error)
    assert f"has {PROMPTS + WARM_UP} that fit" in str(error)


# The figures, on numbers made by hand


def completion(tokens: str, seconds: float, **counts: Any) -> Completion:
    return replace(Completion(tuple(map(ord, tokens)), seconds), **counts)


PLAIN = [completion("abcd", 4.0), completion("abcdefgh", 4.0), completion("ab", 1.0)]


def test_spread_of_values_and_of_one() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0], 2.5) == Spread(median=3.0, lower=2.0, upper=4.0, overall=2.5)
    assert spread([7.0], 7.0) == Spread(7.0, 7.0, 7.0, 7.0)


def test_mean_has_the_standard_error() -> None:
    assert mean([1.0, 3.0]) == Mean(2.0, 1.0)
    assert mean([1.0]) == Mean(1.0, None)


def test_another_law_is_told_by_four_errors() -> None:
    assert same_law(Mean(3.0, 0.3), Mean(5.0, 0.4))
    assert not same_law(Mean(3.0, 0.3), Mean(5.1, 0.4))
    assert same_law(Mean(3.0, None), Mean(9.0, 0.1))
    assert same_law(None, None)


def test_ratios_are_paired_by_prompt_and_the_overall_one_is_of_totals() -> None:
    # Twice as fast on the first two prompts, and an update's ten seconds on the third.
    own = [completion("abcd", 2.0), completion("abcdefgh", 2.0), completion("ab", 10.5)]
    found = figures(own, PLAIN, greedy=True)
    assert (found.ratio.median, found.ratio.upper, found.ratio.overall) == (2.0, 2.0, 9 / 14.5)
    assert found.ratio.lower == pytest.approx((1 / 10.5 + 2.0) / 2)
    assert found.tokens_per_second.median == 2.0
    assert found.tokens_per_second.overall == 14 / 14.5


def test_an_arm_that_emits_more_tokens_is_compared_per_token() -> None:
    own = [completion("abcdefgh", 8.0), completion("abcd", 2.0), completion("a", 0.5)]
    found = figures(own, PLAIN, greedy=False)
    assert (found.ratio.lower, found.ratio.median, found.ratio.upper) == (1.0, 1.0, 1.0)
    assert found.differing is None


def test_differing_prompts_are_counted() -> None:
    own = [PLAIN[0], completion("abcdefgX", 4.0), completion("abc", 1.0)]
    assert figures(own, PLAIN, greedy=True).differing == 2


def test_acceptance_and_efficiency_come_from_sums() -> None:
    own = [
        completion("abcd", 1.0, blocks=2, judged=4, accepted=2, learning=0.0),
        completion("abcdefgh", 2.0, blocks=2, judged=6, accepted=6, learning=0.5),
        completion("ab", 1.0, blocks=3, judged=0, accepted=0, learning=0.5),
    ]
    found = figures(own, PLAIN, greedy=True)
    assert (found.acceptance_rate, found.block_efficiency, found.learning_share) == (0.8, 2.0, 0.25)
    assert figures(PLAIN, PLAIN, greedy=True).acceptance_rate is None


# The order in which arms run


class NotingArm:
    """Writes down which prompts it was given."""

    def __init__(self, name: str, notes: list[tuple[str, int]]) -> None:
        self._name, self._notes = name, notes

    def complete(self, prompt: PromptReceived) -> Completion:
        self._notes.append((self._name, prompt.offset))
        return completion("a", 1.0)


def rotation() -> Iterator[tuple[str, int]]:
    arms = [ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING]
    for number in range(3):
        yield from ((arms[(number + place) % 3], 4 + number) for place in range(3))


def test_every_arm_takes_its_turn_at_every_place_and_only_the_learning_one_sees_the_whole_warm_up() -> None:
    notes: list[tuple[str, int]] = []
    steps: list[tuple[int, int]] = []
    arms = {name: NotingArm(name, notes) for name in (ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING)}
    prompts = [PromptReceived(offset, str(offset), "tiny", offset + 1, "text") for offset in range(7)]
    measure(arms, prompts, 4, lambda what, done, all_steps: steps.append((done, all_steps)))
    warm_up = [("plain", 2), ("plain", 3), ("frozen", 2), ("frozen", 3), *(("learning", offset) for offset in range(4))]
    assert notes == [*warm_up, *rotation()]
    assert steps == [(done, 17) for done in range(1, 18)]
