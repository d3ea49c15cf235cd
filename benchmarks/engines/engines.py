"""The arms of llama.cpp, which is no dependency."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from benchmarks.engines.llamacpp import LlamaCpp, LlamaCppArm
from benchmarks.engines.request import LOOKUP_NGRAM, LOOKUP_TOKENS, Mode, name_quantisation, request_of
from benchmarks.speed.arms import Arm, Engines
from benchmarks.speed.text_arms import PromptWords
from pipeline.assembly.models import Models
from pipeline.config.settings import Config

LLAMA_CPP = "llama.cpp"


class OtherEngines(Engines):
    """llama.cpp, plain and with drafts copied from the own text."""

    def __init__(self, llama_cpp: LlamaCpp) -> None:
        self._llama_cpp = llama_cpp
        lookup = f", lookup, n={LOOKUP_NGRAM}, k={LOOKUP_TOKENS}"
        self._labels = {
            f"{LLAMA_CPP}{mode}": f"llama.cpp {llama_cpp.version}{lookup if mode is Mode.LOOKUP else ''}"
            for mode in llama_cpp.modes
        }
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
        return LlamaCppArm(self._llama_cpp, request, words, scratch / LLAMA_CPP, Mode(name.removeprefix(LLAMA_CPP)))
