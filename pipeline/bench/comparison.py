"""Compares the arms of `omnidraft bench` on the same prompts, in rounds.

A round is a chunk of the prompts, which every arm completes in turn; each round begins with another arm. So noise of
the machine hits all of them alike, and ratios are paired by round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.assembly.admission import Admission
from pipeline.bench.arms import Arm, BenchArm, make_arms
from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from pipeline.reports.machine import machine_of
from pipeline.run.rounds import Round, rotate
from pipeline.sources.stream import open_sources, stream
from store.errors import SourceError, UsageError
from store.events import PromptReceived

CLEAR = 1.02  # a ratio nearer to 1 is no difference, whatever its quartiles are
DRAFTING = (BenchArm.MEMORY, BenchArm.ALL, BenchArm.LEARNING)


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of one arm divided by those of another, paired by round."""

    median: float
    lower: float  # quartile
    upper: float

    @classmethod
    def from_rounds(cls, own: Sequence[Round], other: Sequence[Round]) -> "Ratio":
        """Compare the rounds of two arms, which had the same prompts."""
        found = [_speed(one) / _speed(theirs) for one, theirs in zip(own, other, strict=True)]
        lower, _, upper = quantiles(found, n=4, method="inclusive") if found[1:] else found * 3
        return cls(median(found), lower, upper)

    @property
    def is_faster(self) -> bool:
        """Whether the first arm was faster in three of four rounds, and by more than a trifle."""
        return self.lower > 1 and self.median >= CLEAR

    @property
    def is_slower(self) -> bool:
        """Whether it was slower in three of four rounds, and by more than a trifle."""
        return self.upper < 1 and self.median <= 1 / CLEAR


def _speed(one: Round) -> float:
    """Tokens per second. A completion has at least one token, since the end of a sequence counts."""
    return one.emitted / one.seconds


@dataclass(frozen=True)
class ArmResult:
    """What was measured of one arm."""

    tokens: int
    seconds: float
    tokens_per_second: float  # median over rounds
    tokens_per_forward: float  # emitted target tokens per row and target forward
    ratio: Ratio  # to plain decoding
    equal: float | None  # share of completions that equal those of plain decoding; None when sampling


@dataclass(frozen=True)
class ArmComparison:
    """The arms on the same prompts."""

    arms: Mapping[str, ArmResult]
    learning: Ratio  # all sources with learning, to all sources without
    prompts: int
    rounds: int
    rejected: int  # source rows that the models cannot process
    settings: Config
    machine: Mapping[str, Any]
    notes: Sequence[str]  # what was left out, the chat template

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": make_verdict(self),
            "arms": {name: asdict(found) for name, found in self.arms.items()},
            "learning": asdict(self.learning),
            "prompts": self.prompts,
            "rounds": self.rounds,
            "rejected": self.rejected,
            "machine": dict(self.machine),
            "settings": self.settings.model_dump(mode="json"),
            "notes": list(self.notes),
        }


def compare_arms(config: Config, rounds: int, limit: int, report: Callable[[str], None]) -> ArmComparison:
    """Load the models and measure all arms on up to `limit` prompts, in `rounds` rounds, or in one per prompt. Raises
    `KeyboardInterrupt` on Ctrl-C before all arms have finished a round. Later, only finished rounds count.
    """
    if len(config.targets) > 1 or config.swaps:
        raise UsageError(f"the comparison must have one target, got {', '.join(config.targets)}; run it for each")
    sources = open_sources(config.sources, config.source, seed=config.seed)
    report("loading the models")
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        arms = make_arms(config, Path(scratch), report)
        admission = Admission(config, arms.models)
        warm_up, timed, rejected = choose_prompts(stream(sources), admission.admit, config.batch, limit)
        for name, arm in arms.by_name.items():
            report(f"warming up: {name}")
            arm.complete(warm_up)
        found = run_rounds(arms.by_name, split(timed, rounds), report)
        machine, chat = machine_of(arms.models), admission.describe()
        arms.close()
    return ArmComparison(
        arms=summarize(found, greedy=config.sampling.temperature == 0),
        learning=Ratio.from_rounds(found[BenchArm.LEARNING], found[BenchArm.ALL]),
        prompts=sum(len(one.tokens) for one in found[BenchArm.PLAIN]),
        rounds=len(found[BenchArm.PLAIN]),
        rejected=rejected,
        settings=config,
        machine=machine,
        notes=[*arms.left_out, *([chat.partition(";")[0]] if chat else []), *_list_disturbances(machine)],
    )


