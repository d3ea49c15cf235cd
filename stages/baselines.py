"""What `transformers` does by itself with the same models: the yardsticks that the benchmark measures us against.

Greedy `plain` and greedy `assisted` are also oracles: both must emit what we emit. At temperatures above 0 `assisted`
is a yardstick of speed alone: its rule across vocabularies does not keep the target's law, which `surprisal` shows.
All take a target as `stages.huggingface.load_causal_model` gives it.

Shapes: B rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.distributions import Sampling
from store.errors import ModelError

LOOKUP_TOKENS = 10  # of prompt lookup, as in transformers' own documentation
PAGE_TOKENS = 256  # of continuous batching, its default


@dataclass(frozen=True)
class Request:
    """How to complete prompts.

    Attributes:
        sampling: the transform of the target's law.
        max_new_tokens: most tokens to emit.
        ends: ids of the target that end a sequence; one of them, when emitted, is part of the completion.
        seed: of the draws. `generate` draws from torch's global generator, which is seeded anew for every call.
    """

    sampling: Sampling
    max_new_tokens: int
    ends: frozenset[int]
    seed: int


@dataclass(frozen=True)
class AssistedDrafter:
    """A drafter for `transformers`' assisted generation across tokenizers.

    It must be used by nothing else, tokenizers included: when sampling, `transformers` replaces the drafter's output
    layer, and remembers by the pair of tokenizers which drafter it has replaced it in.
    """

    model: Any
    tokenizer: Any
    target_tokenizer: Any

    @classmethod
    def of(cls, drafter: Any, tokenizer: Any, target_tokenizer: Any, length: int | None) -> "AssistedDrafter":
        """Take over a freshly loaded drafter.

        Args:
            drafter: its generation settings are changed.
            tokenizer: the drafter's.
            target_tokenizer: the target's.
            length: pieces of every draft; None keeps what `transformers` does by default, which is up to 20 pieces
                as long as the drafter is sure enough of them.
        """
        if length is not None:
            settings = drafter.generation_config
            settings.num_assistant_tokens = length
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0  # no early stop: exactly `length`
        return cls(drafter, tokenizer, target_tokenizer)


Prompts = Sequence[Sequence[int]]


def plain(target: Any, prompts: Prompts, request: Request) -> list[list[int]]:
    """Completions by `generate`, one token per forward pass, as one static batch; target ids without the prompts."""
    return _generate(target, prompts, request)


def prompt_lookup(target: Any, prompts: Prompts, request: Request) -> list[list[int]]:
    """The completion of one prompt with drafts copied from where the text repeats itself."""
    return _generate(target, prompts, request, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def assisted(target: Any, prompts: Prompts, request: Request, drafter: AssistedDrafter) -> list[list[int]]:
    """The completion of one prompt by assisted generation: UAG when greedy, TLI when sampling."""
    return _generate(
        target,
        prompts,
        request,
        assistant_model=drafter.model,
        tokenizer=drafter.target_tokenizer,
        assistant_tokenizer=drafter.tokenizer,
    )


def _generate(target: Any, prompts: Prompts, request: Request, **drafting: Any) -> list[list[int]]:
    torch.manual_seed(request.seed)
    width, pad = max(map(len, prompts)), min(request.ends, default=0)
    ids_BT = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=target.device)
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=target.device)
    seen_BT = torch.arange(width, device=target.device) >= width - lengths_B1
    with torch.inference_mode():
        output_BT = target.generate(
            ids_BT,
            attention_mask=seen_BT.long(),
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.ends) or None,
            pad_token_id=pad,
            **_transform(request.sampling),
            **drafting,
        )
    return [_cut(completion, request.ends) for completion in output_BT[:, width:].tolist()]


def _cut(completion: list[int], ends: frozenset[int]) -> list[int]:
    """Without the padding of a row that ended before others."""
    stop = next((place for place, token in enumerate(completion, 1) if token in ends), len(completion))
    return completion[:stop]


def _transform(sampling: Sampling) -> dict[str, Any]:
    """`generate`'s words for a sampling transform; every one is given, for its own defaults are others."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


class ContinuousBatching:
    """`transformers`' continuous batching, on its own thread.

    `start` and `stop` enclose its use: as long as the thread lives, so do its OpenMP threads, and with more of these
    than cores OpenMP no longer spins at barriers, which slows everything else in the process by a third.

    Args:
        target: used by nothing else, for its attention may be replaced.
        request: how to complete; the seed is that of all draws.
        rows: most prompts at a time.
        longest: tokens of the longest prompt and completion together. The cache has room for `rows` of these and no
            more: left alone it takes most of the free memory.
    """

    def __init__(self, target: Any, request: Request, rows: int, longest: int) -> None:
        self._target, self._request, self._rows, self._longest = target, request, rows, longest
        self._session: Any = None

    def start(self) -> None:
        """Make the cache and start the thread."""
        target, request, rows, longest = self._target, self._request, self._rows, self._longest
        settings = copy.deepcopy(target.generation_config)
        settings.update(
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.ends) or -1,
            pad_token_id=min(request.ends, default=0),
            **_transform(request.sampling),
        )
        self._session = target.init_continuous_batching(generation_config=settings)
        limits = self._session.continuous_batching_config
        limits.seed, limits.max_requests_per_batch = request.seed, rows
        limits.num_blocks = rows * -(-longest // PAGE_TOKENS) + 1
        limits.max_batch_tokens = max(PAGE_TOKENS, 2 * longest)
        self._session.start()

    def complete(self, prompts: Prompts) -> list[list[int]]:
        """Target ids without the prompts.

        Raises:
            ModelError: the thread died.
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
    """Minus the log-probability of a whole completion under the target's law at a temperature above 0, in nats.

    Completions drawn from that law agree in its mean per token, whoever drew them; a higher mean betrays another law.
    """
    ids_1T = torch.tensor([[*prompt, *completion]], device=target.device)
    logits_TV = target(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    log_law_TV = (logits_TV / temperature).log_softmax(-1)
    return -float(log_law_TV.gather(1, ids_1T[0, len(prompt) :, None]).double().sum())


@torch.inference_mode()
def preference(target: Any, text: Sequence[int], one: int, other: int) -> float:
    """By how much the target's logit of one token behind a text is above another's; about 0 is a near tie."""
    ids_1T = torch.tensor([list(text)], device=target.device)
    logits_V = target(input_ids=ids_1T, use_cache=False).logits[0, -1].float()
    return float(logits_V[one] - logits_V[other])


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to, so that a clock read next covers it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def threads() -> int:
    """CPU threads of one tensor operation."""
    return torch.get_num_threads()


def device_name(device: torch.device) -> str | None:
    """What an accelerator calls itself; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
