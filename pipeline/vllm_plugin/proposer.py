"""The proposer class that vLLM loads: `--speculative-config '{"method": "custom_class", "model": PATH_OF_CLASS, ...}'`.

The only module that knows vLLM, in whose process it is imported. vLLM makes one object per worker and calls `propose`
after each pass, on the thread of the worker.

Shapes: R rows of the batch, M tokens of the longest text.
"""

import atexit
import logging
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.vllm_plugin.engine import EngineFacts, PluginEngine, build_drafter, count_event
from pipeline.vllm_plugin.sequences import EngineRow, RowRequest
from pipeline.vllm_plugin.settings import PluginSettings, read_settings
from store.errors import UsageError
from store.events import Event

RUNNER = "vllm.v1.worker.gpu_model_runner"  # of the V1 runner, and base of those of other devices
WRAPPED = "passes_runner_to_proposer"


LOG = logging.getLogger("omnidraft.vllm")

TESTED, NOT_TESTED = (0, 31), (0, 33)  # from the first version on, before the second one
IDLE_SECONDS = 1.0  # between two looks for something to save


def check_version(version: str) -> None:
    """Refuse a version of vLLM that the plugin was not tested with: any version may change the interface of proposers.

    >>> check_version("0.32.0+cpu")
    >>> check_version("0.33")
    Traceback (most recent call last):
    store.errors.UsageError: The plugin is tested with vLLM 0.31 up to, not including, 0.33; got 0.33: install another.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not TESTED <= (int(numbers[1]), int(numbers[2])) < NOT_TESTED:
        first, after = ("{}.{}".format(*one) for one in (TESTED, NOT_TESTED))
        raise UsageError(
            f"The plugin is tested with vLLM {first} up to, not including, {after}; got {version}: install another."
        )


class OmnidraftProposer:
    """omnidraft's drafts for vLLM.

    An error of the plugin never ends the engine: it is logged once, and nothing is drafted from then on. Raises
    `UsageError` if the version of vLLM is not a tested one, and `ConfigError` if the settings are refused (see
    `read_settings`).
    """

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        check_version(vllm.__version__)
        parallel = vllm_config.parallel_config
        self._engine: PluginEngine | None = None
        self._runner: Any = None
        self._longest = vllm_config.model_config.max_model_len
        self._greedy_only = vllm_config.device_config.device_type == "cpu"
        if self._greedy_only:
            LOG.warning(
                "on vLLM's CPU backend, drafts change the texts of a pass with a request at temperature above 0 (vLLM "
                "issue 55005): nothing is drafted while there is one, but greedy texts may change when one arrives"
            )
        wrap_runner()
        # vLLM takes the drafts of the first tensor-parallel rank alone.
        if parallel.rank % parallel.tensor_parallel_size == 0:
            settings = read_settings()
            settings = settings.model_copy(update={"run": find_run(settings.run, parallel)})
            self._engine = build_engine(settings, find_facts(vllm_config))
            # The first is called at the end of a worker process of `multiprocessing`, the second of any other, before
            # the folders of temporary files are removed.
            Finalize(self, _close, (self._engine,), exitpriority=10)
            atexit.register(_close, self._engine)
            threading.Thread(
                target=_commit_while_idle, args=(self._engine,), name="omnidraft-commits", daemon=True
            ).start()

    def receive_runner(self, runner: Any) -> None:
        """Take the runner whose batch the next call of `propose` is about. Called by vLLM's wrapped runner."""
        self._runner = runner

    def load_model(self, target: Any) -> None:
        """Read the target's distributions where a log or a learner needs them. vLLM calls it once with the module."""
        if self._engine is not None:
            self._engine.attach(target)

    def close(self) -> None:
        """Save the run and end the drafting. Called at the end of the process, if it is not killed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            _close(engine)

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
        if self._engine is None:
            return [[] for _ in sampled_token_ids]
        try:
            found = read_requests(self._runner, len(sampled_token_ids), self._longest)
            rows = [
                EngineRow(token_ids_cpu[place, : num_tokens_no_spec[place]], len(sampled), request)
                for place, (sampled, request) in enumerate(zip(sampled_token_ids, found.rows, strict=True))
            ]
            return self._engine.step(rows, found.waiting, drafts=found.greedy or not self._greedy_only)
        except Exception:
            LOG.exception("omnidraft failed and drafts nothing from now on; the texts of the engine are not affected")
            self._engine = None
            return [[] for _ in sampled_token_ids]


def _close(engine: PluginEngine) -> None:
    try:
        engine.close()
    except Exception:
        LOG.exception("omnidraft cannot save its run")


def _commit_while_idle(engine: PluginEngine) -> None:
    """Save what the last requests left, while no others come. Runs on a thread of its own."""
    try:
        while engine.commit_if_due():
            time.sleep(IDLE_SECONDS)
    except Exception:
        LOG.exception("omnidraft cannot save its run")


def build_engine(settings: PluginSettings, facts: EngineFacts) -> PluginEngine:
    """Build the plugin's parts. Without a run and without a model, nothing heavy is imported."""
    if settings.run is not None or "model" in settings.sources:
        from pipeline.vllm_plugin.recorded import build_recorded

        return build_recorded(settings, facts)

    def take(events: Iterable[Event]) -> None:
        for event in events:
            count_event(facts.served, event)

    return PluginEngine(build_drafter(settings, facts, take))


def find_run(run: Path | None, parallel: Any) -> Path | None:
    """Return the folder of this replica's run: RUN of the first replica of a machine, RUN-1 of the second one.

    vLLM gives each replica of a dense model the rank 0, as if there was no other; only the index is its own.
    """
    local = getattr(parallel, "data_parallel_rank_local", None)
    number = int(getattr(parallel, "data_parallel_index", 0) if local is None else local)
    return run.with_name(f"{run.name}-{number}") if run and number else run


def find_facts(vllm_config: Any) -> EngineFacts:
    """Return what the plugin must know of the engine. The ids that end a sequence are in two configurations."""
    model = vllm_config.model_config
    ends = (
        getattr(model.hf_text_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    )
    ids = {token for one in ends for token in (one if isinstance(one, list) else [one]) if token is not None}
    return EngineFacts(
        model.model,
        str(getattr(model, "served_model_name", None) or model.model),
        model.get_vocab_size(),
        model.max_model_len,
        vllm_config.speculative_config.num_speculative_tokens,
        vllm_config.scheduler_config.max_num_seqs,
        frozenset(ids),
    )


class BatchRequests(NamedTuple):
    """The requests of an engine."""

    rows: list[RowRequest]  # those of the batch, in its order
    waiting: frozenset[str]  # ids of all that have not ended, also of those that are in the batch or were preempted
    greedy: bool  # whether all of these are greedy


def wrap_runner() -> None:
    """Let vLLM's runner call its proposer's `receive_runner`, if it has that method, before it calls for drafts: the
    method `custom_class` passes no requests. An entry point of vLLM would run in every process of every vLLM of the
    environment. May be called again.
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
