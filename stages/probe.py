"""The probe: a drafter's acceptance to expect on fixed lessons, by one pass over them and without the target.

Shapes: N taught positions.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.blocks import Lesson, Teaching
from stages.language_model import LanguageModel
from stages.lesson_codec import LessonReader, LessonWriter
from stages.losses import expected_acceptance, greedy_agreement
from stages.reading import Reader
from stages.vocabulary_cache import Arrays, digest_of, keep, recall


@dataclass(frozen=True)
class Mark:
    """What a drafter would reach on one lesson.

    Attributes:
        greedy: tokens whose pieces are all the likeliest ones of the drafter: what temperature 0 accepts.
        sampled: the sum over tokens of the chance that temperature 1 accepts them.
        tokens: emitted target tokens.
    """

    greedy: float
    sampled: float
    tokens: int


class Probe:
    """Reads lessons with a drafter, as it now is.

    A token counts as a whole: the product over its pieces of what the gate measures of each. N-grams are taken as
    cached, as they are after some prompts.

    Args:
        lessons: of one target, taught at temperature 1.
        model: a drafter of the kind that will read.
        allowed: the pieces that may be drafted.
    """

    def __init__(self, lessons: Sequence[Lesson], model: LanguageModel, allowed: Collection[int]) -> None:
        self._reader = Reader(model, {lesson.target: allowed for lesson in lessons})
        self._batches = list(self._reader.batches(lessons, branches=False))

    @torch.no_grad()
    def marks(self, model: LanguageModel) -> dict[Lesson, Mark]:
        """By lesson; those beyond the drafter's context are left out. Changes nothing of the model."""
        found: dict[Lesson, Mark] = {}
        for batch in self._batches:
            student, _ = self._reader.laws(model, batch)
            greedy = iter(greedy_agreement(student, batch.taught).tolist())
            sampled = iter(expected_acceptance(student, batch.taught).tolist())
            for lesson in batch.lessons:
                of_tokens = _by_token(greedy, lesson.teachings), _by_token(sampled, lesson.teachings)
                found[lesson] = Mark(sum(of_tokens[0]), sum(of_tokens[1]), len(of_tokens[0]))
        return found


def _by_token(of_pieces: Iterator[float], teachings: Sequence[Teaching]) -> list[float]:
    """The products over each token's pieces; takes as many numbers as there are teachings."""
    products: list[float] = []
    for teaching, value in zip(teachings, of_pieces, strict=False):
        if teaching.depth == 0:
            products.append(value)
        else:
            products[-1] *= value
    return products


@torch.no_grad()
def kept_lessons(key: Sequence[object], target: str, make: Callable[[], Sequence[Lesson]]) -> Sequence[Lesson]:
    """Lessons from the cache folder, or as they are made now; then they are kept.

    Args:
        key: JSON values that they depend on.
        target: their target's name, which is no part of what is kept.
        make: gives them, without labels and branches.
    """
    name = digest_of(*key)
    found: Sequence[Lesson] | None = recall("probe", name, lambda arrays: _restored(arrays, target))
    if found is None:
        found = make()
        keep("probe", name, _arrays_of(found))
    return found


def _arrays_of(lessons: Sequence[Lesson]) -> Arrays:
    written = LessonWriter()
    for lesson in lessons:
        written.add(lesson)
    doubles = [double for _, double in written.index]
    return {
        "doubles": np.frombuffer(json.dumps(doubles).encode(), np.uint8),
        "integers": written.integers.numpy(),
        "floats": written.floats.numpy(),
    }


def _restored(arrays: Arrays, target: str) -> list[Lesson]:
    reader = LessonReader(torch.from_numpy(arrays["integers"]), torch.from_numpy(arrays["floats"]))
    return [reader.read((target, double)) for double in json.loads(arrays["doubles"].tobytes())]
