"""`/v1/responses`, OpenAI's newer interface: a request becomes a chat, and the chunks of its message typed events.

Nothing is kept between requests: a client sends the whole conversation each time.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from typing_extensions import override

from pipeline.serve.http.errors import ApiError, JsonObject, unsupported_error, wrong_value_error
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.openai_requests import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    ChatRequest,
    CommonRequest,
    ParsedRequest,
    Tokens,
    parse_chat,
    validate,
)
from pipeline.serve.http.openai_responses import CompletionResponse, Scored, encode_event, format_chat_logprobs
from pipeline.serve.http.response_stream import ChoiceChunk
from pipeline.serve.http.tool_calls import MAX_TOOLS, ToolCall
from pipeline.serve.messages import Chunk, Finish
from pipeline.sources.conversations import add_item
from stages.sampling.params import SamplingParams

LOGPROBS = "message.output_text.logprobs"  # in `include`
# Parameters of the chat that have another name here.
CHAT_NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "reasoning", "text")


def _to_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(CommonRequest):
    """The body of `/v1/responses`. `input` is a text or a list of messages, calls of functions and their results."""

    input: Annotated[list[dict[str, Any]], BeforeValidator(_to_items), Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: list[dict[str, Any]] = Field([], max_length=MAX_TOOLS)
    tool_choice: object = "auto"
    text: dict[str, Any] = Field({})
    include: list[str] = Field([])
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    previous_response_id: object = None
    chat_template_kwargs: object = None
    enable_thinking: object = None


def parse_response(body: Mapping[str, object], limits: Limits, defaults: SamplingParams) -> ParsedRequest:
    """Parse a request for a response as one for a chat. Raises `ApiError` that names the wrong parameter."""
    request = validate(ResponseRequest, body)
    if request.previous_response_id is not None:
        must = "be left out, because responses are not kept: send the conversation as 'input'"
        raise wrong_value_error("previous_response_id", must, request.previous_response_id)
    if request.n != 1:
        raise unsupported_error("n", request.n, "1")
    chat = {name: value for name, value in body.items() if value is not None and name in ChatRequest.model_fields}
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat |= {"messages": first + _read_input(request.input), "tools": [_nest(tool) for tool in request.tools]}
    chat["tool_choice"] = _nest(request.tool_choice)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if text_format := request.text.get("format"):
        chat["response_format"] = _nest(text_format)
    if LOGPROBS in request.include:
        chat["logprobs"] = True
    elif not request.top_logprobs:
        chat.pop("top_logprobs", None)
    try:
        parsed = parse_chat(chat, limits, defaults)
    except ApiError as error:
        raise _rename(error) from None
    sampling = {"temperature": parsed.sampling.temperature, "top_p": parsed.sampling.top_p}
    shown = sampling | {name: body[name] for name in REPEATED if body.get(name) is not None}
    shown |= {"tools": request.tools, "tool_choice": request.tool_choice, "store": request.store}
    return replace(parsed, shown=shown)


def _nest(value: object) -> object:
    """Return a function, the choice of one, or a schema as chats have it: below its type, not beside it."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("function", "json_schema"):
        return value
    return {"type": kind, kind: {key: one for key, one in value.items() if key != "type"}}


def _rename(error: ApiError) -> ApiError:
    """Name the parameter of a chat as it is called here."""
    detail: Any = error.body["error"]
    first = str(detail["param"]).partition(".")[0]
    if name := CHAT_NAMES.get(first):
        detail |= {"param": name, "message": detail["message"].replace(f"'{first}", f"'{name}")}
    return error


