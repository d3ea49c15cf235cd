"""The benchmark's arms of other engines, which options switch on. None of the engines is a dependency."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from pipeline.assembly.models import Models
from pipeline.bench.engines.llamacpp import LlamaCpp, LlamaCppArm, find_llama_cpp
from pipeline.bench.engines.openvino import OpenVINOArm, require_openvino
from pipeline.bench.engines.weights import PRECISIONS, EngineRequest, request_of
from pipeline.bench.speed.arms import Arm, Engines
from pipeline.bench.speed.text_arms import PromptWords
from pipeline.config.settings import Config
from store.errors import UsageError

SPECULATIVE = "-speculative"  # suffix of an engine's name for the arm with the drafter


class OtherEngines(Engines):
    """OpenVINO GenAI and llama.cpp, each without drafting and with the configured drafter.

    Args:
        openvino: version of OpenVINO GenAI; None to leave it out.
        llama_cpp: server and version of llama.cpp; None to leave it out.
    """

    def __init__(self, openvino: str | None, llama_cpp: LlamaCpp | None) -> None:
        self._llama_cpp = llama_cpp
        self._labels: dict[str, str] = {}
        self._requests: dict[str, EngineRequest] = {}  # by name of each arm that was built
        if openvino is not None:
            self._labels["openvino"] = f"OpenVINO GenAI {openvino}"
        if llama_cpp is not None:
            self._labels["llama.cpp"] = f"llama.cpp {llama_cpp.version}"

    @override
    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return [f"{engine}{kind}" for engine in self._labels for kind in ("", SPECULATIVE)]

    @override
    def label(self, name: str) -> str:
        """Name of an arm in the table, with precision and k after the arm was built."""
        engine, request = name.removesuffix(SPECULATIVE), self._requests.get(name)
        named = f"{self._labels[engine]} {PRECISIONS[request.dtype]}" if request else self._labels[engine]
        if name == engine:
            return named
        return f"{named}, speculative, k={request.max_draft}" if request else f"{named}, speculative"

    @override
    def build(self, name: str, config: Config, models: Models, scratch: Path) -> Arm:
        engine = name.removesuffix(SPECULATIVE)
        self._requests.pop(name, None)  # of an earlier configuration
        request = self._requests[name] = request_of(config, models, scratch / "fetched")
        words = PromptWords(config, models)
        speculative, folder = name != engine, scratch / engine
        if engine == "openvino":
            return OpenVINOArm(request, words, folder, speculative=speculative)
        if self._llama_cpp is None:
            raise UsageError(f"there is no engine {name!r}; name its folder with --llama-cpp")
        return LlamaCppArm(self._llama_cpp, request, words, folder, speculative=speculative)


def find_engines(*, openvino: bool, llama_cpp: Path | None) -> OtherEngines:
    """Find the engines that options switch on.

    Args:
        openvino: whether to include OpenVINO GenAI.
        llama_cpp: folder in which llama.cpp was built; None to leave it out.

    Raises:
        UsageError: an engine is missing.
    """
    return OtherEngines(require_openvino() if openvino else None, find_llama_cpp(llama_cpp) if llama_cpp else None)
