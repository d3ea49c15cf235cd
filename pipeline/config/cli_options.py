"""What commands share: options that override settings, options that several commands have, and `--set KEY=VALUE`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from pipeline.config.environment import parse_value
from pipeline.config.settings import settings
from store.errors import ConfigError

# Groups of options in a command's help, by section of their settings.
PROMPTS, MODELS, RUN = "Prompts", "Models", "Run and versions"
SERVING, SETTINGS = "Serving", "Settings"
PANELS: Mapping[str, str] = {
    "source": PROMPTS,
    "sampling": "Sampling",
    "draft": "Drafting",
    "memory": "Drafting",
    "prompts": MODELS,
    "vocabulary": "Vocabulary",
    "cache": "Drafting",
    "learn": "Learning",
    "drift": "Learning",
    "publish": RUN,
    "log": RUN,
    "commit": RUN,
    "serve": SERVING,
}
_UNSECTIONED: Mapping[str, str] = {"sources": PROMPTS, "run": RUN, "seed": "Sampling"}


def panel_of(key: str) -> str:
    """Return the group of options in which a setting is shown."""
    section, dot, _ = key.partition(".")
    return PANELS[section] if dot else _UNSECTIONED.get(key, MODELS)


def option(key: str, words: str | None = None, *names: str, **more: Any) -> Any:
    """A typer option that overrides a setting; `overrides_of` collects what was given. `words`: help; by default the
    setting's own description, with its choices and its default. The rest is as of `typer.Option`.
    """
    choices = [choice for choice in _choices(key) if isinstance(choice, str)]
    complete = (lambda: choices) if choices else None  # for the shell
    shown: dict[str, Any] = {"rich_help_panel": panel_of(key), "autocompletion": complete}
    made = typer.Option(*names, help=words or _describe(key), show_default=bool(words), **{**shown, **more})
    return _of_setting(made, key)


def separated_option(key: str, *names: str) -> Any:
    """An option for a setting of several values, which are separated by commas."""
    made = option(key, _describe(key, ","), *names)
    made.separated = True
    return made


def argument(key: str, words: str, metavar: str | None = None) -> Any:
    """A typer argument that overrides a setting, as `option`."""
    return _of_setting(typer.Argument(help=words, metavar=metavar, show_default=False), key)


def flag(key: str, value: bool, name: str, words: str) -> Any:
    """An option without a value that overrides a setting with the given one."""
    return _of_setting(typer.Option(name, help=words, rich_help_panel=panel_of(key)), key, value)


def set_option(words: str) -> Any:
    """`--set KEY=VALUE`, for `parse_settings`."""
    return typer.Option(
        "--set", metavar="KEY=VALUE", help=words, rich_help_panel=SETTINGS, autocompletion=_complete_keys
    )


def _complete_keys(incomplete: str) -> list[str]:
    return [f"{key}=" for key in settings() if key.startswith(incomplete)]


def _of_setting(made: Any, key: str, value: bool | None = None) -> Any:
    made.setting, made.meaning = key, value
    return made


def _describe(key: str, separator: str = " ") -> str:
    field, values = settings()[key], _choices(key)
    choices = f" One of {', '.join(map(str, values))}." if values else ""
    shown = separator.join(field.default) if isinstance(field.default, tuple) else field.default
    default = "" if shown in (None, "") else f" [default: {shown}]"
    return f"{field.description}{choices}{default}"


def _choices(key: str) -> tuple[Any, ...]:
    annotation = settings()[key].annotation
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(choice for one in types if get_origin(one) is Literal for choice in get_args(one))


def overrides_of(command: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a command's options override. Its annotations name them. `given` are the values of its
    parameters; what was not given is None, an empty list, or False for a `flag`.
    """
    found: dict[str, Any] = {}
    for name, hint in command.__annotations__.items():
        for made in getattr(hint, "__metadata__", ()):
            value = given[name]
            if not hasattr(made, "setting") or value is None or value == []:
                continue
            if value is False and made.meaning is not None:
                continue
            if hasattr(made, "separated"):
                value = tuple(filter(None, map(str.strip, value.split(","))))
            elif isinstance(settings()[made.setting].default, tuple):
                value = tuple(value) if isinstance(value, list) else (value,)
            found[made.setting] = value if made.meaning is None else made.meaning
    return found


def parse_settings(given: list[str] | None) -> dict[str, object]:
    """Read `key=value` texts as `read_environment` reads variables."""
    found: dict[str, object] = {}
    for setting in given or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set needs KEY=VALUE, got {setting!r}")
        found[key] = parse_value(value, settings()[key]) if key in settings() else value
    return found


RUNS_VARIABLE = "OMNIDRAFT_RUNS"
_CHAT_HELP = (
    "Whether prompts are put into the target's chat template. [default: if it has one, except for builtin:docs and "
    "builtin:code]"
)

RunOption = Annotated[Path | None, typer.Option("--run", help="One run's folder, or s3://BUCKET/PATH.")]
RunsOption = Annotated[Path, typer.Option("--runs", envvar=RUNS_VARIABLE, help="A folder of runs.")]
NewRunsOption = Annotated[
    Path,
    typer.Option(
        "--runs",
        envvar=RUNS_VARIABLE,
        help="Folder of runs: a new run without --run gets a folder in it, named after its start.",
        rich_help_panel=RUN,
    ),
]
SetOption = Annotated[list[str] | None, set_option("Any other setting, such as learn.rate=0.002; may be repeated.")]
DrafterOption = Annotated[str | None, option("drafter", "Drafter model.")]
TargetOption = Annotated[str | None, option("targets", "Target model.")]
ChatOption = Annotated[bool | None, option("source.chat", _CHAT_HELP, "--chat/--no-chat")]
TextOption = Annotated[
    list[str] | None,
    option("sources", "Source of text, as for `replay`; may be repeated.", "--text", metavar="SOURCE"),
]
TextTemplateOption = Annotated[
    str | None, option("source.template", "Text made from a row's columns, such as '{prompt} {reference}'.")
]
PrintJsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead.")]


class _Plain:
    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return params


class PlainCommand(_Plain, TyperCommand):
    """A command whose help shows no type for options without a value."""


class PlainGroup(_Plain, TyperGroup):
    """Commands whose help shows no type for options without a value."""
