"""Requests in OpenAI's form, checked and turned into what is wanted of the engine.

A parameter that is null counts as left out. One that this server cannot follow is accepted at the value that changes
nothing and refused at any other; one that nobody knows is refused with the nearest name, for a mistyped parameter
that is ignored gives wrong results in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipeline.serve_errors import ApiError, shown, unsupported, wrong_value
from pipeline.serve_limits import Defaults, Limits
from pipeline.serve_openai_neutral import neutral_of

MOST_STOPS, STOP_CHARACTERS = 16, 256
MOST_MESSAGES, MOST_PARTS = 1024, 1024
MOST_LOGPROBS = 20
MASK63 = (1 << 63) - 1


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
Short = Annotated[str, Field(max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Strict):
    """Of a streamed answer. `include_obfuscation` is taken and does nothing: chunks are never padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(_Strict):
    """What plain completions and chats have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MASK63)  # -1 and 0: all tokens
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[Stop], BeforeValidator(_stops), Field(max_length=MOST_STOPS)] = []
    seed: int | None = Field(None, ge=-(1 << 63), le=MASK63)
    n: int = Field(1, ge=1)
    user: Short = ""
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] = {}
    store: bool = True


class CompletionRequest(Common):
    """The body of `/v1/completions`. A prompt is a text, or a list of texts that are completed one by one."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message. `name` is taken and not shown to the model: chat templates have no place for it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts), Field(min_length=1, max_length=MOST_PARTS)]
    name: Short = ""


class ChatRequest(Common):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


@dataclass(frozen=True)
class Wanted:
    """A request as the engine will see it, apart from its prompts.

    Attributes:
        prompts: texts of a plain completion; for a chat its messages, with `role` and `content`.
        logprobs: as `Ask.logprobs`.
    """

    model: str
    prompts: tuple[str, ...]
    messages: tuple[dict[str, str], ...]
    n: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    seed: int | None
    logprobs: int | None
    store: bool
    echo: bool
    stream: bool
    include_usage: bool

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages)


def read_completion(body: Mapping[str, Any], limits: Limits, defaults: Defaults) -> Wanted:
    """A plain completion. Raises `ApiError` naming the parameter that is not as it must be."""
    request = _checked(CompletionRequest, body)
    prompts = _prompts(request.prompt)
    if request.best_of is not None and request.best_of != request.n:
        raise unsupported("best_of", request.best_of, f"n, which is {request.n}")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", True, "false where 'logprobs' is asked for")
    most = request.max_tokens or min(defaults.max_tokens, limits.max_tokens)
    told = {"prompts": prompts, "messages": (), "echo": request.echo, "logprobs": request.logprobs}
    return _wanted(request, most, told, limits, defaults)


def read_chat(body: Mapping[str, Any], limits: Limits, defaults: Defaults) -> Wanted:
    """A conversation's next message. Raises `ApiError` as `read_completion`."""
    request = _checked(ChatRequest, {**body, "messages": _plain_messages(body.get("messages"))})
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong_value("top_logprobs", "come with 'logprobs': true", request.top_logprobs)
    both = (request.max_completion_tokens, request.max_tokens)
    if None not in both and both[0] != both[1]:
        raise wrong_value("max_tokens", "equal 'max_completion_tokens' where both are given", both[1])
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    messages = tuple(
        {"role": _role(message.role), "content": "".join(part.text for part in message.content)}
        for message in request.messages
    )
    told = {"prompts": (), "messages": messages, "echo": False, "logprobs": logprobs}
    return _wanted(request, both[0] or both[1] or limits.max_tokens, told, limits, defaults)


def _wanted(request: Common, most: int, told: dict[str, Any], limits: Limits, defaults: Defaults) -> Wanted:
    _check_bounds(request, most, len(told["prompts"]) or 1, limits)
    if told["logprobs"] is not None:
        _check_scores(request.n * (len(told["prompts"]) or 1) * most, told["logprobs"], limits)
    top_k = defaults.top_k if request.top_k is None else max(request.top_k, 0)
    return Wanted(
        model=request.model,
        n=request.n,
        max_tokens=most,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_k=top_k,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        stop=tuple(request.stop),
        seed=None if request.seed is None else request.seed & MASK63,
        store=request.store,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        **told,
    )


def _check_bounds(request: Common, most: int, prompts: int, limits: Limits) -> None:
    if most > limits.max_tokens:
        raise wrong_value("max_tokens", f"be at most {limits.max_tokens}", most)
    if request.n * prompts > limits.choices:
        raise wrong_value("n", f"times the number of prompts ({prompts}) be at most {limits.choices}", request.n)
    if request.stream_options is not None and not request.stream:
        raise wrong_value("stream_options", "come with 'stream': true", request.stream_options.model_dump())


def _check_scores(tokens: int, alternatives: int, limits: Limits) -> None:
    if tokens * (alternatives + 1) > limits.scores:
        must = f"be so few that these and one more for each of {tokens} tokens are at most {limits.scores}"
        raise wrong_value("logprobs", must, alternatives)


def _prompts(prompt: Any) -> tuple[str, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt and all(isinstance(text, str) for text in prompt):
        return tuple(prompt)
    raise wrong_value("prompt", "be a text or a list of texts (token ids are not taken)", prompt)


def _plain_messages(messages: Any) -> Any:
    """Messages without what is null or empty in them, so that one of our own answers can be sent back as it is."""
    if not isinstance(messages, list):
        return messages
    empty: tuple[Any, ...] = (None, [], {})
    return [
        {key: value for key, value in message.items() if key == "content" or value not in empty}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # the newer name, which few chat templates know


Model = TypeVar("Model", bound=Common)


def _checked(kind: type[Model], body: Mapping[str, Any]) -> Model:
    told = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in told if name not in kind.model_fields]:
        if (allowed := neutral_of(name)) is None:
            raise _unknown(name, kind)
        if told.pop(name) not in allowed.values:
            raise unsupported(name, body[name], allowed.words)
    try:
        return kind.model_validate(told)
    except ValidationError as error:
        raise _first_problem(error) from None


def _unknown(name: str, kind: type[BaseModel]) -> ApiError:
    near = get_close_matches(name[:64], kind.model_fields, 1)
    meant = f"; did you mean '{near[0]}'?" if near else ""
    return ApiError(400, f"unknown parameter {shown(name)}{meant}", param=name[:64], code="unknown_parameter")


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(place)[:64] for place in problem["loc"])
    if problem["type"] == "missing":
        return ApiError(400, f"'{param}' is required", param=param, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter '{param}'", param=param, code="unknown_parameter")
    if problem["type"] == "list_type":
        return wrong_value(param, "be a list (or a text, where one may stand for it)", problem["input"])
    must = problem["msg"].partition(" should ")[2].partition(" after validation")[0]
    return wrong_value(param, must or f"be right ({problem['msg']})", problem["input"])
