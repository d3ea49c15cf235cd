"""The studies as data: their arms, the settings of each arm, and the paper's numbers for it.

The paper's numbers are the acceptance rates and speed-ups in its tables (arXiv 2507.02659v3). Its acceptance rate is
accepted / *proposed*, measured after training on other prompts; ours is accepted / judged, measured before learning
from a prompt. Only ratios between arms can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from store.errors import ConfigError

FIXED = {
    "draft.stop": "never",
    "draft.max_draft": 5,
    "draft.width": 1,
}  # always chains of five pieces, the only length that fits the paper's main tables
LONGEST = 8  # pieces in the longest fixed draft, and at most in adaptive ones


class StudyName(StrEnum):
    """Names of the studies."""

    LOSSES = "losses"
    HEAD = "head"
    DRIFT = "drift"
    CACHE = "cache"
    SOURCES = "sources"
    LEARNING = "learning"


@dataclass(frozen=True)
class StudyArm:
    """One arm of a study."""

    name: str  # name in the tables
    settings: Mapping[str, Any]  # settings by dotted key; arms differ in nothing else
    # budget of the n-gram cache as a share of the bytes that the arm `full` reached with the same seed; None if
    # the arm has no such budget
    share: float | None = None


@dataclass(frozen=True)
class PaperColumn:
    """One column of numbers from the paper."""

    # title, source: model or data set, and the table of the paper
    title: str
    source: str
    # acceptance rate and speed-up, by name of the arm of ours that does the same
    values: Mapping[str, tuple[float, float]]

    def acceptance(self, arm: str, reference: str) -> float | None:
        """Ratio of the acceptance rates of two arms; None if the paper lacks one of them."""
        return self._ratio(0, arm, reference)

    def speed_ratio(self, arm: str, reference: str) -> float | None:
        """Ratio of the speed-ups of two arms; None if the paper lacks one of them."""
        return self._ratio(1, arm, reference)

    def _ratio(self, place: int, arm: str, reference: str) -> float | None:
        if arm not in self.values or reference not in self.values:
            return None
        return self.values[arm][place] / self.values[reference][place]


@dataclass(frozen=True)
class Study:
    """A comparison of arms."""

    name: str  # a `StudyName`, or that of a block of the paper's tables
    settings: Mapping[str, Any]  # settings that all arms share, by dotted key
    arms: tuple[StudyArm, ...]  # arms in the order of the tables
    references: tuple[str, ...]  # names of the arms that the others are compared with
    paper: tuple[PaperColumn, ...]  # columns of the paper's numbers
    remark: str  # note on reading the paper's numbers, or its statement if it gives none

    def arm(self, name: str) -> StudyArm:
        """The arm of a name, which must exist."""
        return next(arm for arm in self.arms if arm.name == name)

    def fixed_keys(self) -> set[str]:
        """Keys of the settings that the study decides and a user must not set."""
        budget = {"cache.budget_bytes"} if any(arm.share is not None for arm in self.arms) else set()
        return {*self.settings, *(key for arm in self.arms for key in arm.settings), *budget}

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse settings that differ between the study's arms or are fixed for all of them.

        Raises:
            ConfigError: one of the settings is decided by the study.
        """
        for key in given:
            if key in self.fixed_keys():
                raise ConfigError(f"'{key}' is decided by the arms of the study '{self.name}'; leave it out.")


def _losses() -> Study:
    names = ("direct", "hybrid", "trie", "acceptance")
    without_cache = {"cache.policy": "off"}
    learned = [StudyArm(name, {"learn.loss": name}) for name in names]
    arms = (
        StudyArm("none", {"learn.enabled": False, **without_cache}),
        StudyArm("cache only", {"learn.enabled": False}),
        StudyArm("direct only", {"learn.loss": "direct", **without_cache}),
        *learned,
    )
    paper = (
        _paper("Llama3-8B", "table 1", none=(0.10, 0.94), direct_only=(0.32, 1.58), hybrid=(0.42, 1.70)),
        _paper("Qwen2-7B", "table 1", none=(0.14, 1.04), direct_only=(0.33, 1.50), hybrid=(0.37, 1.61)),
        _paper(
            "k=3",
            "table 5",
            none=(0.16, 1.04),
            cache_only=(0.20, 1.16),
            direct_only=(0.40, 1.59),
            direct=(0.42, 1.61),
            hybrid=(0.46, 1.66),
        ),
        _paper(
            "k=4",
            "table 5",
            none=(0.12, 1.01),
            cache_only=(0.16, 1.11),
            direct_only=(0.32, 1.51),
            direct=(0.35, 1.54),
            hybrid=(0.41, 1.61),
        ),
    )
    remark = (
        "Paper: GSM8K, Llama-68M drafter, table 1, and table 5 (Llama3-8B on fewer prompts, k pieces); none = SpD_DM, "
        "cache only = + N-gram post-processing, direct only = L_DM, direct = L_DM + post-processing, hybrid = L_DM + "
        "λ L_N. It has no other arms of these."
    )
    return Study(StudyName.LOSSES, FIXED, arms, ("none", "hybrid"), paper, remark)


def _paper(title: str, source: str, **values: tuple[float, float]) -> PaperColumn:
    return PaperColumn(title, source, {name.replace("_", " "): pair for name, pair in values.items()})


