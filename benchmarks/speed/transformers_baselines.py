"""Baselines of the benchmark: generation by `transformers` with the same models.

`greedy_generate` and greedy `assisted_generate` are also oracles: their output must equal ours. At temperatures above 0
`assisted_generate` is a baseline of speed only: its rule across vocabularies does not keep the target's distribution,
which `surprisal` shows. All take a target as `stages.engine.models.huggingface.load_causal_model` gives it.

Shapes: B rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.engine.models.generate import generate, to_generate_options
from stages.sampling.params import SamplingParams
from store.errors import ModelError

LOOKUP_TOKENS = 10  # of prompt lookup, as in transformers' own documentation
PAGE_TOKENS = 256  # of continuous batching, its default


@dataclass(frozen=True)
class Request:
    """How to complete prompts."""

    sampling: SamplingParams  # the transform of the target's distribution
    max_new_tokens: int  # most tokens to emit
    # ids of the target that end a sequence; one of them, when emitted, is part of the completion
    eos_ids: frozenset[int]
    seed: int  # of the sampling. `generate` samples from torch's global generator, which is seeded for every call.


@dataclass(frozen=True)
class AssistedDrafter:
    """A drafter for `transformers`' assisted generation across tokenizers.

    Neither it nor its tokenizers may be shared: when sampling, `transformers` replaces the drafter's output layer, and
    records by the pair of tokenizers the drafter in which it has replaced the layer.
    """

    model: Any
    tokenizer: Any
    target_tokenizer: Any

    @classmethod
    def from_drafter(cls, drafter: Any, tokenizer: Any, target_tokenizer: Any, length: int | None) -> "AssistedDrafter":
        """Configure a newly loaded drafter.

        Args:
            drafter: its generation settings are changed.
            tokenizer: the drafter's.
            target_tokenizer: the target's.
            length: pieces of every draft; None keeps the default of `transformers`: up to 20 pieces while the drafter's
                confidence is high enough.
        """
        if length is not None:
            settings = drafter.generation_config
            settings.num_assistant_tokens = length
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0  # no early stop: exactly `length`
        return cls(drafter, tokenizer, target_tokenizer)


Prompts = Sequence[Sequence[int]]


def greedy_generate(target: Any, prompts: Prompts, request: Request) -> list[list[int]]:
    """Complete prompts by `generate`, one token per pass, as one static batch; returns target ids without prompts."""
    return _generate(target, prompts, request)


def prompt_lookup(target: Any, prompts: Prompts, request: Request) -> list[list[int]]:
    """Complete one prompt with drafts copied from repetitions in the text."""
    return _generate(target, prompts, request, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def assisted_generate(target: Any, prompts: Prompts, request: Request, drafter: AssistedDrafter) -> list[list[int]]:
    """Complete one prompt by assisted generation: UAG when greedy, TLI when sampling."""
    return _generate(
        target,
        prompts,
        request,
        assistant_model=drafter.model,
        tokenizer=drafter.target_tokenizer,
        assistant_tokenizer=drafter.tokenizer,
    )


def _generate(target: Any, prompts: Prompts, request: Request, **drafting: Any) -> list[list[int]]:
    return generate(
        target, prompts, request.sampling, request.max_new_tokens, request.eos_ids, request.seed, **drafting
    )


class ContinuousBatching:
    """`transformers`' continuous batching, on its own thread.

    Call `start` before and `stop` after its use: while the thread runs, so do its OpenMP threads, and with more of
    these than cores OpenMP no longer spins at barriers, which slows all other work of the process by a third.

    Args:
        target: not shared, because its attention may be replaced.
        request: how to complete; its seed is that of all sampling.
        rows: maximum number of concurrent prompts.
        longest: tokens of the longest prompt and completion together. The cache is limited to `rows` of these; by
            default it takes most of the free memory.
    """

    def __init__(self, target: Any, request: Request, rows: int, longest: int) -> None:
        self._target, self._request, self._rows, self._longest = target, request, rows, longest
        self._session: Any = None

    def start(self) -> None:
        """Allocate the cache and start the thread."""
        target, request, rows, longest = self._target, self._request, self._rows, self._longest
        settings = copy.deepcopy(target.generation_config)
        settings.update(
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.eos_ids) or -1,
            pad_token_id=min(request.eos_ids, default=0),
            **to_generate_options(request.sampling),
        )
        self._session = target.init_continuous_batching(generation_config=settings)
        limits = self._session.continuous_batching_config
        limits.seed, limits.max_requests_per_batch = request.seed, rows
        limits.num_blocks = rows * -(-longest // PAGE_TOKENS) + 1
        limits.max_batch_tokens = max(PAGE_TOKENS, 2 * longest)
        self._session.start()

    def complete(self, prompts: Prompts) -> list[list[int]]:
        """Complete prompts; returns target ids without the prompts.

        Raises:
            ModelError: the thread ended, or a completion failed.
        """
        names = self._session.add_requests(inputs=[list(prompt) for prompt in prompts])
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = self._session.get_result(timeout=1)
            if result is not None and result.error:
                raise ModelError(f"continuous batching must complete every prompt, but it failed: {result.error}")
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            if result is None and not self._session.is_running():
                raise ModelError("continuous batching must run until it is closed, but its thread has ended")
        return [found[name] for name in names]

    def stop(self) -> None:
        """Stop the thread and free the cache."""
        self._session.stop(block=True)
        self._session.destroy()


@torch.inference_mode()
def surprisal(target: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> float:
    """Return the negative log-probability of a completion under the target at a temperature above 0, in nats.

    All samplers of that distribution have the same mean per token; a higher mean shows another distribution.
    """
    ids_1T = torch.tensor([[*prompt, *completion]], device=target.device)
    logits_TV = target(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    log_distribution_TV = (logits_TV / temperature).log_softmax(-1)
    return -float(log_distribution_TV.gather(1, ids_1T[0, len(prompt) :, None]).double().sum())
