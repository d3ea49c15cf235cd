"""Registered versions as dataclasses, and their tags and descriptions in MLflow."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from store.errors import CorruptError, ModelError
from store.files import digest_of
from store.registry.version_folder import MANIFEST, VersionManifest

Number = TypeVar("Number", int, float)
HIDDEN = "mlflow.omnidraft."  # prefix of tags that MLflow's pages do not show
_PREFIX, BETWEEN = "omnidraft", "--"  # of the name of a pair's registered model
_TEXTS = ("run", "reason", "changes", "digest", "target", "drafter", "drift")  # tags as they are
_REFERENCE = re.compile(r"models:/(?P<name>[^/@:]+)(?:/(?P<number>[0-9]+)|@(?P<alias>[\w.-]+))")
MODEL_NOTE = (
    "States of one drafter for one target, as omnidraft published them: weights, head, n-grams, memory.\n\n"
    "`omnidraft versions` lists them; `omnidraft replay --drafter models:/NAME/NUMBER` starts from one."
)


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version as the registry lists it. Values that a version of other origin does not have are None."""

    name: str  # of the registered model
    number: int  # in the registered model, from 1, over all runs
    run: str | None
    version: int | None  # within its run, from 0
    parent: int | None  # number in the registry
    offset: int | None
    reason: str | None
    acceptance: float | None
    digest: str | None
    aliases: tuple[str, ...]
    created_at: datetime  # UTC
    prompts: tuple[int, int] | None = None  # first and last stream offset since its parent
    drift: str | None = None  # description of the drift to which it is the first response
    probe: float | None = None  # acceptance on the fixed probe, comparable across runs of the target
    target: str | None = None
    drafter: str | None = None  # as it was loaded at the start of the lineage
    probe_interval: tuple[float, float] | None = None  # of 95%
    changes: str | None = None  # what differs from its parent, in words

    @property
    def label(self) -> str:
        """Return `RUN/VERSION`; of a version of other origin its number in MLflow."""
        return f"#{self.number}" if self.run is None or self.version is None else f"{self.run}/{self.version}"


@dataclass(frozen=True, slots=True)
class VersionDetails:
    """Everything that the registry holds about one version."""

    summary: RegisteredVersion
    manifest: VersionManifest
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed `models:/NAME/NUMBER` or `models:/NAME@ALIAS`; exactly one of number and alias is set."""

    name: str
    number: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        check_model_name(self.name)

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse the text of a reference. Raises ModelError for any other text."""
        found = _REFERENCE.fullmatch(text)
        if not found:
            raise ModelError(
                f"a registered version must be written models:/NAME/NUMBER or models:/NAME@ALIAS, got {text!r};"
                " `omnidraft versions` lists the numbers"
            )
        number = found["number"]
        return cls(found["name"], int(number) if number else None, found["alias"])


def name_of_pair(target: str, drafter: str) -> str:
    """Return the name of the registered model of a pair, in which numbers and aliases belong to this pair alone.

    A drafter that is a registered version itself continues the lineage of its pair, also for another target.

    >>> name_of_pair("smollm2-135m", "builtin:drafter-4m")
    'omnidraft--smollm2-135m--drafter-4m'
    >>> name_of_pair("Qwen/Qwen2.5-7B", "models:/omnidraft--smollm2-135m--drafter-4m/3")
    'omnidraft--Qwen-Qwen2.5-7B--drafter-4m'
    """
    return BETWEEN.join((_PREFIX, part_of_name(target), drafter_of_name(drafter)))


def drafter_of_name(drafter: str) -> str:
    """Return how the name of a registered model names a drafter: a model, or a registered version."""
    try:
        name = Reference.parse(drafter).name
    except ModelError:
        return part_of_name(drafter)
    prefix, *parts = name.split(BETWEEN)
    return parts[-1] if prefix == _PREFIX and len(parts) == 2 else part_of_name(name)


