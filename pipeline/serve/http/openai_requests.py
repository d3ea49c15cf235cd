"""Requests in OpenAI's form, validated.

A parameter that is null counts as left out. An unsupported parameter is ignored at values that have no effect and
refused at others. An unknown parameter is refused and the nearest name suggested, because ignoring a mistyped parameter
would give wrong results in silence; only messages, which clients send back with fields of their own, may have more.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from pipeline.serve.http.errors import ApiError, JsonObject, format_value, unsupported_error, wrong_value_error
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.tool_calls import MAX_TOOLS, NO_TOOLS, STRICT, EarlierCall, Tool, ToolUse, read_tool_use
from pipeline.serve.messages import PlainPrompt
from stages.sampling.grammars import GrammarSource
from stages.sampling.params import MAX_BIAS, MAX_PENALTY, MAX_REPETITION, SamplingParams
from store.errors import ConfigError

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_MESSAGES, MAX_PARTS = 1024, 1024
MAX_LOGPROBS = 20
MAX_BIASES, MAX_STOP_IDS = 1024, 64
MASK63 = (1 << 63) - 1
COMPLETION_TOKENS = 16  # of a plain completion that names none, as OpenAI's
MAX_VALUES = 32  # for a chat template
# Names that a chat template is given by the conversation, or by whoever renders it.
GIVEN_VALUES = {"messages", "tools", "documents", "conversations", "chat_template", "return_assistant_tokens_mask"} | {
    "add_generation_prompt",
    "continue_final_message",
}
SAMPLING_NAMES = {field.name for field in fields(SamplingParams)}

# Ignored parameters of OpenAI's interface, of vLLM and of SGLang: accepted with these values alone, which do nothing.
_NO_TOOL, _NULL_ONLY = ("none", "auto"), ()
_ANY_VALUE = {"max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "reasoning", "reasoning_effort"} | {
    "cache_salt",
    "keep_alive",
    "request_id",
    "safety_identifier",
    "verbosity",
}
_IGNORED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "moderation", "prediction", "web_search_options"), _NULL_ONLY),
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), _NULL_ONLY),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("cache_prompt", "detokenize", "include_reasoning", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("early_stopping", "echo", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("bad_words", "functions", "tools"), ([],)),
    **dict.fromkeys(("function_call", "tool_choice"), _NO_TOOL),
    **dict.fromkeys(("min_tokens", "mirostat", "priority", "top_logprobs"), (0,)),
    **dict.fromkeys(("context_management", "conversation", "prompt"), _NULL_ONLY),
    "background": (False,),
    **dict.fromkeys(("length_penalty", "tfs_z", "typical_p"), (1,)),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}


def _to_stop_list(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _to_part_list(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _to_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Short = Annotated[str, Field(max_length=512)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Tokens = Annotated[int, Field(ge=-1)]  # -1: as many as are possible
Seed = Annotated[int, Field(ge=-(1 << 63), le=MASK63), BeforeValidator(_to_integer)]


class _Strict(BaseModel):
    model_config = STRICT


class StreamOptions(_Strict):
    """Options of a streamed response. With `include_obfuscation` it is sent at even intervals, filled up."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CommonRequest(_Strict):
    """Parameters that plain completions and chats share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MASK63)  # -1 and 0: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=1 / MAX_REPETITION, le=MAX_REPETITION)
    logit_bias: Annotated[dict[Short, Bias], Field(max_length=MAX_BIASES)] = {}
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] = []
    response_format: dict[str, object] = {"type": "text"}
    max_tokens: Tokens | None = None
    stop: Annotated[list[StopString], BeforeValidator(_to_stop_list), Field(max_length=MAX_STOPS)] = []
    seed: Seed | None = None
    n: int = Field(1, ge=1)
    best_of: int | None = None
    user: Short = ""
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] = {}
    store: bool = True


class CompletionRequest(CommonRequest):
    """The body of `/v1/completions`. A prompt is a text or its token ids; of a list of these each is completed.

    With `parse_special` the names of control tokens in a text are these tokens, as clients need it that write chat
    templates or fill in the middle themselves. `add_special_tokens`: whether a text begins with BOS. `suffix`: the text
    that follows the completion of a text.
    """

    prompt: object
    parse_special: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    suffix: str = ""


class TextPart(BaseModel):
    """A text part of a message; other fields of it are ignored."""

    model_config = STRICT | {"extra": "ignore"}

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """A text that the answer may repeat: a draft. It changes how fast the answer is, not what it is."""

    model_config = STRICT

    type: Literal["content"]
    content: Annotated[list[TextPart], BeforeValidator(_to_part_list), Field(max_length=MAX_PARTS)]


class ChatMessage(BaseModel):
    """A message of a conversation. Chat templates have no place for other fields, such as `name`; they are ignored."""

    model_config = STRICT | {"extra": "ignore"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_to_part_list), Field(min_length=1, max_length=MAX_PARTS)]
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Short = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, message: object) -> object:
        """Drop fields that are null or empty, so that clients can send back our responses unchanged."""
        if not isinstance(message, dict):
            return message
        kept = {key: value for key, value in message.items() if key == "content" or value not in (None, [], {})}
        if kept.get("role") == "assistant" and not kept.get("content"):
            kept["content"] = ""
        return kept

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant makes calls of tools")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise ValueError("a message has a tool_call_id if its role is 'tool'")
        return self

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role  # few chat templates know the newer name
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class ChatRequest(CommonRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: object = None
    prediction: Prediction | None = None
    chat_template_kwargs: Annotated[dict[Short, object], Field(max_length=MAX_VALUES)] = {}
    enable_thinking: bool | None = None  # one of these values, as clients of Qwen's models write it
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request with all defaults filled in; its prompts are not yet tokenised."""

    body: CommonRequest
    sampling: SamplingParams
    grammar: GrammarSource | None  # what the text must follow; None for any text
    tool_use: ToolUse = NO_TOOLS
    prompts: tuple[PlainPrompt, ...] = ()  # of a plain completion; empty for a chat
    messages: tuple[dict[str, Any], ...] = ()  # of a chat, as chat templates expect them; empty for a plain completion
    values: Mapping[str, object] = field(default_factory=dict)  # of a chat, further ones for its template
    controls: bool = False  # whether names of control tokens in a prompt are these tokens
    begin: bool = True  # whether a prompt begins with BOS
    suffix: str = ""  # text after the completion
    echo: bool = False
    prediction: str = ""  # that the answer to a chat may repeat
    shown: JsonObject | None = None  # of a request to `/v1/responses`, what its response repeats

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def is_even(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_obfuscation

    @property
    def include_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage


def parse_completion(body: Mapping[str, object], limits: Limits, defaults: SamplingParams) -> ParsedRequest:
    """Parse a request for a plain completion. Raises `ApiError` that names the wrong parameter."""
    request = validate(CompletionRequest, body)
    most = -1 if request.max_tokens is None else request.max_tokens
    most = most if "max_tokens" in body else COMPLETION_TOKENS
    prompts = _read_prompts(request.prompt)
    if request.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_value_error("suffix", "come with a prompt that is a text", request.suffix)
    if request.suffix and request.echo:
        raise unsupported_error("echo", True, "false where there is a 'suffix'")
    sampling = _sampling_params(request, limits, defaults, most, request.logprobs, len(prompts))
    return ParsedRequest(
        request,
        sampling,
        _grammar_source(request),
        prompts=prompts,
        controls=request.parse_special,
        begin=request.add_special_tokens,
        suffix=request.suffix,
        echo=request.echo,
    )


def parse_chat(body: Mapping[str, object], limits: Limits, defaults: SamplingParams) -> ParsedRequest:
    """Parse a request for the next message of a conversation. Raises `ApiError` as `parse_completion`."""
    request = validate(ChatRequest, body)
    if request.top_logprobs and not request.logprobs:
        raise wrong_value_error("top_logprobs", "come with 'logprobs': true", request.top_logprobs)
    given = {most for most in (request.max_completion_tokens, request.max_tokens) if most is not None}
    if len(given) > 1:
        must = "equal 'max_completion_tokens' where both are given"
        raise wrong_value_error("max_tokens", must, request.max_tokens)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    messages = tuple(message.for_template() for message in request.messages)
    tool_use = read_tool_use(request.tools, request.tool_choice)
    sampling = _sampling_params(request, limits, defaults, given.pop() if given else -1, logprobs)
    grammar, values = _grammar_source(request, tool_use), _template_values(request)
    predicted = "".join(part.text for part in request.prediction.content) if request.prediction else ""
    return ParsedRequest(request, sampling, grammar, tool_use, messages=messages, values=values, prediction=predicted)


def _template_values(request: ChatRequest) -> dict[str, object]:
    """Return what a chat template is given beside the messages and tools."""
    values = dict(request.chat_template_kwargs)
    wrong = next((name for name in values if name in GIVEN_VALUES or not name.isidentifier()), None)
    if wrong is not None:
        raise wrong_value_error("chat_template_kwargs", "have names of a template's own values", wrong)
    if request.enable_thinking is not None:
        values["enable_thinking"] = request.enable_thinking
    if request.continue_final_message and request.add_generation_prompt:
        raise wrong_value_error("continue_final_message", "come with 'add_generation_prompt': false", got=True)
    if request.continue_final_message and request.messages[-1].role != "assistant":
        must = "come with a last message of the assistant"
        raise wrong_value_error("continue_final_message", must, request.messages[-1].role)
    if not request.add_generation_prompt:
        values |= {"add_generation_prompt": False, "continue_final_message": request.continue_final_message}
    return values


def _sampling_params(
    request: CommonRequest,
    limits: Limits,
    defaults: SamplingParams,
    max_tokens: int,
    logprobs: int | None,
    prompts: int = 1,
) -> SamplingParams:
    _check_bounds(request, prompts, limits)
    if max_tokens < 0:
        max_tokens = limits.scores // ((1 + (logprobs or 0)) * request.n * prompts)
    max_tokens = min(max_tokens, limits.max_tokens)
    given = {name: getattr(request, name) for name in request.model_fields_set & SAMPLING_NAMES}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    given |= {name: tuple(given[name]) for name in ("stop", "stop_token_ids") if name in given}
    if "logit_bias" in given:
        given["logit_bias"] = tuple((_token_id(key), bias) for key, bias in request.logit_bias.items())
    if request.top_k == -1:
        given["top_k"] = 0
    if request.seed is not None:
        given["seed"] = request.seed & MASK63
    return replace(defaults, **given)


def _grammar_source(request: CommonRequest, tool_use: ToolUse = NO_TOOLS) -> GrammarSource | None:
    try:
        source = GrammarSource.from_response_format(request.response_format)
    except ConfigError as error:
        raise ApiError(400, str(error), param="response_format", code="invalid_value") from None
    call = tool_use.make_grammar()
    if source and call:
        raise wrong_value_error("response_format", "be text where a tool must be called", request.response_format)
    if (source or call) and request.ignore_eos:
        must = "be false with a 'response_format' or a demanded tool, which end by themselves"
        raise wrong_value_error("ignore_eos", must, got=True)
    return source or call


def _token_id(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
        raise wrong_value_error("logit_bias", "have token ids as names", key)
    return int(key)


def _check_bounds(request: CommonRequest, prompts: int, limits: Limits) -> None:
    if request.best_of not in (None, 1, request.n):
        raise unsupported_error("best_of", request.best_of, f"n, which is {request.n}")
    if request.n * prompts > limits.choices:
        raise wrong_value_error("n", f"times the number of prompts ({prompts}) be at most {limits.choices}", request.n)


def check_scores(parsed: ParsedRequest, prompts: Sequence[int], limits: Limits) -> None:
    """Raise `ApiError` if a request has too many log probabilities; its prompts have so many tokens."""
    if (logprobs := parsed.sampling.logprobs) is None:
        return
    tokens = parsed.body.n * (len(prompts) * parsed.sampling.max_tokens + (sum(prompts) if parsed.echo else 0))
    if tokens * (logprobs + 1) > limits.scores:
        must = f"be so few that these and one more for each of {tokens} tokens are at most {limits.scores}"
        raise wrong_value_error("logprobs", must, logprobs)


def _read_prompts(prompt: object) -> tuple[PlainPrompt, ...]:
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_tokens(one) for one in prompt):
        return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)
    raise wrong_value_error("prompt", "be a text, a list of token ids, or a list of these", prompt)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def read_tokens(body: Mapping[str, object]) -> list[int]:
    """Return the `tokens` of a request to decode them. Raises `ApiError`."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
        raise wrong_value_error("tokens", "be a list of token ids", tokens)
    return tokens


Model = TypeVar("Model", bound=CommonRequest)


def validate(kind: type[Model], body: Mapping[str, object]) -> Model:
    """Read a body. Raises `ApiError` that names the wrong parameter."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in kind.model_fields or name in _ANY_VALUE:
            continue
        if (allowed := _IGNORED.get(name)) is None:
            near = get_close_matches(name[:64], kind.model_fields, 1)
            message = f"unknown parameter {format_value(name)}" + (f"; did you mean '{near[0]}'?" if near else "")
            raise ApiError(400, message, param=name[:64], code="unknown_parameter")
        if value not in allowed:
            raise unsupported_error(name, value, json.dumps(allowed[0]) if allowed else "null")
    try:
        return kind.model_validate({name: value for name, value in given.items() if name in kind.model_fields})
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(place)[:64] for place in problem["loc"])
    if problem["type"] == "missing":
        return ApiError(400, f"'{param}' is required", param=param, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter '{param}'", param=param, code="unknown_parameter")
    if problem["type"] == "list_type":
        return wrong_value_error(param, "be a list (or a text, where one is allowed)", problem["input"])
    must = problem["msg"].partition(" should ")[2].partition(" after validation")[0]
    return wrong_value_error(param, must or f"be right ({problem['msg']})", problem["input"])
