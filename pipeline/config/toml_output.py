"""Configuration files for people: a sample with every setting, and the settings in force with their origins."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from textwrap import wrap

from pipeline.config.environment import variable_of
from pipeline.config.settings import Config, settings

COLUMNS = 100
_HEAD = "Settings of omnidraft at their defaults, for --config. Remove the # in front of those that you change."


def format_sample() -> str:
    """Format a TOML file with every setting at its default, described and commented out."""
    lines, values = [*_comment(_HEAD)], Config().flatten()
    for section, keys in groupby(settings(), _section_of):
        if section:
            meaning = " ".join((type(getattr(Config(), section)).__doc__ or "").split())
            lines += ["", *_comment(meaning), f"[{section}]"]
        for key in keys:
            line = f"{key.rpartition('.')[2]} =" if values[key] is None else format_line(key, values[key])
            described = _comment(str(settings()[key].description))
            lines += ["", *described, f"# Environment: {variable_of(key)}", f"#{line}"]
    return "\n".join(lines) + "\n"


def format_settings(values: Mapping[str, object], origins: Mapping[str, str], *, changed: bool) -> str:
    """Format settings as TOML. `values` are JSON values by dotted key; those that are None are left out, as TOML has no
    such value. `origins` has the origin of each setting that was given, which is shown as a comment; if `changed`, the
    others are left out.
    """
    shown = [key for key in settings() if values[key] is not None and (key in origins or not changed)]
    lines: list[str] = []
    for section, keys in groupby(shown, _section_of):
        lines += [*([""] if lines else []), *([f"[{section}]"] if section else [])]
        for key in keys:
            line = format_line(key, values[key])
            lines.append(f"{line}  # {origins[key]}" if key in origins else line)
    return "".join(f"{line}\n" for line in lines)


def format_line(key: str, value: object) -> str:
    """Format a JSON value of a setting as a line of TOML in its section."""
    # JSON's strings, numbers, booleans and lists are TOML's too, once DEL is escaped.
    return f"{key.rpartition('.')[2]} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def _section_of(key: str) -> str:
    return key.rpartition(".")[0]


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in wrap(text, COLUMNS - 2, break_long_words=False))
