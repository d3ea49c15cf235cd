"""vLLM's rejection sampler with the plugin's drafts: the distribution of two tokens is the target's, by enumeration."""

import json
import subprocess

import pytest
from places import ROOT
from vllm_environment import find_interpreter, variables_of

pytestmark = pytest.mark.slow


def test_the_distribution_of_two_tokens_is_the_targets():
    python = find_interpreter(install=False)
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "support" / "vllm_distribution.py")],
        capture_output=True,
        text=True,
        env=variables_of(python),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["error"] == 0
    assert max(map(len, answer["drafts"])) == 2
    assert len({tuple(draft) for draft in answer["drafts"]}) > 3
