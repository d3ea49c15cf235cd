"""A fake of vLLM's runner: batches of requests, prompts read in parts, and a proposer that is called as vLLM does.

The target is a function from a text to the next token, so that the texts without drafts are known. A pass emits the
accepted tokens of a draft and one more, also after the end of a sequence, as in vLLM, whose scheduler cuts texts later.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from pipeline.vllm_plugin.proposer import RUNNER
from pipeline.vllm_plugin.speculator import OmnidraftSpeculator
from stages.engine.models.huggingface import load_causal_model

END, VOCABULARY = 0, 40
MOST = 50  # tokens of a completion
COSTS = "[[1, 1.0], [40, 1.4]]"  # of passes, where their times must not matter
Target = Callable[[Sequence[int]], int]


def phrases(tokens: Sequence[int]) -> int:
    """A target that mostly repeats phrases, and ends after about 60 tokens."""
    last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else 1
    if (last * 7 + before * 3 + len(tokens)) % 61 == 0:
        return END
    return 1 + (last * 11 + (before % 3) * 5) % (VOCABULARY - 1)


def complete(target: Target, prompt: Sequence[int], most: int) -> list[int]:
    """The text without drafts, up to the end or `most` tokens."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most and (len(tokens) == len(prompt) or tokens[-1] != END):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


def make_prompts(count: int) -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(1, 40) for _ in range(numbers.randrange(1, 15))] for _ in range(count)]


@dataclass
class _Request:
    number: int
    prompt: list[int]
    text: list[int]
    read: int = 0  # tokens of the text that were read
    draft: list[int] = field(default_factory=list)


@dataclass
class Wishes:
    """The fields of vLLM's `SamplingParams` that the plugin reads."""

    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()


