"""Reading of the JSON files that the benchmarks write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from store.errors import CorruptError, RunError

Found = TypeVar("Found")


def read_json(path: Path, must_be: str, maker: str, read: Callable[[Any], Found]) -> Found:
    """Read a JSON file and return what `read` makes of its content.

    Args:
        path: the file.
        must_be: description of the file, for errors.
        maker: command that writes such a file, for errors.
        read: converts the content; raises `KeyError`, `TypeError` or `ValueError` for another kind of file.

    Raises:
        RunError: the file does not exist or cannot be read.
        CorruptError: the file is of another kind.
    """
    try:
        return read(json.loads(path.read_bytes()))
    except OSError as error:
        raise RunError(f"{path} must be {must_be}: {error.strerror}; `{maker}` makes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must be {must_be}, but cannot be parsed: {error!r}") from error
