"""The benchmark of speed on a tiny pair."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from tiny_pair import TinyPair

from benchmarks.speed.__main__ import bench

COMMANDS = ("speed", "engines", "server", "studies", "model_building", "vllm")


def test_the_arms_of_the_speed_benchmark_agree(tiny_pair: TinyPair, tmp_path: Path):
    results = tmp_path / "results.json"
    bench(
        sources=[str(tiny_pair.sums)],
        target=str(tiny_pair.target),
        drafter=str(tiny_pair.drafter),
        prompts=4,
        round_prompts=2,
        warm_up=2,
        max_new_tokens=8,
        settings=["device=cpu"],
        arms="plain,own-plain,memory,logged",
        json_file=results,
    )
    (run,) = json.loads(results.read_text())["runs"]
    assert list(run["arms"]) == ["plain", "own-plain", "memory", "logged"]
    assert run["rounds"] == {"complete": 2, "planned": 2}
    assert {found["differing"] for found in run["arms"].values()} == {0}
    assert run["arms"]["own-plain"]["block_efficiency"] == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_is_a_command(name: str):
    words = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Usage: " in done.stdout
