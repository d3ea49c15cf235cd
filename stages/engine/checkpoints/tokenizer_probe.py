"""Tries a tokenizer of somebody else in a process of its own, before this process loads it.

The rules of a `tokenizer.json` are a small program: a chain of replacements may make gigabytes of a sentence, a pattern
may take time that grows with the square of a text, and both run in compiled code that cannot be interrupted. The
process reads texts of all kinds with a limit of memory and time; if it ends, this process does not.
"""

import os
import subprocess
import sys
from pathlib import Path

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
_PROGRAM = "from stages.engine.checkpoints.tokenizer_probe import main; main()"


def require_bounded_tokenizer(path: Path, source: str, seconds: float = SECONDS) -> None:
    """Read texts with a tokenizer in another process; without a file, do nothing.

    Raises:
        ModelError: the process took longer or more than `MEMORY_BYTES`, or the library failed in it.
    """
    if not path.is_file():
        return
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(path.resolve())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"it took more than {seconds:g} s"
    else:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1][:200] if lines else f"its process ended with status {done.returncode}"
        if done.returncode == 0:
            return
    raise ModelError(
        f"the tokenizer of {source!r} must read {len(UNITS)} texts of {LENGTH:,} characters within {seconds:g} s and "
        f"{MEMORY_BYTES >> 30} GiB, but: {reason}; fetch the model again"
    )


def main() -> None:
    """Load the tokenizer that the command line names and read the texts; the program of the process."""
    from tokenizers import Tokenizer

    _limit_memory()
    tokenizer = Tokenizer.from_file(sys.argv[1])
    for unit in UNITS:
        tokenizer.encode_batch_fast([(unit * LENGTH)[:LENGTH]], add_special_tokens=False)


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if not sizes.exists():  # the system does not report the memory of a process
        return
    import resource

    now = int(sizes.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
