"""What Numba compiles: kept for all tests, also of later sessions. Compiling takes 20 seconds, in each process that
finds nothing; the folders of the code are named after its source.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

VARIABLE = "OMNIDRAFT_TESTS_COMPILED"  # the folder; by default it is beside pytest's own cache


def keep_compiled(config: pytest.Config, cache: Path) -> None:
    """Choose the folder of this session, whose processes have this cache."""
    if not os.environ.get(VARIABLE):
        kept = config.cache.mkdir("numba") if config.pluginmanager.has_plugin("cacheprovider") else cache / "compiled"
        os.environ[VARIABLE] = str(kept)
    Path(os.environ[VARIABLE]).mkdir(parents=True, exist_ok=True)
    link_compiled(cache)


def copy_cache(cache: Path) -> None:
    """Let the cache of a process have what was measured and compiled for that of the tests."""
    link_compiled(cache)
    for path in Path(os.environ["OMNIDRAFT_CACHE"]).glob("*-*.*"):
        shutil.copy(path, cache)


def link_compiled(cache: Path) -> None:
    """Let a cache folder have what was compiled."""
    cache.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (cache / "numba").symlink_to(os.environ[VARIABLE])


def compile_all() -> None:
    """Compile what most tests need."""
    from stages.engine.compiled.lines.warm_up import compile_lines
    from stages.memory.search_calls import compile_search

    compile_lines()
    compile_search()
