"""The arms of other engines. None of the engines is a dependency."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from benchmarks.engines.llamacpp import LlamaCpp, LlamaCppArm, find_llama_cpp
from benchmarks.engines.openvino import OpenVINOArm, require_openvino
from benchmarks.engines.request import LOOKUP_NGRAM, LOOKUP_TOKENS, Mode, name_quantisation, request_of
from benchmarks.speed.arms import Arm, Engines
from benchmarks.speed.text_arms import PromptWords
from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from store.errors import UsageError

OPENVINO, LLAMA_CPP = "openvino", "llama.cpp"


class OtherEngines(Engines):
    """OpenVINO GenAI, and llama.cpp plain and with drafts copied from the own text.

    Args:
        openvino: version of OpenVINO GenAI; None to leave it out.
        llama_cpp: server and version of llama.cpp; None to leave it out.
    """

    def __init__(self, openvino: str | None = None, llama_cpp: LlamaCpp | None = None) -> None:
        self._llama_cpp = llama_cpp
        self._labels: dict[str, str] = {OPENVINO: f"OpenVINO GenAI {openvino}"} if openvino else {}
        if llama_cpp is not None:
            lookup = f", lookup, n={LOOKUP_NGRAM}, k={LOOKUP_TOKENS}"
            for mode in llama_cpp.modes:
                words = lookup if mode is Mode.LOOKUP else ""
                self._labels[f"{LLAMA_CPP}{mode}"] = f"llama.cpp {llama_cpp.version}{words}"
        self._quantisation = ""

    @override
    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return list(self._labels)

    @override
    def label(self, name: str) -> str:
        return f"{self._labels[name]} {self._quantisation}".strip()

    @override
    def build(self, name: str, config: Config, models: Models, scratch: Path, longest: int) -> Arm:
        request, words = request_of(config, models, scratch / "fetched", longest), PromptWords(config, models)
        self._quantisation = name_quantisation(request.target)
        if name == OPENVINO:
            return OpenVINOArm(request, words)
        if self._llama_cpp is None or name not in self._labels:
            raise UsageError(f"there is no engine {name!r}; name its folder with --llama-cpp")
        return LlamaCppArm(self._llama_cpp, request, words, scratch / LLAMA_CPP, Mode(name.removeprefix(LLAMA_CPP)))


def find_engines(*, openvino: bool, llama_cpp: Path | None) -> OtherEngines:
    """Find the engines that options switch on.

    Args:
        openvino: whether to include OpenVINO GenAI.
        llama_cpp: folder in which llama.cpp was built; None to leave it out.

    Raises:
        UsageError: an engine is missing.
    """
    return OtherEngines(
        require_openvino() if openvino else None, find_llama_cpp(llama_cpp) if llama_cpp is not None else None
    )
