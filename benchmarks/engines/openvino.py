"""The arm of OpenVINO GenAI, which reads a GGUF file itself. Its weights stay in the file's bits where it can."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from typing_extensions import override

from benchmarks.engines.request import EngineRequest
from benchmarks.speed.arms import chunks
from benchmarks.speed.text_arms import PromptWords, TextArm
from store.errors import UsageError
from store.events import PromptReceived


def require_openvino() -> str:
    """Return the version of OpenVINO GenAI. Raises `UsageError` if it is not installed."""
    if find_spec("openvino_genai") is None:
        raise UsageError("--openvino needs OpenVINO GenAI in this environment: pip install openvino-genai")
    return version("openvino-genai")


class OpenVINOArm(TextArm):
    """OpenVINO GenAI, one token per pass, on static batches.

    Raises:
        UsageError: OpenVINO refuses the model; the message has its reason.
    """

    def __init__(self, request: EngineRequest, words: PromptWords) -> None:
        super().__init__(words)
        import openvino_genai

        self._request = request
        try:
            threads = {"INFERENCE_NUM_THREADS": request.threads}
            self._pipeline = openvino_genai.LLMPipeline(str(request.target), "CPU", **threads)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(f"OpenVINO GenAI refuses {request.target}: {lines[-1]}") from error

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[list[int]]:
        found: list[list[int]] = []
        for chunk in chunks(prompts, self._request.batch):
            ids = [self._words.encode(prompt) for prompt in chunk]
            result = self._pipeline.generate(_pad(ids), _settings(self._request, chunk[0].offset))
            found += [list(map(int, tokens)) for tokens in result.tokens]
        return found

    @override
    def close(self) -> None:
        """Delete the pipeline and release its model."""
        del self._pipeline


def _pad(ids: Sequence[Sequence[int]]) -> Any:
    """Return the ids as OpenVINO takes them, padded on the left."""
    import openvino
    import openvino_genai

    width = max(map(len, ids))
    padded = np.array([[0] * (width - len(row)) + list(row) for row in ids], np.int64)
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in ids], np.int64)
    return openvino_genai.TokenizedInputs(openvino.Tensor(padded), openvino.Tensor(mask))


def _settings(request: EngineRequest, offset: int) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = request.max_new_tokens
    settings.do_sample = request.temperature > 0
    settings.apply_chat_template = False
    if request.temperature > 0:
        settings.temperature, settings.top_p = request.temperature, request.top_p
        settings.rng_seed = request.seed + offset
        if request.top_k:
            settings.top_k = request.top_k
    if request.ends:
        settings.set_eos_token_id(request.ends[0])
        settings.stop_token_ids = set(request.ends)
    return settings
