"""Commands, their options and defaults, and the exit status of wrong usage."""

from collections.abc import Callable
from enum import Enum
from inspect import signature, unwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from product import app
from synthetic_runs import small_run_events, write_run
from typing_commands import type_command

Golden = Callable[[str, Any], None]
WRONG = {
    "an unknown option": ["replay", "--no-such-option"],
    "an unknown command": ["no-such-command"],
    "a file of prompts that is missing": ["replay", "no-such-file.jsonl", "--run", "new"],
    "an unknown setting": ["replay", "--set", "no.such=1"],
    "a setting without a value": ["replay", "--set", "seed"],
    "a number that is none": ["replay", "--batch", "many"],
    "settings for a resumed run": ["replay", "--resume", ".", "--batch", "2"],
    "a folder that is no run": ["replay", "--resume", "no-such-run"],
    "a run to read that is missing": ["sql", "--run", "no-such-run", "FROM decisions"],
    "rounds of a benchmark that are none": ["bench", "--rounds", "0"],
    "a store that is missing": ["versions", "list", "--mlflow-uri", "sqlite:///no-such.db"],
}


def to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, Enum):
        return to_json(value.value)
    return value.as_posix() if isinstance(value, Path) else value


def kind_of(annotation: Any) -> Any:
    """The name of a parameter's type, or its choices."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if get_origin(annotation) is Literal:
        return [str(one) for one in get_args(annotation)]
    if get_origin(annotation) in (list, tuple):
        return [kind_of(one) for one in get_args(annotation) if one is not ...]
    if issubclass(annotation, Enum):
        return [to_json(one) for one in annotation]
    return annotation.__name__


def parameter(one: Any, hint: Any, default: Any) -> dict[str, Any]:
    """The command-line interface of a parameter, from its annotation; its help is not frozen."""
    annotation, info = get_args(hint)
    seen = {
        "kind": one.param_type_name,
        "spellings": sorted([*one.opts, *one.secondary_opts]),
        "type": kind_of(annotation),
        "default": to_json(default),
        **{name: getattr(info, name) for name in ("min", "max", "envvar", "exists", "file_okay", "dir_okay", "hidden")},
    }
    defaults = {"exists": False, "file_okay": True, "dir_okay": True, "hidden": False}
    seen["required"] = one.required
    return {name: value for name, value in seen.items() if value is not None and value != defaults.get(name, ...)}


def parameters(command: Any) -> dict[str, Any]:
    """All parameters of a command, by their names in its function."""
    called = unwrap(command.callback) if command.callback else None
    if called is None:
        return {}
    hints, defaults = get_type_hints(called, include_extras=True), signature(called).parameters
    known = {one.name: one for one in command.params}
    return {
        name: parameter(known[name], hints[name], None if given.default is given.empty else given.default)
        for name, given in defaults.items()
        if name in known
    }


def commands(command: Any, name: str = "omnidraft") -> dict[str, Any]:
    """A command and its subcommands, by the words that call them."""
    found = {name: parameters(command)}
    for word, below in getattr(command, "commands", {}).items():
        found |= commands(below, f"{name} {word}")
    return found


def test_commands_and_options(golden: Golden) -> None:
    golden("commands", commands(typer.main.get_command(app)))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_exit_status(golden: Golden, empty_folder: Path) -> None:
    found = {name: type_command(words) for name, words in WRONG.items()}
    assert [path.name for path in empty_folder.iterdir() if path.name != "runs"] == []
    run = write_run(empty_folder / "run", small_run_events())
    found["a sound log"] = type_command(["check", "--run", run])
    (run / "log" / "blocks" / "part-000001.parquet").write_bytes(b"cut")
    found["a damaged log"] = type_command(["check", "--run", run])
    found["a query of a damaged log"] = type_command(["sql", "--run", run, "FROM blocks"])
    found["help"] = type_command(["--help"])
    golden("exit-status", found)
