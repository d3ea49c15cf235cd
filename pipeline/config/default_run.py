"""The run of `omnidraft replay` without a source and a target: a real model on questions, then on code.

Its settings take the place of the defaults; those that the user gave stay.
"""

from collections.abc import Collection, Mapping

from pipeline.config.settings import Config, list_given

NAMING = frozenset({"sources", "targets", "swaps"})  # a user who sets one of these wants another run
REAL_RUN: Mapping[str, object] = {
    "sources": ("builtin:questions", "builtin:code"),
    "source.chat": True,
    "source.limit": 36,
    "sampling.max_new_tokens": 48,
    "draft.exploration": 1 / 32,  # so that the run's log shows the gain of each source of drafts
    # The drafter was distilled from this target: with the usual rate nearly every update lowers its acceptance
    # (benchmarks/notes/learning.md).
    "learn.rate": 2e-4,
}
BUILTIN_RUN: Mapping[str, object] = {"sampling.temperature": 0.7}  # greedy text of the built-in models repeats itself


def is_default_run(base: Config, overrides: Collection[str]) -> bool:
    """Return whether neither a file (`base`) nor any override names what to replay."""
    return NAMING.isdisjoint({*list_given(base), *overrides})


def make_default_run(base: Config, overrides: Mapping[str, object], target: str | None) -> Config:
    """Return the settings of the default run.

    Args:
        base: settings of a file, or the defaults.
        overrides: settings that the user gave otherwise, by dotted key.
        target: name of the real model; None for the built-in pair.

    Raises:
        ConfigError: as `Config.with_overrides`.
    """
    usual = BUILTIN_RUN if target is None else {**REAL_RUN, "targets": (target,)}
    given = {*list_given(base), *overrides}
    return base.with_overrides({key: value for key, value in usual.items() if key not in given} | dict(overrides))
