"""One drafter, several targets: whole replays over a trio of tiny models with three vocabularies."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from replaying import config_of, run_replay, table_of
from tiny_pair import TinyTrio, sentences

from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config

NEW_TOKENS = 16
PROMPTS = 8

pytestmark = pytest.mark.constants(gate_every=3)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny_trio: TinyTrio) -> Path:
    """Prompts of which the fourth names the first target, the fifth an unknown one, and the others none."""
    texts = sentences(500, 500 + PROMPTS)
    rows: list[dict[str, Any]] = [{"prompt": text[:30], "id": number} for number, text in enumerate(texts)]
    rows[3]["target"] = tiny_trio.targets[0]
    rows.insert(4, {"prompt": "Tom has 4", "target": "nobody"})
    path = tmp_path_factory.mktemp("prompts") / "mixed.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def config_for(trio: TinyTrio, source: Path, **changes: Any) -> Config:
    fixed = {"targets": trio.targets, "sources": (str(source),), "draft__sources": ("model",)}
    return config_of(trio.pair, **fixed | changes)


def completions(run: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for row in table_of(run, "decisions").to_pylist():
        if row["emitted_id"] is not None:
            found[row["offset"]].append(row["emitted_id"])
    return dict(found)


def targets_of(run: Path) -> dict[int, str]:
    return {row["offset"]: row["target"] for row in table_of(run, "prompts").to_pylist()}


def plainly(models: Models, text: str) -> list[int]:
    """Return the completions of plain greedy decoding."""
    tokens = models.target_vocabulary.encode(text)
    ids_1T = torch.tensor([tokens])
    model = models.target.model
    found = model.generate(
        input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return found[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def targets(tiny_trio: TinyTrio, mixed: Path) -> dict[str, Models]:
    return {models.name: models for models in load_models(config_for(tiny_trio, mixed), "", Path())}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("lora", [False, True], ids=["shared", "lora"])
def test_greedy_is_plain_decoding_of_each_target_while_the_drafter_learns(
    tiny_trio: TinyTrio, mixed: Path, targets: dict[str, Models], tmp_path: Path, lora: bool, batch: int
):
    config = config_for(tiny_trio, mixed, learn__lora_rank=4 * lora, batch=batch)
    run_replay(config, tmp_path / "run")
    prompts = table_of(tmp_path / "run", "prompts").to_pylist()
    expected = {row["offset"]: plainly(targets[row["target"]], row["prompt_text"]) for row in prompts}
    assert completions(tmp_path / "run") == expected
    updates = table_of(tmp_path / "run", "updates").to_pylist()
    served = {row["target"] for row in updates if row["part"] == "drafter" and row["served"]}
    assert served, "the weights must have changed underway"
    assert sum(row["accepted"] for row in prompts) > 10, "the drafter must have mattered"


def test_prompts_go_to_targets_in_turn_or_by_name_and_an_unknown_target_is_rejected(
    tiny_trio: TinyTrio, mixed: Path, tmp_path: Path
):
    summary = run_replay(config_for(tiny_trio, mixed), tmp_path / "run")
    first, other = tiny_trio.targets
    assert targets_of(tmp_path / "run") == {n: other if n % 2 and n != 3 else first for n in range(PROMPTS)}
    (rejected,) = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert rejected["line"] == 5
    assert rejected["reason"] == f"the column 'target' must name one of the targets {first}, {other}, got 'nobody'"
    assert [summary["targets"][name]["prompts"] for name in (first, other)] == [5, 3]
    assert summary["totals"]["prompts"] == PROMPTS


@pytest.fixture(scope="module")
def swapped(tiny_trio: TinyTrio, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten prompts: three for the first target, four for the other, and the first again."""
    first, other = tiny_trio.targets
    run = tmp_path_factory.mktemp("swapped") / "run"
    swaps = (f"3={other}", f"7={first}")
    run_replay(config_for(tiny_trio, tiny_trio.pair.sums, targets=(first,), swaps=swaps, draft__width=1), run)
    return run