class FakeRunner:
    """Runs requests through a proposer with the arguments that vLLM passes.

    As vLLM's, it has `drafter`, `input_batch` and `requests`, which the plugin finds after `put_vllm`.

    Args:
        proposer: has vLLM's `propose`.
        target: the model.
        rows: maximum number of requests in the batch.
        longest: tokens of a row.
        chunk: tokens of a prompt that one pass reads.
        on_pass: called at each pass with the number of tokens that it reads.
        module: its `compute_logits` is called with the logits of each pass.
        wishes: of all requests, except for `max_tokens`.
    """

    def __init__(
        self,
        proposer: Any,
        target: Target = phrases,
        rows: int = 1,
        longest: int = 200,
        chunk: int = 6,
        on_pass: Callable[[int], None] = lambda tokens: None,
        module: Any = None,
        **wishes: Any,
    ) -> None:
        self.drafter, self.drafts, self.passes = proposer, list[list[int]](), 0
        self.input_batch, self.requests = SimpleNamespace(req_ids=[]), dict[str, Any]()
        self._wishes, self._runs = wishes, 0
        self._target, self._rows, self._chunk, self._on_pass = target, rows, chunk, on_pass
        self._module, self._lines = module, list[list[float]]()
        self._tokens_RM = np.zeros((rows, longest), np.int32)
        self._lengths_R = np.zeros(rows, np.int32)

    def run(self, prompts: Sequence[Sequence[int]], most: int, preempt_every: int = 0) -> list[list[int]]:
        """Complete prompts. Every so many passes the first row is removed and enters again later."""
        waiting = [_Request(number, list(prompt), list(prompt)) for number, prompt in enumerate(prompts)]
        running: list[_Request] = []
        done: dict[int, list[int]] = {}
        self._runs += 1
        while waiting or running:
            while waiting and len(running) < self._rows:
                running.append(waiting.pop(0))
            self._enter(running, most)
            self._step(running)
            for request in [one for one in running if self._is_done(one, most)]:
                done[request.number] = self._completion(request, most)
                self._remove(running, request)
                del self.requests[self._name(request)]
            if preempt_every and running and self.passes % preempt_every == 0:
                self._remove(running, preempted := running[0])
                preempted.read, preempted.draft = 0, []
                waiting.append(preempted)
        return [done[number] for number in range(len(prompts))]

    def _name(self, request: _Request) -> str:
        return f"request-{self._runs}-{request.number}"

    def _enter(self, running: list[_Request], most: int) -> None:
        """Set the batch as vLLM's runner does: all requests until they are done, also while they are removed."""
        self.input_batch.req_ids = [self._name(request) for request in running]
        for request in running:
            state = SimpleNamespace(num_prompt_tokens=len(request.prompt), sampling_params=Wishes(most, **self._wishes))
            self.requests[self._name(request)] = state

    def propose_draft_token_ids(self, sampled: list[list[int]]) -> list[list[int]]:
        """Call the proposer, as vLLM's runner does in its method of this name."""
        drafts: list[list[int]] = self.drafter.propose(sampled, self._lengths_R, self._tokens_RM, slot_mappings={})
        return drafts

    def _step(self, running: list[_Request]) -> None:
        self.passes += 1
        self._lines = []
        sampled = [self._pass(request) for request in running]
        if self._module:
            self._module.compute_logits(torch.tensor(self._lines))
        for row, (request, new) in enumerate(zip(running, sampled, strict=True)):
            request.text += new
            self._tokens_RM[row, : len(request.text)] = request.text
            self._lengths_R[row] = len(request.text)
        drafts = self.propose_draft_token_ids(sampled)
        assert len(drafts) == len(running)
        for request, new, draft in zip(running, sampled, drafts, strict=True):
            assert new or not draft, "a draft for a row whose prompt is not read yet"
            assert len(request.text) + len(draft) < self._tokens_RM.shape[1]
            request.draft = draft
            self.drafts.append(draft)

    def _pass(self, request: _Request) -> list[int]:
        unread = len(request.text) - request.read
        if unread > self._chunk:
            request.read += self._chunk
            self._add_line(request.text)
            self._on_pass(self._chunk)
            return []
        self._on_pass(unread + len(request.draft))
        for place in range(len(request.draft) + 1):
            self._add_line([*request.text, *request.draft[:place]])
        new = [self._target(request.text)]
        while len(new) <= len(request.draft) and new[-1] == request.draft[len(new) - 1]:
            new.append(self._target([*request.text, *new]))
        request.read = len(request.text) + len(new) - 1
        return new

    def _add_line(self, text: Sequence[int]) -> None:
        """Add logits of which the target's token is the largest."""
        chosen = self._target(text)
        self._lines.append([6.0 if token == chosen else (token * 7 + len(text)) % 5 / 5 for token in range(VOCABULARY)])

    def _is_done(self, request: _Request, most: int) -> bool:
        emitted = request.text[len(request.prompt) :]
        return any(token in self._ends for token in emitted) or len(emitted) >= most

    @property
    def _ends(self) -> set[int]:
        return {*self._wishes.get("stop_token_ids", ())} | (set() if self._wishes.get("ignore_eos") else {END})

    def _completion(self, request: _Request, most: int) -> list[int]:
        emitted = request.text[len(request.prompt) :][:most]
        found = [place for place, token in enumerate(emitted) if token in self._ends]
        return emitted[: found[0] + 1] if found else emitted

    def _remove(self, running: list[_Request], request: _Request) -> None:
        """The last row takes the place of a removed one."""
        last = running.pop()
        if last is not request:
            running[running.index(request)] = last


