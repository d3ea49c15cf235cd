"""What the commands share: options made of settings, and `--set KEY=VALUE`."""

from typing import Any, Literal, get_args, get_origin

import typer


def option(key: str) -> Any:
    """A typer option with the setting's own description, default and choices as its help."""
    from pipeline.config import settings

    field = settings()[key]
    choices = f" One of {', '.join(get_args(field.annotation))}." if get_origin(field.annotation) is Literal else ""
    shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
    default = "" if shown in (None, "") else f" [default: {shown}]"
    return typer.Option(help=f"{field.description}{choices}{default}", show_default=False)


def parsed(settings: list[str]) -> dict[str, object]:
    """`key=value` texts; a value is read as TOML where it is TOML, else taken as text."""
    import tomllib

    from store.errors import ConfigError

    found: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set needs KEY=VALUE, got {setting!r}")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found
