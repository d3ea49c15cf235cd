"""Drafts in vLLM's second model runner, through its interface for speculators without a model (`BaseSpeculator`).

That interface returns as many tokens for every row. vLLM's scheduler then asks the runner which of them there are, and
schedules as many as it is told, per row, unless it schedules ahead (asynchronously). So the lengths of drafts are told
there. Ids, prompts and wishes of requests come with what the scheduler sends to the runner before each pass.

Shapes: R rows of the batch, N requests at the same time at most, K drafted tokens of a row at most, W = K + 1.
"""

import sys
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.vllm_plugin.engine import PluginEngine
from pipeline.vllm_plugin.host import EngineHost
from pipeline.vllm_plugin.sequences import EngineRow, RowRequest
from store.errors import UsageError

RUNNER = "vllm.v1.worker.gpu.model_runner"  # of the second runner, and base of those of other devices
WRAPPED = "asks_omnidraft"


class _RequestText:
    """A request, and its text so far."""

    def __init__(self, prompt: list[int], request: RowRequest, most: int) -> None:
        self.request, self._length = request, len(prompt)
        room = max(request.longest, len(prompt)) + most + 1  # a pass may emit tokens beyond the end
        self._tokens = np.empty(room, np.int32)
        self._tokens[: len(prompt)] = prompt

    def extend(self, tokens: list[int], length: int) -> EngineRow:
        """Append what a pass emitted. Raises `TypeError` if the text has another length than vLLM's."""
        self._tokens[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        if tokens and self._length != length:
            raise TypeError(f"a text of {self._length} tokens where vLLM has {length}")
        return EngineRow(self._tokens[: self._length], len(tokens), self.request)


class OmnidraftSpeculator(EngineHost):
    """omnidraft's drafts, with the methods and attributes of vLLM's `BaseSpeculator`.

    With several ranks of tensor parallelism, each reads drafts of its own device: those of the first are sent to all.
    Raises `UsageError` for what it cannot do: asynchronous scheduling, and pipeline parallelism.

    Args:
        states: vLLM's `RequestState`, which holds the texts on the device.
    """

    num_query_per_req, num_extra_query_per_req = 1, 0
    supports_mm_inputs = False
    draft_logits = None  # drafts are certain: a token is accepted with its probability under the target

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        if vllm_config.scheduler_config.async_scheduling:
            raise UsageError(
                "omnidraft's drafts have unequal lengths, which asynchronous scheduling does not know; start vLLM with "
                "--no-async-scheduling"
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UsageError("omnidraft cannot draft with pipeline parallelism; use --tensor-parallel-size instead")
        super().__init__(vllm_config)
        self._states, self._most = states, vllm_config.speculative_config.num_speculative_tokens
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._texts: dict[str, _RequestText] = {}
        self._lengths: dict[str, int] = {}  # of the last drafts
        self._drafts_NK = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, self._most, dtype=torch.int64, device=device
        )
        self._last_W = torch.arange(-self._most - 1, 0, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def receive_schedule(self, scheduled: Any) -> None:
        """Take what vLLM's scheduler sends before a pass: who arrives, who has ended. A preempted request arrives
        again, with what it had emitted.
        """

        def receive(engine: PluginEngine) -> list[list[int]]:
            for name in scheduled.finished_req_ids:
                self._texts.pop(name, None)
            for new in scheduled.scheduled_new_reqs:
                self._texts.pop(new.req_id, None)
                if new.prompt_token_ids is None or new.sampling_params is None:
                    continue  # of embeddings: there are no tokens to copy
                request = self._read_request(new.req_id, len(new.prompt_token_ids), new.sampling_params)
                text = new.prefill_token_ids or new.prompt_token_ids
                self._texts[new.req_id] = _RequestText(text, request, self._most)
            engine.begin_pass()
            return []

        self._draft(0, receive)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: Tensor,
        *others: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **named: object,
    ) -> Tensor:
        """Return drafts (R, K), padded with 0; `trim` knows how long they are.

        Args:
            input_batch: vLLM's `InputBatch`.
            num_sampled: tokens that the pass emitted per row; 0 where it read a part of a prompt (R,).
            dummy_run: whether the batch is made up.
            num_speculative_tokens: K of this pass.
            attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, others, named: not used.
        """
        drafts_RK = self._drafts_NK[: input_batch.num_reqs]
        if dummy_run:
            return drafts_RK
        most = self._most if num_speculative_tokens is None else num_speculative_tokens
        found = self._draft(
            input_batch.num_reqs, lambda engine: engine.step(*self._read_rows(input_batch, num_sampled))
        )
        cut = [draft[:most] for draft in found]
        self._lengths = dict(zip(input_batch.req_ids, map(len, cut), strict=True))
        padded = [draft + [0] * (self._most - len(draft)) for draft in cut]
        drafts_RK.copy_(torch.tensor(padded, dtype=torch.int64).reshape(drafts_RK.shape))
        if self._ranks > 1:
            from vllm.distributed import get_tp_group

            get_tp_group().broadcast(drafts_RK, src=0)
        return drafts_RK

    def _read_rows(self, input_batch: Any, num_sampled: Tensor) -> tuple[list[EngineRow], frozenset[str]]:
        """Return the rows after the pass, and the ids of all requests that have not ended."""
        places_R = input_batch.idx_mapping
        lengths_R = self._states.total_len.gpu[places_R].long()
        last_RW = self._states.all_token_ids.gpu[places_R[:, None], (lengths_R[:, None] + self._last_W).clamp_min(0)]
        columns = num_sampled[: len(places_R), None].long(), lengths_R[:, None], last_RW.long()
        read = torch.cat(columns, 1).tolist()  # waits for the pass, which ends here for whoever measures it
        drafted = input_batch.num_draft_tokens_per_req
        verified = [0] * len(read) if drafted is None else drafted.tolist()
        rows = []
        for name, lines, (emitted, length, *last) in zip(input_batch.req_ids, verified, read, strict=True):
            text = self._texts.get(name)
            if text is None:
                rows.append(EngineRow(np.zeros(0, np.int32), 0, RowRequest(name, 0), lines))
            else:
                rows.append(text.extend(last[len(last) - emitted :], length)._replace(verified=lines))
        return rows, frozenset(self._texts)

    def trim(self, tokens: Any) -> Any:
        """Cut vLLM's `DraftTokenIds` of the last pass to what was drafted."""
        if tokens is not None:
            pairs = zip(tokens.req_ids, tokens.draft_token_ids, strict=True)
            tokens.draft_token_ids = [draft[: self._lengths.get(name, 0)] for name, draft in pairs]
        return tokens


def build_speculator(vllm_config: Any, device: torch.device, states: Any) -> OmnidraftSpeculator:
    """Return what drafts in vLLM's second runner, and let the runner ask it. Called by that runner."""
    speculator = OmnidraftSpeculator(vllm_config, device, states)
    wrap_runner()
    return speculator


def wrap_runner() -> None:
    """Let vLLM's second runner show its module, its schedule and its drafts to its speculator, if that is omnidraft's;
    it shows the module to models that draft only. May be called again.
    """
    runner = sys.modules[RUNNER].GPUModelRunner
    if hasattr(runner, WRAPPED):
        return
    load, execute, take = runner.load_model, runner.execute_model, runner.take_draft_token_ids

    @wraps(load)
    def load_model(self: Any, *given: Any, **named: Any) -> None:
        load(self, *given, **named)
        if isinstance(self.speculator, OmnidraftSpeculator):
            self.speculator.load_model(self.model)

    @wraps(execute)
    def execute_model(self: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        if isinstance(self.speculator, OmnidraftSpeculator) and not named.get("dummy_run"):
            self.speculator.receive_schedule(scheduled)
        return execute(self, scheduled, *given, **named)

    @wraps(take)
    def take_draft_token_ids(self: Any) -> Any:
        found = take(self)
        return self.speculator.trim(found) if isinstance(self.speculator, OmnidraftSpeculator) else found

    runner.load_model, runner.execute_model, runner.take_draft_token_ids = (
        load_model,
        execute_model,
        take_draft_token_ids,
    )
    setattr(runner, WRAPPED, True)
