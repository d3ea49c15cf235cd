"""`pipeline.open_log`: SQL and Arrow over the logs of runs, read-only."""

from pathlib import Path

import pyarrow as pa
import pytest
from replaying import config_of, run_replay
from tiny_pair import TinyPair

import pipeline
from store.query.log_reader import VIEWS, recipes


@pytest.fixture(scope="module")
def runs(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("first", "second")):
        config = config_of(tiny_pair, sources=(str(tiny_pair.sums),), seed=seed, sampling__temperature=1.0)
        run_replay(config, folder / name)
    return [folder / "first", folder / "second"]


def test_sql_gives_arrow_tables(runs: list[Path]):
    with pipeline.open_log(runs[0]) as log:
        rows = log.sql("SELECT outcome, count(*) AS tokens FROM decisions GROUP BY outcome ORDER BY outcome")
        assert isinstance(rows, pa.Table)
        assert "accepted" in rows["outcome"].to_pylist()
        assert log.sql("SELECT 1 AS one FROM decisions", rows=3, seconds=60).num_rows == 3


def test_every_table_is_listed_and_read(runs: list[Path]):
    with pipeline.open_log(str(runs[0])) as log:
        assert tuple(log.tables) == VIEWS
        assert log.tables["prompts"]["prompt_text"] == "VARCHAR"
        for name, columns in log.tables.items():
            assert log.table(name).schema.names == list(columns)
        assert log.table("prompts").num_rows == 10
        with pytest.raises(pipeline.QueryError, match=r"must be one of decisions, .*; got 'decision'"):
            log.table("decision")


def test_recipes_are_listed_and_run(runs: list[Path]):
    with pipeline.open_log(runs[0]) as log:
        assert set(log.recipes) == set(recipes())
        assert all(log.recipes.values())
        assert log.recipe("acceptance-over-time").num_rows > 0
        assert log.recipe("slowest-prompts", rows=2).num_rows == 2
        with pytest.raises(pipeline.QueryError, match="a recipe must be one of"):
            log.recipe("acceptance")
