"""`/v1/responses`, OpenAI's newer interface: a request becomes a chat, and the chunks of its message typed events.

Nothing is kept between requests: a client sends the whole conversation each time.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
from pipeline.serve.messages import Finish
from pipeline.sources.conversations import add_item
from stages.sampling.params import SamplingParams

LOGPROBS = "message.output_text.logprobs"  # in `include`
# Parameters of the chat that have another name here.
CHAT_NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "reasoning", "text")

Event = tuple[str, JsonObject]  # its type and the other fields but its number


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
    chat |= {"messages": first + _read_input(request.input), "tools": [_nest(tool, "tools") for tool in request.tools]}
    chat["tool_choice"] = _nest(request.tool_choice, "tool_choice")
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if text_format := request.text.get("format"):
        chat["response_format"] = _nest_format(text_format)
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


def _nest(value: object, param: str) -> object:
    """Return a tool, or the choice of one, in the form of chats. Raises `ApiError` for tools that are no functions."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise wrong_value_error(param, "have the type 'function', the only one of this server", value)
    return {"type": "function", "function": {key: one for key, one in value.items() if key != "type"}}


def _nest_format(given: object) -> object:
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: one for key, one in given.items() if key != "type"}}
    return given


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


class _Output:
    """The items of a response, and the events of their growth: one message, and calls, in the order of their begin."""

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        self._message: JsonObject | None = None
        self._place: JsonObject = {}  # of the message's text, in events
        self._text, self._logprobs, self._unsent = "", list[JsonObject](), list[JsonObject]()

    def add(self, content: str, calls: Sequence[ToolCall], logprobs: Sequence[JsonObject]) -> list[Event]:
        """Add a part of the message and calls; log probabilities wait for the text that they belong to."""
        events = list[Event]()
        self._unsent += logprobs
        if content:
            events = [] if self._message else self._begin_message()
            delta = {**self._place, "delta": content, "logprobs": self._unsent}
            events.append(("response.output_text.delta", delta))
            self._text, self._logprobs, self._unsent = self._text + content, self._logprobs + self._unsent, []
        for call in calls:
            events += self._add_call(call)
        return events

    def _begin_message(self) -> list[Event]:
        self._message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        place = {"item_id": self._message["id"], "output_index": len(self.items)}
        self._place = {**place, "content_index": 0}
        self.items.append(self._message)
        self._message |= {"status": "in_progress", "content": []}
        added = {"output_index": place["output_index"], "item": dict(self._message)}
        part = {**self._place, "part": self._make_part()}
        return [("response.output_item.added", added), ("response.content_part.added", part)]

    def _make_part(self) -> JsonObject:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _add_call(self, call: ToolCall) -> list[Event]:
        chat: Any = call.describe()
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": chat["id"], "name": call.name}
        index, place = {"output_index": len(self.items)}, {"item_id": item["id"], "output_index": len(self.items)}
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self.items.append(done)
        return [
            ("response.output_item.added", {**index, "item": {**item, "arguments": "", "status": "in_progress"}}),
            ("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
            ("response.function_call_arguments.done", {**place, "arguments": call.arguments, "name": call.name}),
            ("response.output_item.done", {**index, "item": done}),
        ]

    def close(self, *, cut: bool) -> list[Event]:
        """End the message; a response without any item gets an empty one."""
        events = [] if self.items else self._begin_message()
        if self._message is None:
            return events
        self._logprobs += self._unsent
        part = self._make_part()
        self._message |= {"status": "incomplete" if cut else "completed", "content": [part]}
        done = {"output_index": self._place["output_index"], "item": self._message}
        text = {**self._place, "text": self._text, "logprobs": self._logprobs}
        return [
            *events,
            ("response.output_text.done", text),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", done),
        ]


class ResponseObject(CompletionResponse):
    """A response of `/v1/responses`, whole or as a stream of typed events."""

    _number = 0  # of the next event
    _ended = False

    @override
    def format_whole(self) -> JsonObject:
        (choice,) = self._choices
        for place, text in enumerate(choice.text, start=1):
            self._output.add(*choice.calls.push(text, last=place == len(choice.text)), [])
        self._output.add("", [], self._format_logprobs(choice.scored))
        self._output.close(cut=choice.finish is Finish.LENGTH)
        self._ended = True
        return self._describe()

    @override
    def encode_opening(self) -> bytes:
        begun: JsonObject = {"response": self._describe()}
        return self._encode([("response.created", begun), ("response.in_progress", begun)])

    @override
    def encode_chunks(self, chunks: Iterable[ChoiceChunk]) -> Iterator[bytes]:
        for index, chunk in chunks:
            scored = self.add_chunk(index, chunk)
            parts = self._choices[index].calls.push(chunk.text, last=chunk.finish is not None)
            yield self._encode(self._output.add(*parts, self._format_logprobs(scored)))

    @override
    def encode_closing(self) -> bytes:
        cut = self._choices[0].finish is Finish.LENGTH
        events, self._ended = self._output.close(cut=cut), True
        kind = "response.incomplete" if cut else "response.completed"
        return self._encode([*events, (kind, {"response": self._describe()})])

    @cached_property
    def _output(self) -> _Output:
        return _Output()

    def _format_logprobs(self, scored: Sequence[Scored] | None) -> list[JsonObject]:
        found: Any = format_chat_logprobs(scored or (), self._bytes_of)
        return list(found["content"])

    def _encode(self, events: Iterable[Event]) -> bytes:
        encoded = []
        for kind, fields in events:
            event = {"type": kind, "sequence_number": self._number, **fields}
            encoded.append(b"event: " + kind.encode() + b"\n" + encode_event(event))
            self._number += 1
        return b"".join(encoded)

    def _describe(self) -> JsonObject:
        """Return the response as it is so far, with the parameters that it repeats."""
        cut = self._choices[0].finish is Finish.LENGTH
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": ("incomplete" if cut else "completed") if self._ended else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut and self._ended else None,
            "previous_response_id": None,
            "parallel_tool_calls": True,
            "truncation": "disabled",
            **(self._parsed.shown or {}),
            "output": list(self._output.items),
            "usage": self._describe_usage() if self._ended else None,
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
