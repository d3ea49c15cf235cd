"""The probe: what a drafter is expected to reach on prompts that never change, published with every version.

The target completes the probe's prompts greedily, once for a target in one dtype and a pair of vocabularies; its
distributions along these texts are kept on disk as examples. A version is then measured by one pass of the drafter over
them, a drafter as it was loaded once on a machine. Neither depends on the run's stream, drafting, sampling or seed, so
that versions of different runs compare.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import DrafterModels, Models
from pipeline.assembly.stages import Drafting, make_drafting
from pipeline.config.settings import Config
from pipeline.learning.probe_prompts import PROMPTS, identity
from pipeline.loop import UnfitPromptError
from pipeline.models.catalog import MODELS_FOLDER
from stages.contract.blocks import SequenceState, TrainingExample
from stages.drafting.costs import Costs
from stages.engine.models.language_model import fingerprint
from stages.learn.examples.builder import ExampleBuilder
from stages.learn.examples.teacher import TrieTeacher
from stages.learn.training.probe import (
    DRAFT,
    Probe,
    ProbeResult,
    ProbeScore,
    load_or_make_examples,
    load_or_make_scores,
)
from stages.verification.rules import MODES
from store.events import PromptReceived
from store.query.rates import Estimate, estimate_ratio

LOG = logging.getLogger("omnidraft.models")

FORMAT = 2  # of the examples kept on disk: goes up when they change without their key
SCORES_FORMAT = 1  # of the scores of drafters as loaded, likewise
TOKENS = 32  # of every completion
BATCH = 16  # prompts that are completed together
KEPT = 16  # pieces kept of each distribution
SHIPPED = MODELS_FOLDER / "probes"  # SmolLM2's examples with `drafter-4m`: without them the default run begins later

# The target's plain greedy text, with its distributions at temperature 1, whatever the run samples.
PLAIN: Mapping[str, object] = {
    "sampling.temperature": 0.0,
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "sampling.max_new_tokens": TOKENS,
    "draft.mode": "trie",
    "draft.max_draft": 0,
    "draft.temperature": None,
    "cache.policy": "off",
    "learn.enabled": False,
    "source.chat": False,
    "batch": BATCH,
}


def make_probe(config: Config, models: Models, costs: Costs | None = None) -> Callable[[], ProbeResult]:
    """Return a function that measures the drafter as it is when called; it has no metrics if no prompt fits.

    `acceptance` is the share of the target's greedy tokens that the drafter predicts; `tokens_per_pass` is what greedy
    drafts of `stages.learn.training.probe.DRAFT` tokens would emit per target forward; `modelled_tokens_per_second` is
    what they would emit at these costs, and `modelled_tokens_per_second_plain` what the target would emit without
    drafts. `_low` and `_high` are the ends of intervals of 95% over prompts. `under_sampling` is a bound of the
    acceptance to expect at temperature 1, from above: all pieces but the `KEPT` likeliest of a distribution count as
    one; `upon_docs`, `upon_code` and `upon_rust` are the acceptance on each kind of prompt. (MLflow sorts names: what
    is read first comes first.) Draws no random numbers, and leaves rows, kernels and costs of the run alone. `costs`
    are those of passes in earlier runs, in seconds; without them no tokens per second are given.
    """
    return probe_of(models, examples_of(config, models), config.batch, costs, _key_of(models))


def probe_of(
    models: DrafterModels,
    examples: Sequence[TrainingExample],
    batch: int,
    costs: Costs | None = None,
    key: Sequence[object] | None = None,
) -> Callable[[], ProbeResult]:
    """As `make_probe`, over the target's examples; with their key, the drafter as loaded is scored once per machine."""
    drafter, allowed = models.drafter, MODES["trie"].draftable_pieces(models.pair.pieces)
    probe = cache(lambda: Probe(examples, drafter, allowed))

    def score() -> Mapping[TrainingExample, ProbeScore]:
        if key is None or drafter.weight_changes:
            return probe().score(drafter)
        # The pass takes .2 s, 1% of a default run.
        of_drafter = [SCORES_FORMAT, *key, fingerprint(drafter), DRAFT, sorted(allowed)]
        return load_or_make_scores(of_drafter, examples, lambda: probe().score(drafter))

    return lambda: _add_speed(summarize(score()), costs, batch)


