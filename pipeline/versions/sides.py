"""The two sides of a comparison: their versions, and arms over them that share one target."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.assembly.models import Models, load_drafter, load_models
from pipeline.config.settings import Config
from pipeline.run.rounds import LoopInRounds
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.pair import pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import UsageError
from store.registry.registered_version import RegisteredVersion, find_lineage
from store.registry.registry import fetch_version, list_versions, resolve_number
from store.registry.version_folder import VersionManifest, open_version

LOG = logging.getLogger("omnidraft.versions")

BASELINE = "baseline"


@dataclass(frozen=True)
class Side:
    """One version with checked files."""

    label: str  # shown in reports
    number: int | None  # in the registry; None for a folder
    folder: Path
    manifest: VersionManifest


def open_sides(names: tuple[str, str], uri: str, model: str, scratch: Path) -> tuple[Side, Side]:
    """Open the versions that two names mean: numbers, aliases, sealed folders, or `baseline`: the other side's.

    `model`: the registered model, which is read only for names that are no folders; `scratch`: for fetched versions.
    """
    unnamed = (name == BASELINE or is_folder(name) for name in names)
    numbers = [None if skip else resolve_number(uri, model, name) for name, skip in zip(names, unnamed, strict=True)]
    for place, other in ((0, 1), (1, 0)):
        if names[place] == BASELINE:
            numbers[place] = _find_baseline(numbers[other], list_versions(uri, model))
    first, second = (
        _open_side(name, number, uri, model, scratch / str(place))
        for place, (name, number) in enumerate(zip(names, numbers, strict=True))
    )
    if first.manifest["digest"] == second.manifest["digest"] and first.label == second.label:
        raise UsageError(f"two different versions must be compared, got {first.label} twice")
    return first, second


def is_folder(name: str) -> bool:
    """Return whether a name of a side is that of a version's folder."""
    return not name.isdecimal() and Path(name).is_dir()


def _find_baseline(number: int | None, known: Sequence[RegisteredVersion]) -> int:
    """Return the first version of a version's lineage in the registry."""
    if number is None or number not in [version.number for version in known]:
        raise UsageError(
            f"'{BASELINE}' is the baseline of the other version, which must be in the registry; name a number"
        )
    baseline = find_lineage(number, known)[-1]
    if next(version.parent for version in known if version.number == baseline) is not None:
        raise UsageError(
            f"'{BASELINE}' must still be in the registry, but the baseline was pruned: version {baseline} is the first "
            f"that is left of the lineage of version {number}; name a number or a folder"
        )
    return baseline


def _open_side(name: str, number: int | None, uri: str, model: str, into: Path) -> Side:
    folder = Path(name) if number is None else fetch_version(f"models:/{model}/{number}", uri, into)
    label = f"#{number}" if number is not None else str(folder)
    return Side(label, number, folder, open_version(folder))


def find_common_target(first: Side, second: Side) -> str:
    """Return the target that both versions were made for."""
    targets = [side.manifest["target"] for side in (first, second)]
    if targets[0] != targets[1]:
        raise UsageError(
            f"two versions are compared with one target, but {first.label} was made for {targets[0]} and "
            f"{second.label} for {targets[1]}; choose one with --target"
        )
    return targets[0]


def make_arms(config: Config, sides: tuple[Side, Side], uri: str, scratch: Path) -> tuple[LoopInRounds, LoopInRounds]:
    """Make both sides' loops over one copy of the target, each with its own caches."""
    settings = config.with_overrides({"drafter": str(sides[0].folder)})
    (first,) = load_models(settings, uri, scratch / "fetched")
    models = first, replace_drafter(config, first, sides[1].folder)
    for side, own in zip(sides, models, strict=True):
        if own.pair.digest != side.manifest["pair"]:
            LOG.warning("the n-gram cache of %s is left out: it was made for other vocabularies", side.label)
    arms = [LoopInRounds(own, config, scratch / "run") for own in models]
    return arms[0], arms[1]


def replace_drafter(config: Config, models: Models, folder: Path) -> Models:
    """Return models with the same target, on its own rows, and another drafter."""
    drafter = load_drafter(config, str(folder), str(models.target.device))
    drafter.prove_forward()
    tokenizer = load_tokenizer(str(folder))
    drafter_vocabulary = Vocabulary(tokenizer, str(folder))
    return replace(
        models,
        target=models.target.share_weights(),
        drafter=drafter,
        drafter_vocabulary=drafter_vocabulary,
        drafter_tokenizer=tokenizer,
        drafter_folder=folder,
        pair=pair(models.target_vocabulary, drafter_vocabulary, config.vocabulary.special),
    )
