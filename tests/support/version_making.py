"""Small sealed version folders with every kind of file, and their events."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from store.events import VersionPublished
from store.registry.version_folder import ManifestFields, seal

CREATED_AT = "2026-01-02T03:04:05+00:00"


def fields(
    version: int = 0,
    run: str = "run-a",
    *,
    model: str = "omnidraft-drafter",
    metrics: Mapping[str, float] | None = None,
    drift: str | None = None,
) -> ManifestFields:
    return {
        "name": model,
        "version": version,
        "parent": version - 1 if version else None,
        "run": run,
        "offset": 100 * version,
        "target": "builtin:target",
        "drafter": "builtin:drafter",
        "pair": "ab" * 32,
        "counters": {"drafter_version": version, "head_version": 0, "cache_version": version},
        "created_at": CREATED_AT,
        "drift": drift,
        "metrics": metrics or {},
    }


def fill(folder: Path, seed: int) -> None:
    """Write the files of a version; different seeds give different bytes."""
    (folder / "tokenizer").mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors", "ngrams.parquet", "tokenizer/tokenizer.json")):
        (folder / name).write_bytes(random.Random(10 * seed + number).randbytes(3000))


def publication(
    run: Path, version: int, *, seed: int | None = None, ngrams: bytes | None = None, **others: Any
) -> tuple[Path, VersionPublished]:
    """Make a sealed folder in a run's folder and its event. `seed`: of its files; `others`: as of `fields`."""
    folder = run / "versions" / f"{version:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    fill(folder, seed=version if seed is None else seed)
    if ngrams is not None:
        (folder / "ngrams.parquet").write_bytes(ngrams)
    digest = seal(folder, fields(version, run.name, **others))
    event = VersionPublished(
        offset=100 * version,
        version=version,
        target="builtin:target",
        parent=version - 1 if version else None,
        reason="interval" if version else "baseline",
        drafter_version=version,
        head_version=0,
        cache_version=version,
        cache_entries=7 * version,
        acceptance=0.25 * version if version else None,
        folder=str(folder.relative_to(run)),
        digest=digest,
        changes="drafter +1 update; n-grams +7" if version else "the drafter as it was loaded",
    )
    return folder, event


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
