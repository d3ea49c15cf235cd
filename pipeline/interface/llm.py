"""Speculative decoding in this process, without HTTP: `generate` on the engine of `omnidraft serve`."""

import gc
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, Self, overload

from pipeline.assembly.stages import make_sampling_params
from pipeline.config.defaults import with_serving_defaults
from pipeline.config.settings import Config
from pipeline.interface.arguments import (
    Name,
    Settings,
    build_config,
    flatten_settings,
    model_settings,
    restored_threads,
)
from pipeline.interface.versions import PublishedVersion
from pipeline.run.folder import RUNS, open_new_run
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import GRAMMAR_LIMIT, BusyError, Chunk, EncodedPrompt, Finish, GenerationRequest, Usage
from pipeline.serve.run import ServerRun
from stages.sampling.grammars import GrammarSource
from stages.sampling.params import SamplingParams
from store.errors import ConfigError, OmnidraftError, UsageError
from store.registry.registry import default_uri

NO_LIMIT = 2**31  # requests that may wait: the caller waits for them in any case
PARAMETERS = {field.name for field in fields(SamplingParams)} - {"logprobs"}
Message = Mapping[str, str]


@dataclass(frozen=True)
class Completion:
    """A completed prompt: `text`, `tokens`, `finish`, and the counts of its decoding in `usage`."""

    text: str  #: the completion, without the prompt
    tokens: tuple[int, ...]  #: its target ids, the end-of-sequence token included
    finish: str  #: `stop` (end of sequence, or a stop string) or `length`
    #: counts: `prompt` and `emitted` target tokens, `blocks` (target passes), `drafted` drafter pieces, `accepted`
    #: target tokens.
    usage: Usage

    @property
    def tokens_per_pass(self) -> float:
        """Target tokens per target pass; 1 is plain decoding."""
        return self.usage.emitted / self.usage.blocks


class _Request:
    """A request in the engine: its chunks, until the last one."""

    def __init__(self, engine: LiveEngine, generation_request: GenerationRequest) -> None:
        self._engine, self._chunks = engine, SimpleQueue[Chunk]()
        try:
            self.cancel = engine.submit(generation_request, self._chunks.put)
        except BusyError:
            raise (self._engine_error() if engine.failure else _closed_error()) from None

    def chunks(self) -> Iterator[Chunk]:
        """Wait for each chunk. Raises `OmnidraftError` if the engine failed, `UsageError` if it was closed, and
        `ConfigError` if the grammar of the request takes too much work.
        """
        while True:
            chunk = self._chunks.get()
            if chunk.finish is Finish.FAILED:
                raise self._engine_error()
            if chunk.finish is Finish.CANCELLED:
                raise _closed_error()
            if chunk.finish is Finish.GRAMMAR:
                raise ConfigError(f"the completion {GRAMMAR_LIMIT}")
            yield chunk
            if chunk.finish:
                return

    def _engine_error(self) -> OmnidraftError:
        return OmnidraftError(f"the engine stopped: {self._engine.failure!r}; make another LLM")

    def completion(self) -> Completion:
        chunks = list(self.chunks())
        last = chunks[-1]
        assert last.finish is not None
        assert last.usage is not None  # it comes with the finish
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Completion("".join(chunk.text for chunk in chunks), tokens, last.finish.value, last.usage)


