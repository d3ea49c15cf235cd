"""Keys of settings with their defaults and permitted values."""

import re
from collections.abc import Callable
from typing import Any

from product import ROOT, Config

WORDS = ("title", "description")
ELSEWHERE = {"tests", "docs", "build", "dist"}


def list_allowed(schema: dict[str, Any]) -> dict[str, Any]:
    """A setting's type, limits and choices, without prose."""
    limits = {name: value for name, value in schema.items() if name not in WORDS}
    return limits | {name: [list_allowed(one) for one in limits[name]] for name in ("anyOf", "allOf") if name in limits}


def settings(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """All settings by their dotted keys."""
    found: dict[str, Any] = {}
    for name, one in schema["properties"].items():
        section = one.get("$ref") or (one.get("allOf") or [{}])[0].get("$ref")
        if section:
            found |= settings(definitions[section.rpartition("/")[2]], definitions, f"{prefix}{name}.")
        else:
            found[prefix + name] = list_allowed(one)
    return found


def values(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= values(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_settings(golden: Callable[[str, Any], None]) -> None:
    schema = Config.model_json_schema()
    defaults = values(Config().model_dump(mode="json"))
    known = settings(schema, schema["$defs"])
    assert known.keys() == defaults.keys()
    golden("settings", {key: one | {"default": defaults[key]} for key, one in known.items()})


def test_environment_variables(golden: Callable[[str, Any], None]) -> None:
    files = [path for path in ROOT.rglob("*.py") if not foreign(path.relative_to(ROOT).parts)]
    assert len(files) > 200
    found = {name for path in files for name in re.findall(r"\bOMNIDRAFT_[A-Z_]+", path.read_text(encoding="utf-8"))}
    golden("environment", sorted(found))


def foreign(parts: tuple[str, ...]) -> bool:
    """Whether a file is not part of the product."""
    return parts[0] in ELSEWHERE or any(part.startswith((".", "venv", "node_modules")) for part in parts)
