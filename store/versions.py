"""A registered version in plain values, with the tags and the notes that stand for it in the registry."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from store.errors import ModelError
from store.events import VersionPublished
from store.version_folder import Manifest

Number = TypeVar("Number", int, float)
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
    """The version that the tags of `tags_of` describe. `created_ms`: milliseconds since the epoch."""
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
    )


def _number(tags: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    """None too for what is no number: anyone may edit tags in MLflow's pages."""
    try:
        return kind(tags[key])
    except (KeyError, ValueError):
        return None


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


def run_note(name: str, datasets: Sequence[Sequence[str]]) -> str:
    """Markdown for the page of a run over these (name, source) pairs."""
    sources = "\n".join(f"- {dataset}: `{source}`" for dataset, source in datasets)
    return (
        f"**{name}**: one replay of a stream of prompts, in this order:\n\n{sources}\n\n"
        "Curves are over the *stream offset*, the number of the prompt. The nested runs are the published drafters."
    )


def version_note(made: VersionPublished, run: str) -> str:
    """Plain text that begins with what tells versions apart: tables show some twenty characters of it."""
    taught = "the drafter as it was loaded" if made.parent is None else "taught by the stream until then"
    return (
        f"{made.reason} at prompt {made.offset}: version {made.version} of {run}, {taught},"
        f" with {made.cache_entries} cached n-grams."
    )
