"""The benchmark's arms of llama.cpp, plain and speculative, on the same weights, through its server with token ids."""

import json
import re
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from typing_extensions import override

from pipeline.bench.engines.gguf import save_gguf
from pipeline.bench.engines.weights import PRECISIONS, EngineRequest, Llama, load_llama
from pipeline.bench.speed.text_arms import PromptWords, TextArm
from store.errors import UsageError
from store.events import PromptReceived

SERVER = "llama-server"
PLACES = (".", "bin", "build/bin")  # folders of a build that may hold the server
VERSION_SECONDS = 60
LOADING_SECONDS = 300
ANSWER_SECONDS = 600


@dataclass(frozen=True)
class LlamaCpp:
    """The server of llama.cpp and its version."""

    server: Path
    version: str


def find_llama_cpp(folder: Path) -> LlamaCpp:
    """Find llama.cpp in the folder in which it was built.

    Raises:
        UsageError: the server is missing or does not run, or the `gguf` package is not installed.
    """
    places = [folder / place / SERVER for place in PLACES]
    found = [place for place in places if place.is_file()]
    if not found:
        raise UsageError(f"--llama-cpp must name the folder that llama.cpp was built in, no {SERVER} is in '{folder}'")
    if find_spec("gguf") is None:
        raise UsageError("--llama-cpp needs the package that converts weights: pip install gguf")
    named = re.search(r"version: (.+)", _version(found[0]))
    return LlamaCpp(found[0].resolve(), named[1] if named else "of unknown version")


def _version(server: Path) -> str:
    """The output of `llama-server --version`."""
    try:
        done = subprocess.run(
            [server, "--version"],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"'{server}' must print its version, but: {error}; build it for this machine") from error
    return done.stdout + done.stderr


class LlamaCppArm(TextArm):
    """llama.cpp's server with continuous batching, one slot per prompt of the batch.

    With a draft model it uses speculative decoding, which translates between vocabularies through text if the version
    supports it. It drafts up to `max_draft` pieces and stops at its own minimum probability. The server counts a whole
    block before it checks the limit, so a speculative completion of full length can be some tokens short. It reports
    how much it drafted, but not how much it judged, so it has no acceptance rate here.

    Args:
        found: server and version.
        request: models, sampling and precision.
        words: encodes prompts in the target's vocabulary.
        folder: folder for the converted weights.
        speculative: whether to draft with the drafter.

    Raises:
        UsageError: the server refuses the models; the message has its reason.
    """

    def __init__(
        self, found: LlamaCpp, request: EngineRequest, words: PromptWords, folder: Path, *, speculative: bool
    ) -> None:
        super().__init__(words)
        self._request = request
        folder.mkdir(parents=True, exist_ok=True)
        target = load_llama(request.target)
        path = convert_weights(target, folder / "target.gguf", request.dtype, _require_end(request))
        arguments = _arguments(request, path, target.longest)
        if speculative:
            drafter = load_llama(request.drafter)
            shared = drafter.tokenizer.get_vocab() == target.tokenizer.get_vocab()
            end = request.end if shared else drafter.tokenizer.eos_token_id
            path = convert_weights(drafter, folder / "drafter.gguf", request.dtype, end)
            arguments |= _draft_arguments(request, path)
        log = folder / f"server{'-speculative' if speculative else ''}.log"
        words_of_command = [str(word) for pair in arguments.items() for word in pair]
        self._server = LlamaCppServer([str(found.server), *words_of_command, "--no-webui"], log)
        self._pool = ThreadPoolExecutor(request.batch)

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[list[int]]:
        questions = map(self._question, prompts)  # the next free slot takes the next prompt
        return [answer["tokens"] for answer in self._pool.map(self._server.ask, questions)]

    def _question(self, prompt: PromptReceived) -> dict[str, Any]:
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


def convert_weights(llama: Llama, path: Path, dtype: str, end: int | None) -> Path:
    """Write a GGUF file with the end-of-sequence id `end`, unless the file exists."""
    if not path.is_file():
        save_gguf(llama, path, dtype, end)
    return path


def _require_end(request: EngineRequest) -> int:
    if request.end is None:  # llama.cpp would choose an end-of-sequence id itself
        raise UsageError(f"llama.cpp needs an end-of-sequence id, {request.target} has none; leave llama.cpp out")
    return request.end


def _arguments(request: EngineRequest, target: Path, longest: int) -> dict[str, object]:
    cache = PRECISIONS[request.dtype]
    return {
        "--model": target,
        "--ctx-size": request.batch * longest,
        "--parallel": request.batch,
        "--threads": request.threads,
        "--cache-type-k": cache,
        "--cache-type-v": cache,
    }


def _draft_arguments(request: EngineRequest, drafter: Path) -> dict[str, object]:
    cache = PRECISIONS[request.dtype]
    return {
        "--model-draft": drafter,
        "--draft-max": request.max_draft,
        "--cache-type-k-draft": cache,
        "--cache-type-v-draft": cache,
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
                self._process = subprocess.Popen([*command, *address], stdout=output, stderr=subprocess.STDOUT)
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

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; may be called by several threads.

        Raises:
            UsageError: the server did not answer.
        """
        try:
            status, answer = self._call("POST", "/completion", json.dumps(question))
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
