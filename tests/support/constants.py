"""Other values of the product's constants for a test: in this process, and in those that `warm_python` starts for it.

    @pytest.mark.constants(prompt_chunk=4)  # one test, or with `pytestmark` those of a file
    with constants(prompt_chunk=4): ...  # in fixtures of a module

Nobody sets them in use, so they are no settings. `PLACES` names each, with the module that reads it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

VARIABLE = "TEST_CONSTANTS"  # what processes inherit
PLACES = {
    "commit_share": "pipeline.run.committer.SHARE",
    "learner_share": "pipeline.serve.run.CPU_SHARE",
    "learner_niceness": "pipeline.learner_service.process.NICENESS",
    "prompt_chunk": "pipeline.assembly.stages.CHUNK",
    "update_lag": "pipeline.assembly.training.LAG",
    "update_steps": "pipeline.assembly.training.STEPS",
    "replay_prompts": "pipeline.assembly.training.REPLAY",
    "gate_every": "pipeline.assembly.training.GATE_EVERY",
    "gate_window": "pipeline.assembly.training.GATE_WINDOW",
    "gate_tolerance": "pipeline.assembly.training.GATE_TOLERANCE",
    "head_batch": "pipeline.assembly.training.HEAD_BATCH",
    "head_buffer": "pipeline.assembly.training.HEAD_BUFFER",
    "drift_grace": "pipeline.learning.drift.GRACE",
    "drift_threshold": "pipeline.learning.drift.THRESHOLD",
    "drift_tolerance": "pipeline.learning.drift.TOLERANCE",
    "drift_cooldown": "pipeline.learning.drift.COOLDOWN",
    "recall_margin": "pipeline.assembly.learner.RECALL_MARGIN",
    "part_tokens": "stages.learn.examples.builder.PART_TOKENS",
    "part_context": "stages.learn.examples.builder.CONTEXT",
    "recall_versions": "pipeline.assembly.learner.RECALL_VERSIONS",
}
NO_GATE = 1 << 62  # of `gate_every`
# No test waits until a commit or an update may take its time, nor for a learner that other tests leave no processor.
ALWAYS = {"commit_share": 1.0, "learner_share": 4.0, "learner_niceness": 0}


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """Give constants other values, by their names in `PLACES`."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, with_constants(**values)))
        for name, value in values.items():
            stack.enter_context(patch.object(*_find(name), value))
        yield


def with_constants(**values: Any) -> dict[str, str]:
    """The environment of a process that is to have these values, with those of this process."""
    return {VARIABLE: json.dumps(json.loads(os.environ.get(VARIABLE, "{}")) | values)}


def apply_inherited() -> None:
    """Take over the values of the process that started this one."""
    for name, value in json.loads(os.environ.get(VARIABLE, "{}")).items():
        module, constant = _find(name)
        setattr(module, constant, value)


def _find(name: str) -> tuple[Any, str]:
    module, _, constant = PLACES[name].rpartition(".")
    return import_module(module), constant
