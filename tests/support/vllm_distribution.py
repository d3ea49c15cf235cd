"""The distribution of two tokens in vLLM's rejection sampler, by enumeration. Run by an interpreter that has vLLM.

The target is a Markov chain over three tokens whose probabilities are quarters. The drafts are the plugin's. The
sampler is called for a batch that has one row per point of a grid of its random numbers. All points have the same
weight, and the grid is such that counts over it are the exact probabilities:

- uniform numbers: the middles of quarters;
- the race of exponential numbers for the token after a rejection: two tokens are left, and E1 / E0 > t has the
  probability 1 / (1 + t), so its quantiles are known;
- the bonus token: each as often as its probability is. A pass has a race or a bonus token, so one number chooses
  both.

Where Triton is installed, vLLM's Triton kernels run in Triton's interpreter, else vLLM's replacements for the CPU.

With the argument `second`, the sampler is that of vLLM's second model runner, whose kernels make their random numbers
themselves, of a request's seed and a position: every seed below `SEEDS` has a row, and the error is that of a share of
so many rows, in standard errors.

Output: JSON with `kernels`, `error` (the greatest difference of a probability), and `drafts`, those that were judged.
"""

import ast
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

PARTS, RACE = 4, 12  # the tokens that are left after a rejection have 2 or 3 quarters together
CHAIN = ((1, 2, 1), (1, 1, 2), (2, 1, 1))  # quarters of the next token, by the last one
BLOCK = 16  # tokens that a Triton kernel reads at once
HISTORY = [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]] * 6
PROMPTS = [[0, 1, 2, 0, 1, 2, 0], [2, 1, 0, 1], [1, 1, 2], [2, 2, 2, 0]]
KERNELS = {
    "_rejection_random_sample": "rejection_random_sample_kernel",
    "_sample_recovered_tokens": "sample_recovered_tokens_kernel",
}
Distribution = dict[tuple[int, ...], Fraction]


def draft_after(prompt: Sequence[int], *emitted: int) -> list[int]:
    """The draft of a plugin with a history, after a prompt and tokens that were emitted one per pass."""
    from pipeline.vllm_plugin.engine import EngineFacts
    from pipeline.vllm_plugin.host import build_engine
    from pipeline.vllm_plugin.sequences import EngineRow, RowRequest
    from pipeline.vllm_plugin.settings import PluginSettings

    settings = PluginSettings.model_validate({"pass_costs": ((1, 1.0), (100, 1.1))})
    engine = build_engine(settings, EngineFacts("target", "target", len(CHAIN), 100, 2, 4, frozenset()))
    for text in HISTORY:
        for end in range(2, len(text) + 1):
            engine.step([EngineRow(np.array(text[:end], np.int32), 1, RowRequest("a", 100))])
        engine.step([])
    text, draft = list(prompt), list[int]()
    for token in ([], *([token] for token in emitted)):
        text += token
        (draft,) = engine.step([EngineRow(np.array(text, np.int32), 1, RowRequest("a", 100))])
    return draft


def find_distribution(sampler: Any, last: int, draft: Sequence[int]) -> Distribution:
    """The distribution of the tokens that a pass emits."""
    if not draft:
        return {(token,): Fraction(CHAIN[last][token], PARTS) for token in range(len(CHAIN)) if CHAIN[last][token]}
    contexts = [last, *draft]
    middles = [(2 * point + 1) / (2 * PARTS) for point in range(PARTS)]
    ratios = [2 * RACE / (2 * point + 1) - 1 for point in range(RACE)]
    bonus = [token for token, weight in enumerate(CHAIN[draft[-1]]) for _ in range(weight)]
    points = list(product(product(middles, repeat=len(draft)), range(RACE)))
    races = [race_of(contexts, draft, uniforms, ratios[number]) for uniforms, number in points]
    logits = torch.log(torch.tensor([CHAIN[context] for context in contexts[:-1]]) / PARTS)
    output = sample(
        sampler, logits, draft, [one[0] for one in points], races, [bonus[one[1] % PARTS] for one in points]
    )
    counts = Counter(tuple(token for token in row if token >= 0) for row in output.tolist())
    return {emitted: Fraction(count, len(points)) for emitted, count in counts.items()}


def race_of(contexts: Sequence[int], draft: Sequence[int], uniforms: Sequence[float], ratio: float) -> list[float]:
    """Exponential numbers with this ratio of the tokens that are left at the first rejection."""
    places = zip(contexts, draft, uniforms, strict=False)
    rejected = [token for context, token, uniform in places if CHAIN[context][token] / PARTS < uniform]
    race = [1.0] * len(CHAIN)
    if rejected:
        left = [token for token in range(len(CHAIN)) if token != rejected[0]]
        race[left[1]] = ratio
    return race


