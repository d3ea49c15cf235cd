"""A registered version in plain values, with the tags and the notes that stand for it in the registry."""

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
from store.version_folder import MANIFEST, Manifest

Number = TypeVar("Number", int, float)
ABOUT = "about"  # the tag of a registered version that holds, as JSON, what its table has no room for
_REFERENCE = re.compile(r"models:/(?P<name>[^/@:]+)(?:/(?P<number>[0-9]+)|@(?P<alias>[\w.-]+))")
MODEL_NOTE = (
    "Drafters taught by omnidraft while a stream of prompts ran: weights, tokenizer, head and n-gram cache.\n\n"
    "`omnidraft versions` lists them; `omnidraft replay --drafter models:/NAME/NUMBER` goes on from one."
)


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version as the registry lists it. What a version published by others lacks is None."""

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
    drift: int | None = None  # offset of the drift that it is the first to answer
    probe: float | None = None  # acceptance on the fixed probe, by which versions of any runs compare


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a version of a run comes from."""

    run: str
    parent: int | None  # number in the registry
    first: int | None  # stream offset that it learned from; None for the drafter as it was loaded
    drift: int | None
    datasets: str


@dataclass(frozen=True, slots=True)
class VersionDetails:
    """All that the registry knows of one version."""

    summary: RegisteredVersion
    manifest: Manifest
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class Reference:
    """`models:/NAME/NUMBER` or `models:/NAME@ALIAS`, taken apart; exactly one of number and alias is set."""

    name: str
    number: int | None
    alias: str | None

    def __post_init__(self) -> None:
        check_model_name(self.name)

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Raises ModelError for anything else."""
        found = _REFERENCE.fullmatch(text)
        if not found:
            raise ModelError(
                f"a registered version must be written models:/NAME/NUMBER or models:/NAME@ALIAS, got {text!r};"
                " `omnidraft versions` lists the numbers"
            )
        number = found["number"]
        return cls(found["name"], int(number) if number else None, found["alias"])


def numbered(alias: str, versions: Iterable[RegisteredVersion]) -> int | None:
    """The number of the version that has the alias, if one has."""
    return next((version.number for version in versions if alias in version.aliases), None)


def check_model_name(name: str) -> None:
    """Raises ModelError for a name that would end the quotation in one of MLflow's filters."""
    if set(name) & set("'\"`\\"):
        raise ModelError(f"the name of a registered model must be free of quotes and backslashes, got {name!r}")


def metric_name(text: str) -> str:
    """`text` as one part of a metric's name: letters, digits and `_.-` only, at most 100 characters.

    MLflow refuses other characters, and slashes keep the parts apart.
    """
    name = re.sub(r"[^\w.-]+", "_", text)[:100]
    return name if name.strip(".") else "_"  # "..", which would lead to another name, and nothing


def metric_key(text: str) -> str:
    """A whole name of a metric, cleaned part by part."""
    return "/".join(map(metric_name, text.split("/")))


def check_registered(folder: Path, digest: str, tags: Mapping[str, str]) -> None:
    """That a fetched version is the one that was published. What its tags do not say is not checked.

    The manifest travels with the files; only the registry's own tags tell that both were replaced together.

    Args:
        folder: with the manifest.
        digest: of the files.
        tags: of the registered version, plain.

    Raises:
        CorruptError: for another digest of the files, or another manifest.
    """
    for what, found in {"digest": digest, "manifest": digest_of(folder / MANIFEST)}.items():
        if tags.get(what, found) != found:
            raise CorruptError(
                f"the version must have the registered {what} {tags[what]}, got {found}; publish it again"
            )


def from_tags(number: int, tags: Mapping[str, str], aliases: Sequence[str], created_ms: int) -> RegisteredVersion:
    """The version that the tags of `tags_of` describe. `created_ms`: milliseconds since the epoch."""
    tags = plain(tags)
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
    """None too for what is no number: anyone may edit tags in MLflow's pages."""
    try:
        return kind(tags[key])
    except (KeyError, ValueError):
        return None


def plain(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags with those that `tags_of` folded into one."""
    try:
        folded = json.loads(tags.get(ABOUT, "{}"))
    except ValueError:  # anyone may edit tags in MLflow's pages
        folded = {}
    shown = {key: value for key, value in tags.items() if key != ABOUT}
    return ({key: str(value) for key, value in folded.items()} if isinstance(folded, dict) else {}) | shown


def tags_of(event: VersionPublished, lineage: Lineage, probe: float | None, manifest: str | None) -> dict[str, str]:
    """What a registered version is tagged with; few tags, since the table of versions has a line for each.

    `manifest`: sha256 of its manifest.
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
    """Markdown for the page of a run over these (name, source) pairs, with its figures once there are any."""
    sources = ", then ".join(f"{dataset} (`{source}`)" for dataset, source in datasets)
    return (  # pages show some five lines of it
        f"**{name}**: one replay of a stream of prompts: {sources or 'none'}.\n\n{_gained(summary or {})}"
        "Curves are over the *stream offset*, the number of the prompt. The nested runs are the published drafters."
        " Among the artifacts, `acceptance.png` shows drifts and versions along the stream, `tokens.html` some"
        " completions token by token."
    )


def _gained(summary: Mapping[str, float]) -> str:
    """A table of acceptance in the first and the last fifth of each dataset; nothing when the summary has no such."""
    first, last = "/first_fifth_acceptance_rate", "/last_fifth_acceptance_rate"
    rows = [
        f"| {key.removesuffix(first)} | {rate:.3f} | {summary[key.removesuffix(first) + last]:.3f} |"
        for key, rate in summary.items()
        if key.endswith(first) and key.removesuffix(first) + last in summary
    ]
    head = "| acceptance | first fifth | last fifth |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n\n" if rows else ""


def version_note(made: VersionPublished, lineage: Lineage) -> str:
    """Plain text that begins with what tells versions apart: tables show some twenty characters of it."""
    loaded = "the drafter as it was loaded"
    taught = loaded if lineage.first is None else f"taught by prompts {lineage.first} to {made.offset}"
    since = "" if lineage.drift is None else f", the first since the drift at prompt {lineage.drift}"
    return (
        f"{made.reason} at prompt {made.offset}: version {made.version} of {lineage.run} for {made.target}, {taught}"
        f"{since}, with {made.cache_entries} cached n-grams."
    )
