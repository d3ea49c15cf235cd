"""omnidraft from Python: replay prompts, read a run's log, load a drafter version, complete prompts in this process.

    import pipeline

    result = pipeline.replay("builtin:code", run="runs/first", source={"limit": 50})
    with pipeline.open_log(result.run) as log:
        log.sql("SELECT outcome, count(*) AS tokens FROM decisions GROUP BY outcome").to_pandas()

`docs/python.md` describes every name. They are imported on first use, so that `import pipeline` loads neither torch nor
any other large library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.settings import Config
    from pipeline.interface.llm import LLM, Completion
    from pipeline.interface.log import Log, open_log
    from pipeline.interface.replays import ReplayResult, RunSummary, StreamMetrics, replay
    from pipeline.interface.versions import PublishedVersion, load_version
    from pipeline.learner_service.stored_learning import merge_learning
    from store.errors import (
        ConfigError,
        CorruptError,
        ModelError,
        OmnidraftError,
        QueryError,
        RunError,
        SourceError,
        UsageError,
        VocabularyError,
    )

__all__ = [
    "LLM",
    "Completion",
    "Config",
    "ConfigError",
    "CorruptError",
    "Log",
    "ModelError",
    "OmnidraftError",
    "PublishedVersion",
    "QueryError",
    "ReplayResult",
    "RunError",
    "RunSummary",
    "SourceError",
    "StreamMetrics",
    "UsageError",
    "VocabularyError",
    "load_version",
    "merge_learning",
    "open_log",
    "replay",
]

_MODULES = {
    "Config": "pipeline.config.settings",
    "LLM": "pipeline.interface.llm",
    "Completion": "pipeline.interface.llm",
    "Log": "pipeline.interface.log",
    "open_log": "pipeline.interface.log",
    "ReplayResult": "pipeline.interface.replays",
    "RunSummary": "pipeline.interface.replays",
    "StreamMetrics": "pipeline.interface.replays",
    "replay": "pipeline.interface.replays",
    "PublishedVersion": "pipeline.interface.versions",
    "load_version": "pipeline.interface.versions",
    "merge_learning": "pipeline.learner_service.stored_learning",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use. Exceptions are those of `store.errors`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "store.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, and whatever is imported already."""
    return sorted({*__all__, *globals()})
