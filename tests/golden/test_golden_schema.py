"""The log's tables, the views that SQL sees, and the recipes' columns."""

from collections.abc import Callable
from typing import Any

from product import SCHEMA_VERSION, TABLES, VIEWS, LogReader, recipes, schema_of

Golden = Callable[[str, Any], None]


def test_tables_of_the_schema(golden: Golden) -> None:
    tables = {
        table: [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema_of(table)]
        for table in TABLES
    }
    golden("tables", {"version": SCHEMA_VERSION, "tables": tables})


def test_views(golden: Golden) -> None:
    with LogReader([]) as log:
        golden("views", {view: [" ".join(column) for column in log.columns(view)] for view in VIEWS})


def test_recipes(golden: Golden) -> None:
    with LogReader([]) as log:
        found = {name: [f"{field.name}: {field.type}" for field in log.recipe(name).schema] for name in recipes()}
    golden("recipes", found)
