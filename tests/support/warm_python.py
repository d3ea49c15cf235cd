"""Processes that start with their libraries loaded: they are forked from one that imported them, which saves each of
them seconds. `Popen` replaces `subprocess.Popen`, `Context` replaces multiprocessing's `spawn`, and `run_worker`
replaces the interpreter of Ray's workers; they run what a new interpreter would have run.

This file is also the program of the process that is forked; until then it imports the standard library alone.
"""

import array
import atexit
import gc
import importlib
import json
import multiprocessing.context
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from multiprocessing import popen_spawn_posix, process
from pathlib import Path
from typing import Any
from unittest.mock import patch

import constants

LOADED = (
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "transformers",
    "pipeline.cli.app",
    "pipeline.run.replay",
    "pipeline.serve.run",
    "pipeline.cluster.worker",
    "pipeline.cluster.learner",
    "river.drift",
)  # but not ray, which reads the worker's identity from its environment as soon as it is imported
HIGH = 500  # descriptors that arrive are kept above those that a program counts on
RAY_WORKER = "default_worker.py"
NESTED = "OMNIDRAFT_TESTS_FORK"  # variable of a forked process whose own children are to be forked, too
STARTED = subprocess.Popen  # by the system, also where a test has put `Popen` of this module in its place


class Server:
    """The process that is forked, from the side of its clients. It ends with the process that started it.

    Attributes:
        address: its socket.
        interpreter: a program that replaces the interpreter where Ray starts a worker.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="warm-")  # a short path: that of a socket has at most 108 bytes
        self.address = f"{self.folder}/socket"
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = STARTED(
            [sys.executable, __file__, self.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.interpreter = f"{self.folder}/python"
        code = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import warm_python"
        call = f"warm_python.run_worker({self.address!r}, {sys.executable!r})"
        Path(self.interpreter).write_text(f"#!{sys.executable} -ES\n{code}\n{call}\n", encoding="utf-8")
        Path(self.interpreter).chmod(0o755)
        atexit.register(self.end)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def server() -> Server:
    """The one server for all tests of this process."""
    return Server()


class Child:
    """A forked process, which is not a child of this one."""

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        fds: Mapping[int, int],
        environment: Mapping[str, str],
        cwd: str,
        *,
        session: bool = False,
    ) -> None:
        request = {"arguments": list(arguments), "fds": list(fds), "environment": dict(environment), "cwd": cwd}
        request["session"] = session
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        socket.send_fds(self._socket, [b"\0"], list(fds.values()))
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._number()
        self._status: int | None = None

    def _number(self) -> int:
        number = array.array("q")
        number.frombytes(self._socket.recv(8, socket.MSG_WAITALL))
        return number[0] if number else signal.SIGKILL  # the server has ended, and with it what it forked

    def wait(self, block: bool) -> int | None:
        """Its status, as `os.waitpid` reports it; None if it is running. Later calls return the same status: a signal's
        handler may raise before the caller has stored it."""
        if self._status is None:
            if not block and not select.select([self._socket], [], [], 0)[0]:
                return None
            self._status = self._number()
            self._socket.close()
        return self._status


class Popen(subprocess.Popen):
    """A process of `[sys.executable, ("-c", CODE | "-m", MODULE), ...]` with all that `subprocess.Popen` can do. Other
    programs are started as usual."""

    _child: Child | None = None

    def _execute_child(self, *given: Any) -> None:
        values = dict(zip(signature(super()._execute_child).parameters, given, strict=True))
        words = [] if isinstance(values["args"], str | bytes) else [os.fsdecode(word) for word in values["args"]]
        if words[:1] != [sys.executable]:
            super()._execute_child(*given)
            return
        words = [word for word in words if word != "-P"]  # nothing is imported from the current folder
        own = {0: values["p2cread"], 1: values["c2pwrite"], 2: values["errwrite"]}
        fds = {number: number if fd == -1 else fd for number, fd in own.items()}
        fds |= {fd: fd for fd in values["pass_fds"]}
        environment = os.environ if values["env"] is None else values["env"]
        cwd, session = os.fspath(values["cwd"] or os.getcwd()), values["start_new_session"]
        self._child = Child(server().address, words[1:], fds, environment, cwd, session=bool(session))
        self.pid, self._child_created = self._child.pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(values[end] for end in ends))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._child is None:
            return super()._try_wait(wait_flags)
        status = self._child.wait(wait_flags != os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._child is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None and (status := self._child.wait(False)) is not None:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(*arguments: Any, **named: Any) -> subprocess.CompletedProcess:
    """Run a program like `subprocess.run`, in a forked process."""
    with patch("subprocess.Popen", Popen):
        return subprocess.run(*arguments, **named)


class _Spawned(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with patch.object(popen_spawn_posix.util, "spawnv_passfds", self._fork):
            super()._launch(process_obj)

    def _fork(self, path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments[1:]]
        begin = words.index("-c")  # in front of it: flags for the interpreter
        passed = {fd: fd for fd in (0, 1, 2, *fds)}
        self._child = Child(server().address, words[begin:], passed, os.environ, os.getcwd())
        return self._child.pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and (status := self._child.wait(flag != os.WNOHANG)) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Process(process.BaseProcess):
    """A process like that of `multiprocessing`, but forked."""

    _start_method = "spawn"

    @staticmethod
    def _Popen(process_obj: Any) -> _Spawned:  # noqa: N802  (multiprocessing's name)
        return _Spawned(process_obj)


class Context(multiprocessing.context.SpawnContext):
    """The context of `multiprocessing.get_context("spawn")`, with forked processes."""

    Process = Process


@contextmanager
def ray_workers():
    """Fork the workers of a Ray that is started in this context."""
    with patch.object(sys, "executable", server().interpreter):
        yield


def run_worker(address: str, executable: str) -> None:
    """Run a worker of Ray, or pass anything else on to the interpreter."""
    workers = [place for place, word in enumerate(sys.argv) if Path(word).name == RAY_WORKER]
    if not workers:
        os.execv(executable, [executable, *sys.argv[1:]])
    setup = ("--serialized-runtime-env-context", "--language")
    words = [word for word in sys.argv[workers[0] :] if not word.startswith(setup)]
    child = Child(address, words, {fd: fd for fd in (0, 1, 2)}, os.environ, os.getcwd())
    status = os.waitstatus_to_exitcode(child.wait(True) or 0)
    os._exit(status if status >= 0 else 128 - status)


def serve(address: str) -> dict[str, Any]:
    """Load the libraries, and fork. Returns in the forked process alone, with the request that it serves."""
    import mlflow_tables

    for name in LOADED:
        with suppress(ImportError):  # of an extra
            importlib.import_module(name)
    _load_late_parts()
    mlflow_tables.copy_tables()
    assert "ray" not in sys.modules
    assert threading.active_count() == 1, "no thread survives a fork"
    gc.freeze()  # what is never collected is never copied either
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    ends.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([listener, ends, sys.stdin], [], [])
        if ends in ready:
            ends.recv(4096)
            _reap(children)
        if sys.stdin in ready:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            client, _ = listener.accept()
            request = _receive(client)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for own in (listener, ends, wakeup, client, *children.values()):
                    own.close()
                return request | {"address": address}
            for fd in request["arrived"]:
                os.close(fd)
            children[pid] = client
            _send_number(client, pid)


def _load_late_parts() -> None:
    """Load what Numba and transformers load at their first use."""
    from numba.core.registry import cpu_target

    from stages.engine.models.huggingface import load_causal_model, new_llama

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    with tempfile.TemporaryDirectory() as folder:
        new_llama(0, num_hidden_layers=1, num_attention_heads=1, **sizes).save_pretrained(folder)
        load_causal_model(folder, "float32", "cpu")


def _send_number(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # it may be gone
        client.sendall(array.array("q", [number]).tobytes())


def _reap(children: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = children.pop(ended[0])
            _send_number(client, ended[1])
            client.close()


def _receive(client: socket.socket) -> dict[str, Any]:
    import fcntl

    _, fds, _, _ = socket.recv_fds(client, 1, 64)
    with client.makefile("rb") as lines:
        request = json.loads(lines.readline())
    request["arrived"] = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
    for fd in fds:
        os.close(fd)
    return request


def become(request: dict[str, Any]) -> None:
    """Run the requested program, as the interpreter would have done."""
    for arrived, wanted in zip(request["arrived"], request["fds"], strict=True):
        os.dup2(arrived, wanted)
        os.close(arrived)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    constants.apply_inherited()
    if NESTED in os.environ:
        globals()["server"] = lambda: types.SimpleNamespace(address=request["address"])
        subprocess.Popen = Popen  # type: ignore[misc]
    first, *words = request["arguments"]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = named
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        code, *rest = words
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = words
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *words]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def end(error: BaseException | None) -> None:
    """End as the interpreter would have done, but without taking all that is loaded apart (half a second)."""
    status: object = None
    if isinstance(error, SystemExit):
        status = error.code
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody listens any more, or it is closed
            stream.flush()
    os._exit((status or 0) & 255)


if __name__ == "__main__":
    request = serve(sys.argv[1])
    try:
        become(request)
    except BaseException as error:
        end(error)
    end(None)
