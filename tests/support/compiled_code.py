"""What Numba and LLVM compile: kept for all tests, also of later sessions. Numba takes 20 seconds in each process that
finds nothing, LLVM takes one for each kind of models; the folders of the code are named after its source.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from places import ROOT

VARIABLE = "OMNIDRAFT_TESTS_COMPILED"  # the folder; by default it is beside pytest's own cache
ENGINE = ROOT / "stages" / "engine"  # all that compiled code is made from


def keep_compiled(config: pytest.Config, cache: Path) -> None:
    """Choose the folder of this session, whose processes have this cache."""
    if not os.environ.get(VARIABLE):
        kept = config.cache.mkdir("numba") if config.pluginmanager.has_plugin("cacheprovider") else cache / "compiled"
        os.environ[VARIABLE] = str(kept)
    Path(os.environ[VARIABLE]).mkdir(parents=True, exist_ok=True)
    link_compiled(cache)
    for path in find_kept().iterdir():
        with suppress(FileExistsError):  # another process of this session was faster
            (cache / path.name).symlink_to(path)


def find_kept() -> Path:
    """The folder of what LLVM compiled for the code as it is; there is none for other code any more."""
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ENGINE.rglob("*.py")))).hexdigest()
    folder = Path(os.environ[VARIABLE]) / f"llvm-{code}"
    for other in set(folder.parent.glob("llvm-*")) - {folder}:
        shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return folder


def store_compiled(cache: Path) -> None:
    """Keep for later sessions what LLVM compiled in this one."""
    kept = find_kept()
    for path in cache.glob("compiled-*"):
        part = kept.with_name(f"{path.name}.{os.getpid()}")
        if not path.is_symlink():
            shutil.copy(path, part)
            part.replace(kept / path.name)


def copy_cache(cache: Path) -> None:
    """Let the cache of a process have what was measured and compiled for that of the tests."""
    link_compiled(cache)
    for path in Path(os.environ["OMNIDRAFT_CACHE"]).glob("*-*.*"):
        if not path.name.startswith("packed-"):  # as large as models
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
