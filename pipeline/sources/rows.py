"""Rows of a source, and the rule that makes a prompt of a row or rejects it with a reason."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from reprlib import repr as short
from string import Formatter
from typing import Any, NoReturn, Protocol, Self

from pipeline.config.sections import SourceSettings
from pipeline.sources.conversations import (
    Messages,
    add_item,
    from_python,
    from_text,
    list_turns,
    read_function,
    read_messages,
    to_text,
)
from store.errors import ConfigError, SourceError

PROMPT = "prompt"
PROMPT_ALONE = (("", PROMPT),)  # a template
TARGET = "target"  # the column that may name a row's target
INPUT = "input"
NESTED = (INPUT, "body")  # may be a request: of a line of a batch for OpenAI's API, or of its preferences
USUAL_FIELDS = (PROMPT, "messages", "conversations", "question", "text", "instruction", "content", "chosen", *NESTED)
INSTRUCTIONS = ("instruction", INPUT)  # texts to which other columns belong
CONVERSATIONS = ("messages", "conversations", "chosen")  # usual fields that never are text
BESIDE = (INPUT, "system", "tools", "history", "instructions")  # columns that belong to a usual field
ID_COLUMNS = ("prompt_id", "id", "task_id", "custom_id")
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character; cannot be encoded in UTF-8


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a row cannot be a prompt: what must hold, and what was got."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row with its line from 1: values by column, or the reason why it could not be read."""

    line: int
    values: Mapping[str, object] | Fault


class Rows(Protocol):
    """Rows of one file or feed, before they become prompts.

    The constructor opens the source far enough to know that it can be read, and raises SourceError if not.
    """

    columns: Collection[str] | None  # names; None if they are known only from the rows

    def count(self) -> int | None:
        """Return the approximate number of rows; by default None: unknown, or costly to know."""
        return None

    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        """Yield all rows in a fixed order; called at most once, holds a bounded part in memory.

        A row may lack columns other than the given ones. A row that cannot be read comes as a `Fault`,
        and the rest follow.
        """
        ...


