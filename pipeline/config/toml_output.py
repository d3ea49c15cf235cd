"""Configuration files for people: a sample with every setting, and the settings in force with their origins."""

import json
from collections.abc import Iterator, Mapping
from textwrap import wrap

from pipeline.config.environment import variable_of
from pipeline.config.settings import Config, settings

COLUMNS = 100
_HEAD = "Settings of omnidraft at their defaults, for --config. Remove the # in front of those that you change."


def format_sample() -> str:
    """Format a TOML file with every setting at its default, described and commented out."""
    lines, values = [*_comment(_HEAD)], Config().model_dump(mode="json")
    for section, keys in _group_by_section().items():
        if section:
            meaning = " ".join((type(getattr(Config(), section)).__doc__ or "").split())
            lines += ["", *_comment(meaning), f"[{section}]"]
        for key in keys:
            field, value = settings()[key], _value_of(values, key)
            name = key.rpartition(".")[2]
            (line,) = [f"{name} ="] if value is None else toml_lines({name: value})
            lines += ["", *_comment(str(field.description)), f"# Environment: {variable_of(key)}", f"#{line}"]
    return "\n".join(lines) + "\n"


def format_settings(config: Config, origins: Mapping[str, str], *, changed: bool) -> str:
    """Format settings as TOML.

    Args:
        config: the settings. Those that are None are left out, as TOML has no such value.
        origins: origin of each setting that was given, by key; shown as a comment.
        changed: leave out the settings that were not given.
    """
    lines: list[str] = []
    values = config.model_dump(mode="json")
    for section, keys in _group_by_section().items():
        shown: list[str] = []
        for key in keys:
            value = _value_of(values, key)
            if value is not None and (key in origins or not changed):
                (line,) = toml_lines({key.rpartition(".")[2]: value})
                shown.append(f"{line}  # {origins[key]}" if key in origins else line)
        if shown:
            lines += [*([""] if lines else []), *([f"[{section}]"] if section else []), *shown]
    return "".join(f"{line}\n" for line in lines)


def toml_lines(values: Mapping[str, object]) -> list[str]:
    """Format JSON values by name as lines of TOML."""
    # JSON's strings, numbers, booleans and lists are TOML's too, once DEL is escaped.
    dumped = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return [f"{name} = {value}".replace("\x7f", "\\u007f") for name, value in dumped.items()]


def _group_by_section() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key in settings():
        groups.setdefault(key.rpartition(".")[0], []).append(key)
    return groups


def _value_of(values: Mapping[str, object], key: str) -> object:
    section, _, name = key.rpartition(".")
    inner = values[section] if section else values
    assert isinstance(inner, Mapping)
    return inner[name]


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in wrap(text, COLUMNS - 2, break_long_words=False))
