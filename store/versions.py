"""A registered version in plain values, and the tags that carry them through the registry."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from store.errors import ModelError
from store.events import VersionPublished
from store.version_folder import Manifest

_REFERENCE = re.compile(r"models:/(?P<name>[^/@:]+)(?:/(?P<number>[0-9]+)|@(?P<alias>[\w.-]+))")


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


def from_tags(number: int, tags: Mapping[str, str], aliases: Sequence[str], created_ms: int) -> RegisteredVersion:
    """The version that the tags of `tags_of` describe; raises ValueError for tags that only look like ours."""

    def integer(key: str) -> int | None:
        return int(tags[key]) if key in tags else None

    return RegisteredVersion(
        number=number,
        run=tags.get("run"),
        version=integer("version"),
        parent=integer("parent"),
        offset=integer("offset"),
        reason=tags.get("reason"),
        acceptance=float(tags["acceptance"]) if "acceptance" in tags else None,
        cache_entries=integer("cache_entries"),
        digest=tags.get("digest"),
        aliases=tuple(sorted(aliases)),
        created_at=datetime.fromtimestamp(created_ms / 1000, tz=UTC),
    )


def tags_of(event: VersionPublished, run: str, parent: int | None) -> dict[str, str]:
    """What a registered version is tagged with; `parent` is its parent's number in the registry, when known."""
    tags: dict[str, object] = {
        "run": run,
        "version": event.version,
        "parent": parent,
        "offset": event.offset,
        "reason": event.reason,
        "acceptance": None if event.acceptance is None else round(event.acceptance, 4),
        "cache_entries": event.cache_entries,
        "digest": event.digest,
    }
    return {key: str(value) for key, value in tags.items() if value is not None}
