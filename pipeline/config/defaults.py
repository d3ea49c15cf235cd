"""Defaults of commands that differ from the settings' own: settings that the user gave stay.

`omnidraft replay` without a source and a target runs a real model on questions, then on tasks in Rust, which its
drafter has never seen. A server, or an engine in this process, decodes several requests together, at the temperature of
other servers.
"""

from collections.abc import Collection, Mapping

from pipeline.config.settings import Config

NAMING = frozenset({"sources", "targets", "swaps"})  # a user who sets one of these wants another run
REAL_RUN: Mapping[str, object] = {
    "sources": ("builtin:questions", "builtin:rust"),
    "source.chat": True,
    "source.limit": 48,
    "sampling.max_new_tokens": 48,
}
BUILTIN_RUN: Mapping[str, object] = {"sampling.temperature": 0.7}  # greedy text of the built-in models repeats itself
EXPLORATION = 1 / 32  # of a replay, so that it knows its speed without drafts; takes about 1% of the time
BATCH = 8  # requests decoded together
TEMPERATURE = 1.0  # as OpenAI's interface and vLLM


def is_default_run(base: Config, overrides: Collection[str]) -> bool:
    """Return whether neither a file (`base`) nor any override names what to replay."""
    return NAMING.isdisjoint({*base.list_given(), *overrides})


def make_default_run(base: Config, overrides: Mapping[str, object], target: str | None) -> Config:
    """Return the settings of the default run: `base` of a file, with overrides by dotted key.

    `target`: name of the real model; None for the built-in pair.
    """
    usual = BUILTIN_RUN if target is None else {**REAL_RUN, "targets": (target,)}
    given = {*base.list_given(), *overrides}
    return base.with_overrides({key: value for key, value in usual.items() if key not in given} | dict(overrides))


def add_replay_defaults(base: Config, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the overrides of a replay with its default for `draft.exploration`, where a file (`base`) sets none."""
    defaults = {} if "draft.exploration" in base.list_given() else {"draft.exploration": EXPLORATION}
    return defaults | dict(overrides)


def with_serving_defaults(config: Config) -> Config:
    """Return the settings with a server's defaults for `batch` and `sampling.temperature`, where they are not set."""
    defaults, given = {"batch": BATCH, "sampling.temperature": TEMPERATURE}, config.list_given()
    return config.with_overrides({name: value for name, value in defaults.items() if name not in given})