def _read_input(given: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    messages: list[JsonObject] = []
    for number, item in enumerate(given):
        try:
            add_item(messages, item)
        except ValueError as error:
            raise wrong_value_error(f"input.{number}", str(error), item) from None
    return messages


class ResponseObject(CompletionResponse):
    """A response of `/v1/responses`, whole or as a stream of typed events. Its items are one message, and calls, in the
    order of their begin.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items: list[dict[str, Any]] = []
        self._content: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._place: dict[str, Any] = {}  # of the message's content in events; empty until it begins
        self._scores: list[Any] = []  # log probabilities that wait for the text that they belong to
        self._events, self._number = b"", 0  # encoded, not yet sent; number of the next

    @override
    def add_chunk(self, index: int, chunk: Chunk) -> list[Scored] | None:
        scored = super().add_chunk(index, chunk)
        found: Any = format_chat_logprobs(scored or (), self._bytes_of)
        self._scores += found["content"]
        for part in self._choices[index].calls.divide(chunk.text, last=chunk.finish is not None):
            if isinstance(part, ToolCall):
                self._add_call(part)
            elif part:
                self._begin_message()
                self._add_event("output_text.delta", **self._place, delta=part, logprobs=self._scores)
                self._content["text"] += part
                self._content["logprobs"] += self._scores
                self._scores = []
        if chunk.finish is not None:
            self._end_message()
        return scored

    @override
    def format_whole(self) -> JsonObject:
        return self._describe()

    @override
    def encode_opening(self) -> bytes:
        self._add_event("created", response=self._describe())
        return self._take_events("in_progress", response=self._describe())

    @override
    def encode_chunks(self, chunks: Iterable[ChoiceChunk]) -> Iterator[bytes]:
        for index, chunk in chunks:
            self.add_chunk(index, chunk)
            yield self._take_events()

    @override
    def encode_closing(self) -> bytes:
        return self._take_events(self._status, response=self._describe())

    def _begin_message(self) -> None:
        if self._place:
            return
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._place = {**self._add_item({**item, "status": "in_progress", "content": []}), "content_index": 0}
        self._add_event("content_part.added", **self._place, part=self._content)

    def _end_message(self) -> None:
        if not self._items:  # a response has at least an empty one
            self._begin_message()
        if self._place:
            self._content["logprobs"] += self._scores
            done = {key: self._content[key] for key in ("text", "logprobs")}
            self._add_event("output_text.done", **self._place, **done)
            self._add_event("content_part.done", **self._place, part=self._content)
            self._end_item(self._place["output_index"], status=self._status, content=[self._content])

    def _add_call(self, call: ToolCall) -> None:
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.describe()["id"]}
        place = self._add_item({**item, "name": call.name, "arguments": "", "status": "in_progress"})
        self._add_event("function_call_arguments.delta", **place, delta=call.arguments)
        self._add_event("function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        self._end_item(place["output_index"], status="completed", arguments=call.arguments)

    def _add_item(self, item: dict[str, Any]) -> dict[str, Any]:
        """Begin an item. Returns its place in events."""
        self._add_event("output_item.added", output_index=len(self._items), item=item)
        self._items.append(item)
        return {"item_id": item["id"], "output_index": len(self._items) - 1}

    def _end_item(self, index: int, **changed: object) -> None:
        self._items[index] |= changed
        self._add_event("output_item.done", output_index=index, item=self._items[index])

    def _add_event(self, kind: str, **fields: object) -> None:
        if self._parsed.body.stream:
            event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
            self._events += f"event: response.{kind}\n".encode() + encode_event(event)
            self._number += 1

    def _take_events(self, last: str | None = None, **fields: object) -> bytes:
        if last:
            self._add_event(last, **fields)
        events, self._events = self._events, b""
        return events

    @property
    def _status(self) -> str:
        finish = self._choices[0].finish
        return "in_progress" if finish is None else "incomplete" if finish is Finish.LENGTH else "completed"

    def _describe(self) -> JsonObject:
        """Return the response as it is so far, with the parameters that it repeats."""
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "previous_response_id": None,
            "parallel_tool_calls": True,
            "truncation": "disabled",
            **(self._parsed.shown or {}),
            "output": self._items,
            "usage": None if self._status == "in_progress" else self._describe_usage(),
        }

    def _describe_usage(self) -> JsonObject:
        usage: Any = self._sum_usage()
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "omnidraft": usage["omnidraft"],
        }
