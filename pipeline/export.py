"""`omnidraft versions export`: a version as a plain drafter that other engines load, whole or not at all."""

import shutil
import tempfile
from pathlib import Path

from pipeline.build_cache import NGRAM_FILE
from pipeline.build_models import locate
from pipeline.build_stages import HEAD_FILE
from pipeline.cli_registry import new_folder
from pipeline.export_card import Card
from pipeline.lineage import lineage_of
from stages.export import export_drafter, licence_of
from store.errors import OmnidraftError
from store.registry import fetch_version, list_versions, show_version
from store.version_folder import MANIFEST

OWN_FOLDER = "omnidraft"  # vLLM takes every safetensors file beside the model for a part of it
DRAFT_LENGTH = 5


def export_version(uri: str, name: str, number: int, into: Path) -> Path:
    """Write a registered version into a new or empty folder: drafter, tokenizer, model card, cache and head.

    Every byte is checked against the version's manifest before any of it is read as a model.

    Raises:
        ModelError: there is no such version, or it holds no model that can be loaded.
        CorruptError: a file is not what was published, or may not be in a version.
        UsageError: the folder holds files, is the working directory, or cannot be written; there is no store.
    """
    with new_folder(into) as free:
        details, lineage = show_version(uri, name, number), lineage_of(number, list_versions(uri, name))
        free.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=free.parent, prefix=f".{free.name}-") as scratch:
            version = fetch_version(f"models:/{name}/{number}", uri, Path(scratch) / "version")
            part = Path(scratch) / "part"
            parameters = export_drafter(version, part, DRAFT_LENGTH)
            _copy_own(version, part / OWN_FOLDER)
            licence = _licence(details.manifest["drafter"], uri, Path(scratch) / "source")
            card = Card(details, lineage, free.name, DRAFT_LENGTH, parameters, licence)
            (part / "README.md").write_text(card.text(), encoding="utf-8")
            part.replace(free)
    return into


def _copy_own(version: Path, into: Path) -> None:
    """What only omnidraft reads."""
    into.mkdir()
    for file in (HEAD_FILE, NGRAM_FILE, MANIFEST):
        if (version / file).is_file():
            shutil.copyfile(version / file, into / file)


def _licence(drafter: str, uri: str, scratch: Path) -> str | None:
    """That of the drafter which the run began with; one that was a version itself is not fetched again for it."""
    try:
        return None if drafter.startswith("models:/") else licence_of(locate(drafter, uri, scratch))
    except OmnidraftError:  # the drafter is no longer there, or no longer what it was
        return None