class LLM:
    """A target with a drafter, loaded and ready to complete prompts. The target's output distribution is kept.

    Close it, or use it as a context manager: that ends its threads and commits the log. Threads may share it; requests
    of all callers are decoded in one continuous batch.

        with pipeline.LLM() as llm:
            print(llm.generate("def add(a, b):", max_tokens=32).text)

    Args:
        target: target model: a hub name, a folder or `builtin:NAME`. None: the built-in one.
        drafter: draft model: as the target, a version from `load_version`, or `models:/NAME/NUMBER`.
        run: folder of a run, new or empty, that keeps a log of the requests, as `omnidraft serve` does. None: no log is
            left.
        learning: `off`, or as for `omnidraft serve`: `live` trains the drafter on the requests and takes updates into
            service, `idle` does so only while no request runs, `shadow` only publishes versions. All need `run` and
            start a process: in a script, call `LLM` below `if __name__ == "__main__":`.
        config: settings that the other arguments override, as for `replay`. `sampling` holds the defaults of requests.
            Where nothing is set, the temperature is 1 and `batch` 8, as for `omnidraft serve`.
        settings: any other setting by its name, those of a section as a mapping.

    Raises:
        ConfigError: a setting is unknown or its value impossible.
        ModelError, VocabularyError: a model cannot be loaded or the pair cannot work together.
        RunError: the folder is not free.
    """

    def __init__(
        self,
        target: Name | None = None,
        drafter: Name | PublishedVersion | None = None,
        *,
        run: str | os.PathLike[str] | None = None,
        learning: str = "off",
        config: Settings | None = None,
        **settings: object,
    ) -> None:
        overrides = {"serve.learn": learning, **model_settings(target, drafter), **flatten_settings(settings)}
        overrides["serve.waiting"] = NO_LIMIT
        if run is not None:
            overrides["run"] = Path(run)
        self._config = build_config(config, overrides, with_serving_defaults)
        self._numbers = itertools.count()
        with ExitStack() as undo, restored_threads():
            undo.callback(gc.collect)  # objects of a run refer to each other; a thread that trains ends with them
            self._engine: LiveEngine | None = undo.enter_context(_make_server_run(self._config, undo)).engine
            self._closing = weakref.finalize(self, undo.pop_all().close)

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Completion]: ...

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> Completion | list[Completion]:
        """Complete one prompt or several, and wait for it. Ctrl-C cancels them.

        Args:
            prompts: a text, or texts that are decoded together.
            sampling: `max_tokens` (at most so many target tokens), `temperature` (0 is greedy), `top_k`, `top_p`,
                `stop` (one or several texts before which the completion ends), `seed`. By default those of the
                settings' section `sampling`. Also `min_p`, `presence_penalty`, `frequency_penalty`,
                `repetition_penalty`, `logit_bias` (token ids to numbers), `ignore_eos`, `stop_token_ids` and
                `response_format` (a mapping), as in docs/serve.md.

        Returns:
            the completion of a text, or a list with one per text in their order.

        Raises:
            UsageError: a prompt is empty or longer than the models' contexts, or the LLM is closed.
            ConfigError: a sampling parameter is unknown or impossible.
            OmnidraftError: the engine failed.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        completions = self._complete([self._encode(text) for text in texts], sampling)
        return completions[0] if isinstance(prompts, str) else completions

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Completion:
        """Complete a conversation in the target's chat template; see `generate` for `sampling` and errors. Each message
        has `role` (`system`, `user` or `assistant`) and `content`, both texts.
        """
        return self._complete([self._encode(messages)], sampling)[0]

    def stream(self, prompt: str | Sequence[Message], **sampling: Any) -> Iterator[str]:
        """The completion of a text or of a conversation, piece by piece, as blocks are verified.

        Closing the iterator cancels the request. See `generate` for `sampling` and errors; all of them are raised by
        the first step of the iteration.
        """
        request = _Request(self._open, self._request(self._encode(prompt), sampling))
        try:
            for chunk in request.chunks():
                if chunk.text:
                    yield chunk.text
        finally:
            request.cancel()

    def close(self) -> None:
        """Finish the requests in flight, commit the log, end all threads and processes, and free the models.

        Calling it again does nothing. Raises RunError if the engine had failed.
        """
        self._engine = None
        self._closing()

    def _complete(self, prompts: Sequence[EncodedPrompt], sampling: Mapping[str, Any]) -> list[Completion]:
        generation_requests, requests = [self._request(prompt, sampling) for prompt in prompts], list[_Request]()
        try:
            for generation_request in generation_requests:
                requests.append(_Request(self._open, generation_request))
            return [request.completion() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def _encode(self, prompt: str | Sequence[Message]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return self._open.encode(prompt)
        for message in prompt:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise UsageError(f"a message must have texts as 'role' and 'content', got {message!r}")
        return self._open.encode_chat(prompt)

    def _request(self, prompt: EncodedPrompt, sampling: Mapping[str, Any]) -> GenerationRequest:
        values = dict(sampling)
        source = GrammarSource.from_response_format(values.pop("response_format", {"type": "text"}))
        params = self._make_params(values)
        if source and params.ignore_eos:
            raise ConfigError("ignore_eos must be False with a response_format, which ends by itself, got True")
        return GenerationRequest(f"request-{next(self._numbers)}", prompt, params, grammar=source)

    def _make_params(self, values: dict[str, Any]) -> SamplingParams:
        if unknown := values.keys() - PARAMETERS:
            names = ", ".join(sorted(PARAMETERS))
            raise ConfigError(f"a sampling parameter must be response_format or one of {names}; got {min(unknown)!r}")
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids"):
            values[name] = tuple(values.get(name, ()))
        values["logit_bias"] = tuple(dict(values.get("logit_bias", {})).items())
        params = replace(make_sampling_params(self._config.sampling), **values)
        if wrong := params.find_unknown_id(size := self._open.vocabulary_size):
            raise ConfigError(f"{wrong[0]} must have token ids from 0 to {size - 1}, got {wrong[1]}")
        return params

    @property
    def _open(self) -> LiveEngine:
        if self._engine is None:
            raise _closed_error()
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_server_run(config: Config, undo: ExitStack) -> ServerRun:
    """The engine with its run; without a folder of its own the run goes when `undo` does."""
    if config.run is None:
        if config.serve.learn != "off" and config.learn.enabled:
            raise ConfigError(
                f"learning needs a run that keeps what is learned, got learning={config.serve.learn!r}; add run="
            )
        scratch = Path(undo.enter_context(TemporaryDirectory(prefix="omnidraft-llm-")))
        uri = config.publish.mlflow_uri or default_uri(RUNS)  # where `models:/` names are looked up
        config = config.with_overrides({"run": scratch / "run", "publish.mlflow_uri": uri})
    run_folder, mirror = open_new_run(config.run)
    return ServerRun(config, run_folder, lambda event: None, mirror=mirror, keeps=True)


def _closed_error() -> UsageError:
    return UsageError("an LLM must be open to complete prompts, but this one is closed; make another one")
