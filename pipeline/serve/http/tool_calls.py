"""Tools of chats: their parameters in OpenAI's form, and the calls that are read from a completion's text.

A call is JSON with the name of a function and its arguments, or has these in another form, in the style of the target's
chat template. Where a request demands a call, the completion is JSON alone, and a grammar enforces it.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from pipeline.serve.http.errors import JsonObject, wrong_value_error
from stages.sampling.grammars import GrammarSource
from stages.vocabulary.chat import HERMES, MISTRAL, XML, CallStyle

MAX_TOOLS = 128
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
BARE = CallStyle()  # of a demanded call
CALL_NAMES = {"name", "arguments", "parameters", "id", "type"}  # in the JSON of a call
SEPARATORS = " \t\r\n;"  # between bare calls
# A call as Qwen3-Coder writes it. A value ends where its end marker is followed by another parameter or the end.
XML_HEAD, XML_NEXT, XML_END = re.compile(r"<function=([^>\n]*)(>|$)"), "<parameter=", "</function>"
XML_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
NAMED = re.compile(r"([a-zA-Z0-9_.-]*)\s*(?:\[CALL_ID\][a-zA-Z0-9]*)?(?:\[ARGS\])?\s*")  # as Mistral writes it
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
        known: dict[Any, Any] = {tool["function"]["name"]: tool["function"] for tool in map(dict[str, Any], use.tools)}
        self._schemas = {name: known.get(name, {}).get("parameters", {}) for name in use.names}
        self._style, self._pending = use.style, ""
        self._bare = True  # whether a call may begin here without a marker
        self._separators: str | None = None  # before such a call; white space

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add a part of the text. Returns the new content and the new calls."""
        parts = self.divide(text, last=last)
        content = "".join(part for part in parts if isinstance(part, str))
        return content, [part for part in parts if isinstance(part, ToolCall)]

    def divide(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """Add a part of the text. Returns new content and new calls in their order."""
        if self._style is None:
            return [text]
        self._pending += text
        parts = list[str | ToolCall]()
        while (place := self._find_begin(self._style)) is not None:
            begin, body = place
            try:
                read = self._read_calls(self._style, body, last)
                if read is None and not last:
                    break
            except ValueError:
                read = None
            if read is None:
                parts.append(self._take(body if self._bare or body > begin else body + len(self._style.body)))
                self._bare = False
                continue
            end, found = read
            parts.append(self._take(begin).rstrip())
            self._take(end - begin)
            parts += found
            self.count, self._bare, self._separators = self.count + len(found), True, SEPARATORS
        held = self._pending[place[0] :] if place else self._find_begun(self._style)
        parts.append(self._take(len(self._pending.removesuffix(held).rstrip())))
        if last:
            rest = self._take(len(self._pending))
            parts.append(rest.rstrip(self._separators if self._bare else None) if self.count else rest)
        return parts

    def _take(self, size: int) -> str:
        taken, self._pending = self._pending[:size], self._pending[size:]
        return taken

    def _find_begin(self, style: CallStyle) -> tuple[int, int] | None:
        """Return where what may be calls begins, and where it does behind its marker; None if there is no such place
        so far.
        """
        if self._bare:
            rest = self._pending.lstrip(self._separators)
            body = len(self._pending) - len(rest)
            if style.begin and rest.startswith(style.begin):
                return 0, body + len(style.begin)
            self._bare = any(begin.startswith(rest) for begin in (style.begin, style.body))  # it is not decided yet
            if not self._bare and rest.startswith(("{", "[", style.body or "{")):
                self._bare = True
                return 0, body
        found = [] if self._bare else [self._pending.find(begin) for begin in (style.begin, style.body) if begin]
        begin = min((place for place in found if place >= 0), default=None)
        if begin is None:
            return None
        return begin, begin + len(style.begin) * self._pending.startswith(style.begin, begin)

    def _find_begun(self, style: CallStyle) -> str:
        """Return the end of the text that the marker may begin with."""
        if self._bare:
            return self._pending
        begun = (begin[:size] for begin in (style.begin, style.body) for size in range(len(begin) + 1))
        return max((one for one in begun if self._pending.endswith(one)), key=len)

    def _read_calls(self, style: CallStyle, body: int, last: bool) -> tuple[int, list[ToolCall]] | None:
        """Read the calls that begin at a place, behind their marker. Returns where they end, and the calls; None while
        they are open. Raises `ValueError` if they are none, whatever follows.
        """
        text = self._pending[body:].lstrip()
        parsed = parse_calls(text, self._schemas)
        if parsed is None:
            return None
        calls, size = parsed
        end = len(self._pending) - len(text) + size
        rest = self._pending[end:].lstrip()
        if rest.startswith(style.end):
            return (len(self._pending) - len(rest) + len(style.end) if style.end else end), calls
        if last and style.end.startswith(rest):  # the end of the sequence closes the call
            return len(self._pending), calls
        begins = (style.begin, style.body or style.begin)
        if rest.startswith((*begins, "{", "[")) or (last and any(begin.startswith(rest) for begin in begins)):
            return end, calls
        if any(marker.startswith(rest) for marker in (style.end, *begins)):
            return None
        raise ValueError("a call must end with its marker")


def parse_calls(text: str, schemas: Mapping[str, Any]) -> tuple[list[ToolCall], int] | None:
    """Parse the beginning of a text as a call of one of these functions, or as a list of calls: JSON, or in the form of
    Qwen3-Coder or of Mistral. The functions have schemas of their arguments.

    Returns the calls and the length of their text; None if it is not complete. Raises `ValueError` if it is something
    else, whatever follows: the keys and values that are there already are checked.
    """
    if text.startswith("<"):
        return _parse_xml(text, schemas)
    if text and text[0] not in "{[":
        return _parse_named(text, schemas)
    names = schemas.keys()
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


def _check_name(name: str, schemas: Mapping[str, Any], *, whole: bool) -> None:
    if not (name in schemas if whole else any(known.startswith(name) for known in schemas)):
        raise ValueError("a call must have the name of a function")


def _parse_xml(text: str, schemas: Mapping[str, Any]) -> tuple[list[ToolCall], int] | None:
    """Parse `<function=NAME>`, parameters and `</function>`, as Qwen3-Coder writes them; else as `parse_calls`."""
    head = XML_HEAD.match(text)
    if head is None:
        if XML.body.startswith(text):
            return None
        raise ValueError("a call must begin with the name of a function")
    _check_name(head[1], schemas, whole=bool(head[2]))
    properties, arguments, place = schemas.get(head[1], {}).get("properties", {}), dict[str, Any](), head.end()
    while found := XML_PARAMETER.match(text, place):
        if found[1] in arguments:
            raise ValueError("a call must have each parameter once")
        arguments[found[1]] = _read_value(found[2], properties.get(found[1]))
        place = found.end()
    rest = text[place:].lstrip()
    if rest.startswith(XML_END):
        return [ToolCall(head[1], json.dumps(arguments, ensure_ascii=False))], len(text) - len(rest) + len(XML_END)
    if not rest.startswith(XML_NEXT) and not any(mark.startswith(rest) for mark in (XML_NEXT, XML_END)):
        raise ValueError("a call must hold parameters, and end")
    return None


def _read_value(text: str, schema: object) -> Any:
    """Return the value of a parameter that is written as text: itself, where the schema lets it be a text."""
    kinds = _list_kinds(schema)
    if text in ("null", "None") and "null" in kinds:
        return None
    if "string" in kinds or not kinds:
        return text
    try:
        return json.loads(text.lower() if "boolean" in kinds else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _list_kinds(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind: Any = schema.get("type") or []
    choices = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return {*([kind] if isinstance(kind, str) else kind)}.union(*(_list_kinds(one) for some in choices for one in some))


def _parse_named(text: str, schemas: Mapping[str, Any]) -> tuple[list[ToolCall], int] | None:
    """Parse a name, `[ARGS]` and an object, as Mistral writes them, also with an id; else as `parse_calls`."""
    found: Any = NAMED.match(text)
    _check_name(found[1], schemas, whole=len(found[1]) < len(text))
    body = text[found.end() :]
    if not body.startswith("{"):
        if any(mark.startswith(body) for mark in MISTRAL.inner):
            return None
        raise ValueError("a call must have an object as arguments")
    from_json(body, allow_partial=True, allow_inf_nan=False)
    try:
        arguments, size = DECODER.raw_decode(body)
    except RepeatedNameError:
        raise
    except ValueError:
        return None
    return [ToolCall(found[1], json.dumps(arguments, ensure_ascii=False))], found.end() + size


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