@dataclass(frozen=True, slots=True)
class Condition:
    """A `--where` condition: the text of a column equals a value, or does not."""

    column: str
    value: str
    equal: bool

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse `column=value` or `column!=value`."""
        column, sign, value = text.partition("=")
        equal = not column.endswith("!")
        column = column if equal else column[:-1]
        if not sign or not column:
            raise ConfigError(f"A condition must be 'column=value' or 'column!=value', got '{text}'.")
        return cls(column, value, equal)

    def holds(self, values: Mapping[str, object]) -> bool:
        """Return whether a row that has the column meets the condition."""
        return (_to_text(values[self.column]) == self.value) is self.equal


@dataclass(frozen=True)
class PromptRule:
    """The rule that selects rows and makes prompts of them."""

    fields: tuple[str, ...]  # columns that may hold the prompt; the first one that a row has is used
    # literal texts, each with the column that follows it; `prompt` stands for the prompt field
    template: tuple[tuple[str, str | None], ...]
    where: tuple[Condition, ...]  # conditions that must all hold
    beside: tuple[str, ...] = ()  # further columns of a prompt
    every_turn: bool = False  # whether each message of a user in a conversation is answered, or the last one

    @classmethod
    def from_settings(cls, options: SourceSettings) -> Self:
        fields = (options.prompt_field,) if options.prompt_field else USUAL_FIELDS
        template = PROMPT_ALONE if options.template is None else _parse_template(options.template)
        where = tuple(Condition.from_text(text) for text in options.where)
        beside = () if options.prompt_field else BESIDE
        return cls(fields, template, where, beside, options.turns == "all")

    @property
    def columns(self) -> set[str]:
        """Every column that the rule or a prompt's name may need."""
        return {*self.fields, *self.beside, *self._list_other_columns(), *ID_COLUMNS, TARGET}

    def narrow_to(self, columns: Collection[str], place: str) -> Self:
        """Return the rule for rows of `place` that have these columns: one prompt field for all of them."""
        for column in self._list_other_columns():
            if column not in columns:
                _refuse_columns([column], columns, place, "--where or --template")
        field = next((field for field in self.fields if field in columns), None)
        if field is None and any(name == PROMPT for _, name in self.template):
            _refuse_columns(self.fields, columns, place, "source.prompt_field")
        return replace(self, fields=(field,)) if field else self

    def apply(self, values: Mapping[str, object]) -> Sequence[str] | Fault:
        """Return the text of the prompt, of several if every turn is answered, or a `Fault`; nothing for a row that a
        condition excludes.
        """
        for condition in self.where:
            if condition.column not in values:
                return Fault(_name_missing([condition.column], values))
            if not condition.holds(values):
                return ()
        names = [name for _, name in self.template]
        try:
            prompts = self._read_prompt(values) if PROMPT in names else [""]
            others = {name: _read_value(name, values) for name in names if name not in (None, PROMPT)}
        except (ValueError, RecursionError) as error:
            return Fault(str(error))
        if self.template != PROMPT_ALONE and any(map(from_text, prompts)):
            return Fault("the prompt must be text where a template is given, got a conversation")
        texts = []
        for prompt in prompts:
            known = others | {PROMPT: prompt, None: ""}
            text = _check_text("".join(literal + known[name] for literal, name in self.template))
            if isinstance(text, Fault):
                return text
            texts.append(text)
        return texts

    def _read_prompt(self, values: Mapping[str, object]) -> list[str]:
        """Return the text of the prompt, of several if every turn is answered. Raises `ValueError` for another value
        than text or a conversation.
        """
        field = next((field for field in self.fields if field in values), None)
        if field is None:
            raise ValueError(_name_missing(self.fields, values))
        value = values[field]
        if field in NESTED and isinstance(value, Mapping):
            return replace(self, fields=USUAL_FIELDS[:-1])._read_prompt(value)
        beside = {name: values.get(name) for name in self.beside}
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return [self._read_text(field, one) for one in value]
        found = _read_conversation(field, value)
        if not found and field not in INSTRUCTIONS:
            return [self._read_text(field, value)]
        messages, tools = found or (_read_instruction(field, self._read_text(field, value), beside), [])
        tools = tools or _read_tools(beside.get("tools"))
        system = beside.get("system") or beside.get("instructions")
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": str(system)}, *messages]
        if not found and not tools and len(messages) == 1:
            return [messages[0]["content"]]
        turns = list_turns(messages)
        if not turns:
            raise ValueError(f"the conversation in '{field}' must have a message of the user")
        return [to_text(turn, tools) for turn in (turns if self.every_turn else turns[-1:])]

    def _read_text(self, field: str, value: object) -> str:
        if not isinstance(value, str) or (field in CONVERSATIONS and self.beside):
            kinds = "messages" if field in CONVERSATIONS else "text or messages"
            raise ValueError(f"the prompt in '{field}' must be {kinds}, got {short(value)}")
        if not value.strip():
            raise ValueError(f"the prompt in '{field}' must not be empty")
        return value

    def _list_other_columns(self) -> list[str]:
        in_template = [name for _, name in self.template if name not in (None, PROMPT)]
        return [*(condition.column for condition in self.where), *(name for name in in_template if name)]


def prompt_id(values: Mapping[str, object], otherwise: str) -> str:
    """Return the row's own id if it has a usable one, else `otherwise`."""
    for column in ID_COLUMNS:
        value = values.get(column)
        if isinstance(value, str | int) and not isinstance(value, bool) and isinstance(_check_text(str(value)), str):
            return str(value)
    return otherwise


def require_different(columns: Sequence[str], place: str) -> Sequence[str]:
    """Return the columns of a place, if no two have one name. Raises `SourceError`."""
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"{place} must have columns of different names, got two of the name {short(twice)}.")
    return columns


