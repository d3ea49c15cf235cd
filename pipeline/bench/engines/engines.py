"""The benchmark's arms of other engines, which options switch on. None of the engines is a dependency."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from pipeline.assembly.models import Models
from pipeline.bench.engines.gguf import name_quantisation
from pipeline.bench.engines.llamacpp import LlamaCpp, LlamaCppArm, find_llama_cpp
from pipeline.bench.engines.openvino import OpenVINOArm, require_openvino
from pipeline.bench.engines.weights import LOOKUP_NGRAM, PRECISIONS, EngineRequest, Mode, request_of
from pipeline.bench.speed.arms import Arm, Engines
from pipeline.bench.speed.text_arms import PromptWords
from pipeline.config.settings import Config
from stages.engine.checkpoints.gguf_file import find_gguf
from stages.tools.transformers_baselines import LOOKUP_TOKENS
from store.errors import UsageError


class OtherEngines(Engines):
    """OpenVINO GenAI and llama.cpp, each plain, with the configured drafter, and with drafts copied from the own text.

    Args:
        openvino: version of OpenVINO GenAI; None to leave it out.
        llama_cpp: server and version of llama.cpp; None to leave it out.
        openvino_weights: format of the target's weights in OpenVINO.
    """

    def __init__(self, openvino: str | None, llama_cpp: LlamaCpp | None, openvino_weights: str = "float32") -> None:
        self._llama_cpp, self._openvino_weights = llama_cpp, openvino_weights
        self._labels: dict[str, str] = {}
        self._arms: dict[str, tuple[str, Mode]] = {}  # engine and mode, by name of the arm
        self._built: dict[str, tuple[EngineRequest, str]] = {}  # request and precision, by name of each arm
        if openvino is not None:
            self._labels["openvino"] = f"OpenVINO GenAI {openvino}"
            self._arms |= {f"openvino{mode}": ("openvino", mode) for mode in Mode}
        if llama_cpp is not None:
            self._labels["llama.cpp"] = f"llama.cpp {llama_cpp.version}"
            self._arms |= {f"llama.cpp{mode}": ("llama.cpp", mode) for mode in llama_cpp.modes}

    @override
    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return list(self._arms)

    @override
    def label(self, name: str) -> str:
        """Name of an arm in the table, with precision and lengths after the arm was built."""
        engine, mode = self._arms[name]
        if name not in self._built:
            return f"{self._labels[engine]}, {mode[1:]}" if mode else self._labels[engine]
        request, precision = self._built[name]
        details = {
            Mode.PLAIN: "",
            Mode.SPECULATIVE: f", speculative, k={request.max_draft}",
            Mode.LOOKUP: f", lookup, n={LOOKUP_NGRAM}, k={LOOKUP_TOKENS}",
        }
        return f"{self._labels[engine]} {precision}{details[mode]}"

    @override
    def build(self, name: str, config: Config, models: Models, scratch: Path, longest: int) -> Arm:
        self._built.pop(name, None)  # of an earlier configuration
        engine, mode = self._arms.get(name, ("", Mode.PLAIN))
        request = request_of(config, models, scratch / "fetched", longest)
        words, folder = PromptWords(config, models), scratch / engine
        if engine == "openvino":
            weights = self._openvino_weights
            precision = PRECISIONS[request.dtype]
            self._built[name] = request, precision if weights == "float32" else f"{weights}, {precision}"
            return OpenVINOArm(request, words, folder, mode, weights)
        if self._llama_cpp is None:
            raise UsageError(f"there is no engine {name!r}; name its folder with --llama-cpp")
        stored = find_gguf(request.target)
        self._built[name] = request, name_quantisation(stored) if stored else PRECISIONS[request.dtype]
        return LlamaCppArm(self._llama_cpp, request, words, folder, mode)


def find_engines(*, openvino: bool, llama_cpp: Path | None, openvino_weights: str = "float32") -> OtherEngines:
    """Find the engines that options switch on.

    Args:
        openvino: whether to include OpenVINO GenAI.
        llama_cpp: folder in which llama.cpp was built; None to leave it out.
        openvino_weights: format of the target's weights in OpenVINO: "float32", "int8" or "int4".

    Raises:
        UsageError: an engine is missing.
    """
    version = require_openvino(openvino_weights) if openvino else None
    return OtherEngines(version, find_llama_cpp(llama_cpp) if llama_cpp else None, openvino_weights)
