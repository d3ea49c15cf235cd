"""One vLLM engine in a process of its own, which answers rounds of prompts: JSON lines in, JSON lines out.

The first line is an `EngineSpec`; the answer, once the engine is ready, says whether vLLM took its second model runner.
Each line after it is a `RoundRequest` and its answer a `RoundResult`. The process ends with its input.

Run by `python -m benchmarks.vllm.engine` in an environment with vLLM.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any, Self


@dataclass(frozen=True)
class EngineSpec:
    """An engine."""

    model: str  # the target
    batch: int  # maximum number of requests at the same time
    speculative: Mapping[str, Any] | None = None  # vLLM's speculative configuration; None to draft nothing
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `vllm.LLM`


@dataclass(frozen=True)
class RoundRequest:
    """Prompts to complete greedily."""

    prompts: Sequence[Sequence[int]] | Sequence[str]  # token ids, or texts
    tokens: int  # maximum number of tokens of a completion
    chat: bool = False  # whether texts are rendered with the target's chat template
    # number of the engine's step before which each prompt arrives; by default all arrive at once
    arrivals: Sequence[int] = ()


@dataclass(frozen=True)
class RoundResult:
    """What came of a round."""

    texts: Sequence[Sequence[int]]  # token ids of the completions
    passes: int  # number of passes in which a request emitted tokens, summed over requests
    steps: int  # number of passes of the engine
    # drafted, accepted: drafted tokens
    drafted: int
    accepted: int
    seconds: float  # of the round
    gaps: Sequence[float]  # seconds between the tokens of one request and its next ones
    # processor seconds of the proposer in the engine's process, and the seconds that passed
    proposing: tuple[float, float]
    prompts: Sequence[Sequence[int]] = ()  # token ids of the prompts

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the result that an engine wrote."""
        return cls(**{**values, "proposing": tuple(values["proposing"])})

    @property
    def emitted(self) -> int:
        """Number of emitted tokens."""
        return sum(map(len, self.texts))


class _ProposerClock:
    """Measures what proposes drafts in one of vLLM's model runners, whatever the method of drafting."""

    def __init__(self, runner: Any) -> None:
        self.processor = self.passed = 0.0
        speculator = getattr(runner, "speculator", None)  # of the second runner, if anything drafts
        holder, name = (speculator, "propose") if speculator else (runner, "propose_draft_token_ids")
        if (propose := getattr(holder, name, None)) is None:
            return

        def propose_and_measure(*given: Any, **named: Any) -> Any:
            begin, began = thread_time(), perf_counter()
            try:
                return propose(*given, **named)
            finally:
                self.processor += thread_time() - begin
                self.passed += perf_counter() - began

        setattr(holder, name, propose_and_measure)


class _Engine:
    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        options = {"max_num_seqs": spec.batch, "disable_log_stats": False, **spec.options}
        self._llm = LLM(spec.model, speculative_config=spec.speculative, **options)
        core: Any = self._llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.second_runner = hasattr(runner, "speculator")
        self._clock = _ProposerClock(runner)
        self._completed = 0  # rounds

    def complete(self, request: RoundRequest) -> RoundResult:
        """Complete a round, step by step."""
        from vllm import SamplingParams

        engine, sampling = self._llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=request.tokens)
        prompts = [self._encode(prompt, chat=request.chat) for prompt in request.prompts]
        arrivals = request.arrivals or [0] * len(prompts)
        waiting = sorted(range(len(prompts)), key=lambda number: arrivals[number])
        texts: dict[int, list[int]] = {}
        times: dict[int, list[float]] = {number: [] for number in waiting}
        before, began = self._read_counts(), perf_counter()
        clock, steps = (self._clock.processor, self._clock.passed), 0
        while waiting or engine.has_unfinished_requests():
            while waiting and arrivals[waiting[0]] <= steps:
                number = waiting.pop(0)
                prompt: Any = {"prompt_token_ids": prompts[number]}
                engine.add_request(f"{self._completed}-{number}", prompt, sampling)
            for output in engine.step():
                number = int(output.request_id.split("-")[1])
                texts[number] = list(output.outputs[0].token_ids)
                times[number].append(perf_counter())
            steps += 1
        seconds, after = perf_counter() - began, self._read_counts()
        self._completed += 1
        return RoundResult(
            [texts[number] for number in range(len(prompts))],
            sum(map(len, times.values())),
            steps,
            after[0] - before[0],
            after[1] - before[1],
            seconds,
            [later - earlier for found in times.values() for earlier, later in pairwise(found)],
            (self._clock.processor - clock[0], self._clock.passed - clock[1]),
            prompts,
        )

    def _encode(self, prompt: Sequence[int] | str, *, chat: bool) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer: Any = self._llm.get_tokenizer()
        if not chat:
            return list(tokenizer.encode(prompt))
        turns = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))

    def _read_counts(self) -> tuple[int, int]:
        """Return the drafted and the accepted tokens since the engine began."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.llm_engine.get_metrics()}
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        return int(found.get(names[0], 0)), int(found.get(names[1], 0))


def main() -> None:
    """Answer lines of standard input on standard output, which vLLM's own messages do not reach."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = _Engine(EngineSpec(**json.loads(sys.stdin.readline())))
    answers.write(json.dumps({"second_runner": engine.second_runner}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(asdict(engine.complete(RoundRequest(**json.loads(line))))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
