"""What goes wrong when models are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Writing weights and tokenizers: safetensors and tokenizers have errors of their own for a full disk.

    Raises:
        OSError: whatever went wrong.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{folder} could not be written: {error}") from error