def sample(
    sampler: Any,
    logits: torch.Tensor,
    draft: Sequence[int],
    uniforms: Sequence[Sequence[float]],
    races: Sequence[Sequence[float]],
    bonus: Sequence[int],
) -> torch.Tensor:
    """Call `rejection_sample` with one row per point, whose random numbers are given."""
    rows, length = len(bonus), len(draft)
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(rows), generators={}, top_k=None, top_p=None
    )

    def fill(self: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        return self.copy_(torch.tensor(races, dtype=self.dtype))

    numbers = torch.tensor(uniforms, dtype=torch.float64).flatten()
    with (
        mock.patch.object(sampler, "generate_uniform_probs", return_value=numbers),
        mock.patch.object(torch.Tensor, "exponential_", fill),
    ):
        found: torch.Tensor = sampler.rejection_sample(
            torch.tensor(draft, dtype=torch.int32).repeat(rows),
            [length] * rows,
            length,
            torch.arange(1, rows + 1, dtype=torch.int32) * length,
            None,  # as for every proposer of the method `custom_class`
            logits.repeat(rows, 1),
            torch.tensor(bonus, dtype=torch.int32).unsqueeze(1),
            metadata,
        )
    return found


SEEDS = 512


def sample_by_seeds(last: int, draft: Sequence[int]) -> Counter[tuple[int, ...]]:
    """What the second runner's sampler emits after a token, by a draft and each seed."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    lines, places = len(draft) + 1, torch.arange(SEEDS)
    of_lines = places.repeat_interleave(lines).int()
    logits = torch.log(torch.tensor([CHAIN[context] for context in (last, *draft)]) / PARTS)
    emitted, counts = rejection_sample(
        logits.repeat(SEEDS, 1),
        None,  # as for every speculator without `draft_logits`
        torch.tensor([last, *draft]).repeat(SEEDS),
        torch.arange(0, SEEDS * lines + 1, lines, dtype=torch.int32),
        torch.arange(lines).repeat(SEEDS),
        places.int(),
        of_lines,
        torch.arange(lines, dtype=torch.int32).repeat(SEEDS),
        torch.ones(SEEDS),
        places,
        len(draft),
    )
    rows = zip(emitted.tolist(), counts.tolist(), strict=True)
    return Counter(tuple(tokens[:count]) for tokens, count in rows)


def measure_second_runner() -> dict[str, Any]:
    """The greatest difference of a share of first pairs of tokens from the target's probability."""
    drafts = [draft for prompt in PROMPTS if (draft := draft_after(prompt))]
    worst = 0.0
    for prompt in PROMPTS:
        if not (draft := draft_after(prompt)):
            continue
        found: Counter[tuple[int, ...]] = Counter()
        for emitted, count in sample_by_seeds(prompt[-1], draft).items():
            found[emitted[:2]] += count
        pairs = [key for key in found if len(key) == 2]
        assert pairs, "the first drafted token is accepted in some row"
        for first in range(len(CHAIN)):
            chance = CHAIN[prompt[-1]][first] / PARTS
            share = sum(count for key, count in found.items() if key[0] == first) / SEEDS
            worst = max(worst, abs(share - chance) / (chance * (1 - chance) / SEEDS) ** 0.5)
        begun = sum(found[key] for key in pairs)
        for second in range(len(CHAIN)):
            chance = CHAIN[draft[0]][second] / PARTS
            share = sum(found[key] for key in pairs if key[1] == second) / begun
            worst = max(worst, abs(share - chance) / (chance * (1 - chance) / begun) ** 0.5)
    return {"kernels": "triton", "error": worst, "drafts": drafts}


def run_in_interpreter(sampler: Any) -> None:
    """Let the sampler launch its Triton kernels in Triton's interpreter."""
    source = inspect.getsource(sampler)
    wanted = [
        ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in KERNELS.values()
    ]
    path = Path(tempfile.mkdtemp()) / "kernels.py"
    jitted = "\n\n\n".join(f"@triton.jit\n{one}" for one in wanted)
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{jitted}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    for launcher, kernel in KERNELS.items():
        setattr(sampler, launcher, make_launcher(launcher, getattr(kernels, kernel)))


def make_launcher(name: str, kernel: Any) -> Any:
    """Replace vLLM's launcher of this name, as its `DispatchSpec` defines it."""

    def random(output: Any, ends: Any, draft: Any, probs: Any, target: Any, *rest: Any) -> None:
        grid = (output.shape[0],)
        kernel[grid](output, ends, draft, probs, target, *rest[:-2], rest[-2], target.shape[1], rest[-1], True, False)

    def sample_recovered(
        output: Any, ends: Any, draft: Any, probs: Any, target: Any, inv_q: Any, *, max_spec_len: int
    ) -> None:
        grid = (ends.shape[0], max_spec_len)
        kernel[grid](output, ends, draft, probs, target, inv_q, target.shape[1], BLOCK, True, False)

    return random if name == "_rejection_random_sample" else sample_recovered


def main() -> None:
    if sys.argv[1:] == ["second"]:
        sys.stdout.write(f"\n{json.dumps(measure_second_runner())}\n")
        return
    interpreted = importlib.util.find_spec("triton") is not None
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    from vllm.v1.sample import rejection_sampler as sampler

    if interpreted:
        run_in_interpreter(sampler)
    found_before: dict[tuple[int, tuple[int, ...]], Distribution] = {}

    def distribution_of(last: int, draft: list[int]) -> Distribution:
        key = last, tuple(draft)
        if key not in found_before:
            found_before[key] = find_distribution(sampler, last, draft)
        return found_before[key]

    error, drafts = Fraction(0), []
    for prompt in PROMPTS:
        draft = draft_after(prompt)
        drafts.append(draft)
        found: Counter[tuple[int, ...]] = Counter()
        for emitted, chance in distribution_of(prompt[-1], draft).items():
            if len(emitted) > 1:
                found[emitted[:2]] += chance
                continue
            after = draft_after(prompt, *emitted)
            drafts.append(after)
            for following, its in distribution_of(emitted[0], after).items():
                found[emitted[0], following[0]] += chance * its
        for first, second in product(range(len(CHAIN)), repeat=2):
            wanted = Fraction(CHAIN[prompt[-1]][first] * CHAIN[first][second], PARTS**2)
            error = max(error, abs(found[first, second] - wanted))
        assert sum(found.values()) == 1
    answer = {"kernels": "triton" if interpreted else "cpu", "error": float(error), "drafts": drafts}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
