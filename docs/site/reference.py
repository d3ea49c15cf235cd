"""The pages that are made from the code: every setting, and the Python interface."""

import json
from collections.abc import Mapping
from typing import Any

import pipeline
from pipeline.cli.config import format_line
from pipeline.config.environment import variable_of
from pipeline.config.settings import Config, settings

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "less than"}
TYPES = {"string": "a text", "integer": "a whole number", "number": "a number", "array": "a list of texts"}


def format_settings() -> str:
    """Format every setting as Markdown: its meaning, its values, its default and its environment variable."""
    lines, heading = list[str](), None
    defaults, schema = Config().model_dump(mode="json"), Config.model_json_schema()
    for key, field in settings().items():
        section, _, name = key.rpartition(".")
        values = defaults[section] if section else defaults
        properties = _section_of(schema, section)["properties"] if section else schema["properties"]
        if section != heading:
            lines += [f"## {section or 'Sources, models and run'}", ""]
            lines += [_section_of(schema, section)["description"], ""] if section else []
            heading = section
        lines += [f"### {key}", "", str(field.description).replace("<", "\\<"), ""]
        lines += [f"- Values: {describe_values(properties[name])}", f"- Default: {_format_default(name, values[name])}"]
        lines += [f"- Environment: `{variable_of(key)}`", ""]
    return "\n".join(lines)


def format_interface() -> str:
    """Format the entries of all public names of `pipeline` for Sphinx's autodoc."""
    names = sorted(pipeline.__all__, key=str.lower)
    values = {name: getattr(pipeline, name) for name in names}
    errors = [name for name in names if isinstance(values[name], type) and issubclass(values[name], Exception)]
    classes = [name for name in names if isinstance(values[name], type) and name not in errors]
    functions = [name for name in names if name not in (*errors, *classes)]
    groups = (
        ("Functions", "autofunction", functions, ()),
        ("Classes", "autoclass", classes, (":members:", ":exclude-members: model_config")),
        ("Errors", "autoexception", errors, (":show-inheritance:",)),
    )
    lines: list[str] = []
    for title, directive, members, options in groups:
        lines += [f"## {title}", ""]
        for name in members:
            lines += [
                "```{eval-rst}",
                f".. {directive}:: pipeline.{name}",
                *(f"   {one}" for one in options),
                "```",
                "",
            ]
    return "\n".join(lines)


def describe_values(schema: Mapping[str, Any]) -> str:
    """Describe in words which values a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(describe_values(one) for one in schema["anyOf"] if one["type"] != "null")
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if "enum" in schema.get("items", ()):
        return f"a list of {describe_values(schema['items'])}"
    words = "a path" if schema.get("format") == "path" else TYPES[schema["type"]]
    bounds = [f"{word} {schema[bound]}" for bound, word in BOUNDS.items() if bound in schema]
    return f"{words}, {' and '.join(bounds)}" if bounds else words


def _section_of(schema: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return the schema of a section."""
    found: Mapping[str, Any] = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
    return found


def _format_default(name: str, value: object) -> str:
    return "not set" if value is None else f"`{format_line(name, value).partition(' = ')[2]}`"
