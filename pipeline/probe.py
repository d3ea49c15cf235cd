"""The probe: what a drafter is expected to reach on prompts that never change, published with every version.

The target completes the probe's prompts greedily, once for a target in one dtype and a pair of vocabularies; its laws
along these texts are kept on disk as lessons. A version is then measured by one pass of the drafter over them. Neither
depends on the run's stream, drafting, sampling or seed, so that versions of different runs compare.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeline.admission import make_admission
from pipeline.build_models import DrafterModels, Models
from pipeline.build_stages import Drafting, draftable, make_drafting
from pipeline.config import Config
from pipeline.loop import UnfitPromptError
from pipeline.probe_prompts import PROMPTS, identity
from stages.blocks import Lesson, Row
from stages.fingerprint import fingerprint
from stages.lessons import Notebook
from stages.probe import Mark, Probe, kept_lessons
from store.events import PromptReceived

FORMAT = 1  # of the lessons kept on disk: goes up when they change without their key
TOKENS = 32  # of every completion
BATCH = 16  # prompts that are completed together
KEPT = 16  # pieces kept of each law

# The target's plain greedy text, with its laws at temperature 1, whatever the run samples.
_PLAIN: Mapping[str, object] = {
    "sampling.temperature": 0.0,
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "sampling.max_new_tokens": TOKENS,
    "draft.mode": "trie",
    "draft.max_draft": 0,
    "draft.temperature": None,
    "cache.policy": "off",
    "learn.enabled": True,
    "learn.teacher_temperature": 1.0,
    "learn.teacher_top": KEPT,
    "learn.off_policy": False,
    "source.chat": False,
    "batch": BATCH,
}


def make_probe(config: Config, models: Models) -> Callable[[], dict[str, float]]:
    """The figures of the drafter as it is when they are asked for, by name; none if no prompt fits the models.

    `probe/acceptance` is the share of the target's greedy tokens that the drafter foretells, `probe/acceptance_docs`
    and `_code` that of each kind of prompt; `probe/acceptance_sampled` is a bound of the acceptance to expect at
    temperature 1, from above: all pieces but the `KEPT` likeliest of a law count as one. Draws no random numbers, and
    leaves rows, kernels and costs of the run alone.

    Args:
        config: of the run.
        models: one target with the drafter, no rows admitted.
    """
    return probe_of(config, models, lessons_of(config, models))


def probe_of(config: Config, models: DrafterModels, lessons: Sequence[Lesson]) -> Callable[[], dict[str, float]]:
    """As `make_probe`, over the target's lessons."""
    probe = Probe(lessons, models.drafter, draftable(config.with_overrides(_PLAIN), models.pair))
    return lambda: figures(probe.marks(models.drafter))


def lessons_of(config: Config, models: Models) -> Sequence[Lesson]:
    """The target's lessons on the probe's prompts, from disk where they were made before."""
    limit = models.drafter.max_length  # prompts and texts beyond it are no lessons
    key = [FORMAT, TOKENS, KEPT, identity(), fingerprint(models.target), models.pair.digest, limit]
    return kept_lessons(key, models.name, lambda: _make_lessons(config, models))


def figures(marks: Mapping[Lesson, Mark]) -> dict[str, float]:
    """Rates over all tokens, and over those of each kind of prompt."""
    kinds: dict[str, list[Mark]] = defaultdict(list)
    for lesson, mark in marks.items():
        kinds[PROMPTS[lesson.offset][0]].append(mark)
    every = list(marks.values())
    tokens = sum(mark.tokens for mark in every)
    if not tokens:
        return {}
    by_kind = {f"probe/acceptance_{kind}": _greedy_rate(found) for kind, found in kinds.items()}
    sampled = sum(mark.sampled for mark in every) / tokens
    return {"probe/acceptance": _greedy_rate(every), "probe/acceptance_sampled": sampled, **by_kind}


def _greedy_rate(marks: Sequence[Mark]) -> float:
    return sum(mark.greedy for mark in marks) / sum(mark.tokens for mark in marks)


def prompts() -> list[PromptReceived]:
    """The probe's prompts as a stream."""
    return [
        PromptReceived(offset, f"probe:{kind}:{offset}", kind, offset + 1, text)
        for offset, (kind, text) in enumerate(PROMPTS)
    ]


def _make_lessons(config: Config, models: Models) -> list[Lesson]:
    """By the production stages on rows of their own; prompts that do not fit are left out."""
    plain = config.with_overrides(_PLAIN)
    own = replace(models, target=models.target.beside(), drafter=models.drafter.beside())
    stages, prepare = make_drafting(plain, own, lambda notice: None), make_admission(plain, own)
    rows = []
    for prompt in prompts():
        try:
            rows.append(prepare(prompt))
        except UnfitPromptError:
            continue
    found = []
    for start in range(0, len(rows), BATCH):
        found += _complete(stages, rows[start : start + BATCH], models.name)
    return sorted(found, key=lambda lesson: lesson.offset)


def _complete(stages: Drafting, rows: list[Row], target: str) -> list[Lesson]:
    """Complete rows together; the last takes the place of one that is finished, as in the loop."""
    notes, lessons = {row: Notebook() for row in rows}, []
    of_block = (stages.decode, stages.translate, stages.verify)
    for row in rows:
        for stage in of_block:
            stage.admit(row)
    while rows:
        verdicts = stages.verify(stages.translate(stages.decode(rows)))
        for verdict in verdicts:
            notes[verdict.proposal.draft.row].note(verdict)
        for row in [row for row in rows if row.finish]:
            last = rows.pop()
            if last is not row:
                rows[rows.index(row)] = last
            for stage in of_block:
                stage.release(row)
            lessons.append(notes[row].lesson(row, target))
    return lessons