class SecondRunner(FakeRunner):
    """vLLM's second runner: its speculator is told the schedule, and reads texts where the runner keeps them. After
    each pass it computes logits once more, as for log probabilities of prompts.

    Args:
        config: as of `fake_config`.
        drafts: whether there is a speculator.
        options: as of `FakeRunner`.
    """

    def __init__(self, config: Any, *, drafts: bool = True, **options: Any) -> None:
        super().__init__(None, longest=config.model_config.max_model_len, **options)
        slots, longest = 2 * self._rows, config.model_config.max_model_len  # a text may end beyond the longest
        self.states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(slots, longest, dtype=torch.int32)),
        )
        self.speculator = OmnidraftSpeculator(config, torch.device("cpu"), self.states) if drafts else None
        self._running: list[_Request] = []
        self._scheduled: set[str] = set()  # requests of the last pass
        if self.speculator and self._module:
            self.speculator.load_model(self._module)

    @override
    def _enter(self, running: list[_Request], most: int) -> None:
        super()._enter(running, most)
        self._running, names = running, self.input_batch.req_ids
        new = [
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=request.prompt,
                prefill_token_ids=list(request.text),
                sampling_params=self.requests[name].sampling_params,
            )
            for name, request in zip(names, running, strict=True)
            if name not in self._scheduled
        ]
        finished = {name for name in self._scheduled if name not in self.requests}
        self._scheduled = set(names)
        if self.speculator:
            self.speculator.receive_schedule(SimpleNamespace(finished_req_ids=finished, scheduled_new_reqs=new))

    @override
    def propose_draft_token_ids(self, sampled: list[list[int]]) -> list[list[int]]:
        """Draft as vLLM's second runner does, whose rows are in other places than the requests."""
        rows = len(sampled)
        if self._module:
            self._module.compute_logits(torch.zeros(len(self._lines), VOCABULARY))
        if self.speculator is None:
            return [[] for _ in sampled]
        places = torch.arange(rows).flip(0) + self._rows
        for row, place in enumerate(places.tolist()):
            self.states.total_len.gpu[place] = int(self._lengths_R[row])
            self.states.all_token_ids.gpu[place] = torch.from_numpy(self._tokens_RM[row])
        drafted = np.array([len(request.draft) for request in self._running], np.int32)
        batch = SimpleNamespace(
            num_reqs=rows,
            req_ids=list(self.input_batch.req_ids),
            idx_mapping=places,
            num_draft_tokens_per_req=drafted if drafted.any() else None,
        )
        counts = torch.tensor([len(tokens) for tokens in sampled], dtype=torch.int32)
        found = self.speculator.propose(batch, {}, {}, None, None, counts, counts, num_speculative_tokens=None)
        told = SimpleNamespace(req_ids=batch.req_ids, draft_token_ids=found.tolist())
        drafts: list[list[int]] = self.speculator.trim(told).draft_token_ids
        return drafts


class ModelRunner(FakeRunner):
    """A runner whose target is a real model, greedy.

    Args:
        folder: of the model.
        proposer, rows, module: as of `FakeRunner`.
    """

    def __init__(self, folder: Path, proposer: Any, rows: int = 1, module: Any = None) -> None:
        self._model = load_causal_model(str(folder), "float32", "cpu").eval()
        self._known: dict[tuple[int, ...], list[float]] = {}
        super().__init__(proposer, self._choose, rows, longest=400, chunk=64, module=module)

    def _logits(self, text: Sequence[int]) -> list[float]:
        key = tuple(text)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self._model(torch.tensor([key])).logits[0, -1].tolist()
        return self._known[key]

    def _choose(self, text: Sequence[int]) -> int:
        logits = self._logits(text)
        return logits.index(max(logits))

    @override
    def _add_line(self, text: Sequence[int]) -> None:
        self._lines.append(self._logits(text))


def fake_config(
    most: int = 4,
    device: str = "cuda",
    longest: int = 200,
    rank: int = 0,
    tensor_parallel: int = 1,
    replica: int = 0,
    model: str = "fake",
    size: int = VOCABULARY,
) -> SimpleNamespace:
    """The fields of vLLM's `VllmConfig` that the proposer reads."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(
            rank=rank,
            tensor_parallel_size=tensor_parallel,
            data_parallel_rank=0,  # as of dense models
            data_parallel_index=replica,
            data_parallel_rank_local=None,
            pipeline_parallel_size=1,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        scheduler_config=SimpleNamespace(max_num_seqs=16, async_scheduling=False),
        model_config=SimpleNamespace(
            model=model,
            get_vocab_size=lambda: size,
            max_model_len=longest,
            hf_text_config=SimpleNamespace(eos_token_id=END),
            try_get_generation_config=lambda: {"eos_token_id": [END]},
        ),
    )


class NothingDrafted:
    """A proposer without drafts."""

    def propose(self, sampled: list[list[int]], *_: Any, **named: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class FakeTarget:
    """A module that returns its input as logits."""

    def compute_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV


def put_vllm(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> None:
    """Let `import vllm` find a module with a version, and a runner that has requests; nothing else."""
    module = ModuleType("vllm")
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", module)
    runner = ModuleType(RUNNER)
    runner.__dict__["GPUModelRunner"] = FakeRunner
    monkeypatch.setitem(sys.modules, RUNNER, runner)
    # The plugin wraps it: afterwards it is as before.
    monkeypatch.setattr(FakeRunner, "propose_draft_token_ids", FakeRunner.propose_draft_token_ids)
