"""From the arguments of a Python call to settings, by the same rules for all functions of the interface.

A setting is known by its dotted key, as for `--set` of the command line. In Python a section may also be a mapping:

>>> flatten_settings({"batch": 4, "sampling": {"temperature": 0.7}, "learn.rate": 0.002})
{'batch': 4, 'sampling.temperature': 0.7, 'learn.rate': 0.002}
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.settings import Config, load
from pipeline.interface.versions import PublishedVersion
from stages.engine.models.devices import count_threads, set_threads

Name = str | os.PathLike[str]  # of a model or a source
Names = Name | Sequence[Name]
Settings = Config | Mapping[str, object] | Name  # complete ones, some by key, or a file


def flatten_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted keys, from keys that may be dotted or name a section whose value is a mapping."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def build_config(
    config: Settings | None,
    overrides: Mapping[str, object],
    with_defaults: Callable[[Config], Config] = lambda config: config,
) -> Config:
    """All settings of a call. Raises ConfigError if one is unknown or impossible, or the file cannot be read.

    Args:
        config: what the caller gave as `config`: a `Config`, a mapping as for `flatten_settings`, or the path of a TOML
            file or of a run's `config.json`. None: the defaults.
        overrides: settings that take the place of those, as for `flatten_settings`.
        with_defaults: fills in other defaults where `config` sets nothing.
    """
    given: dict[str, object] = {}
    match config:
        case None:
            base = Config()
        case Config():
            base = config
        case Mapping():
            base, given = Config(), flatten_settings(config)
        case _:
            base = load(Path(config))
    return with_defaults(base).with_overrides(given | flatten_settings(overrides))


def model_settings(target: Names | None, drafter: Name | PublishedVersion | None) -> dict[str, object]:
    """The settings that the arguments `target` and `drafter` stand for; a version of a registry brings its store."""
    found: dict[str, object] = {}
    if target is not None:
        found["targets"] = text_names(target)
    if isinstance(drafter, PublishedVersion):
        found["drafter"] = drafter.reference
        if drafter.uri is not None:
            found["publish.mlflow_uri"] = drafter.uri
    elif drafter is not None:
        found["drafter"] = os.fspath(drafter)
    return found


def text_names(names: Names) -> tuple[str, ...]:
    """One name or several, each a text or a path, as texts."""
    several = [names] if isinstance(names, str | os.PathLike) else names
    return tuple(os.fspath(name) for name in several)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end: a run with a small target sets it to one."""
    before = count_threads()
    try:
        yield
    finally:
        set_threads(before)
