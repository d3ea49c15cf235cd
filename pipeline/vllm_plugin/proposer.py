"""The proposer class of vLLM's first model runner: `--speculative-config '{"method": "custom_class", "model": THIS}'`.

vLLM makes one object per worker and calls `propose` after each pass, on the thread of the worker. Where vLLM takes its
second runner, `speculator.py` is in the place of this class; it is needed as long as vLLM's CPU backend takes the first
runner where Triton has no backend for CPUs.

Shapes: R rows of the batch, M tokens of the longest text.
"""

import logging
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.vllm_plugin.engine import PluginEngine
from pipeline.vllm_plugin.host import EngineHost
from pipeline.vllm_plugin.sequences import EngineRow, RowRequest

RUNNER = "vllm.v1.worker.gpu_model_runner"  # of the first runner, and base of those of other devices
WRAPPED = "passes_runner_to_proposer"

LOG = logging.getLogger("omnidraft.vllm")


class OmnidraftProposer(EngineHost):
    """omnidraft's drafts for vLLM's first runner, which takes those of the first tensor-parallel rank alone."""

    def __init__(self, vllm_config: Any) -> None:
        self._runner: Any = None
        self._greedy_only = vllm_config.device_config.device_type == "cpu"
        if self._greedy_only:
            LOG.warning(
                "on the CPU backend of vLLM's first runner, drafts change the texts of a pass with a request at "
                "temperature above 0 (vLLM issue 55005): nothing is drafted while there is one, but greedy texts may "
                "change when one arrives"
            )
        super().__init__(vllm_config)
        wrap_runner()

    def receive_runner(self, runner: Any) -> None:
        """Take the runner whose batch the next call of `propose` is about. Called by vLLM's wrapped runner."""
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft per row after a pass.

        Args:
            sampled_token_ids: per row the tokens that the pass emitted; none where it read a part of a prompt.
            num_tokens_no_spec: number of tokens of each row's text (R or more,).
            token_ids_cpu: the texts, the emitted tokens included (R or more, M).
            slot_mappings: not used.
        """

        def step(engine: PluginEngine) -> list[list[int]]:
            found = self.read_requests(self._runner, len(sampled_token_ids))
            rows = [
                EngineRow(token_ids_cpu[place, : num_tokens_no_spec[place]], len(sampled), request)
                for place, (sampled, request) in enumerate(zip(sampled_token_ids, found.rows, strict=True))
            ]
            return engine.step(rows, found.waiting, drafts=found.greedy or not self._greedy_only)

        return self._draft(len(sampled_token_ids), step)

    def read_requests(self, runner: Any, rows: int) -> "BatchRequests":
        """Return the requests of vLLM's `GPUModelRunner`, whose batch has this many rows. Raises `AttributeError`,
        `KeyError` or `TypeError` if it is not as that of the supported versions.
        """
        states, names = runner.requests, runner.input_batch.req_ids
        if len(names) != rows:
            raise TypeError(f"{len(names)} requests for {rows} rows")
        found = [
            self._read_request(name, states[name].num_prompt_tokens, states[name].sampling_params) for name in names
        ]
        greedy = not any(state.sampling_params.temperature > 0 for state in states.values())
        return BatchRequests(found, frozenset(states), greedy)


class BatchRequests(NamedTuple):
    """The requests of vLLM."""

    rows: list[RowRequest]  # those of the batch, in its order
    waiting: frozenset[str]  # ids of all that have not ended, also of those that are in the batch or were preempted
    greedy: bool  # whether all of these are greedy


def wrap_runner() -> None:
    """Let vLLM's runner call its proposer's `receive_runner`, if it has that method, before it calls for drafts: the
    method `custom_class` passes no requests. May be called again.
    """
    runner = sys.modules[RUNNER].GPUModelRunner
    propose = runner.propose_draft_token_ids
    if hasattr(propose, WRAPPED):
        return

    @wraps(propose)
    def propose_with_runner(self: Any, *given: Any, **named: Any) -> Any:
        receive = getattr(getattr(self, "drafter", None), "receive_runner", None)
        if receive is not None:
            receive(self)
        return propose(self, *given, **named)

    setattr(propose_with_runner, WRAPPED, True)
    runner.propose_draft_token_ids = propose_with_runner
