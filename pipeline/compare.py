"""`omnidraft versions compare`: two versions on the same prompts with the same draws, prompt by prompt in turn.

Nothing learns. Each side begins with the n-grams that its version holds and goes on adding those that it meets, as in
service. By default the drafters are compared by themselves: every draft has the same length, and nothing is looked up,
because a head that drafts less where it is unsure would raise the acceptance without a better drafter. With
`as_served` each version's own head decides, and lookup drafts where it pays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.compare_build import Side, SideArm, common_target, make_arms
from pipeline.compare_figures import INTERVAL, RESAMPLES, Paired, Passage, paired
from pipeline.config import Config
from pipeline.probe import prompts as probe_prompts
from pipeline.source import open_source
from stages.baselines import preference
from store.errors import CorruptError, SourceError, UsageError
from store.events import PromptReceived

WARM_UP = "The first words of a text that nobody counts"

PROBE = "probe"  # stands for the fixed probe where a source is named

_FROZEN: Mapping[str, object] = {
    "batch": 1,
    "swaps": (),
    "learn.enabled": False,
    "learn.lora": False,  # a version's adapter is merged into its drafter, alike on both sides
    "publish.enabled": False,
    "drift.detector": "none",
}
_BY_THEMSELVES: Mapping[str, object] = {
    "draft.adapt": False,
    "draft.lookup": False,
    "draft.only_where_paying": False,
    "draft.costs": "estimated",  # decides nothing then
}
_NAMED = {"targets": "--target", "sources": "--probe", "drafter": "A and B"}  # what chooses them


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        sides: labels of both.
        numbers: in the registry, None for folders.
        settings: by which it can be run again.
        prompts: their ids.
        figures: by name.
        passages: of both sides, by prompt.
    """

    sides: tuple[str, str]
    numbers: tuple[int | None, int | None]
    settings: dict[str, Any]
    prompts: tuple[str, ...]
    figures: dict[str, Paired]
    passages: tuple[tuple[Passage, ...], tuple[Passage, ...]]

    def to_json(self) -> dict[str, Any]:
        """All of it but the tokens."""
        counts = [
            {"prompt": prompt, "first": _counts(one), "second": _counts(other)}
            for prompt, one, other in zip(self.prompts, *self.passages, strict=True)
        ]
        return {
            "sides": self.sides,
            "numbers": self.numbers,
            "interval": {"level": INTERVAL, "method": "percentile bootstrap over prompts", "resamples": RESAMPLES},
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "settings": self.settings,
            "prompts": counts,
        }

    def flat(self) -> dict[str, float]:
        """The figures for MLflow, by names such as `acceptance_rate/change`."""
        told = {f"{name}/{part}": value for name, one in self.figures.items() for part, value in asdict(one).items()}
        return {"prompts": float(len(self.prompts))} | {
            name: value for name, value in told.items() if value is not None
        }


def _counts(passage: Passage) -> dict[str, float]:
    counts = asdict(passage)
    return counts | {"tokens": len(passage.tokens)}


def require_free(keys: Iterable[str], *, as_served: bool) -> None:
    """Refuse to change what a comparison fixes.

    Raises:
        UsageError: one of the settings is fixed.
    """
    for key in keys:
        if key in _NAMED:
            raise UsageError(f"a comparison takes no setting {key!r}; it is chosen by {_NAMED[key]}")
        if key in _FROZEN:
            raise UsageError(f"a comparison has {key} = {_FROZEN[key]!r} on both sides; leave --set {key} out")
        if key in _BY_THEMSELVES and not as_served:
            raise UsageError(
                f"drafters are compared by themselves with {key} = {_BY_THEMSELVES[key]!r}, so --set cannot change it; "
                "try --as-served"
            )


def compared(
    config: Config, *, target: str | None, sides: tuple[Side, Side], as_served: bool, probe: str | None = None
) -> Config:
    """The settings of a comparison: frozen, one prompt at a time.

    Raises:
        UsageError: the versions were made for different targets, and none is named.
    """
    chosen = {"targets": (target or common_target(*sides),), "sources": (probe or PROBE,)}
    return config.with_overrides({**chosen, **_FROZEN, **({} if as_served else _BY_THEMSELVES)})


def read_prompts(config: Config, probe: str | None) -> list[PromptReceived]:
    """The prompts of a source, up to `source.limit`, or the fixed probe's; rows that are no prompts are passed over.

    Raises:
        SourceError: it cannot be read, or holds no prompt.
    """
    if probe is None:
        return probe_prompts()[: config.source.limit]
    source = open_source(probe, config.source, seed=config.seed)
    found = [event for event in source.read(0) if isinstance(event, PromptReceived)]
    if not found:
        raise SourceError(f"a probe must hold prompts, but '{probe}' has none; see --set source.prompt_field")
    return found


def compare(
    config: Config,
    sides: tuple[Side, Side],
    prompts: Sequence[PromptReceived],
    uri: str,
    scratch: Path,
    progress: Callable[[int], None],
    notice: Callable[[str], None],
) -> Comparison:
    """Complete every prompt on both sides, in the order A B, B A, A B, ...

    Args:
        config: as `compared` gives it.
        sides: two versions.
        prompts: one or more; all must fit the models.
        uri: of the registry, for targets that lie there.
        scratch: an empty folder.
        progress: is told how many prompts are done.
        notice: is told what the user should know.

    Raises:
        CorruptError: at temperature 0 the two texts of a prompt differ.
        SourceError: a prompt does not fit the models.
    """
    arms = make_arms(config, sides, uri, scratch, notice)
    for arm in arms:
        arm.complete([PromptReceived(len(prompts), "warm-up", "warm-up", 1, WARM_UP)])
    passages: tuple[list[Passage], list[Passage]] = [], []
    for done, prompt in enumerate(prompts):
        for place in (0, 1) if done % 2 == 0 else (1, 0):
            passages[place].append(_passage(arms[place], prompt))
        if config.sampling.temperature == 0:
            _require_equal(arms[0], prompt, passages[0][-1].tokens, passages[1][-1].tokens)
        progress(done + 1)
    settings = config.model_dump(mode="json", exclude={"drafter", "run", "learn", "publish", "commit", "log"})
    first, second = (tuple(side) for side in passages)
    return Comparison(
        (sides[0].label, sides[1].label),
        (sides[0].number, sides[1].number),
        settings,
        tuple(prompt.prompt_id for prompt in prompts),
        paired(first, second),
        (first, second),
    )


def _passage(arm: SideArm, prompt: PromptReceived) -> Passage:
    before, done = arm.model_blocks, arm.complete([prompt])
    assert done.work is not None, "the pipeline's own arms tell what they did"
    work, by_model = done.work, arm.model_blocks - before
    return Passage(done.tokens[0], work.blocks, by_model, work.judged, work.accepted, done.seconds)


def _require_equal(arm: SideArm, prompt: PromptReceived, one: Sequence[int], other: Sequence[int]) -> None:
    """Greedy text is the target's own, whoever drafts.

    Raises:
        CorruptError: it is not.
    """
    if one == other:
        return
    place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    tie = ""
    if place is not None:
        text = [*arm.models.target_words.encode(prompt.text), *one[:place]]
        margin = abs(preference(arm.models.target.model, text, one[place], other[place]))
        tie = f"; there the target's logits of the two tokens are {margin:.2g} apart, and about 0 is a tie of rounding"
    raise CorruptError(
        f"at temperature 0 both versions must give the target's text, but that of prompt {prompt.prompt_id} parts at "
        f"token {place}{tie}; try --set dtype=float32"
    )
