"""vLLM's rejection samplers with the plugin's drafts: the distribution of two tokens is the target's."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from vllm_environment import find_interpreter, prepare_second_runner, variables_of

pytestmark = pytest.mark.slow


def measure(*words: str, paths: Sequence[Path] = ()) -> dict[str, Any]:
    python = find_interpreter(install=False)
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "support" / "vllm_distribution.py"), *words],
        capture_output=True,
        text=True,
        env=variables_of(python, *paths),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def test_the_distribution_of_two_tokens_is_the_targets():
    answer = measure()
    assert answer["error"] == 0
    assert max(map(len, answer["drafts"])) == 2
    assert len({tuple(draft) for draft in answer["drafts"]}) > 3


def test_the_second_runner_samples_the_targets_distribution_next_to_drafts(tmp_path: Path):
    answer = measure("second", paths=prepare_second_runner(tmp_path))
    assert answer["error"] < 3.5, "standard errors of a share; the seeds are fixed"
    assert max(map(len, answer["drafts"])) == 2
