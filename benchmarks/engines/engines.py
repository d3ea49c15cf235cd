"""The arms of llama.cpp, which is no dependency."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from benchmarks.engines.llamacpp import LlamaCpp, LlamaCppArm
from benchmarks.engines.request import name_quantisation, request_of
from benchmarks.speed.arms import Arm, Engines
from benchmarks.speed.text_arms import PromptWords
from pipeline.assembly.models import Models
from pipeline.config.settings import Config

LLAMA_CPP = "llama.cpp"


class OtherEngines(Engines):
    """llama.cpp without speculation and with each kind of it that it has.

    Args:
        llama_cpp: its server.
        draft: a GGUF file of the target's vocabulary that it may draft with.
    """

    def __init__(self, llama_cpp: LlamaCpp, draft: Path | None = None) -> None:
        self._llama_cpp, self._draft = llama_cpp, draft
        self._modes = {f"{LLAMA_CPP}{mode and '-' + mode}": mode for mode in llama_cpp.modes(draft)}
        self._quantisation = ""

    @override
    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return list(self._modes)

    @override
    def label(self, name: str) -> str:
        mode = self._modes[name]
        return f"{LLAMA_CPP} {self._llama_cpp.version}{mode and ', ' + mode} {self._quantisation}".strip()

    @override
    def build(self, name: str, config: Config, models: Models, scratch: Path, longest: int) -> Arm:
        request, words = request_of(config, models, scratch / "fetched", longest), PromptWords(config, models)
        self._quantisation = name_quantisation(request.target)
        return LlamaCppArm(self._llama_cpp, request, words, scratch / LLAMA_CPP, self._modes[name], self._draft)
