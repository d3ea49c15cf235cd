"""`omnidraft config`: the settings in force and their origins, a sample file, and the schema of all settings."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from pipeline.config.cli_options import PrintJsonOption, SetOption, parse_settings
from pipeline.config.defaults import REAL_RUN, is_default_run
from pipeline.config.environment import read_environment, variable_of
from pipeline.config.settings import Config, load, settings
from store.errors import UsageError

COLUMNS = 100
_HEAD = "Settings of omnidraft at their defaults, for --config. Remove the # in front of those that you change."


def config(
    file: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with any of the settings, or a run's config.json.")
    ] = None,
    settings: SetOption = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Leave out the settings that are at their defaults.")
    ] = False,
    as_json: PrintJsonOption = False,
    sample: Annotated[
        Path | None,
        typer.Option(help="Write every setting with its meaning, variable and default to this new file, - to print."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a configuration file, for editors.")
    ] = False,
) -> None:
    """Show the settings that `omnidraft replay` would use.

    As TOML, with their origins. Later origins override earlier ones: the default, the file, an environment
    variable, `--set`. A replay for which none of them names a source or a target has some other defaults: it runs
    SmolLM2-135M-Instruct.
    """
    if sample:
        _write_sample(sample)
    elif schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    else:
        _show(file, settings, changed=changed, as_json=as_json)


def _show(file: Path | None, settings: list[str] | None, *, changed: bool, as_json: bool) -> None:
    base, variables, typed = load(file) if file else Config(), read_environment(), parse_settings(settings)
    chosen = base.with_overrides(variables | typed)
    origins = {key: str(file) for key in base.list_given()} if file else {}
    origins |= {key: variable_of(key) for key in variables} | dict.fromkeys(typed, "--set")
    if as_json:
        print(json.dumps({"settings": chosen.model_dump(mode="json"), "origins": origins}, indent=2))
        return
    if not changed and is_default_run(base, {*variables, *typed}):
        print("# A replay without a source and a target runs SmolLM2-135M-Instruct with the drafter builtin:drafter-4m")
        print("# and these defaults in place of those below:")
        for key, value in REAL_RUN.items():
            if key not in origins:
                print(f"#   {key} = {json.dumps(value)}")
        print()
    print(format_settings(chosen.flatten(), origins, changed=changed), end="")


def _write_sample(file: Path) -> None:
    if file == Path("-"):
        print(format_sample(), end="")
        return
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(format_sample())
    except OSError as error:
        raise UsageError(f"the sample must go to a new file, but '{file}': {error.strerror}; name another") from error
    print(file)


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
