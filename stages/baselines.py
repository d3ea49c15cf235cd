"""What `transformers` does by itself with the same models: the yardsticks that the benchmark measures us against.

Batch 1, with the caches that `generate` makes for itself. Greedy `plain` and greedy `assisted` are also oracles: both
must emit what we emit. At temperatures above 0 `assisted` is a yardstick of speed alone: its rule across vocabularies
does not keep the target's law, which `surprisal` shows.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.distributions import Sampling
from stages.language_model import LanguageModel


@dataclass(frozen=True)
class Request:
    """How to complete a prompt.

    Attributes:
        sampling: the transform of the target's law.
        max_new_tokens: most tokens to emit.
        ends: ids of the target that end a sequence; one of them, when emitted, is part of the completion.
        seed: of the draws. `generate` draws from torch's global generator, which is seeded anew for every prompt.
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
    def of(cls, drafter: LanguageModel, tokenizer: Any, target_tokenizer: Any, length: int | None) -> "AssistedDrafter":
        """Take over a freshly loaded drafter.

        Args:
            drafter: its generation settings are changed.
            tokenizer: the drafter's.
            target_tokenizer: the target's.
            length: pieces of every draft; None keeps what `transformers` does by default, which is up to 20 pieces
                as long as the drafter is sure enough of them.
        """
        if length is not None:
            settings = drafter.model.generation_config
            settings.num_assistant_tokens = length
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0  # no early stop: exactly `length`
        return cls(drafter.model, tokenizer, target_tokenizer)


def plain(target: LanguageModel, prompt: Sequence[int], request: Request) -> list[int]:
    """The completion by `generate`, one token per forward pass; target ids without the prompt."""
    return _generate(target, prompt, request)


def assisted(target: LanguageModel, prompt: Sequence[int], request: Request, drafter: AssistedDrafter) -> list[int]:
    """The completion by assisted generation: UAG when greedy, TLI when sampling; target ids without the prompt."""
    return _generate(
        target,
        prompt,
        request,
        assistant_model=drafter.model,
        tokenizer=drafter.target_tokenizer,
        assistant_tokenizer=drafter.tokenizer,
    )


def _generate(target: LanguageModel, prompt: Sequence[int], request: Request, **drafting: Any) -> list[int]:
    torch.manual_seed(request.seed)
    ids_1T = torch.tensor([prompt], device=target.device)
    ends = sorted(request.ends)
    with torch.inference_mode():
        output_1T = target.model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=request.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **_transform(request.sampling),
            **drafting,
        )
    completion: list[int] = output_1T[0, len(prompt) :].tolist()
    return completion


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


@torch.inference_mode()
def surprisal(target: LanguageModel, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> float:
    """Minus the log-probability of a whole completion under the target's law at a temperature above 0, in nats.

    Completions drawn from that law agree in its mean per token, whoever drew them; a higher mean betrays another law.
    """
    ids_1T = torch.tensor([[*prompt, *completion]], device=target.device)
    logits_TV = target.model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    log_law_TV = (logits_TV / temperature).log_softmax(-1)
    return -float(log_law_TV.gather(1, ids_1T[0, len(prompt) :, None]).double().sum())


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
