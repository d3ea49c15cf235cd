"""The benchmark's arms that are llama.cpp, plain and speculative, on the same weights: its server, asked in ids."""

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
from time import monotonic, perf_counter, sleep
from typing import Any

from pipeline.bench_arms import Round
from pipeline.bench_engine_gguf import save_gguf
from pipeline.bench_engine_weights import PRECISIONS, Llama, Request, load_llama
from stages.vocabulary import Vocabulary
from store.errors import UsageError
from store.events import PromptReceived

SERVER = "llama-server"
PLACES = (".", "bin", "build/bin")  # where a build puts it
VERSION_SECONDS = 60
LOADING_SECONDS = 300
ANSWER_SECONDS = 600


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server and what it calls its version."""

    server: Path
    version: str


def find_llama_cpp(folder: Path) -> LlamaCpp:
    """llama.cpp in the folder that it was built in.

    Raises:
        UsageError: it is not there or does not run, or the `gguf` package is not installed.
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
    """What it says of its version."""
    try:
        done = subprocess.run(
            [server, "--version"], capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"'{server}' must tell its version, but: {error}; build it for this machine") from error
    return done.stdout + done.stderr


class LlamaCppArm:
    """llama.cpp's server: continuous batching with a slot for every prompt of the batch; with a draft model, its
    speculative decoding, which translates between vocabularies by way of the text where the version does that.

    It drafts up to `max_draft` pieces and stops at its own least probability. Its server counts a whole block before
    it looks at the limit, so that a speculative completion of full length can be some tokens short. It tells how
    much it drafted, not how much of that it judged, so that it has no acceptance rate here.

    Args:
        found: the server.
        request: what is asked.
        words: the target's vocabulary.
        folder: for the converted weights.
        speculative: whether the drafter drafts.

    Raises:
        UsageError: the server does not take the models; it says why.
    """

    def __init__(
        self, found: LlamaCpp, request: Request, words: Vocabulary, folder: Path, *, speculative: bool
    ) -> None:
        self._request, self._words = request, words
        folder.mkdir(parents=True, exist_ok=True)
        target = load_llama(request.target)
        path = converted(target, folder / "target.gguf", request.dtype, _require_end(request))
        arguments = _arguments(request, path, target.longest)
        if speculative:
            drafter = load_llama(request.drafter)
            shared = drafter.tokenizer.get_vocab() == target.tokenizer.get_vocab()
            end = request.end if shared else drafter.tokenizer.eos_token_id
            path = converted(drafter, folder / "drafter.gguf", request.dtype, end)
            arguments += _draft_arguments(request, path)
        log = folder / f"server{'-speculative' if speculative else ''}.log"
        self._server = Server([str(found.server), *arguments], log)
        self._pool = ThreadPoolExecutor(request.batch)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """As `Arm.complete`."""
        started = perf_counter()
        questions = map(self._question, prompts)
        answers = list(self._pool.map(self._server.ask, questions))  # a slot that is free takes the next
        tokens = tuple(tuple(answer["tokens"]) for answer in answers)
        for one in tokens:
            self._words.decode(one)
        return Round(tokens, perf_counter() - started)

    def _question(self, prompt: PromptReceived) -> dict[str, Any]:
        request = self._request
        greedy = request.temperature == 0
        return {
            "prompt": self._words.encode(prompt.text),
            "cache_prompt": False,  # the other arms read every prompt anew
            "n_predict": request.max_new_tokens,
            "samplers": ["top_k"] if greedy else ["top_k", "top_p", "temperature"],
            "top_k": 1 if greedy else request.top_k,
            "top_p": request.top_p,
            "temperature": request.temperature,
            "seed": request.seed + prompt.offset,
            "return_tokens": True,
            "response_fields": ["tokens"],
        }

    def close(self) -> None:
        """Stop the server; questions that are under way break off."""
        self._server.close()
        self._pool.shutdown(cancel_futures=True)


def converted(llama: Llama, path: Path, dtype: str, end: int | None) -> Path:
    """Write a GGUF file whose texts end at `end`; one that is there stays."""
    if not path.is_file():
        save_gguf(llama, path, dtype, end)
    return path


def _require_end(request: Request) -> int:
    if request.end is None:  # llama.cpp would take an id of its own for the end
        raise UsageError(f"llama.cpp ends texts at an id, {request.target} has none; leave it out")
    return request.end


def _arguments(request: Request, target: Path, longest: int) -> list[str]:
    cache = PRECISIONS[request.dtype]
    named = {
        "--model": target,
        "--ctx-size": request.batch * longest,
        "--parallel": request.batch,
        "--threads": request.threads,
        "--cache-type-k": cache,
        "--cache-type-v": cache,
    }
    return [str(word) for pair in named.items() for word in pair] + ["--no-webui"]


def _draft_arguments(request: Request, drafter: Path) -> list[str]:
    cache = PRECISIONS[request.dtype]
    named = {
        "--model-draft": drafter,
        "--draft-max": request.max_draft,
        "--cache-type-k-draft": cache,
        "--cache-type-v-draft": cache,
    }
    return [str(word) for pair in named.items() for word in pair]


class Server:
    """A server process on this machine that answers questions in JSON.

    Args:
        command: of the server, without its address.
        log: where its output goes.

    Raises:
        UsageError: it does not start, ends, or is not ready in time.
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
        except BaseException:  # an interrupt too must not leave it running
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
        """The server's answer; may be called by several threads.

        Raises:
            UsageError: it did not answer.
        """
        try:
            status, answer = self._call("POST", "/completion", json.dumps(question))
        except (OSError, HTTPException) as error:
            raise UsageError(f"llama.cpp must answer, but broke off: {self._last_words()}") from error
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
        """The last lines of its log that tell of an error, or the last line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search("error|fail|not compatible|assert", line, re.IGNORECASE)]
        return " / ".join(errors[-2:] or lines[-1:]) or "it said nothing"

    def close(self) -> None:
        """Stop it and wait for that."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
