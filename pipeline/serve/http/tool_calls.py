"""Tools of chats: their parameters in OpenAI's form, and the calls that are read from a completion's text.

A call is written as by models of the Hermes and Qwen families: `<tool_call>{"name": ..., "arguments": {}}</tool_call>`.
Where a request demands a call, the completion is that JSON alone, and a grammar enforces it.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from pipeline.serve.http.errors import JsonObject, wrong_value_error
from stages.sampling.grammars import GrammarSource
from stages.vocabulary.chat import CALL_BEGIN, CALL_END

MAX_TOOLS = 128
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(BaseModel):
    """A function that the model may call. `strict` is ignored: only a demanded call follows the schema."""

    model_config = STRICT

    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool: a function."""

    model_config = STRICT

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> JsonObject:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | function}


class CalledFunction(BaseModel):
    """The function of an earlier call, with its arguments as JSON."""

    model_config = STRICT

    name: FunctionName
    arguments: str


class EarlierCall(BaseModel):
    """A call that a message of the assistant has made; other fields of it, such as an index, are ignored."""

    model_config = STRICT | {"extra": "ignore"}

    id: Annotated[str, Field(max_length=512)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> JsonObject:
        """Return it as chat templates expect it: with the arguments as an object. Raises `ApiError`."""
        arguments = _read_object(self.function.arguments)
        if arguments is None:
            raise wrong_value_error("tool_calls", "have a JSON object as arguments", self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class CallForm(Enum):
    """How a completion may write calls."""

    NO = "no"
    TAGGED = "tagged"  # between the markers, with text around them
    BARE = "bare"  # the whole text is one call


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request."""

    tools: tuple[JsonObject, ...] = ()  # as chat templates expect them; empty if none may be called
    form: CallForm = CallForm.NO
    # schemas of the arguments by function name, if one of these must be called; empty else
    demanded: tuple[tuple[str, JsonObject], ...] = ()
    names: frozenset[str] = frozenset()  # of the functions that may be called

    @property
    def markers(self) -> tuple[str, ...]:
        """The names of special tokens that are part of the text."""
        return (CALL_BEGIN, CALL_END) if self.form is CallForm.TAGGED else ()

    def make_grammar(self) -> GrammarSource | None:
        """Make the grammar of a demanded call; None if none is demanded.

        >>> ToolUse(demanded=(("now", {"type": "object"}),)).make_grammar().text
        '{"anyOf": [{"type": "object", "properties": {"name": {"const": "now"}, "arguments": {"type": "object"}}, \
"required": ["name", "arguments"], "additionalProperties": false}]}'
        """
        forms = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.demanded
        ]
        return GrammarSource("json_schema", json.dumps({"anyOf": forms})) if forms else None


NO_TOOLS = ToolUse()


def read_tool_use(tools: Sequence[Tool], choice: object) -> ToolUse:
    """Read the parameters `tools` and `tool_choice`. Raises `ApiError` for a wrong choice."""
    names = [tool.function.name for tool in tools]
    if len({*names}) != len(names):
        raise wrong_value_error("tools", "have different function names", names)
    match choice:
        case None | "auto" | "none" | "required":
            chosen = names
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if not more and not rest:
            chosen = [one for one in names if one == name]
        case _:
            must = "be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
            raise wrong_value_error("tool_choice", must, choice)
    if choice not in (None, "auto", "none") and not chosen:
        raise wrong_value_error("tool_choice", "be possible with the request's 'tools'", choice)
    if not tools or choice == "none":
        return NO_TOOLS
    shown = tuple(tool.for_template() for tool in tools)
    if choice in (None, "auto"):
        return ToolUse(shown, CallForm.TAGGED, names=frozenset(names))
    schemas = [(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in tools]
    demanded = tuple((name, schema) for name, schema in schemas if name in chosen)
    return ToolUse(shown, CallForm.BARE, demanded, frozenset(chosen))


@dataclass(frozen=True)
class ToolCall:
    """A call that was read from a completion, with its arguments as JSON."""

    name: str
    arguments: str

    def describe(self, index: int | None = None) -> JsonObject:
        """Return it in OpenAI's form, with a new id; with its index if it is part of a stream."""
        place: JsonObject = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class CallReader:
    """Divides the text of one completion, which comes in parts, into content and calls.

    What may be the beginning of a call is held back. What turns out to be none is content: a marker without a JSON
    object behind it, JSON that is not valid, a function that the request does not have, a call that was cut short.

    >>> reader = CallReader(ToolUse(form=CallForm.TAGGED, names=frozenset({"add"})))
    >>> reader.push("I <tool_call> add. <tool")
    ('I <tool_call> add.', [])
    >>> reader.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> reader.push("\\n", last=True)
    ('', [])
    """

    def __init__(self, use: ToolUse) -> None:
        self.count = 0  # calls so far
        self._use, self._pending = use, ""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add a part of the text. Returns the new content and the new calls."""
        if self._use.form is CallForm.NO:
            return text, []
        self._pending += text
        content, calls = "", list[ToolCall]()
        if self._use.form is CallForm.TAGGED:
            content = self._read_tagged(calls, last)
        elif last and (call := self._make_call(_read_object(self._pending))):
            calls, self._pending = [call], ""
        self.count += len(calls)
        if last:
            rest, self._pending = self._pending, ""
            content += rest.rstrip() if self.count else rest
        return content, calls

    def _read_tagged(self, calls: list[ToolCall], last: bool) -> str:
        """Remove all that is decided, whatever follows: calls, which are added to the list, and the returned content.

        White space before a call is no content.
        """
        parts = list[str]()
        while (begin := self._pending.find(CALL_BEGIN)) >= 0:
            body = begin + len(CALL_BEGIN)
            end, call = self._find_end(body)
            if end is None and not last:
                break
            parts.append(self._pending[:begin].rstrip() if call else self._pending[:body])
            calls += [call] if call else []
            self._pending = self._pending[end or body :]
        if begin < 0:
            lengths = range(len(CALL_BEGIN) - 1, -1, -1)
            begun = next(length for length in lengths if self._pending.endswith(CALL_BEGIN[:length]))
            begin = len(self._pending) - begun
        content = self._pending[:begin].rstrip()
        self._pending = self._pending[len(content) :]
        return "".join([*parts, content])

    def _find_end(self, body: int) -> tuple[int | None, ToolCall | None]:
        """Return where the first marker's call ends, with the call; or where text goes on, if it is none.

        The place is None while it is open.
        """
        if self._pending[body:].lstrip()[:1] not in ("", "{"):
            return body, None
        end = self._pending.find(CALL_END, body)
        if end < 0:
            return None, None
        call = self._make_call(_read_object(self._pending[body:end]))
        return (end + len(CALL_END), call) if call else (body, None)

    def _make_call(self, value: dict[str, Any] | None) -> ToolCall | None:
        match value:
            case {"name": str(name), "arguments": dict(arguments), **rest} if not rest and name in self._use.names:
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        return None


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def describe_message(text: str, use: ToolUse) -> tuple[JsonObject, int]:
    """Return the message of the assistant whose whole text this is, and its number of calls."""
    content, calls = CallReader(use).push(text, last=True)
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message |= {"content": content or None, "tool_calls": [call.describe() for call in calls]}
    return message, len(calls)
