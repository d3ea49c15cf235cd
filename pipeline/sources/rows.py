"""Rows of a source, and the rule that makes a prompt of a row or rejects it with a reason."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from reprlib import repr as short
from string import Formatter
from typing import Any, NoReturn, Protocol, Self

from pipeline.config.sections import SourceSettings
from store.errors import ConfigError, SourceError

PROMPT = "prompt"
TARGET = "target"  # the column that may name a row's target
USUAL_FIELDS = (PROMPT, "question", "text", "instruction", "content")
ID_COLUMNS = ("prompt_id", "id", "task_id")
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
        """Return the approximate number of rows, None if that is costly to know."""
        ...

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

    @classmethod
    def from_settings(cls, options: SourceSettings) -> Self:
        fields = (options.prompt_field,) if options.prompt_field else USUAL_FIELDS
        template = (("", PROMPT),) if options.template is None else _parse_template(options.template)
        return cls(fields, template, tuple(Condition.from_text(text) for text in options.where))

    @property
    def columns(self) -> set[str]:
        """Every column that the rule or a prompt's name may need."""
        return {*self.fields, *self._list_other_columns(), *ID_COLUMNS, TARGET}

    def narrow_to(self, columns: Collection[str], place: str) -> Self:
        """Return the rule for rows of `place` that have these columns: one prompt field for all of them."""
        for column in self._list_other_columns():
            if column not in columns:
                _refuse_columns([column], columns, place, "--where or --template")
        field = next((field for field in self.fields if field in columns), None)
        if field is None and any(name == PROMPT for _, name in self.template):
            _refuse_columns(self.fields, columns, place, "source.prompt_field")
        return replace(self, fields=(field,)) if field else self

    def apply(self, values: Mapping[str, object]) -> str | Fault | None:
        """Return the prompt's text, a `Fault`, or None for a row that a condition excludes."""
        for condition in self.where:
            if condition.column not in values:
                return _report_missing([condition.column], values)
            if not condition.holds(values):
                return None
        text = ""
        for literal, name in self.template:
            value = self._read_value(name, values)
            if isinstance(value, Fault):
                return value
            text += literal + value
        return _check_text(text)

    def _read_value(self, name: str | None, values: Mapping[str, object]) -> str | Fault:
        if name is None:
            return ""
        if name == PROMPT:
            return self._read_prompt(values)
        if name not in values:
            return _report_missing([name], values)
        value = values[name]
        if not isinstance(value, str | int | float):
            return Fault(f"the column '{name}' must hold text or a number, got {short(value)}")
        return _to_text(value)

    def _read_prompt(self, values: Mapping[str, object]) -> str | Fault:
        field = next((field for field in self.fields if field in values), None)
        if field is None:
            return _report_missing(self.fields, values)
        value = values[field]
        if not isinstance(value, str):
            return Fault(f"the prompt in '{field}' must be text, got {short(value)}")
        return value if value.strip() else Fault(f"the prompt in '{field}' must not be empty")

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


def _report_missing(wanted: Collection[str], values: Mapping[str, object]) -> Fault:
    return Fault(f"the row must have {_name_columns(wanted)}, got {_join_names(values)}")


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
