"""The probe: a drafter's expected acceptance on fixed examples, by one pass over them and without the target.

Shapes: N supervised positions.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.contract.example_codec import ExampleReader, ExampleWriter, IndexEntry
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.batches import ExampleBatcher, sum_by_row
from stages.learn.examples.losses import expected_acceptance, greedy_agreement
from stages.vocabulary.disk_cache import Arrays, digest_json, load_arrays, store_arrays

DRAFT = 5  # tokens of a draft, as many as pieces by default


@dataclass(frozen=True)
class ProbeScore:
    """The expected acceptance of a drafter on one example."""

    greedy: float  # number of tokens whose pieces are all the drafter's most probable ones: accepted at temperature 0
    sampled: float  # sum over tokens of the probability that they are accepted at temperature 1
    tokens: int  # number of emitted target tokens
    pieces: int  # number of the drafter's pieces that spell them
    forwards: int  # target forwards that these tokens take at temperature 0 with drafts of `DRAFT` tokens each


@dataclass(frozen=True)
class ProbeResult:
    """What the probe measured of a drafter."""

    metrics: Mapping[str, float] = field(default_factory=dict)  # by name
    scores: Sequence[ProbeScore] = ()  # per prompt, in the order of the prompts; none if nothing was measured
    # per prompt, what its text takes with the drafts of `ProbeScore.forwards`; none without such costs
    seconds: Sequence[float] = ()
    plain_seconds: float | None = None  # what a token takes without drafts


class Probe:
    """Scores a drafter on fixed examples.

    A token counts as a whole: the score is the product of the gate's measure over its pieces. N-grams are assumed to be
    cached, as they are after some prompts.

    Args:
        examples: of one target, with soft targets at temperature 1.
        model: a drafter of the same architecture and vocabulary as those that are scored.
    """

    def __init__(self, examples: Sequence[TrainingExample], model: LanguageModel, allowed: Collection[int]) -> None:
        self._batcher = ExampleBatcher(model, {example.target: allowed for example in examples})
        self._batches = list(self._batcher.make_batches(examples))

    @torch.no_grad()
    def score(self, model: LanguageModel) -> dict[TrainingExample, ProbeScore]:
        """Score a drafter on each example; those longer than its context are left out. The model does not change."""
        found: dict[TrainingExample, ProbeScore] = {}
        for batch in self._batches:
            student, _ = self._batcher.compute_distributions(model, batch)
            measured = greedy_agreement(student, batch.teacher), expected_acceptance(student, batch.teacher)
            first_N = batch.teacher.first_N
            products = [_multiply_by_token(values_N, first_N) for values_N in measured]
            greedy, sampled = (sum_by_row(values_N, batch) for values_N in products)
            tokens = list(map(int, sum_by_row(first_N.double(), batch)))
            pieces = map(int, sum_by_row(torch.ones_like(first_N, dtype=torch.float64), batch))
            predicted = (products[0][first_N.bool()] > 0).split(tokens)  # positions are in the order of the rows
            forwards = (count_forwards(token_T.tolist()) for token_T in predicted)
            found |= zip(batch.examples, map(ProbeScore, greedy, sampled, tokens, pieces, forwards), strict=True)
        return found


def count_forwards(predicted: Sequence[bool], draft: int = DRAFT) -> int:
    """Count the target forwards of a text in which each emits the accepted beginning of a draft and one token more."""
    forwards = position = 0
    while position < len(predicted):
        ahead = [*predicted[position : position + draft], False]
        position += ahead.index(False) + 1
        forwards += 1
    return forwards


def _multiply_by_token(of_pieces_N: Tensor, first_N: Tensor) -> Tensor:
    """Return the product over the pieces of each token at its first piece, and 0 at the others (N,)."""
    token_N = first_N.long().cumsum(0) - 1
    products = of_pieces_N.new_ones(len(of_pieces_N), dtype=torch.float64)
    products = products.scatter_reduce(0, token_N, of_pieces_N.double(), "prod")
    return products[token_N] * first_N


@torch.no_grad()
def load_or_make_examples(
    key: Sequence[object],
    target: str,
    make: Callable[[], Sequence[TrainingExample]],
    *,
    shipped: Path | None = None,
) -> Sequence[TrainingExample]:
    """Load examples from the cache folder or from those that are shipped, or make and store them.

    Args:
        target: name of their target, which is not stored.
        shipped: folder of files as in the cache folder.
    """
    name = digest_json(*key)
    found: Sequence[TrainingExample] | None = load_arrays(
        "probe", name, lambda arrays: _from_arrays(arrays, target), shipped=shipped
    )
    if found is None:
        found = make()
        store_arrays("probe", name, _to_arrays(found))
    return found


def load_or_make_scores(
    key: Sequence[object],
    examples: Sequence[TrainingExample],
    make: Callable[[], Mapping[TrainingExample, ProbeScore]],
) -> Mapping[TrainingExample, ProbeScore]:
    """Load a drafter's scores on the examples from the cache folder, or make and store them."""
    name = digest_json(*key)
    numbers_NF = load_arrays("scores", name, lambda arrays: arrays["numbers"])
    if numbers_NF is not None:
        return {
            examples[int(place)]: ProbeScore(greedy, sampled, *map(int, counts))
            for place, greedy, sampled, *counts in numbers_NF.tolist()
        }
    found = make()
    rows = [(place, *astuple(found[one])) for place, one in enumerate(examples) if one in found]
    store_arrays("scores", name, {"numbers": np.array(rows, dtype=np.float64).reshape(-1, 6)})
    return found


def _to_arrays(examples: Sequence[TrainingExample]) -> Arrays:
    written = ExampleWriter()
    for example in examples:
        written.add(replace(example, states=None))  # they belong to drafters that read them
    return {"integers": written.integers.numpy(), "floats": written.floats.numpy()}


def _from_arrays(arrays: Arrays, target: str) -> list[TrainingExample]:
    reader = ExampleReader(torch.from_numpy(arrays["integers"]), torch.from_numpy(arrays["floats"]))
    examples = []
    while not reader.at_end:
        examples.append(reader.read(IndexEntry(target)))
    return examples
