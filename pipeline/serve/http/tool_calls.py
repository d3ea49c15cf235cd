"""Tools of chats: their parameters in OpenAI's form, and the calls that are read from a completion's text.

A call is JSON with the name of a function and its arguments, in the style of the target's chat template. Where a
request demands a call, the completion is that JSON alone, and a grammar enforces it.
"""

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from pipeline.serve.http.errors import JsonObject, wrong_value_error
from stages.sampling.grammars import GrammarSource
from stages.vocabulary.chat import HERMES, CallStyle

MAX_TOOLS = 128
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
BARE = CallStyle()  # of a demanded call
CALL_NAMES = {"name", "arguments", "parameters", "id", "type"}  # in the JSON of a call
SEPARATORS = " \t\r\n;"  # between bare calls
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


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request."""

    tools: tuple[JsonObject, ...] = ()  # as chat templates expect them; empty if none may be called
    style: CallStyle | None = None  # of the calls in a text; None if none may be called
    # schemas of the arguments by function name, if one of these must be called; empty else
    demanded: tuple[tuple[str, JsonObject], ...] = ()
    names: frozenset[str] = frozenset()  # of the functions that may be called

    def adopt_style(self, style: CallStyle | None) -> "ToolUse":
        """Return it with the style of the chat template, if the model chooses whether to call."""
        return replace(self, style=style) if style and self.tools and not self.demanded else self

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
        return ToolUse(shown, HERMES, names=frozenset(names))
    schemas = [(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in tools]
    demanded = tuple((name, schema) for name, schema in schemas if name in chosen)
    return ToolUse(shown, BARE, demanded, frozenset(chosen))


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

    Held back is what may become a call, whatever follows, and white space before it. All else is content: a marker
    without JSON after it, JSON that no function of the request takes, a call that was cut short.

    >>> reader = CallReader(ToolUse(style=HERMES, names=frozenset({"add"})))
    >>> reader.push('I <tool_call> add. <tool_call>{"sum": 1, <tool')
    ('I <tool_call> add. <tool_call>{"sum": 1,', [])
    >>> reader.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> reader.push("\\n", last=True)
    ('', [])
    """

    def __init__(self, use: ToolUse) -> None:
        self.count = 0  # calls so far
        self._names, self._style, self._pending = use.names, use.style, ""
        self._bare = True  # whether a call may begin here without a marker
        self._separators: str | None = None  # before such a call; white space

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add a part of the text. Returns the new content and the new calls."""
        if self._style is None:
            return text, []
        self._pending += text
        parts, calls = list[str](), list[ToolCall]()
        while (place := self._find_begin(self._style)) is not None:
            begin, body = place
            try:
                read = self._read_calls(self._style, body, last)
                if read is None and not last:
                    break
            except ValueError:
                read = None
            if read is None:
                parts.append(self._take(body))
                self._bare = False
                continue
            end, found = read
            parts.append(self._take(begin).rstrip())
            self._take(end - begin)
            calls, self._bare, self._separators = calls + found, True, SEPARATORS
        self.count += len(calls)
        held = self._pending[place[0] :] if place else self._find_begun(self._style)
        parts.append(self._take(len(self._pending.removesuffix(held).rstrip())))
        if last:
            rest = self._take(len(self._pending))
            parts.append(rest.rstrip(self._separators if self._bare else None) if self.count else rest)
        return "".join(parts), calls

    def _take(self, size: int) -> str:
        taken, self._pending = self._pending[:size], self._pending[size:]
        return taken

    def _find_begin(self, style: CallStyle) -> tuple[int, int] | None:
        """Return where what may be calls begins, and where their JSON does; None if there is no such place so far."""
        if self._bare:
            rest = self._pending.lstrip(self._separators)
            body = len(self._pending) - len(rest)
            if rest.startswith(("{", "[")):
                return 0, body
            if style.begin and rest.startswith(style.begin):
                return 0, body + len(style.begin)
            self._bare = style.begin.startswith(rest)  # it is not decided yet
        begin = -1 if self._bare or not style.begin else self._pending.find(style.begin)
        return None if begin < 0 else (begin, begin + len(style.begin))

    def _find_begun(self, style: CallStyle) -> str:
        """Return the end of the text that the marker may begin with."""
        if self._bare:
            return self._pending
        return next(
            begun for size in range(len(style.begin), -1, -1) if self._pending.endswith(begun := style.begin[:size])
        )

    def _read_calls(self, style: CallStyle, body: int, last: bool) -> tuple[int, list[ToolCall]] | None:
        """Read the calls whose JSON begins at a place. Returns where they end, and the calls; None while they are open.
        Raises `ValueError` if they are none, whatever follows.
        """
        text = self._pending[body:].lstrip()
        parsed = parse_calls(text, self._names)
        if parsed is None:
            return None
        calls, size = parsed
        end = len(self._pending) - len(text) + size
        rest = self._pending[end:].lstrip()
        if rest.startswith(style.end):
            return (len(self._pending) - len(rest) + len(style.end) if style.end else end), calls
        if last and style.end.startswith(rest):  # the end of the sequence closes the call
            return len(self._pending), calls
        if rest.startswith((style.begin, "{", "[")) or (last and style.begin.startswith(rest)):
            return end, calls
        if style.end.startswith(rest) or style.begin.startswith(rest):
            return None
        raise ValueError("a call must end with its marker")


def parse_calls(text: str, names: Collection[str]) -> tuple[list[ToolCall], int] | None:
    """Parse JSON at the beginning of a text as a call of one of these functions, or as a list of calls.

    Returns the calls and the length of the JSON; None if it is not complete. Raises `ValueError` if it is something
    else, whatever follows: the keys and values that are there already are checked.
    """
    if text and text[0] not in "{[":
        raise ValueError("calls must be objects")
    begun = from_json(text, allow_partial=True, allow_inf_nan=False) if text else []
    for call in begun if isinstance(begun, list) else [begun]:
        if (
            not isinstance(call, dict)
            or not call.keys() <= CALL_NAMES
            or call.get("name", next(iter(names))) not in names
        ):
            raise ValueError("a call must have the name of a function")
    try:
        value, size = DECODER.raw_decode(text)
    except RepeatedNameError:
        raise
    except ValueError:
        return None
    calls = [_make_call(one) for one in (value if isinstance(value, list) else [value])]
    if not calls:
        raise ValueError("a list of calls must not be empty")
    return calls, size


def _make_call(value: dict[str, Any]) -> ToolCall:
    match value:
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    raise ValueError("a call must have a name and arguments")


class RepeatedNameError(ValueError):
    """JSON of an object that has a name twice, so that it is not clear what it says."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RepeatedNameError("an object must have each name once")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


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
