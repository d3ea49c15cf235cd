"""The requests of vLLM's batch, which its method `custom_class` does not pass to a proposer.

`wrap_runner` lets the model runner give itself to its proposer before it calls for drafts. The runner makes the
proposer when it is made itself, so the proposer can do that in time: no entry point of vLLM is needed, which every
process of every vLLM of the environment would run. Nothing of vLLM is imported.
"""

import sys
from functools import wraps
from typing import Any, NamedTuple

from pipeline.vllm_plugin.sequences import RowRequest

RUNNER = "vllm.v1.worker.gpu_model_runner"  # of the V1 runner, and base of those of other devices
WRAPPED = "passes_runner_to_proposer"


class BatchRequests(NamedTuple):
    """The requests of an engine."""

    rows: list[RowRequest]  # those of the batch, in its order
    waiting: frozenset[str]  # ids of all that have not ended, also of those that are in the batch or were preempted
    greedy: bool  # whether all of these are greedy


def wrap_runner() -> None:
    """Let vLLM's runner call its proposer's `receive_runner`, if it has that method, before it calls for drafts.

    May be called again.
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


def read_requests(runner: Any, rows: int, longest: int) -> BatchRequests:
    """Return the requests of vLLM's `GPUModelRunner`, whose batch has this many rows. Raises `AttributeError`,
    `KeyError` or `TypeError` if it is not as that of the tested versions.
    """
    states, names = runner.requests, runner.input_batch.req_ids
    if len(names) != rows:
        raise TypeError(f"{len(names)} requests for {rows} rows")
    greedy = not any(state.sampling_params.temperature > 0 for state in states.values())
    return BatchRequests([_read_request(name, states[name], longest) for name in names], frozenset(states), greedy)


def _read_request(name: str, state: Any, longest: int) -> RowRequest:
    wishes = state.sampling_params
    most = longest if wishes.max_tokens is None else state.num_prompt_tokens + wishes.max_tokens
    return RowRequest(
        name,
        min(longest, most),
        frozenset(wishes.stop_token_ids or ()),
        wishes.ignore_eos,
        "stop" if wishes.stop else "cancelled",  # vLLM aborts a request whose text has a stop string
    )
