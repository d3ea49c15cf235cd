"""Chat templates are programs of others: they are rendered in a process of their own.

That process has a limit of memory, and is ended when a template passes its time limit: neither loops nor one huge value
reach the process that decodes. It is started by the first template, renders one at a time, and is started again after
it was ended. It inherits few variables of the environment.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

MEMORY_BYTES = 512 << 20  # beyond what it needs without any template
START_SECONDS = 60.0
INHERITED = ("PATH", "HOME", "TZ", "LANG", "LD_LIBRARY_PATH")  # variables of the environment; no keys
_PROGRAM = "from stages.vocabulary.template_process import main; main()"


class TemplateError(Exception):
    """A template that raised an error, or passed a limit."""


class TemplateProcess:
    """Renders templates in another process. May be used from any thread.

    A copy of this object in a forked process starts a process of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0  # the process that started it

    def render(self, template: str, values: Mapping[str, Any], seconds: float) -> str:
        """Render a template as `transformers` does, with these values: messages, tools and names of special tokens.

        Raises:
            TemplateError: the template raised an error, took more than `seconds`, or too much memory.
        """
        request = {"template": template, "values": dict(values), "seconds": seconds}
        with self._lock:
            connection = self._connect()
            try:
                connection.send_bytes(json.dumps(request, default=str).encode())
                if not connection.poll(seconds):
                    self._end()
                    raise TemplateError(f"it took more than {seconds:g} s")
                answer: dict[str, str] = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                self._end()
                raise TemplateError("the process that rendered it ended, perhaps for its memory") from None
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def _connect(self) -> Connection:
        if self._owner != os.getpid():
            self._process = self._connection = None  # of the process that this one was forked from
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        arguments = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._connection, self._owner = ours, os.getpid()
        if not ours.poll(START_SECONDS):
            self._end()
            raise TemplateError(f"the process that renders it did not start within {START_SECONDS:g} s")
        ours.recv_bytes()
        return ours

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        if self._connection:
            self._connection.close()
        self._process = self._connection = None


def main() -> None:
    """Render templates until the other end of the pipe closes; the program of the process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    connection = Connection(int(sys.argv[1]))
    render_jinja_template([[{"role": "user", "content": ""}]], chat_template="")  # loads what it needs
    _limit_memory(MEMORY_BYTES)
    connection.send_bytes(b"ready")
    while True:
        try:
            given = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.alarm(int(given["seconds"]) + 2)  # ends this process if the other one is no longer there to do so
        answer = _render(render_jinja_template, given["template"], given["values"])
        signal.alarm(0)
        try:
            connection.send_bytes(json.dumps(answer).encode())
        except MemoryError:
            connection.send_bytes(b'{"error": "its text takes too much memory"}')


def _render(render: Any, template: str, values: dict[str, Any]) -> dict[str, str]:
    try:
        messages: Sequence[Any] = values.pop("messages")
        (text,), _ = render([messages], chat_template=template, add_generation_prompt=True, **values)
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # a template may raise any error
        lines = str(error).strip().splitlines()
        return {"error": lines[0] if lines else type(error).__name__}
    return {"text": text}


def _limit_memory(more: int) -> None:
    """Limit the address space of this process to its size and `more` bytes, if the system reports the size."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        return
    import resource

    now = int(sizes.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


TEMPLATES = TemplateProcess()  # one for all templates of this process
