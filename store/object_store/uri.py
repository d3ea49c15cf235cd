"""URIs of runs on an object store, and their local folders. Imports nothing heavy."""

import hashlib
import re
from pathlib import Path, PurePosixPath

from store.files import cache_root

_URI = re.compile(r"(s3|gs):/+(?P<rest>[^/].*)")


def uri_of(run: Path) -> str | None:
    """Return the URI of a path from the command line, since `Path` keeps one slash of two; None for a folder."""
    found = _URI.fullmatch(str(run))
    return f"{found[1]}://{found['rest']}" if found else None


def cache_folder(use: str, uri: str) -> Path:
    """Return the local folder of a run on an object store, in the cache folder; it has the run's name."""
    return cache_root() / use / hashlib.sha256(uri.encode()).hexdigest()[:16] / PurePosixPath(uri).name
