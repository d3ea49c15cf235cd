"""Apply mutants one by one to a copy of the repository, and report which ones the tests find.

    python tests/mutants/run.py                     all of them
    python tests/mutants/run.py --part 3/8          the third eighth
    python tests/mutants/run.py accept-inverted     by name, or by the name of a list
    python tests/mutants/run.py --sound             the named tests without any mutant, which must pass

The libraries are imported once; every test run is a fork. Exit status 1 if a mutant survives without a stated reason.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from compiled_code import VARIABLE
from mutants import ROOT, Mutant, read_mutants

SECONDS = 100  # limit for the tests of one mutant; tests that reach it are stopped and count as failed
LIBRARIES = ("pytest", "hypothesis", "torch", "numpy", "pyarrow.parquet", "pydantic", "duckdb", "transformers")
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs", "build")
PASSED, FAILED = 0, 1  # exit codes of pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of mutants or of lists; by default all")
    parser.add_argument("--part", default="1/1", help="which part of them: NUMBER/COUNT")
    parser.add_argument("--sound", action="store_true", help="run the tests without mutants")
    options = parser.parse_args()
    number, count = map(int, options.part.split("/"))
    mutants = [one for one in read_mutants() if not options.names or {one.name, one.area} & {*options.names}]
    os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    for name in LIBRARIES:
        with suppress(ImportError):  # a library of an extra that is not installed
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = f"{temporary}/compiled"
        os.environ[VARIABLE] = f"{temporary}/numba"
        if options.sound:
            return check_tests(copy, mutants, number, count)
        verdicts = [report(copy, one) for one in mutants[number - 1 :: count]]
    print({verdict: verdicts.count(verdict) for verdict in sorted({*verdicts})})
    return int("survived" in verdicts or "error" in verdicts)


def report(copy: Path, mutant: Mutant) -> str:
    """Try one mutant and print a line. Returns the verdict."""
    started = time.monotonic()
    with mutant.apply(copy):
        verdict, by = "survived", ""
        for tests in mutant.tests:
            code = run_tests(copy, [tests])
            if code != PASSED:
                verdict = "killed" if code in (FAILED, None) else "error"
                by = tests if code is not None else f"{tests} (time limit)"
                break
    if verdict == "survived" and mutant.survives:
        verdict = "explained"
    print(f"{verdict:9} {time.monotonic() - started:5.0f} s  {mutant.area}/{mutant.name}  {by}", flush=True)
    return verdict


def check_tests(copy: Path, mutants: Sequence[Mutant], number: int, count: int) -> int:
    """Run the tests of the mutants on the unchanged copy. Returns 1 if any fails."""
    named = list(dict.fromkeys(tests for one in mutants for tests in one.tests))[number - 1 :: count]
    failed = [tests for tests in named if run_tests(copy, [tests]) != PASSED]
    print(f"{len(named) - len(failed)} of {len(named)} pass as they are; not: {failed}")
    return int(bool(failed))


def run_tests(copy: Path, tests: Sequence[str]) -> int | None:
    """Run tests in a fork until one fails. Returns pytest's exit code, or None at the time limit."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        os.chdir(copy)
        sys.path[:0] = [str(copy)]
        import pytest

        code = pytest.main(
            ["-x", "-n", "0", "-q", "-m", "not sweep", "-p", "no:cacheprovider", f"--rootdir={copy}", *tests]
        )
        os._exit(int(code))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with suppress(ProcessLookupError):  # processes that the tests started and did not end
                os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    sys.exit(main())
