"""Compares the arms of `omnidraft bench`, ways to complete the same prompts with the same target, in rounds.

A round is a chunk of the prompts, which every arm completes in turn; each round begins with another arm. So noise of
the machine hits all of them alike, and ratios are paired by round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Protocol

from typing_extensions import override

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models, load_only_target, locate, registry_uri
from pipeline.assembly.stages import make_sampling_params
from pipeline.config.settings import Config
from pipeline.loop import Loop, UnfitPromptError
from pipeline.reports.machine import machine_of
from pipeline.run.rounds import LoopInRounds, Records, Round, rotate
from pipeline.sources.stream import open_sources, stream
from stages.engine.checkpoints.gguf_file import find_gguf
from stages.engine.models.generate import generate
from stages.engine.models.huggingface import load_causal_model
from store.errors import ModelError, SourceError, UsageError
from store.events import Event, PromptReceived
from store.log.run_log import RunLog


class BenchArm(StrEnum):
    """The arms, in the order of the table."""

    TRANSFORMERS = "transformers"
    PLAIN = "plain"
    MEMORY = "memory"
    ALL = "all sources"
    LEARNING = "all, learning"


QUANTISED = ("int8", "int4", "codes", "codes8")  # formats of weights that `transformers` cannot compute with
FROZEN: Mapping[str, object] = {"learn.enabled": False}
SETTINGS: Mapping[BenchArm, Mapping[str, object]] = {
    BenchArm.PLAIN: {**FROZEN, "draft.max_draft": 0},
    BenchArm.MEMORY: {**FROZEN, "draft.sources": ("own", "memory")},
    BenchArm.ALL: FROZEN,
    BenchArm.LEARNING: {"learn.enabled": True},
}


class Arm(Protocol):
    """A way to complete prompts. It is called round by round in stream order, and keeps what it learns between them."""

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """Complete the prompts and measure the time. All of them fit the models."""
        ...

    def close(self) -> None:
        """Close files and threads. Called once, after the last round."""
        ...


class LogRecords(Records):
    """Writes the log, as `replay` does. Commits, which `replay` spaces by their cost, are left out."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        folder.mkdir(parents=True)
        self._log = RunLog(folder)

    @override
    def take(self, event: Event) -> None:
        self._log.append(event)

    @override
    def close(self) -> None:
        self._log.close()


class GenerateArm(Arm):
    """`transformers`' own `generate`, without drafts."""

    def __init__(self, target: Any, config: Config, models: Models) -> None:
        self._target, self._config, self._models = target, config, models
        self._encode = Admission(config, models).encode

    @override
    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        started, batch, most = perf_counter(), self._config.batch, self._config.sampling.max_new_tokens
        sampling = make_sampling_params(self._config.sampling)
        tokens: list[tuple[int, ...]] = []
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            ids, seed = [self._encode(one)[0] for one in chunk], self._config.seed + chunk[0].offset
            for completion in generate(self._target, ids, sampling, most, self._models.eos_ids, seed):
                self._models.target_vocabulary.decode(completion)
                tokens.append(tuple(completion))
        return Round(tuple(tokens), perf_counter() - started)

    @override
    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Arms:
    """The arms that can run."""

    by_name: Mapping[str, Arm]
    models: Models  # names and vocabularies; no arm uses its caches
    left_out: Sequence[str]  # a sentence for each arm that cannot run

    def close(self) -> None:
        for arm in self.by_name.values():
            arm.close()


def make_arms(config: Config, scratch: Path, report: Callable[[str], None]) -> Arms:
    """Load the models once for all arms; a drafter that learns, and `transformers`, have weights of their own."""
    config = config.with_overrides({"publish.enabled": False})
    models = load_only_target(config, scratch / "models")
    arms: dict[str, Arm] = {}
    left_out: list[str] = []
    report("loading transformers")
    try:
        arms[BenchArm.TRANSFORMERS] = _make_generate(config, models, scratch)
    except ModelError as error:
        left_out.append(f"transformers was left out: {error}")
    for name, settings in SETTINGS.items():
        report(f"preparing: {name}")
        own, folder = config.with_overrides(settings), scratch / f"{name}-run"
        drafter = load_only_target(own, scratch / name).drafter if own.learn.enabled else models.drafter.share_weights()
        with_caches = replace(models, target=models.target.share_weights(), drafter=drafter)
        arms[name] = LoopInRounds(with_caches, own, folder, partial(LogRecords, folder))
    return Arms(arms, models, left_out)


def _make_generate(config: Config, models: Models, scratch: Path) -> Arm:
    """Raises `ModelError` for a model that `transformers` cannot run as it is here."""
    source = locate(models.name, registry_uri(config.publish), scratch / "transformers")
    if find_gguf(source):
        raise ModelError("it would compute with float32 copies of a GGUF file's weights")
    if config.weights in QUANTISED:
        raise ModelError(f"it has no weights in {config.weights}")
    return GenerateArm(load_causal_model(source, config.dtype, str(models.target.device)), config, models)


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