def import_extra(module: str, extra: str, spec: str) -> Any:
    """Import a library of an optional extra for a source."""
    try:
        return import_module(module)
    except ImportError:
        raise SourceError(
            f"The source '{spec}' needs the optional extra '{extra}'. Try: pip install 'omnidraft[{extra}]'"
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'KNOWN'?` with the closest known name, or an empty text."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _parse_template(template: str) -> tuple[tuple[str, str | None], ...]:
    """Parse a template of plain `{column}` fields: other forms of `str.format` could read attributes of objects."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"The template must be a format text, got {short(template)}: {error}. {_ESCAPE}") from None
    for _, name, spec, conversion in parts:
        if name is not None and (not name or spec or conversion or set(name) & set(".[]{}")):
            raise ConfigError(f"A template may only hold plain '{{column}}' names, got {short(template)}. {_ESCAPE}")
    return tuple((literal, name) for literal, name, _, _ in parts)


_ESCAPE = "Write '{{' and '}}' for braces in the text."


def _to_text(value: object) -> str:
    """Convert a value to text: booleans as `true` and `false`, null as an empty text."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_text(text: str) -> str | Fault:
    if not text.strip():
        return Fault("the prompt must not be empty")
    if "\0" in text:
        return Fault("the prompt must not contain NUL characters")
    if SURROGATE.search(text):
        return Fault("the prompt must be valid Unicode, got half of a surrogate pair")
    return text


def _read_value(name: str, values: Mapping[str, object]) -> str:
    """Return a column's text in a template. Raises `ValueError` if it has none."""
    if name not in values:
        raise ValueError(_name_missing([name], values))
    value = values[name]
    if not isinstance(value, str | int | float):
        raise ValueError(f"the column '{name}' must hold text or a number, got {short(value)}")  # noqa: TRY004
    return _to_text(value)


def _read_conversation(field: str, value: object) -> tuple[Messages, list[Any]] | None:
    """Return the messages of a prompt, and the tools that its text names; None for one that is no conversation."""
    if isinstance(value, str):
        messages = from_python(value)
        return (messages, []) if messages else from_text(value)
    if not isinstance(value, list):
        return None
    items: Messages = []
    for number, item in enumerate(value if field == INPUT else (), start=1):
        try:
            add_item(items, item)
        except ValueError as error:
            raise ValueError(f"item {number} must {error}") from None
    return read_messages(items or value), []


def _read_instruction(field: str, text: str, beside: Mapping[str, object]) -> Messages:
    """Return an instruction with its input, after the pairs of its history, as messages."""
    history, more = beside.get("history"), beside.get(INPUT) if field != INPUT else None
    pairs = [zip(("user", "assistant"), pair, strict=True) for pair in (history if isinstance(history, list) else ())]
    messages = [{"role": role, "content": one} for pair in pairs for role, one in pair]
    return read_messages([*messages, {"role": "user", "content": f"{text}\n{more}" if more else text}])


def _read_tools(value: object) -> list[Any]:
    """Return the tools beside a conversation, which many data sets keep as JSON."""
    tools = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list):
        raise ValueError(f"the tools must be a list, got {short(tools)}")  # noqa: TRY004
    return [read_function(tool) for tool in tools]


def _name_missing(wanted: Collection[str], values: Mapping[str, object]) -> str:
    return f"the row must have {_name_columns(wanted)}, got {_join_names(values)}"


def _refuse_columns(wanted: Collection[str], columns: Collection[str], place: str, option: str) -> NoReturn:
    hint = next(filter(None, (nearest(name, columns) for name in wanted)), "")
    got = _join_names(columns)
    raise SourceError(f"{place} must have {_name_columns(wanted)}, got {got}.{hint} Choose another with {option}.")


def _name_columns(wanted: Collection[str]) -> str:
    return ("the column " if len(wanted) == 1 else "one of the columns ") + _join_names(wanted)


def _join_names(names: Collection[str]) -> str:
    """Join at most a dozen names: a row may have thousands."""
    shown = [short(name) for name, _ in zip(names, range(12), strict=False)]
    return (", ".join(shown) or "no columns") + (f" and {len(names) - 12} more" if len(names) > 12 else "")
