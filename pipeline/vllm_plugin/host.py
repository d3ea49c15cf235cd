"""What both of vLLM's runners share of the plugin: one engine per worker, whose errors never end vLLM.

With `proposer.py` (first runner) and `speculator.py` (second runner) all that knows vLLM, in whose process it is
imported.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pipeline.vllm_plugin.engine import EngineFacts, PluginEngine, build_drafter, count_event
from pipeline.vllm_plugin.sequences import RowRequest
from pipeline.vllm_plugin.settings import PluginSettings, read_settings
from pipeline.vllm_plugin.versions import check_version
from store.events import Event

LOG = logging.getLogger("omnidraft.vllm")

IDLE_SECONDS = 1.0  # between two looks for something to save


class EngineHost:
    """The plugin's engine in a worker of vLLM, on the first rank of tensor parallelism: the others have none.

    An error ends the drafting, not vLLM: it is logged once. Raises `UsageError` if the version of vLLM is not
    supported, and `ConfigError` if the settings are refused (see `read_settings`).
    """

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        check_version(vllm.__version__)
        parallel = vllm_config.parallel_config
        self._engine: PluginEngine | None = None
        self._longest = vllm_config.model_config.max_model_len
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

    def load_model(self, target: Any) -> None:
        """Read the target's distributions where a log or a learner needs them. Called once with the module."""
        if self._engine is not None:
            self._engine.attach(target)

    def close(self) -> None:
        """Save the run and end the drafting. Called at the end of the process, if it is not killed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            _close(engine)

    def _draft(self, rows: int, step: Callable[[PluginEngine], list[list[int]]]) -> list[list[int]]:
        """Return what a step of the engine drafts per row: nothing on other ranks, and from the first error on."""
        if self._engine is not None:
            try:
                return step(self._engine)
            except Exception:
                LOG.exception("omnidraft failed and drafts nothing from now on; the texts of vLLM are not affected")
                self._engine = None
        return [[] for _ in range(rows)]

    def _read_request(self, name: str, prompt_tokens: int, wishes: Any) -> RowRequest:
        """Return what the engine must know of a request, from vLLM's `SamplingParams`."""
        most = self._longest if wishes.max_tokens is None else prompt_tokens + wishes.max_tokens
        return RowRequest(
            name,
            min(self._longest, most),
            frozenset(wishes.stop_token_ids or ()),
            wishes.ignore_eos,
            "stop" if wishes.stop else "cancelled",  # vLLM aborts a request whose text has a stop string
        )


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
