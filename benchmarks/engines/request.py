"""What other engines are asked for: a GGUF file and the sampling of the other arms."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.assembly.models import Models, locate, registry_uri
from pipeline.config.settings import Config
from stages.engine.checkpoints.gguf_file import find_gguf, read_gguf
from stages.engine.models.devices import count_threads
from store.errors import UsageError

DRAFTED_TOKENS = 64  # most that an engine drafts at once
CONTEXT_STEP = 256  # tokens; engines allocate caches in such steps


@dataclass(frozen=True)
class EngineRequest:
    """Target, sampling and sizes, equal for all engines and for the other arms."""

    target: Path  # a GGUF file
    temperature: float  # 0 is greedy
    top_k: int  # 0 keeps all
    top_p: float
    max_new_tokens: int
    seed: int
    ends: tuple[int, ...]  # ids that end a sequence
    longest: int  # context that the longest prompt with its completion needs, in tokens
    batch: int
    threads: int


def request_of(config: Config, models: Models, fetched: Path, longest: int) -> EngineRequest:
    """Return the request that a configuration describes.

    Args:
        config: models, sampling, lengths, batch size and seed.
        models: the loaded models.
        fetched: folder for models that a registry holds.
        longest: tokens of the longest prompt and completion together.

    Raises:
        UsageError: the target is no GGUF file.
    """
    stored = find_gguf(locate(models.name, registry_uri(config.publish), fetched))
    if stored is None:
        raise UsageError(f"other engines read a GGUF file, {models.name} is none; llama.cpp's convert_hf_to_gguf.py")
    sampling = config.sampling
    context = -(-(longest + DRAFTED_TOKENS + 2) // CONTEXT_STEP) * CONTEXT_STEP
    return EngineRequest(
        target=stored,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        seed=config.seed,
        ends=tuple(sorted(models.eos_ids)),
        longest=min(models.target.max_length, context),
        batch=config.batch,
        threads=count_threads(),
    )


def name_quantisation(path: Path) -> str:
    """Name the quantisation of a GGUF file, such as `Q4_1`: that which it states, else that of most of its bytes.

    Raises:
        ModelError: it cannot be read.
    """
    import gguf

    file = read_gguf(path)
    try:
        kind = gguf.LlamaFileType(file.metadata["general.file_type"])
        return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        sizes: Counter[int] = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.kind] += len(tensor.data)
        return gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name