def test_a_target_that_comes_back_has_its_cache_and_head_as_it_left_them(tiny_trio: TinyTrio, swapped: Path):
    decisions = table_of(swapped, "decisions").to_pylist()
    first, other = tiny_trio.targets
    mine = [row for row in decisions if row["target"] == first]
    left = max(row["cache_version"] for row in mine if row["offset"] < 3)
    back = [row["cache_version"] for row in mine if row["offset"] == 7]
    assert left > 0
    assert back[0] >= left
    assert back[0] - left <= NEW_TOKENS, "only what its last prompt brought"
    heads = [row["head_version"] for row in mine if row["offset"] == 7]
    trained = [
        row
        for row in table_of(swapped, "updates").to_pylist()
        if row["part"] == "head" and row["target"] == first and row["offset"] < 7
    ]
    assert heads[0] == len(trained) > 0
    assert next(row["cache_version"] for row in decisions if row["target"] == other) == 0, "the other's began empty"


def versions_of(run: Path, target: str) -> list[dict[str, Any]]:
    return [row for row in table_of(run, "versions").to_pylist() if row["target"] == target]


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["shared", "lora"])
def test_each_target_has_versions_of_its_own_in_the_run_s_folder(
    tiny_trio: TinyTrio, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
):
    monkeypatch.setattr("pipeline.run.context.Notifier", MagicMock())
    config = config_for(tiny_trio, mixed, learn__lora_rank=4 * lora, publish__enabled=True, publish__interval=2)
    run_replay(config, tmp_path / "run")
    for number, target in enumerate(tiny_trio.targets):
        versions = versions_of(tmp_path / "run", target)
        assert (versions[0]["version"], versions[0]["parent"], versions[0]["reason"]) == (number, None, "baseline")
        assert [row["parent"] for row in versions[1:]] == [row["version"] for row in versions[:-1]]
        assert len(versions) >= 3
        folder = tmp_path / "run" / versions[-1]["folder"]
        assert {"model.safetensors", "head.safetensors", "ngrams.parquet", "manifest.json"} <= files_of(folder)
        assert ("adapter/adapter_model.safetensors" in files_of(folder)) is lora
        assert json.loads((folder / "manifest.json").read_text())["target"] == target


@torch.no_grad()
def logits_of(models: Models) -> torch.Tensor:
    ids_1T = torch.tensor([models.drafter_vocabulary.encode("Ida has 7 stones and")])
    return models.drafter.read(ids_1T)


def test_a_drafter_s_folder_with_an_adapter_comes_back_with_lora_and_merged_without(
    tiny_trio: TinyTrio, tmp_path: Path
):
    config = config_of(tiny_trio.pair, learn__lora_rank=4)
    (models,) = load_models(config, "", tmp_path)
    with torch.no_grad():
        for weight in models.drafter.trained_weights:
            weight.add_(0.1)
    want, bare = logits_of(models), logits_of(load_models(config_of(tiny_trio.pair), "", tmp_path)[0])
    models.drafter.save(tmp_path / "saved", models.drafter_tokenizer)
    again = replace(tiny_trio.pair, drafter=tmp_path / "saved")
    with_lora = load_models(config_of(again, learn__lora_rank=4), "", tmp_path)[0]
    merged = load_models(config_of(again), "", tmp_path)[0]
    assert float((want - bare).abs().max()) > 0.1
    assert torch.equal(logits_of(with_lora), want)
    torch.testing.assert_close(logits_of(merged), want, atol=1e-4, rtol=1e-4)
    assert merged.drafter.adapter is None
    run_replay(config_of(again), tmp_path / "run")  # and the whole of it learns on
    assert max(row["drafter_version"] for row in table_of(tmp_path / "run", "prompts").to_pylist()) > 0
