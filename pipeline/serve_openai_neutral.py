"""Parameters of OpenAI's interface, and of other servers of it, that this server accepts only where they do nothing."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Neutral:
    """The values of a parameter that change nothing, and how a message names them."""

    values: Any  # whatever `in` can be asked of
    words: str


class _Anything:
    """What only names the sender, or chooses between things of which there is one."""

    def __contains__(self, _: object) -> bool:
        return True


_ANYTHING = Neutral(_Anything(), "any value")
_ZERO, _ONE = Neutral((0,), "0"), Neutral((1,), "1")
_FALSE, _TRUE = Neutral((False,), "false"), Neutral((True,), "true")
_NONE_OF_THEM = Neutral(([],), "[]")
_NULL = Neutral((), "null")
_NO_TOOL = Neutral(("none", "auto"), '"none"')

_NEUTRAL = {
    "audio": _NULL,
    "frequency_penalty": _ZERO,
    "function_call": _NO_TOOL,
    "functions": _NONE_OF_THEM,
    "logit_bias": Neutral(({},), "{}"),
    "modalities": Neutral((["text"],), '["text"]'),
    "moderation": _NULL,
    "parallel_tool_calls": _ANYTHING,
    "prediction": _NULL,
    "presence_penalty": _ZERO,
    "prompt_cache_key": _ANYTHING,
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": _NULL,
    "reasoning_effort": Neutral(("none",), '"none"'),
    "response_format": Neutral(({"type": "text"},), '{"type": "text"}'),
    "safety_identifier": _ANYTHING,
    "service_tier": Neutral(("auto", "default"), '"auto"'),
    "suffix": Neutral(("",), '""'),
    "tool_choice": _NO_TOOL,
    "tools": _NONE_OF_THEM,
    "verbosity": Neutral(("medium",), '"medium"'),
    "web_search_options": _NULL,
    # Of vLLM and SGLang.
    "add_generation_prompt": _TRUE,
    "continue_final_message": _FALSE,
    "ignore_eos": _FALSE,
    "include_stop_str_in_output": _FALSE,
    "length_penalty": _ONE,
    "min_p": _ZERO,
    "min_tokens": _ZERO,
    "repetition_penalty": _ONE,
    "skip_special_tokens": _TRUE,
    "stop_token_ids": _NONE_OF_THEM,
    "use_beam_search": _FALSE,
}


def neutral_of(name: str) -> Neutral | None:
    """The values at which a parameter does nothing; None for a name that nobody uses."""
    return _NEUTRAL.get(name)
