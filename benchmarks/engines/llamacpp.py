"""The arms of llama.cpp on the same GGUF file, through its server with token ids."""

import json
import re
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from typing_extensions import override

from benchmarks.engines.request import EngineRequest
from benchmarks.speed.text_arms import PromptWords, TextArm
from store.errors import UsageError
from store.events import PromptReceived

SERVER = "llama-server"
PLACES = (".", "bin", "build/bin")  # folders of a build that may hold the server
DRAFT_MODEL = "draft-simple"  # its speculation with a drafter of the same vocabulary
# Options of each kind of its speculation. `ngram-simple` copies after 12 equal tokens by default, which hardly occur in
# short answers; the others have their own defaults.
SPECULATION: dict[str, dict[str, object]] = {
    "ngram-simple": {"--spec-ngram-simple-size-n": 3, "--spec-ngram-simple-size-m": 10},
    "ngram-mod": {},
    "ngram-cache": {},
    DRAFT_MODEL: {},
}
VERSION_SECONDS = 60
LOADING_SECONDS = 300
ANSWER_SECONDS = 600


@dataclass(frozen=True)
class LlamaCpp:
    """The server of llama.cpp."""

    server: Path  # its file
    version: str  # its version
    # words of its help, which contain its options and kinds of speculation. They differ by version.
    help_words: frozenset[str] = frozenset()

    def modes(self, draft: Path | None) -> tuple[str, ...]:
        """The kinds of speculation that its version has, after "" for none; with a drafter only if there is one."""
        return ("", *(kind for kind in SPECULATION if kind in self.help_words and (draft or kind != DRAFT_MODEL)))

    def choose(self, *options: str) -> str:
        """The first of these options that its help names, else the last."""
        return next((option for option in options if option in self.help_words), options[-1])


def find_llama_cpp(folder: Path) -> LlamaCpp:
    """Find llama.cpp in the folder in which it was built.

    Raises:
        UsageError: the server is missing or does not run.
    """
    places = [folder / place / SERVER for place in PLACES]
    found = [place for place in places if place.is_file()]
    if not found:
        raise UsageError(f"--llama-cpp must name the folder that llama.cpp was built in, no {SERVER} is in '{folder}'")
    named = re.search(r"version: (.+)", _output(found[0], "--version"))
    help_words = frozenset(re.findall(r"[\w.-]+", _output(found[0], "--help")))
    return LlamaCpp(found[0].resolve(), named[1] if named else "of unknown version", help_words)


def _output(server: Path, option: str) -> str:
    """What the server prints for an option such as `--version`."""
    try:
        done = subprocess.run(
            [server, option], check=False, capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"'{server}' must print its {option[2:]}, but: {error}; build it for this machine") from error
    return done.stdout + done.stderr


class LlamaCppArm(TextArm):
    """llama.cpp's server with continuous batching, one slot per prompt of the batch.

    Raises:
        UsageError: the server refuses the model; the message has its reason.
    """

    def __init__(
        self, found: LlamaCpp, request: EngineRequest, words: PromptWords, folder: Path, mode: str, draft: Path | None
    ) -> None:
        super().__init__(words)
        self._request = request
        folder.mkdir(parents=True, exist_ok=True)
        arguments = _arguments(request)
        if mode:
            arguments |= {"--spec-type": mode} | SPECULATION[mode]
        if mode == DRAFT_MODEL:
            arguments |= {"--spec-draft-model": draft}
        words_of_command = [str(word) for pair in arguments.items() for word in pair]
        command = [str(found.server), *words_of_command, found.choose("--no-ui", "--no-webui")]
        self._server = LlamaCppServer(command, folder / f"server{mode}.log")
        self._pool = ThreadPoolExecutor(request.batch)

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[list[int]]:
        requests = map(self._make_request, prompts)  # the next free slot takes the next prompt
        return [answer["tokens"] for answer in self._pool.map(self._server.complete, requests)]

    def _make_request(self, prompt: PromptReceived) -> dict[str, Any]:
        request = self._request
        greedy = request.temperature == 0
        return {
            "prompt": self._words.encode(prompt),
            "cache_prompt": False,  # the other arms prefill every prompt
            "n_predict": request.max_new_tokens,
            "samplers": ["top_k"] if greedy else ["top_k", "top_p", "temperature"],
            "top_k": 1 if greedy else request.top_k,
            "top_p": request.top_p,
            "temperature": request.temperature,
            "seed": request.seed + prompt.offset,
            "return_tokens": True,
            "response_fields": ["tokens"],
        }

    @override
    def close(self) -> None:
        """Stop the server; running requests fail."""
        self._server.close()
        self._pool.shutdown(cancel_futures=True)


def _arguments(request: EngineRequest) -> dict[str, object]:
    return {
        "--model": request.target,
        "--ctx-size": request.batch * request.longest,
        "--parallel": request.batch,
        "--threads": request.threads,
        "--cache-type-k": "f32",  # as in our arms
        "--cache-type-v": "f32",
    }


class LlamaCppServer:
    """A server process on this machine that answers requests in JSON.

    Args:
        command: command of the server, without its address.
        log: file for its output.

    Raises:
        UsageError: the server does not start, exits, or is not ready in time.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._log = log
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        try:
            with log.open("wb") as output:
                # In a session of its own, so that Ctrl-C reaches the benchmark alone, which then stops it.
                self._process = subprocess.Popen(
                    [*command, *address], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            raise UsageError(f"llama.cpp's server must start, but: {error}; build it for this machine") from error
        try:
            self._await_ready()
        except BaseException:  # also on an interrupt the server must not keep running
            self.close()
            raise

    def _await_ready(self) -> None:
        latest = monotonic() + LOADING_SECONDS
        while monotonic() < latest and self._process.poll() is None:
            try:
                if self._call("GET", "/health", None)[0] == 200:
                    return
            except (OSError, HTTPException):
                pass
            sleep(0.05)
        raise UsageError(f"llama.cpp must load the models, but did not: {self._last_words()}")

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; may be called by several threads.

        Raises:
            UsageError: the server did not answer.
        """
        try:
            status, answer = self._call("POST", "/completion", json.dumps(request))
        except (OSError, HTTPException) as error:
            raise UsageError(f"llama.cpp must answer, but the connection broke: {self._last_words()}") from error
        if status != 200:
            raise UsageError(f"llama.cpp must complete a prompt, but answered {status}: {answer[:200]!r}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _call(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _last_words(self) -> str:
        """The last lines of the log that report an error, or the last line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search("error|fail|not compatible|assert", line, re.IGNORECASE)]
        return " / ".join(errors[-2:] or lines[-1:]) or "its log is empty"

    def close(self) -> None:
        """Stop the process and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