def _head() -> Study:
    fixed = [StudyArm(f"fixed {n}", {"draft.stop": "never", "draft.max_draft": n}) for n in range(2, LONGEST + 1)]
    rules: dict[str, dict[str, Any]] = {
        "threshold 0.3": {"draft.stop": 0.3},
        "threshold 0.7": {"draft.stop": 0.7},
        "cost": {"draft.stop": "cost"},
    }
    adaptive = [StudyArm(f"{name}, interleaved", {"draft.max_draft": LONGEST, **rule}) for name, rule in rules.items()]
    # The threshold that the paper recommends for the data of the column (its section on adaptive drafting).
    paper = (
        _adaptive("GSM8K", "0.7", distil=(0.42, 2.20), interleaved=(0.52, 2.15)),
        _adaptive("MBPP+HE", "0.7", distil=(0.35, 1.92), interleaved=(0.48, 1.94)),
        _adaptive("Alpaca", "0.3", distil=(0.25, 1.57), interleaved=(0.41, 1.60)),
        _adaptive("XSum", "0.3", distil=(0.23, 1.53), interleaved=(0.38, 1.58)),
    )
    remark = (
        "Paper: table 2, Vicuna-7B, same vocabulary; fixed 5 = distil only (its length is not stated, five fits best), "
        "threshold = interleaved, with the threshold that it recommends for that data. It has no cost rule."
    )
    settings = {"learn.enabled": True, "draft.width": 1}
    return Study(StudyName.HEAD, settings, (*fixed, *adaptive), ("fixed 5",), paper, remark)


def _adaptive(title: str, threshold: str, **values: tuple[float, float]) -> PaperColumn:
    names = {"fixed 5": "distil", f"threshold {threshold}, interleaved": "interleaved"}
    return PaperColumn(title, "table 2", {ours: values[theirs] for ours, theirs in names.items()})


def _drift() -> Study:
    with_cache = [StudyArm(answer, {"drift.response": answer}) for answer in ("reset", "recall", "none")]
    with_cache.append(StudyArm("no detector", {"drift.detector": "none"}))
    without = [StudyArm(f"{arm.name}, no cache", {**arm.settings, "cache.policy": "off"}) for arm in with_cache]
    remark = (
        "Paper: figure 5 (GSM8K, then MBPP + HumanEval): both metrics drop sharply, then climb back; the recovery is "
        "larger with the cache than without. Its numbers are not stated (images)."
    )
    # Every arm publishes versions, so that there are some to recall.
    settings = {"learn.enabled": True, "publish.enabled": True}
    return Study(StudyName.DRIFT, settings, (*with_cache, *without), ("no detector",), (), remark)


def _cache() -> Study:
    sizes = {"1/4": 0.25, "1/2": 0.5}
    arms = (
        StudyArm("full", {"cache.policy": "unbounded"}),
        StudyArm("none", {"cache.policy": "off"}),
        *(
            StudyArm(f"{size} {policy.upper()}", {"cache.policy": policy}, share)
            for size, share in sizes.items()
            for policy in ("lru", "lfu")
        ),
    )
    values = {
        "none": (0.219, 1.29),
        "1/4 LRU": (0.254, 1.33),
        "1/4 LFU": (0.259, 1.36),
        "1/2 LRU": (0.261, 1.35),
        "1/2 LFU": (0.263, 1.36),
        "full": (0.267, 1.36),
    }
    remark = (
        "Paper: table 14, MBPP + HumanEval. full: never evicts, so it is the same with LRU and LFU; the other budgets "
        "are shares of the bytes that it reached with the same seed."
    )
    paper = (PaperColumn("MBPP+HE", "table 14", values),)
    return Study(StudyName.CACHE, FIXED, arms, ("full",), paper, remark)


def _sources() -> Study:
    copied, frozen = ("own", "memory"), {"learn.enabled": False}
    arms = (
        StudyArm("none", {"draft.max_draft": 0, **frozen}),
        StudyArm("own", {"draft.sources": ("own",), **frozen}),
        StudyArm("memory chain", {"draft.sources": copied, "draft.width": 1, **frozen}),
        StudyArm("memory tree", {"draft.sources": copied, **frozen}),
        StudyArm("model frozen", {"draft.sources": ("model",), **frozen}),
        StudyArm("model learning", {"draft.sources": ("model",), "learn.enabled": True}),
        StudyArm("all", {"draft.sources": (*copied, "model"), "learn.enabled": True}),
    )
    remark = "The paper has one source, the drafter. memory chain, memory tree: with the sequence's own text."
    # Each block uses the source that is expected to be fastest: by estimated costs, unless draft.costs is given.
    settings = {"draft.pause": True, "draft.stop": "cost"}
    return Study(StudyName.SOURCES, settings, arms, ("none", "model frozen"), (), remark)


def _learning() -> Study:
    never = 1_000_000  # prompts between updates
    regression = {"learn.method": "least-squares", "learn.spacing": "fixed", "learn.interval": 4}
    arms = (
        StudyArm("baseline", {"learn.method": "gradient", "learn.spacing": "fixed", "learn.interval": never}),
        StudyArm("gradient, fixed", {"learn.method": "gradient", "learn.spacing": "fixed", "learn.interval": 4}),
        StudyArm("gradient, paying", {"learn.method": "gradient", "learn.spacing": "paying", "learn.interval": 4}),
        StudyArm("least squares, states", regression),
    )
    remark = (
        "The paper has no such comparison. Right first pieces: at every token of the completions, before learning from "
        "them; all arms have the same places at temperature 0. Measuring them is in none of the seconds."
    )
    return Study(StudyName.LEARNING, {"learn.enabled": True, **FIXED}, arms, ("baseline",), (), remark)


STUDIES = {study.name: study for study in (_losses(), _head(), _drift(), _cache(), _sources(), _learning())}
