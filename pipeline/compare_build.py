"""The two sides of a comparison: which versions are meant, and arms over them that share one target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.bench_pipeline import NoRecords, PipelineArm
from pipeline.build_models import Models, load_drafter, load_models, pair_of
from pipeline.config import Config
from pipeline.lineage import lineage_of
from stages.huggingface import load_tokenizer
from stages.vocabulary import Vocabulary
from store.errors import ModelError, UsageError
from store.events import BlockDone, Drafter, Event
from store.registry import fetch_version, list_versions
from store.version_folder import Manifest, open_version
from store.versions import RegisteredVersion, numbered

FLOOR = "floor"


@dataclass(frozen=True)
class Side:
    """One version, its files checked.

    Attributes:
        label: for people.
        number: in the registry; None for a folder.
        folder: its files.
        manifest: where it came from.
    """

    label: str
    number: int | None
    folder: Path
    manifest: Manifest


def open_sides(names: tuple[str, str], uri: str, model: str, scratch: Path) -> tuple[Side, Side]:
    """The versions that two names mean: numbers, aliases, sealed folders, or `floor` for that of the other side.

    Args:
        names: of both sides.
        uri: of the registry, which is asked only for what is no folder.
        model: the registered model.
        scratch: what is fetched goes below it.

    Raises:
        ModelError: there is no such version.
        CorruptError: a file is not what was sealed.
        UsageError: both names mean one version, or `floor` has no other side in the registry.
    """
    known = [] if all(map(_is_folder, names)) else list_versions(uri, model)
    numbers = [None if _is_folder(name) else _number(name, known) for name in names]
    for place, other in ((0, 1), (1, 0)):
        if names[place] == FLOOR:
            numbers[place] = _floor_of(numbers[other], known)
    first, second = (
        _open(name, number, uri, model, scratch / str(place))
        for place, (name, number) in enumerate(zip(names, numbers, strict=True))
    )
    if first.manifest["digest"] == second.manifest["digest"] and first.label == second.label:
        raise UsageError(f"two different versions must be compared, got {first.label} twice")
    return first, second


def _is_folder(name: str) -> bool:
    return not name.isdecimal() and Path(name).is_dir()


def _number(name: str, known: Sequence[RegisteredVersion]) -> int | None:
    if name == FLOOR:
        return None
    if name.isdecimal():
        return int(name)
    number = numbered(name, known)
    if number is not None:
        return number
    aliases = sorted({alias for version in known for alias in version.aliases})
    raise ModelError(
        f"a version must be named by its number, an alias ({', '.join(aliases) or 'there is none'}), its folder, or "
        f"'{FLOOR}', got {name!r}; `omnidraft versions` lists them"
    )


def _floor_of(number: int | None, known: Sequence[RegisteredVersion]) -> int:
    """The first of a version's line in the registry."""
    if number is None or number not in [version.number for version in known]:
        raise UsageError(f"'{FLOOR}' is that of the other version, which must be in the registry; name a number")
    floor = lineage_of(number, known)[-1]
    if next(version.parent for version in known if version.number == floor) is not None:
        raise UsageError(
            f"'{FLOOR}' must still be in the registry, but the floor was pruned: version {floor} is the first that is "
            f"left of the line of version {number}; name a number or a folder"
        )
    return floor


def _open(name: str, number: int | None, uri: str, model: str, into: Path) -> Side:
    folder = Path(name) if number is None else fetch_version(f"models:/{model}/{number}", uri, into)
    label = f"version {number}" if number is not None else str(folder)
    return Side(label, number, folder, open_version(folder))


def common_target(first: Side, second: Side) -> str:
    """The target that both were made for.

    Raises:
        UsageError: they were made for different ones.
    """
    targets = [side.manifest["target"] for side in (first, second)]
    if targets[0] != targets[1]:
        raise UsageError(
            f"two versions are compared with one target, but {first.label} was made for {targets[0]} and "
            f"{second.label} for {targets[1]}; say which with --target"
        )
    return targets[0]


class _Counted(NoRecords):
    """Counts the blocks in which lookup did not draft."""

    def __init__(self) -> None:
        self.blocks = 0

    def take(self, event: Event) -> None:
        """As `Records.take`."""
        self.blocks += isinstance(event, BlockDone) and event.drafter is Drafter.MODEL


class SideArm(PipelineArm):
    """One side's loop, which also tells whose blocks they were. Arguments as of `PipelineArm`."""

    def __init__(self, models: Models, config: Config, folder: Path) -> None:
        self._counted = _Counted()
        super().__init__(models, config, folder, lambda loop, clock: self._counted)

    @property
    def model_blocks(self) -> int:
        """Blocks so far in which lookup did not draft."""
        return self._counted.blocks


def make_arms(
    config: Config, sides: tuple[Side, Side], uri: str, scratch: Path, notice: Callable[[str], None]
) -> tuple[SideArm, SideArm]:
    """Both sides' loops over one copy of the target, each with caches of its own."""
    settings = config.with_overrides({"drafter": str(sides[0].folder)})
    (first,) = load_models(settings, uri, scratch / "fetched")
    models = first, with_drafter(config, first, sides[1].folder)
    for side, own in zip(sides, models, strict=True):
        if own.pair.digest != side.manifest["pair"]:
            notice(f"the n-gram cache of {side.label} is left out: it was made for other vocabularies")
    arms = [SideArm(own, config, scratch / "run") for own in models]
    return arms[0], arms[1]


def with_drafter(config: Config, models: Models, folder: Path) -> Models:
    """The same target, on rows of its own, with another drafter."""
    drafter = load_drafter(config, str(folder), str(models.target.device))
    drafter.require_rows()
    tokenizer = load_tokenizer(str(folder))
    words = Vocabulary(tokenizer, str(folder))
    return replace(
        models,
        target=models.target.beside(),
        drafter=drafter,
        drafter_words=words,
        drafter_tokenizer=tokenizer,
        drafter_folder=folder,
        pair=pair_of(config, models.target_words, words),
    )
