"""MLflow's local store after its folder was moved or copied.

The store keeps the addresses of files as absolute paths. They are changed to those of the folder in which the store now
lies, so that a copy neither reads the files of the original nor writes new ones there.
"""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOG = logging.getLogger("omnidraft.registry")

ARTIFACTS = "mlartifacts"  # folder of all files, next to the database
# Table and column of every address of a file in MLflow's schema.
_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def adopt_artifacts(database: Path) -> None:
    """Change the addresses of a store whose folder was moved; otherwise only read it.

    A database that cannot be read is left to MLflow, which reports it. One that was moved and cannot be written is
    reported as a warning: its files are then not found.
    """
    if not database.is_file():
        return
    folder = database.resolve().parent / ARTIFACTS
    here = folder.as_uri()
    former = list[str]()
    try:
        with closing(sqlite3.connect(database)) as store, store:
            former = _find_former_roots(store, folder)
            for root in former:
                _change_addresses(store, root, here)
    except sqlite3.Error as error:
        if former:
            LOG.warning(
                "%s was moved, and its addresses of files still lead to %s: they could not be changed (%s)",
                *(database, ", ".join(former), error),
            )
        return
    if former:
        LOG.info("%s was moved: its files are now looked for in %s instead of %s", database, here, ", ".join(former))


def _find_former_roots(store: sqlite3.Connection, folder: Path) -> list[str]:
    """Return the addresses of other folders of that name that experiments have.

    A store whose files never were next to it has none: its own folder is not there, and the other one is.
    """
    found = store.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
    others = [root for (root,) in found if root and root.startswith("file:///") and root != folder.as_uri()]
    return [
        root
        for root in others
        if root.endswith(f"/{ARTIFACTS}") and (folder.is_dir() or not Path(unquote(urlsplit(root).path)).is_dir())
    ]


def _change_addresses(store: sqlite3.Connection, root: str, here: str) -> None:
    for table, column in _ADDRESSES:
        if column not in [row[1] for row in store.execute(f"PRAGMA table_info({table})")]:
            continue  # in another version of the schema
        store.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR substr({column}, 1, ?) = ?",
            (here, len(root) + 1, root, len(root) + 1, f"{root}/"),
        )
