"""The benchmark's arms of other engines, where a flag says that they are on this machine. None is a dependency."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.bench_arms import Arm
from pipeline.bench_engine_llamacpp import LlamaCpp, LlamaCppArm, find_llama_cpp
from pipeline.bench_engine_openvino import OpenVINOArm, require_openvino
from pipeline.bench_engine_weights import PRECISIONS, Request, request_of
from pipeline.build_models import Models
from pipeline.config import Config
from store.errors import UsageError
from store.registry import default_uri

SPECULATIVE = "-speculative"  # behind an engine's name: with the drafter


class OtherEngines:
    """OpenVINO GenAI and llama.cpp, each plain and with the configured drafter.

    Args:
        openvino: its version; None where it is not asked for.
        llama_cpp: where it lies; None where it is not asked for.
    """

    def __init__(self, openvino: str | None, llama_cpp: LlamaCpp | None) -> None:
        self._llama_cpp = llama_cpp
        self._labels: dict[str, str] = {}
        self._requests: dict[str, Request] = {}  # of the arms that were built
        if openvino is not None:
            self._labels["openvino"] = f"OpenVINO GenAI {openvino}"
        if llama_cpp is not None:
            self._labels["llama.cpp"] = f"llama.cpp {llama_cpp.version}"

    def names(self, batch: int, temperature: float) -> Sequence[str]:
        """As `Engines.names`."""
        return [f"{engine}{kind}" for engine in self._labels for kind in ("", SPECULATIVE)]

    def label(self, name: str) -> str:
        """As `Engines.label`; precision and k once the arm was asked for."""
        engine, request = name.removesuffix(SPECULATIVE), self._requests.get(name)
        named = f"{self._labels[engine]} {PRECISIONS[request.dtype]}" if request else self._labels[engine]
        if name == engine:
            return named
        return f"{named}, speculative, k={request.max_draft}" if request else f"{named}, speculative"

    def build(self, name: str, config: Config, models: Models, scratch: Path) -> Arm:
        """As `Engines.build`."""
        engine = name.removesuffix(SPECULATIVE)
        self._requests.pop(name, None)  # what an earlier configuration asked
        request = self._requests[name] = request_of(
            config, models, config.publish.mlflow_uri or default_uri(Path("runs")), scratch / "fetched"
        )
        speculative, folder = name != engine, scratch / engine
        if engine == "openvino":
            return OpenVINOArm(request, models.target_words, folder, speculative=speculative)
        if self._llama_cpp is None:
            raise UsageError(f"there is no engine {name!r}; name its folder with --llama-cpp")
        return LlamaCppArm(self._llama_cpp, request, models.target_words, folder, speculative=speculative)


def find_engines(*, openvino: bool, llama_cpp: Path | None) -> OtherEngines:
    """The engines that were asked for.

    Args:
        openvino: whether OpenVINO GenAI is wanted.
        llama_cpp: the folder that llama.cpp was built in; None if it is not wanted.

    Raises:
        UsageError: one of them is not there.
    """
    return OtherEngines(require_openvino() if openvino else None, find_llama_cpp(llama_cpp) if llama_cpp else None)
