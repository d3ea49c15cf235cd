"""`omnidraft bench` over tiny random models: what it runs, compares and reports. Speeds are not checked."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pipeline.assembly.models import Models
from pipeline.bench.speed.arms import BATCH_ONE, LOGGING, ON_REQUEST, Arm, ArmName
from pipeline.bench.speed.arms import OURS as ALL_OURS
from pipeline.cli.bench import speed as cli_bench
from pipeline.config.settings import Config
from pipeline.model_building import recipes
from pipeline.model_building.pretrain import Recipe
from pipeline.models import catalog as zoo
from pipeline.run.rounds import Round
from stages.engine.models import huggingface
from store.errors import ConfigError, SourceError, UsageError
from store.events import PromptReceived

TEXTS = [
    f"The {size} box holds {n} red balls and {n + 3} blue ones, {n * 7} in all."
    for n in range(60)
    for size in ("big", "old")
]
SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS, WARM_UP, NEW_TOKENS, ROUND = 4, 5, 12, 2
BY_DEFAULT = [name for name in ArmName if name not in ON_REQUEST]
EVERY_PROMPT = ("learn.interval=1", "learn.spacing=fixed")  # triggers an update
AT_BATCH_THREE = [name for name in BY_DEFAULT if name not in BATCH_ONE]
OURS = [name for name in ALL_OURS if name in BY_DEFAULT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny random models with different vocabularies, and a file of prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "target", recipes.SPLIT_THREE_DIGITS, words=420, width=32, seed=1)
    make_model(folder / "drafter", "", words=380, width=16, seed=2)
    lines = [json.dumps({"prompt": text}) for text in TEXTS[: PROMPTS + WARM_UP]]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make_model(folder: Path, split: str, words: int, width: int, seed: int) -> None:
    recipe = Recipe(steps=1, rows=1, length=8, peak_rate=1e-3)
    model = recipes.ModelRecipe(zoo.ZooModel(folder.name, "", words, {}), split, {}, recipe)
    folder.mkdir()
    recipes.train_tokenizer(model, TEXTS, folder / "bpe.json")
    special = {
        "bos_token": recipes.BOS,
        "eos_token": recipes.EOS,
        "pad_token": recipes.PAD,
        "unk_token": recipes.UNK,
    }
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
    app.command()(cli_bench.bench)
    options = ["--target", folder / "target", "--drafter", folder / "drafter", "--device", "cpu", "--threads", 1]
    sizes = ["--prompts", PROMPTS, "--warm-up", WARM_UP, "--max-new-tokens", NEW_TOKENS, "--round-prompts", ROUND]
    arguments = [folder / "prompts.jsonl", *options, *sizes, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[list[dict], str]:
    """The reports at batch 1 and 3, and the printed output."""
    # Every prompt triggers an update, so that arms learn within so few; all draft, though that cannot pay off here.
    settings = (*EVERY_PROMPT, "publish.interval=2", "draft.pause=false", "draft.costs=estimated")
    more = [word for setting in settings for word in ("--set", setting)]
    result = run(folder, "--json", str(folder / "greedy.json"), "--batch", "1,3", *more)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "greedy.json").read_text())["runs"], result.output


@pytest.mark.sweep
def test_all_arms_run_that_can_at_the_batch(greedy: tuple[list[dict], str]) -> None:
    (one, three), _ = greedy
    assert list(one["arms"]) == BY_DEFAULT
    assert list(three["arms"]) == AT_BATCH_THREE
    assert [report["settings"]["batch"] for report in (one, three)] == [1, 3]


def test_every_arm_is_reported_with_medians_and_ratios(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        for arm in report["arms"].values():
            for quartiles in (arm["tokens_per_second"], arm["ratio"]):
                assert 0 < quartiles["lower"] <= quartiles["median"] <= quartiles["upper"]
                assert quartiles["overall"] > 0
            assert len(arm["rounds"]) == PROMPTS // ROUND
            assert [len(one["tokens"]) for one in arm["rounds"]] == [ROUND] * (PROMPTS // ROUND)
        assert report["arms"]["plain"]["ratio"] == {"median": 1.0, "lower": 1.0, "upper": 1.0, "overall": 1.0}


def test_ours_are_compared_with_every_other_arm(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        assert {name: set(ratios) for name, ratios in report["ratios"].items()} == {
            name: set(report["arms"]) - {name} for name in OURS
        }
        seconds = {name: [one["seconds"] for one in arm["rounds"]] for name, arm in report["arms"].items()}
        learning_to_logged = [a / b for a, b in zip(seconds["learning"], seconds["logged"], strict=True)]
        ratio = report["ratios"]["logged"]["learning"]
        assert ratio["median"] == pytest.approx(sum(learning_to_logged) / 2)  # of two rounds with the same tokens
        assert ratio["overall"] == pytest.approx(sum(seconds["learning"]) / sum(seconds["logged"]))


def test_all_arms_emit_the_same_greedy_tokens(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        assert {name: arm["differing"] for name, arm in report["arms"].items()} == dict.fromkeys(report["arms"], 0)
        assert {arm["tokens"] for arm in report["arms"].values()} == {report["arms"]["plain"]["tokens"]}
        assert {arm["widest_difference"] for arm in report["arms"].values()} == {None}


def test_the_roofline_and_the_breakdown_are_of_our_arms_alone(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        for name, arm in report["arms"].items():
            ours = name in OURS
            assert (arm["block_efficiency"] is not None) == ours
            blocks = [one["blocks"] for one in arm["rounds"]]
            if ours:
                assert arm["block_efficiency"] == pytest.approx(arm["tokens"] / sum(blocks))
            else:
                assert set(blocks) == {None}
            assert (arm["efficiency"] is not None) == ours
            assert (arm["breakdown"] is not None) == ours
        assert sorted(map(int, report["costs"]["target"])) == ([1] if report["settings"]["batch"] == 1 else [1, 2, 3])
        assert report["costs"]["context"] > report["costs"]["prompt_tokens"] > 0


def test_each_arm_of_ours_does_what_its_name_states(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        arms = {name: report["arms"][name] for name in OURS}
        assert arms["own-plain"]["block_efficiency"] == 1
        assert arms["own-plain"]["acceptance_rate"] is None
        assert arms["own-plain"]["efficiency"]["drafting"] == 0 < arms["frozen"]["efficiency"]["drafting"]
        learning = {name: arm["breakdown"]["learning"] > 0 for name, arm in arms.items()}
        assert learning == {
            "own-plain": False,
            "memory": False,
            "never-learned": False,
            "frozen": False,
            "learning": True,
            "logged": True,
        }
        for part in ("log", "versions", "drift"):
            kept = {name for name, arm in arms.items() if arm["breakdown"][part] > 0}
            assert kept == {"logged"}


def test_logged_arms_with_a_source_off_keep_the_log_and_lack_the_source(folder: Path) -> None:
    settings = (*EVERY_PROMPT, "draft.pause=false", "draft.costs=estimated")
    more = [word for setting in settings for word in ("--set", setting)]
    arms = ",".join(LOGGING)
    result = run(folder, "--json", str(folder / "off.json"), "--batch", "1", "--arms", arms, *more)
    assert result.exit_code == 0, result.output
    (report,) = json.loads((folder / "off.json").read_text())["runs"]
    parts = {name: arm["breakdown"] for name, arm in report["arms"].items()}
    assert list(parts) == list(LOGGING)
    assert all(part["log"] > 0 for part in parts.values())
    assert {name for name, part in parts.items() if part["learning"] > 0} == {"logged", "memory-logged"}
    drafted = {name: arm["efficiency"]["drafting"] for name, arm in report["arms"].items()}
    assert drafted["memory-logged"] < drafted["frozen-logged"]


def test_the_shares_of_a_breakdown_make_a_whole(greedy: tuple[list[dict], str]) -> None:
    for report in greedy[0]:
        for name in OURS:
            shares = dict(report["arms"][name]["breakdown"])
            for parallel in ("translation_per_target_step", "learning_beside", "log_beside"):
                assert shares.pop(parallel) >= 0
            assert sum(shares.values()) == pytest.approx(1)
            assert min(shares.values()) >= 0


def test_the_tables_name_arms_machine_and_settings(greedy: tuple[list[dict], str]) -> None:
    (report, _), output = greedy
    for words in ("transformers generate", "assisted, k=5", "prompt lookup", "omnidraft frozen", "learning, logged"):
        assert words in output
    for words in (report["machine"]["device"], f"torch {report['machine']['torch']}", "1 threads", "float32"):
        assert words in output
    for words in ("Batch 1,", "Batch 3,", "efficiency", "target at 6"):
        assert words in output


@pytest.mark.sweep
def test_sampling_reports_surprisal_in_place_of_differences_as_markdown(folder: Path) -> None:
    path = folder / "sampled.json"
    arms = "plain,assisted,prompt-lookup,continuous,frozen"
    result = run(folder, "--temperature", "1", "--json", str(path), "--arms", arms, "--markdown")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(path.read_text())["runs"]
    for arm in report["arms"].values():
        assert arm["differing"] is None
        assert math.isfinite(arm["nats_per_token"]["value"])
        assert arm["nats_per_token"]["value"] > 0
    table = [line.split("|")[1:-1] for line in result.output.splitlines() if line.startswith("| ")]
    assert table[0][-1].strip() == "nats/token"
    assert set(table[1][1:]) == {" ---: "}
    assert [row[0].strip() for row in table[2:4]] == ["transformers generate", "transformers assisted, k=5"]


def test_without_plain_the_first_arm_is_the_reference(folder: Path) -> None:
    result = run(folder, "--arms", "learning,frozen", "--json", str(folder / "two.json"))
    assert result.exit_code == 0, result.output
    (report,) = json.loads((folder / "two.json").read_text())["runs"]
    assert report["reference"] == "learning"
    assert report["arms"]["learning"]["ratio"]["median"] == 1


def test_bad_requests_are_refused_before_any_model_is_loaded(folder: Path) -> None:
    for more, kind, words in (
        (("--arms", "plain,frosen"), UsageError, "did you mean 'frozen'"),
        (
            ("--arms", "plain,assisted", "--batch", "1,2"),
            UsageError,
            "run at batch 2 and temperature 0, but 'assisted'",
        ),
        (("--batch", "0"), UsageError, "--batch must be comma-separated numbers from 1"),
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
    assert "55 prompts" in str(error)
    assert f"has {PROMPTS + WARM_UP} that fit" in str(error)


class Parrot:
    """An engine that answers every prompt with one token, and counts its rounds and closings."""

    label_text = "parrot 1.0"

    def __init__(self) -> None:
        self.rounds = self.closed = 0

    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return ("parrot",) if batch < 3 else ()

    def label(self, name: str) -> str:
        return self.label_text

    def build(self, name: str, config: Config, models: Models, scratch: Path, longest: int) -> Arm:
        return self

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        self.rounds += 1
        return Round(((7,),) * len(prompts), 1.0)

    def close(self) -> None:
        self.closed += 1


def test_an_engine_runs_at_the_batches_that_it_supports_and_differing_text_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parrot = Parrot()
    monkeypatch.setattr(cli_bench, "_engines", lambda *flags: parrot)
    result = run(folder, "--arms", "plain,parrot", "--json", str(folder / "parrot.json"))
    assert result.exit_code == 0, result.output
    (report,) = json.loads((folder / "parrot.json").read_text())["runs"]
    arm: dict[str, Any] = report["arms"]["parrot"]
    assert (arm["differing"], arm["acceptance_rate"]) == (PROMPTS, None)
    assert arm["widest_difference"] > 0
    assert "parrot 1.0" in result.output
    assert "Some greedy completions differ from those of plain" in result.output
    assert (parrot.rounds, parrot.closed) == (2 + PROMPTS // ROUND, 1)
    assert "'parrot' does not" in str(run(folder, "--arms", "parrot", "--batch", "3").exception)
