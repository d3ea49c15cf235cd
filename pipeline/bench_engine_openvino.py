"""The benchmark's arms that are OpenVINO GenAI, plain and speculative, on the same weights."""

from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from pipeline.bench_arms import Round
from pipeline.bench_engine_graph import save_graph
from pipeline.bench_engine_weights import PRECISIONS, Llama, Request, load_llama
from stages.vocabulary import Vocabulary
from store.errors import UsageError
from store.events import PromptReceived


def require_openvino() -> str:
    """OpenVINO GenAI's version.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("openvino_genai") is None or find_spec("openvino_tokenizers") is None:
        raise UsageError("--openvino needs OpenVINO GenAI in this environment: pip install openvino-genai")
    return version("openvino-genai")


class OpenVINOArm:
    """Continuous batching of OpenVINO GenAI; with a draft model, its speculative decoding.

    It tells how much it drafted, not how much of that it judged, so that it has no acceptance rate here.

    Args:
        request: what is asked.
        words: the target's vocabulary.
        folder: for the converted weights.
        speculative: whether the drafter drafts.

    Raises:
        UsageError: OpenVINO does not take the models; it says why.
    """

    def __init__(self, request: Request, words: Vocabulary, folder: Path, *, speculative: bool) -> None:
        self._request, self._words = request, words
        self._draft = speculative
        target = converted(load_llama(request.target), folder / "target")
        drafter = converted(load_llama(request.drafter), folder / "drafter") if speculative else None
        try:
            self._pipeline = _pipeline(request, target, drafter)
        except RuntimeError as error:
            raise UsageError(f"OpenVINO GenAI refuses {request.target} and its drafter: {_reason(error)}") from error

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """As `Arm.complete`."""
        started = perf_counter()
        tokens = self._generate(prompts)
        for one in tokens:
            self._words.decode(one)
        return Round(tokens, perf_counter() - started)

    def _generate(self, prompts: Sequence[PromptReceived]) -> tuple[tuple[int, ...], ...]:
        """All completions, one entering as another ends: the scheduler itself would take all prompts at once."""
        waiting, running = deque(enumerate(prompts)), dict[int, Any]()
        tokens: dict[int, tuple[int, ...]] = {}
        while waiting or running:
            while waiting and len(running) < self._request.batch:
                place, prompt = waiting.popleft()
                settings = _settings(self._request, prompt.offset, self._draft)
                running[place] = self._pipeline.add_request(place, _tensor(self._words.encode(prompt.text)), settings)
            self._pipeline.step()
            for place in [place for place, handle in running.items() if handle.get_status().name != "RUNNING"]:
                tokens[place] = tuple(map(int, running.pop(place).read_all()[0].generated_ids))
        return tuple(tokens[place] for place in range(len(prompts)))

    def close(self) -> None:
        """Let the models go."""
        del self._pipeline


def converted(llama: Llama, folder: Path) -> Path:
    """Write an OpenVINO folder of a Llama: model, tokenizer and detokenizer; one that is there stays.

    Raises:
        UsageError: OpenVINO cannot convert the tokenizer.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer

    if (folder / "openvino_detokenizer.xml").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_graph(llama, folder / "openvino_model.xml")
    try:
        parts = convert_tokenizer(llama.tokenizer, with_detokenizer=True)
    except Exception as error:  # of many types, for what it does not know
        raise UsageError(f"OpenVINO must be able to convert the tokenizer, but: {_reason(error)}") from error
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")
    return folder


def _pipeline(request: Request, target: Path, drafter: Path | None) -> Any:
    import openvino_genai

    properties = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[request.dtype],
        "KV_CACHE_PRECISION": PRECISIONS[request.dtype],
        "INFERENCE_NUM_THREADS": request.threads,
    }
    draft = {"draft_model": openvino_genai.draft_model(drafter, "CPU", **properties)} if drafter else {}
    scheduler = openvino_genai.SchedulerConfig()  # whose max_num_seqs bounds only its other, slower way to schedule
    tokenizer = openvino_genai.Tokenizer(target)
    return openvino_genai.ContinuousBatchingPipeline(target, tokenizer, scheduler, "CPU", **properties, **draft)


def _settings(request: Request, offset: int, draft: bool) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = request.max_new_tokens
    settings.do_sample = request.temperature > 0
    if request.temperature > 0:
        settings.temperature, settings.top_p = request.temperature, request.top_p
        settings.rng_seed = request.seed + offset
    if request.temperature > 0 and request.top_k:
        settings.top_k = request.top_k
    if request.end is not None:
        settings.set_eos_token_id(request.end)
    if draft:
        settings.num_assistant_tokens = request.max_draft
    return settings


def _tensor(ids: Sequence[int]) -> Any:
    import openvino

    return openvino.Tensor(np.array([ids], np.int64))


def _reason(error: Exception) -> str:
    """The last line that says something: OpenVINO puts the places in its source first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
