"""Registered versions as dataclasses, and their tags and descriptions in MLflow."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from store.errors import CorruptError, ModelError
from store.events import VersionPublished
from store.files import digest_of
from store.registry.version_folder import MANIFEST, VersionManifest

Number = TypeVar("Number", int, float)
ABOUT = "about"  # the tag of a registered version with all values, as JSON, that have no tag of their own
_REFERENCE = re.compile(r"models:/(?P<name>[^/@:]+)(?:/(?P<number>[0-9]+)|@(?P<alias>[\w.-]+))")
MODEL_NOTE = (
    "Drafters that omnidraft trained online on a stream of prompts: weights, tokenizer, head and n-gram cache.\n\n"
    "`omnidraft versions` lists them; `omnidraft replay --drafter models:/NAME/NUMBER` starts from one."
)


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version as the registry lists it. Values that a version of other origin does not have are None."""

    number: int  # in the registry, from 1, over all runs
    run: str | None
    version: int | None  # within its run, from 0
    parent: int | None  # number in the registry
    offset: int | None
    reason: str | None
    acceptance: float | None
    cache_entries: int | None
    digest: str | None
    aliases: tuple[str, ...]
    created_at: datetime  # UTC
    learned: tuple[int, int] | None = None  # first and last stream offset since its parent
    drift: int | None = None  # offset of the drift to which it is the first response
    probe: float | None = None  # acceptance on the fixed probe, comparable across runs


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of a published version."""

    run: str
    parent: int | None  # number in the registry
    first: int | None  # first stream offset that it learned from; None for the drafter as it was loaded
    drift: int | None
    datasets: str


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


def find_number(alias: str, versions: Iterable[RegisteredVersion]) -> int | None:
    """Return the number of the version that has the alias, or None."""
    return next((version.number for version in versions if alias in version.aliases), None)


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
    """Check that a fetched version is the published one. Digests that the tags do not contain are not checked.

    The manifest is fetched together with the files. Only the registry's own tags detect that both were replaced.

    Args:
        folder: the folder with the manifest.
        digest: digest of the files.
        tags: tags of the registered version, with `ABOUT` unfolded.

    Raises:
        CorruptError: the digest of the files or the manifest differs from the registered one.
    """
    for what, found in {"digest": digest, "manifest": digest_of(folder / MANIFEST)}.items():
        if tags.get(what, found) != found:
            raise CorruptError(
                f"the version must have the registered {what} {tags[what]}, got {found}; publish it again"
            )


def from_tags(number: int, tags: Mapping[str, str], aliases: Sequence[str], created_ms: int) -> RegisteredVersion:
    """Build a version from the tags that `tags_of` writes. `created_ms`: milliseconds since the epoch."""
    tags = tag_values(tags)
    return RegisteredVersion(
        number=number,
        run=tags.get("run"),
        version=_number(tags, "version", int),
        parent=_number(tags, "parent", int),
        offset=_number(tags, "offset", int),
        reason=tags.get("reason"),
        acceptance=_number(tags, "acceptance", float),
        cache_entries=_number(tags, "cache_entries", int),
        digest=tags.get("digest"),
        aliases=tuple(sorted(aliases)),
        created_at=datetime.fromtimestamp(created_ms / 1000, tz=UTC),
        learned=_span(tags.get("learned", "")),
        drift=_number(tags, "drift", int),
        probe=_number(tags, "probe", float),
    )


def _span(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _number(tags: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    """Return a tag as a number; None if it is absent or not a number, since users can edit tags in MLflow's pages."""
    try:
        return kind(tags[key])
    except (KeyError, ValueError):
        return None


def tag_values(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags with the values that `tags_of` folded into one tag."""
    try:
        folded = json.loads(tags.get(ABOUT, "{}"))
    except ValueError:  # users can edit tags in MLflow's pages
        folded = {}
    shown = {key: value for key, value in tags.items() if key != ABOUT}
    return ({key: str(value) for key, value in folded.items()} if isinstance(folded, dict) else {}) | shown


def tags_of(event: VersionPublished, lineage: Lineage, probe: float | None, manifest: str | None) -> dict[str, str]:
    """Return the tags of a registered version. They are few, since MLflow's table of versions has a line for each.

    `manifest`: SHA-256 of its manifest.
    """
    shown: dict[str, object] = {
        "run": lineage.run,
        "parent": lineage.parent,
        "learned": None if lineage.first is None else f"{lineage.first}-{event.offset}",
        "drift": lineage.drift,
        "acceptance": None if event.acceptance is None else round(event.acceptance, 4),
        "probe": None if probe is None else round(probe, 4),
    }
    folded = {
        "version": event.version,
        "offset": event.offset,
        "reason": event.reason,
        "target": event.target,
        "datasets": lineage.datasets,
        "cache_entries": event.cache_entries,
        "digest": event.digest,
        "manifest": manifest,
    }
    tags = shown | {ABOUT: json.dumps(folded)}
    return {key: str(value) for key, value in tags.items() if value is not None}


def run_note(name: str, datasets: Sequence[Sequence[str]], summary: Mapping[str, float] | None = None) -> str:
    """Return Markdown for the page of a run over these (name, source) pairs, with its metrics if given."""
    sources = ", then ".join(f"{dataset} (`{source}`)" for dataset, source in datasets)
    return (  # pages show about five lines of it
        f"**{name}**: one replay of a stream of prompts: {sources or 'none'}.\n\n{_acceptance_table(summary or {})}"
        "Curves are over the *stream offset*, the number of the prompt. The nested runs are the published drafters."
        " Among the artifacts, `acceptance.png` shows drifts and versions along the stream, `tokens.html` some"
        " completions token by token."
    )


def _acceptance_table(summary: Mapping[str, float]) -> str:
    """Return a table of acceptance in the first and last fifth of each dataset; empty if the summary has none."""
    first, last = "/first_fifth_acceptance_rate", "/last_fifth_acceptance_rate"
    rows = [
        f"| {key.removesuffix(first)} | {rate:.3f} | {summary[key.removesuffix(first) + last]:.3f} |"
        for key, rate in summary.items()
        if key.endswith(first) and key.removesuffix(first) + last in summary
    ]
    head = "| acceptance | first fifth | last fifth |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n\n" if rows else ""


def version_note(made: VersionPublished, lineage: Lineage) -> str:
    """Describe a version. The text begins with what distinguishes it: tables show about twenty characters of it."""
    loaded = "the drafter as it was loaded"
    origin = loaded if lineage.first is None else f"trained on prompts {lineage.first} to {made.offset}"
    since = "" if lineage.drift is None else f", the first since the drift at prompt {lineage.drift}"
    return (
        f"{made.reason} at prompt {made.offset}: {lineage.run}/{made.version} for {made.target}, {origin}"
        f"{since}, with {made.cache_entries} cached n-grams."
    )
