"""Tries a tokenizer of somebody else in a process of its own, before this process loads it.

The rules of a `tokenizer.json` are a small program: a chain of replacements may make gigabytes of a sentence, a pattern
may take time that grows with the square of a text, and both run in compiled code that cannot be interrupted. The
process reads texts of all kinds with a limit of memory and time; if it ends, this process does not.
"""

import os
from collections.abc import Callable
from pathlib import Path

from store.child import CallError, ChildCalls, ChildError, limit_memory
from store.errors import ModelError

SECONDS = 60.0  # for loading, too, which takes a second or two for the largest
MEMORY_BYTES = 2 << 30  # beyond what the process needs for the library
LENGTH = 1 << 14  # characters of each text
UNITS = (
    "a",
    " ",
    "0",
    ".",
    "\n",
    "é",
    "e\u0301",
    "\u1f82",
    "\ufdfa",
    "漢",
    "👍",
    "\u2581",
    "a1. ",
    "The end, 2 it's. ",
)


def require_bounded_tokenizer(path: Path, source: str, seconds: float = SECONDS) -> None:
    """Read texts with a tokenizer in another process; without a file, do nothing. Raises `ModelError` if the process
    took longer or more than `MEMORY_BYTES`, or the library failed in it.
    """
    if not path.is_file():
        return
    calls = ChildCalls(_make_reader, MEMORY_BYTES, name="tokenizer", variables=("PATH", "LD_LIBRARY_PATH"))
    try:
        calls.call(str(path.resolve()), seconds)
    except (TimeoutError, CallError, ChildError) as error:
        raise ModelError(
            f"the tokenizer of {source!r} must read {len(UNITS)} texts of {LENGTH:,} characters within {seconds:g} s "
            f"and {MEMORY_BYTES >> 30} GiB, but: {str(error).splitlines()[0][:200]}; fetch the model again"
        ) from error
    finally:
        calls.close()


def _make_reader(memory: int) -> Callable[[str], None]:
    """Return what loads a tokenizer and reads the texts; runs in the process, whose memory it limits."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the library prints that it fails
    limit_memory(memory)

    def read(path: str) -> None:
        tokenizer = Tokenizer.from_file(path)
        for unit in UNITS:
            tokenizer.encode_batch_fast([(unit * LENGTH)[:LENGTH]], add_special_tokens=False)

    return read
