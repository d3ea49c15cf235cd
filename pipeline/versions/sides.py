"""The two sides of a comparison, and the settings that are the same on both. Nothing here loads torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from store.errors import UsageError
from store.registry.registered_version import RegisteredVersion, find_lineage
from store.registry.registry import fetch_version, list_versions, resolve_number
from store.registry.version_folder import VersionManifest, describe_additions, digest_drafter, open_version

BASELINE = "baseline"

FROZEN: Mapping[str, object] = {
    "batch": 1,
    "swaps": (),
    "learn.enabled": False,
    "learn.lora_rank": 0,  # a version's adapter is merged into its drafter, on both sides
    "publish.enabled": False,
    "drift.detector": "none",
}
DRAFTERS_ALONE: Mapping[str, object] = {
    "draft.stop": "never",
    "draft.sources": ("model",),
    "draft.pause": False,
    "draft.costs": "estimated",  # without effect then
}
_NAMED = {"targets": "--target", "sources": "--probe", "drafter": "A and B"}  # the options that choose them


@dataclass(frozen=True)
class Side:
    """One version with checked files."""

    label: str  # shown in reports
    number: int | None  # in the registry; None for a folder
    folder: Path
    manifest: VersionManifest


def open_sides(names: tuple[str, str], uri: str, model: str, scratch: Path) -> tuple[Side, Side]:
    """Open the versions that two names mean: as of `resolve_number`, sealed folders, or `baseline`: the other side's.

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
    manifest = open_version(folder)
    label = f"{manifest['run']}/{manifest['version']}" if number is not None else str(folder)
    return Side(label, number, folder, manifest)


def describe_equal(first: Side, second: Side, *, as_served: bool) -> str:
    """Say that two versions cannot differ in a comparison, since what is compared is equal; "" if it is not."""
    one, other = first.manifest, second.manifest
    if digest_drafter(one) != digest_drafter(other) or (as_served and one["digest"] != other["digest"]):
        return ""
    if one["digest"] == other["digest"]:
        return f"equal versions: every file of {first.label} and {second.label} is the same"
    changes = describe_additions(one["counters"], other["counters"])
    rest = f"; {second.label} has {changes}" if changes else ""
    return (
        f"equal drafters: {first.label} and {second.label} have the same weights{rest}. --as-served compares those too"
    )


def find_common_target(first: Side, second: Side) -> str:
    """Return the target that both versions were made for."""
    targets = [side.manifest["target"] for side in (first, second)]
    if targets[0] != targets[1]:
        raise UsageError(
            f"two versions are compared with one target, but {first.label} was made for {targets[0]} and "
            f"{second.label} for {targets[1]}; choose one with --target"
        )
    return targets[0]


def require_free(keys: Iterable[str], *, as_served: bool) -> None:
    """Refuse to change settings that a comparison fixes."""
    for key in keys:
        if key in _NAMED:
            raise UsageError(f"a comparison takes no setting {key!r}; it is chosen by {_NAMED[key]}")
        if key in FROZEN:
            raise UsageError(f"a comparison has {key} = {FROZEN[key]!r} on both sides; leave --set {key} out")
        if key in DRAFTERS_ALONE and not as_served:
            raise UsageError(
                f"drafters alone are compared with {key} = {DRAFTERS_ALONE[key]!r}, so --set cannot change it; "
                "try --as-served"
            )
