"""Settings from environment variables: `sampling.top_p` is OMNIDRAFT_ and the key, in capitals, with `_` for the dot.

A value is written as in TOML, but text needs no quotes, and a list may be its entries separated by commas:

>>> read_environment({"OMNIDRAFT_SAMPLING_TOP_P": "0.9", "OMNIDRAFT_TARGETS": "a,b", "OMNIDRAFT_SEED": ""})
{'targets': ('a', 'b'), 'sampling.top_p': 0.9}
"""

import logging
import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.config.settings import settings

LOG = logging.getLogger("omnidraft.cli")

PREFIX = "OMNIDRAFT_"
_TYPO = 0.7  # similarity from which an unknown name is taken for a mistyped one
OTHERS = ("API_KEY", "CACHE", "FAULT", "RUNS")  # variables with this prefix that are no settings


def variable_of(key: str) -> str:
    """Return the name of the variable of a setting."""
    return PREFIX + key.replace(".", "_").upper()


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Return the settings that variables give, by dotted key; an empty variable gives none.

    A variable that is named like one of a setting, but is none, is reported as a warning. Values are not checked here.
    """
    known = {variable_of(key).removeprefix(PREFIX): (key, field) for key, field in settings().items()}
    found = {name.removeprefix(PREFIX): text for name, text in environment.items() if name.startswith(PREFIX)}
    for name in sorted(found.keys() - known.keys() - set(OTHERS)):
        for close in get_close_matches(name, known, n=1, cutoff=_TYPO):
            LOG.warning("the variable %s%s is no setting; did you mean %s%s?", PREFIX, name, PREFIX, close)
    given = {name: found[name] for name in known if found.get(name)}
    return {known[name][0]: parse_value(text, known[name][1]) for name, text in given.items()}


def parse_value(text: str, field: FieldInfo) -> Any:
    """Read a value of a setting as TOML, unless the setting is a text; a list may be given without brackets."""
    if _is_text(field.annotation):
        return text
    is_list = isinstance(field.default, tuple)
    if is_list and not text.startswith("["):
        return tuple(filter(None, map(str.strip, text.split(","))))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return tuple(value) if is_list and isinstance(value, list) else value


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) in (dict, tuple, Literal):
        return False
    return annotation in (str, Path) or any(map(_is_text, get_args(annotation)))
