"""The form of JSON values: names of keys and types of values, without the values and the lengths of lists."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_DIGEST = re.compile(r"[0-9a-f]{32,64}")


def shape(value: Any) -> Any:
    """The form of a value: an object keeps its keys, a list becomes one common form of its elements."""
    if isinstance(value, dict):
        return _merged_keys((_name(key), shape(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [common_form(map(shape, value))] if value else []
    return {str: "text", bool: "bool", int: "number", float: "number"}.get(type(value), "null")


def _name(key: str) -> str:
    """A key with placeholders for numbers and digests, which are data."""
    return "<number>" if key.isdecimal() else _DIGEST.sub("<digest>", key)


def _merged_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for key, form in pairs:
        found.setdefault(key, []).append(form)
    return {key: common_form(forms) for key, forms in found.items()}


def common_form(forms: Iterable[Any]) -> Any:
    """The common form of several values.

    A key that only some objects have ends in `?`. Types of plain values are joined by `|`. Where plain values, lists
    and objects are mixed, the form is `{"any of": [...]}`.
    """
    kinds = [kind for form in forms for kind in _kinds(form)]
    words = sorted({kind for kind in kinds if isinstance(kind, str)})
    lists = [element for kind in kinds if isinstance(kind, list) for element in kind]
    found: list[Any] = [" | ".join(words)] if words else []
    if any(isinstance(kind, list) for kind in kinds):
        found.append([common_form(lists)] if lists else [])
    if objects := [kind for kind in kinds if isinstance(kind, dict)]:
        found.append(_one_object(objects))
    return found[0] if len(found) == 1 else {"any of": found}


def _kinds(form: Any) -> list[Any]:
    if isinstance(form, dict) and "any of" in form:
        return [kind for one in form["any of"] for kind in _kinds(one)]
    return list(form.split(" | ")) if isinstance(form, str) else [form]


def _one_object(objects: list[dict[str, Any]]) -> dict[str, Any]:
    always = set.intersection(*({key for key in one if not key.endswith("?")} for one in objects))
    merged = _merged_keys((key.removesuffix("?"), form) for one in objects for key, form in one.items())
    return {key if key in always else f"{key}?": form for key, form in merged.items()}


def shape_of_json(path: Path) -> Any:
    """The form of a JSON file."""
    return shape(json.loads(path.read_bytes()))


def shape_of_lines(path: Path, kind: str | None = None) -> Any:
    """The common form of the lines of a file; by the value of the key `kind`, if one is given."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    if kind is None:
        return common_form(map(shape, lines))
    return {str(name): common_form(shape(line) for line in lines if line.get(kind) == name)
            for name in {line.get(kind) for line in lines}}  # fmt: skip
