"""How a run on an object store is named, and where this machine keeps what it has of it. Imports nothing heavy."""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

_URI = re.compile(r"(s3|gs):/+(?P<rest>[^/].*)")


def uri_of(run: Path) -> str | None:
    """The URI that a command line took for a path: of two slashes a `Path` keeps one. None for a folder."""
    found = _URI.fullmatch(str(run))
    return f"{found[1]}://{found['rest']}" if found else None


def below(uri: str, *names: str) -> str:
    """The URI of something below another; what stands behind a question mark stays behind it."""
    place, mark, options = uri.partition("?")
    return "/".join((place.rstrip("/"), *names)) + mark + options


def cache_folder(use: str, uri: str) -> Path:
    """Where this machine keeps what it has of a run on an object store; named like the run.

    Below `$OMNIDRAFT_CACHE`, else `$XDG_CACHE_HOME/omnidraft`, else `~/.cache/omnidraft`, where the views of
    vocabularies lie too.
    """
    chosen, shared = os.environ.get("OMNIDRAFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(chosen) if chosen else Path(shared or Path.home() / ".cache") / "omnidraft"
    name = PurePosixPath(urlsplit(uri).path).name
    return root.absolute() / use / hashlib.sha256(uri.encode()).hexdigest()[:16] / name