def part_of_name(model: str) -> str:
    """Return a model's name without the characters that a registered model's name may not have.

    Of a path it is the last part and a digest, since other folders may be called the same.
    """
    path = Path(model).expanduser()
    if path.is_absolute() or model.startswith("."):
        whole = path.resolve()
        model = f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:6]}"
    return re.sub(r"-+", "-", re.sub(r"[^\w.]+", "-", model.removeprefix("builtin:"))).strip("-") or "model"


def find_lineage(number: int, known: Sequence[RegisteredVersion]) -> list[int]:
    """Return a version, its parent, and so on to its baseline, as far as the registry still has them.

    Parents are tags that anyone may edit: a cycle ends before its first repetition.
    """
    parents = {version.number: version.parent for version in known}
    found = [number]
    while (parent := parents.get(found[-1])) in parents and parent is not None and parent not in found:
        found.append(parent)
    return found


def check_model_name(name: str) -> None:
    """Raise ModelError for a name with characters that would end a quoted string in MLflow's filters."""
    if set(name) & set("'\"`\\"):
        raise ModelError(f"the name of a registered model must be free of quotes and backslashes, got {name!r}")


def metric_name(text: str) -> str:
    """Convert `text` to one part of a metric's name: letters, digits and `_.-` only, at most 100 characters.

    MLflow refuses other characters; slashes separate the parts.
    """
    name = re.sub(r"[^\w.-]+", "_", text)[:100]
    return name if name.strip(".") else "_"  # neither "..", which would be another name, nor an empty name


def metric_key(text: str) -> str:
    """Convert `text` to the name of a metric, part by part."""
    return "/".join(map(metric_name, text.split("/")))


def check_registered(folder: Path, digest: str, tags: Mapping[str, str]) -> None:
    """Raise CorruptError unless a fetched version has the registered digest of its files and manifest, where tags have
    them.

    The manifest is fetched together with the files. Only the registry's own tags detect that both were replaced.
    """
    for what, found in {"digest": digest, "manifest": digest_of(folder / MANIFEST)}.items():
        if tags.get(what, found) != found:
            raise CorruptError(
                f"the version must have the registered {what} {tags[what]}, got {found}; publish it again"
            )


def from_tags(
    name: str, number: int, tags: Mapping[str, str], aliases: Sequence[str], created_ms: int
) -> RegisteredVersion:
    """Build a version from the tags that `Publication` writes. `created_ms`: when MLflow got it, since the epoch."""
    tags = tag_values(tags)
    texts: dict[str, Any] = {key: tags.get(key) for key in _TEXTS}
    counts = {key: _number(tags, key, int) for key in ("version", "parent", "offset")}
    rates = {key: _number(tags, key, float) for key in ("acceptance", "probe", "probe_low", "probe_high")}
    low, high = rates.pop("probe_low"), rates.pop("probe_high")
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", tags.get("prompts", ""))
    return RegisteredVersion(
        name=name,
        number=number,
        aliases=tuple(sorted(aliases)),
        created_at=_time(tags.get("created_at", "")) or datetime.fromtimestamp(created_ms / 1000, tz=UTC),
        prompts=(int(found[1]), int(found[2])) if found else None,
        probe_interval=None if low is None or high is None else (low, high),
        **(texts | counts | rates),
    )


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _number(tags: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    """Return a tag as a number; None if it is absent or not a number, since users can edit tags in MLflow's pages."""
    try:
        return kind(tags[key])
    except (KeyError, ValueError):
        return None


def tag_values(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags by their plain names: also those that pages hide."""
    return {key.removeprefix(HIDDEN): value for key, value in tags.items()}


def run_note(name: str, datasets: Sequence[Sequence[str]]) -> str:
    """Return Markdown for the page of a run over these (name, source) pairs."""
    sources = ", then ".join(f"{dataset} (`{source}`)" for dataset, source in datasets)
    return (  # pages show about five lines of it
        f"**{name}**: one replay of a stream of prompts: {sources or 'none'}.\n\n"
        "Curves are over the *stream offset*, the number of the prompt. The nested runs are the published drafters."
        " Among the artifacts, `acceptance.png` shows drifts and versions along the stream, `tokens.html` some"
        " completions token by token."
    )