def _list_disturbances(machine: Mapping[str, Any]) -> list[str]:
    """Say so if more processes want the cores than there are: ratios are noisy then."""
    load, cores = machine["load"], machine["cores"]
    if not load or load <= cores + 1:  # one of them is this process
        return []
    return [f"other processes used the cores (load {load:g} on {cores}): measure again on a quiet machine"]


def choose_prompts(
    events: Iterable[object], admit: Callable[[PromptReceived], object], warm_up: int, limit: int
) -> tuple[list[PromptReceived], list[PromptReceived], int]:
    """Take the first prompts that fit the models: some to warm up, then those that are timed. Returns both, and the
    number of rows that were left out. Of few prompts one warms up, so that the others are timed.
    """
    chosen: list[PromptReceived] = []
    rejected = 0
    for event in events:
        if len(chosen) == warm_up + limit:
            break
        try:
            if isinstance(event, PromptReceived):
                admit(event)
                chosen.append(event)
                continue
        except UnfitPromptError:
            pass
        rejected += 1
    if len(chosen) < 2:
        raise SourceError(
            f"the sources must have two prompts that fit the models at least, got {len(chosen)} ({rejected} do not fit)"
        )
    few = warm_up if len(chosen) >= 4 * warm_up else 1
    return chosen[:few], chosen[few:], rejected


def split(prompts: Sequence[PromptReceived], rounds: int) -> list[Sequence[PromptReceived]]:
    """Split the prompts into chunks of nearly equal length, at most one per prompt.

    >>> [list(chunk) for chunk in split("abcde", 2)]
    [['a', 'b'], ['c', 'd', 'e']]
    """
    number = min(rounds, len(prompts))
    return [prompts[part * len(prompts) // number : (part + 1) * len(prompts) // number] for part in range(number)]


def run_rounds(
    arms: Mapping[str, Arm], chunks: Sequence[Sequence[PromptReceived]], report: Callable[[str], None]
) -> dict[str, list[Round]]:
    """Let the arms complete every chunk in turn. After Ctrl-C the rounds that all arms have finished are returned."""
    found: dict[str, list[Round]] = {name: [] for name in arms}
    try:
        for number, chunk in enumerate(chunks):
            for name in rotate(list(arms), number):
                report(f"round {number + 1} of {len(chunks)}: {name}")
                found[name].append(arms[name].complete(chunk))
    except KeyboardInterrupt:
        complete = min(map(len, found.values()))
        if not complete:
            raise
        return {name: own[:complete] for name, own in found.items()}
    return found


def summarize(rounds: Mapping[str, Sequence[Round]], *, greedy: bool) -> dict[str, ArmResult]:
    """Compute the result of every arm, next to plain decoding."""
    plain, found = rounds[BenchArm.PLAIN], dict[str, ArmResult]()
    for name, own in rounds.items():
        tokens, blocks = sum(one.emitted for one in own), sum(len(one.blocks) for one in own)
        paired = zip(own, plain, strict=True)
        texts = [texts for one, other in paired for texts in zip(one.tokens, other.tokens, strict=True)]
        found[name] = ArmResult(
            tokens=tokens,
            seconds=sum(one.seconds for one in own),
            tokens_per_second=median(map(_speed, own)),
            tokens_per_forward=tokens / blocks if blocks else 1.0,  # `generate` emits one token per forward
            ratio=Ratio.from_rounds(own, plain),
            equal=sum(one == other for one, other in texts) / len(texts) if greedy else None,
        )
    return found


def make_verdict(found: ArmComparison) -> str:
    """Return the answer in one sentence: is drafting worth it for these prompts, and learning?"""
    best = max(DRAFTING, key=lambda name: found.arms[name].ratio.median)
    ratio = found.arms[best].ratio
    value = f"{ratio.median:.2f} times plain decoding"
    if ratio.is_faster:
        drafting = f"Drafting is worth {ratio.median:.2f} times on these prompts ({best})"
    elif ratio.is_slower:
        drafting = f"Drafting does not pay on these prompts: {value} at best ({best})"
    else:
        drafting = f"Drafting makes no clear difference on these prompts: {value} at best ({best})"
    if found.learning.is_faster:
        return f"{drafting}; learning is worth {found.learning.median:.2f} times more."
    if found.learning.is_slower:
        return f"{drafting}; learning costs more than it gains so far ({found.learning.median:.2f} times)."
    return f"{drafting}; learning nothing yet."
