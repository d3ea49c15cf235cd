"""Read what a part of a log states about itself, and compare it with its entry in the manifest.

A part names its table and its schema version in its metadata, and has its place in the table in the column `seq`, which
counts rows from 0. So it can be put in its place without a manifest.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.errors import CorruptError
from store.files import digest_of
from store.log.manifest import READABLE_VERSIONS, Part, part_path
from store.log.partitions import read_manifests

_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class FoundPart:
    """A readable part in a folder.

    Attributes:
        part: as a manifest names it.
        first_seq: number of its first row in the table; those of the others follow.
        vouched: whether its digest is the one that a manifest recorded.
    """

    part: Part
    first_seq: int
    vouched: bool

    @property
    def end_seq(self) -> int:
        """Number of the row after its last one."""
        return self.first_seq + self.part.rows


def read_found_part(path: Path, table: str, recorded: str | None) -> FoundPart:
    """Read a part that a manifest may not name, with all its rows.

    Args:
        path: of the file.
        table: in whose folder it is.
        recorded: digest that a manifest recorded; None if none did.

    Raises:
        CorruptError: it is a link, cannot be read, belongs elsewhere, or has another digest than the recorded one.
    """
    if path.is_symlink() or not path.is_file():
        raise CorruptError(f"{path} must be a plain file, but is a link or something else")
    digest = str(digest_of(path))
    if recorded not in (None, digest):
        raise CorruptError(f"{path} must have the digest {str(recorded)[:12]}... that was committed, but was changed")
    try:
        rows = pq.read_table(path, partitioning=None)
        metadata = rows.schema.metadata or {}
        named, version = metadata[b"omnidraft.table"].decode(), int(metadata[b"omnidraft.schema_version"])
        seqs, offsets = rows["seq"].to_numpy(), pc.min_max(rows["offset"]).as_py()
    except _UNREADABLE as error:
        raise CorruptError(f"{path} must be a part of a log, but cannot be read: {error}") from error
    if named != table or version not in READABLE_VERSIONS:
        raise CorruptError(f"{path} must be a part of {table} of a known version, got {named} of version {version}")
    if not len(seqs) or (np.diff(seqs) != 1).any():
        raise CorruptError(f"{path} must have rows whose seq counts by one, but has not")
    name, size = f"{table}/{path.name}", path.stat().st_size
    part = Part(name, len(seqs), size, digest, offsets["min"], offsets["max"], version)
    return FoundPart(part, int(seqs[0]), recorded is not None)


def compare_with_manifest(run_folder: Path) -> list[str]:
    """Compare the manifests of a run with the rows and offsets of their parts; return one sentence per difference.

    Parts that cannot be read are left out: their digests differ. Raises what `read_manifest` raises.
    """
    found: list[str] = []
    for folder, manifest in read_manifests(run_folder).items():
        for part in (part for parts in manifest.tables.values() for part in parts):
            path = part_path(folder, part)
            try:
                numbers = _read_numbers(path)
            except _UNREADABLE:
                continue
            stated = (part.rows, part.first_offset, part.last_offset)
            if numbers != stated:
                found.append(
                    f"{path} has {numbers[0]} rows with offsets {numbers[1]} to {numbers[2]}, but its manifest has "
                    f"{stated[0]} with {stated[1]} to {stated[2]}"
                )
    return found


def _read_numbers(path: Path) -> tuple[int, int | None, int | None]:
    """Return the number of rows, and the lowest and highest offset; the footer has them where all is well."""
    with pq.ParquetFile(path) as file:
        footer = file.metadata
        column = footer.schema.names.index("offset")
        groups = [footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups)]
        if groups and all(group is not None and group.has_min_max for group in groups):
            return footer.num_rows, min(group.min for group in groups), max(group.max for group in groups)
        offsets = pc.min_max(file.read(columns=["offset"])["offset"]).as_py()
        return footer.num_rows, offsets["min"], offsets["max"]
