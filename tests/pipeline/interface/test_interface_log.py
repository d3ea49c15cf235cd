"""`pipeline.open_log`: SQL and Arrow over the logs of runs, read-only."""

from pathlib import Path

import pyarrow as pa
import pytest
from synthetic_runs import small_run_events, write_run

import pipeline
from store.query.log_reader import VIEWS, recipes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", small_run_events())


def test_sql_gives_arrow_tables(run: Path):
    with pipeline.open_log(run) as log:
        rows = log.sql("SELECT outcome, count(*) AS tokens FROM decisions GROUP BY outcome ORDER BY outcome")
        assert isinstance(rows, pa.Table)
        assert "accepted" in rows["outcome"].to_pylist()
        assert log.sql("SELECT 1 AS one FROM decisions", rows=3, seconds=60).num_rows == 3


def test_every_table_is_listed_and_read(run: Path):
    with pipeline.open_log(str(run)) as log:
        assert tuple(log.tables) == VIEWS
        assert log.tables["prompts"]["prompt_text"] == "VARCHAR"
        for name, columns in log.tables.items():
            assert log.table(name).schema.names == list(columns)
        assert log.table("prompts").num_rows == 15
        with pytest.raises(pipeline.QueryError, match=r"must be one of decisions, .*; got 'decision'"):
            log.table("decision")


def test_recipes_are_listed_and_run(run: Path):
    with pipeline.open_log(run) as log:
        assert set(log.recipes) == set(recipes())
        assert all(log.recipes.values())
        assert log.recipe("acceptance-over-time").num_rows > 0
        assert log.recipe("slowest-prompts", rows=2).num_rows == 2
        with pytest.raises(pipeline.QueryError, match="a recipe must be one of"):
            log.recipe("acceptance")
