"""MLflow's empty tables, made once in a session of tests and copied from there: its migrations take seconds a store."""

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

VARIABLE = "OMNIDRAFT_TEST_MLFLOW_TABLES"  # names the file that is copied; processes that tests start find it so
_MODULES = ("mlflow.store.db.utils", "mlflow.store.model_registry.sqlalchemy_store")


def copy_tables() -> None:
    """Let new SQLite stores of this process begin as copies, if it has loaded MLflow."""
    for name in _MODULES:
        module = sys.modules.get(name)
        make = getattr(module, "_initialize_tables", None)
        if make is not None and not isinstance(make, _Tables):
            module._initialize_tables = _Tables(make)  # type: ignore[union-attr]


class _Tables:
    """Replaces MLflow's function that makes the tables."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, engine: Any) -> None:
        import sqlalchemy

        path = os.environ.get(VARIABLE)
        if path is None or engine.dialect.name != "sqlite" or sqlalchemy.inspect(engine).get_table_names():
            self._make(engine)
            return
        with FileLock(f"{path}.lock"):
            if not Path(path).exists():
                made = sqlalchemy.create_engine(f"sqlite:///{path}.new")
                self._make(made)
                made.dispose()
                os.replace(f"{path}.new", path)
        tables = sqlite3.connect(path)
        with engine.connect() as connection:
            tables.backup(connection.connection.driver_connection)
        tables.close()