def _add_speed(result: ProbeResult, costs: Costs | None, batch: int) -> ProbeResult:
    """Add the seconds and the tokens per second of drafts of `DRAFT` tokens, for each of `batch` rows in flight."""
    if costs is None or not result.scores:
        return result
    plain = costs.verification_cost(batch) / batch
    seconds = [_count_seconds(score, costs, batch) for score in result.scores]
    speed = estimate_ratio([score.tokens for score in result.scores], seconds)
    metrics = dict(result.metrics) | {"modelled_tokens_per_second_plain": 1 / plain}
    if speed:
        metrics |= _with_ends("modelled_tokens_per_second", speed)
    return ProbeResult(metrics, result.scores, seconds, plain)


def _count_seconds(score: ProbeScore, costs: Costs, batch: int) -> float:
    """Seconds of a text whose target forwards each verify a draft of `DRAFT` tokens. A pass drafts one piece a row."""
    drafting = DRAFT * score.pieces / score.tokens * costs.drafting_cost(batch) if score.tokens else 0.0
    return score.forwards * (costs.verification_cost(batch * (DRAFT + 1)) + drafting) / batch


def examples_of(config: Config, models: Models) -> Sequence[TrainingExample]:
    """The target's examples on the probe's prompts, from disk where they were made before or are shipped."""
    make = partial(_make_examples, config, models)
    return load_or_make_examples(_key_of(models), models.name, make, shipped=SHIPPED)


def _key_of(models: Models) -> list[object]:
    limit = models.drafter.max_length  # determines how much of a prompt the drafter reads
    return [FORMAT, TOKENS, KEPT, identity(), fingerprint(models.target), models.pair.digest, limit]


def summarize(marks: Mapping[TrainingExample, ProbeScore]) -> ProbeResult:
    """Rates over all tokens, and over those of each kind of prompt."""
    kinds: dict[str, list[ProbeScore]] = defaultdict(list)
    for example in sorted(marks, key=lambda example: example.offset):
        kinds[PROMPTS[example.offset][0]].append(marks[example])
    every = [score for found in kinds.values() for score in found]
    tokens, forwards = [score.tokens for score in every], [score.forwards for score in every]
    estimates = {
        "acceptance": estimate_ratio([score.greedy for score in every], tokens),
        "tokens_per_pass": estimate_ratio(tokens, forwards),
    }
    found = {
        f"upon_{kind}": sum(score.greedy for score in scores) / sum(score.tokens for score in scores)
        for kind, scores in kinds.items()
        if any(tokens)
    }
    if any(tokens):
        found["under_sampling"] = sum(score.sampled for score in every) / sum(tokens)
    for name, estimate in estimates.items():
        if estimate:
            found |= _with_ends(name, estimate)
    return ProbeResult(found, every) if any(tokens) else ProbeResult()


def _with_ends(name: str, estimate: Estimate) -> dict[str, float]:
    ends = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {f"{name}{end}": value for end, value in ends.items()}


def prompts() -> list[PromptReceived]:
    """The probe's prompts as a stream."""
    return [
        PromptReceived(offset, f"probe:{kind}:{offset}", kind, offset + 1, text)
        for offset, (kind, text) in enumerate(PROMPTS)
    ]


def _make_examples(config: Config, models: Models) -> list[TrainingExample]:
    """By the production stages on rows of their own; prompts that do not fit are left out."""
    LOG.info("the target completes the %d prompts of the probe, once on this machine", len(PROMPTS))
    plain = config.with_overrides(PLAIN)
    own = replace(models, target=models.target.share_weights(), drafter=models.drafter.share_weights())
    teacher = TrieTeacher(models.pair, KEPT)
    stages, prepare = make_drafting(plain, own, teacher=teacher), Admission(plain, own).admit
    rows = []
    for prompt in prompts():
        try:
            rows.append(prepare(prompt))
        except UnfitPromptError:
            continue
    found = []
    for start in range(0, len(rows), BATCH):
        found += _complete(stages, rows[start : start + BATCH], models.name)
    return sorted(found, key=lambda example: example.offset)


def _complete(stages: Drafting, rows: list[SequenceState], target: str) -> list[TrainingExample]:
    """Complete rows together; the last takes the place of one that is finished, as in the loop."""
    notes, examples = {row: ExampleBuilder() for row in rows}, []
    of_block = (stages.decode, stages.translate, stages.verify)
    for row in rows:
        for stage in of_block:
            stage.admit(row)
    while rows:
        verdicts = stages.verify(stages.translate(stages.decode(rows)))
        for verdict in verdicts:
            notes[verdict.proposal.draft.row].add_verdict(verdict)
        for row in [row for row in rows if row.finish]:
            last = rows.pop()
            if last is not row:
                rows[rows.index(row)] = last
            for stage in of_block:
                stage.release(row)
            examples.append(notes[row].build(row, target))
    return examples
