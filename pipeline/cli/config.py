"""`omnidraft config`: the settings in force and their origins, a sample file, and the schema of all settings."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.config.cli_options import PrintJsonOption, SetOption, parse_settings
from pipeline.config.defaults import REAL_RUN, is_default_run
from pipeline.config.environment import read_environment, variable_of
from pipeline.config.settings import Config, load
from pipeline.config.toml_output import format_sample, format_settings
from store.errors import UsageError


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
