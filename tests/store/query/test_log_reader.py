import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from synthetic_runs import (
    decision,
    make_drift,
    make_rejection,
    prompt,
    small_run_events,
    write_run,
)

from store.errors import QueryError, RunError
from store.events import Outcome
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.run_log import Commit, RunLog
from store.log.schema import TABLES, schema_of
from store.query import log_reader as queries
from store.query.log_reader import VIEWS, LogReader, recipes, run_folders


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small", small_run_events())


@pytest.fixture(scope="module")
def small(small_run):
    with LogReader([small_run]) as log:
        yield log


@pytest.fixture(scope="module")
def nothing():
    with LogReader([]) as log:
        yield log


def test_the_views_of_an_empty_log_have_the_columns_and_types_of_a_full_one(small, nothing):
    assert [row["name"] for row in small.select("SHOW TABLES").to_pylist()] == sorted([*VIEWS, "engine_runs"])
    described = Path(__file__).parents[3].joinpath("docs", "log.md").read_text(encoding="utf-8")
    assert [view for view in (*VIEWS, "engine_runs") if f"`{view}`" not in described] == []
    for view in VIEWS:
        assert nothing.columns(view) == small.columns(view)
        assert nothing.columns(view)[0] == ("run", "VARCHAR")
    for table in TABLES:
        assert [name for name, _ in nothing.columns(table)] == ["run", *schema_of(table).names]


def test_tokens_are_the_emitted_ones_in_order_with_their_text(tmp_path):
    events = [
        decision(offset=1, position=1, emitted_bytes=b"\xe2\x82", index=1),
        decision(offset=1, position=0, emitted_bytes="né".encode()),
        make_rejection(offset=0, position=0),
        decision(offset=0, position=1, outcome=Outcome.UNJUDGED, emitted_id=None, emitted_bytes=None, origin=None),
    ]
    with LogReader([write_run(tmp_path / "run", events)]) as log:
        rows = log.select("FROM tokens").to_pylist()
    assert [(row["offset"], row["position"], row["text"], row["origin"]) for row in rows] == [
        (0, 0, " a", "residual"),
        (1, 0, "né", "accepted"),
        (1, 1, "\ufffd", "accepted"),
    ]


def test_runs_are_named_by_their_folders(tmp_path):
    """Names may be patterns, of other runs too, and have what DuckDB takes for separators."""
    names = ["b", "it's", "?", "[!b]*", "a\\[b]", "\\ *\n", "-x:100%20#"]
    for number, name in enumerate(names, 1):
        write_run(tmp_path / name, [decision(position=place, index=place) for place in range(number)])
    (tmp_path / "not-a-run").mkdir()
    with LogReader(run_folders(tmp_path)) as log:
        rows = log.select("SELECT run, count(*) AS rows FROM decisions GROUP BY run ORDER BY rows").to_pylist()
    assert rows == [{"run": name, "rows": number} for number, name in enumerate(names, 1)]


def test_the_error_for_a_folder_without_runs_names_the_command_to_make_one(tmp_path):
    with pytest.raises(RunError, match="omnidraft replay"):
        run_folders(tmp_path)
    with pytest.raises(RunError, match="manifest"):
        LogReader([tmp_path])


def test_a_reader_is_a_snapshot_that_stays_valid_while_the_run_continues(tmp_path):
    with RunLog(tmp_path) as writer:
        writer.append(decision())
        writer.commit(Commit(dict), wait=True)
        with LogReader([tmp_path]) as early:
            writer.append(decision(position=1, index=1))
            writer.commit(Commit(dict), wait=True)
            assert early.select("FROM decisions").num_rows == 1
        with LogReader([tmp_path]) as late:
            assert late.select("FROM decisions").num_rows == 2


READING = [
    "FROM tokens LIMIT 1",
    "SELECT 1;",
    "WITH t AS (FROM tokens) SELECT count(*) FROM t",
    "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 3) FROM n",
    "EXPLAIN SELECT * FROM tokens",
    "EXPLAIN ANALYZE SELECT * FROM tokens",
    "DESCRIBE tokens",
    "SUMMARIZE prompts",
    "SHOW TABLES",
    "PIVOT decisions ON outcome IN ('accepted') USING count(*)",
    "SELECT piece FROM decisions, unnest(pieces) AS _(piece)",
    "FROM range(3)",
    "SELECT list_transform([1, 2], lambda x: x + 1)",
    "SELECT * FROM prompts WHERE prompt_text = 'COPY_QUERY_NODE read_csv(1)'",
]


def test_rows_beyond_the_limit_are_not_computed(small):
    assert small.select("SELECT md5(i::VARCHAR) AS text FROM range(1000000000000) t(i)", most=5).num_rows == 5


ENDLESS = [
    "SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b",
    "SELECT a.range FROM range(100000000000) a",
    "EXPLAIN ANALYZE SELECT count(*) FROM range(100000000) a, range(100000000) b",
    "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
]


@pytest.mark.parametrize("query", ENDLESS)
def test_a_query_is_cancelled_at_its_time_limit_and_the_next_one_runs(small, query):
    with pytest.raises(QueryError, match=r"within 0\.2 s"):
        small.select(query, seconds=0.2)
    assert small.select("FROM decisions", most=3, seconds=60).num_rows == 3


@pytest.mark.parametrize(
    "query",
    ["SELECT i FROM range(1000000000) t(i) ORDER BY md5(i::VARCHAR)", "SELECT list(i) FROM range(10000000000) t(i)"],
)
def test_a_query_that_needs_too_much_memory_is_refused(tmp_path, monkeypatch, query):
    monkeypatch.setattr(queries, "MEMORY", "100MB")
    with LogReader([]) as log:
        with pytest.raises(QueryError, match="within 100MB of memory"):
            log.select(query)
        assert log.select("SELECT 1").num_rows == 1


@pytest.mark.parametrize("query", READING)
def test_reading_statements_run(small, query):
    small.select(query)


FORBIDDEN = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM MAIN.READ_CSV('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_text('/etc/passwd')",
    "FROM tokens ORDER BY (SELECT count(*) FROM read_text('/etc/passwd'))",
    "SELECT list_transform([1], lambda x: (SELECT count(*) FROM read_text('/etc/passwd')))",
    "SUMMARIZE FROM read_text('/etc/passwd')",
    "SELECT getenv('HOME')",
    "SELECT * FROM read_parquet('{folder}/*.parquet')",
    "SELECT * FROM '{folder}/../secret.parquet'",
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM enable_logging()",
    "SELECT * FROM sys.path",
    "SELECT * FROM parquet_metadata('{part}')",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM python_scan_all_frames",
    "SELECT * FROM pragma_storage_info('decisions')",
    "SELECT * FROM pg_attach('x')",
    "SELECT * FROM 'https://localhost/x.parquet'",
    "SELECT * FROM read_duckdb('{folder}/x.db')",
    "WITH t AS MATERIALIZED (FROM read_blob('/etc/passwd')) FROM t",
    "SELECT * FROM decisions JOIN LATERAL (FROM read_text('/etc/passwd')) ON true",
    "WITH x AS (INSERT INTO decisions DEFAULT VALUES RETURNING *) FROM x",
    "CREATE OR REPLACE MACRO text_of(x) AS 'y'",
    "CREATE SECRET s (TYPE s3)",
    "CREATE TEMP TABLE t AS FROM decisions",
    "IMPORT DATABASE '{folder}'",
    "DETACH memory",
    "SET VARIABLE x = 1",
    "SET SESSION memory_limit = '100GB'",
    "PRAGMA memory_limit = '100GB'",
    "CHECKPOINT",
    "EXPLAIN SET threads = 1",
    "COPY (SELECT 1) TO '{part}'",
    "COPY decisions TO '{folder}/new.parquet'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{part}'",
    "EXPLAIN /* */ ANALYZE COPY (SELECT 1) TO '{part}'",
    "WITH x AS (COPY (SELECT 1) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) FROM x",
    "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) FROM x",
    "FROM query('WITH x AS (COPY (SELECT 1) TO ''{part}'' (FORMAT parquet, USE_TMP_FILE false)) FROM x')",
    "FROM json_execute_serialized_sql(json_serialize_sql("
    "'WITH x AS (COPY (SELECT 1) TO ''{part}'' (FORMAT parquet, USE_TMP_FILE false)) FROM x'))",
    "EXPORT DATABASE '{folder}/out'",
    "ATTACH '{folder}/x.db'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "PRAGMA database_list",
    "SET enable_external_access = true",
    "SET threads = 1",
    "RESET lock_configuration",
    "CALL enable_logging()",
    "DROP VIEW decisions",
    "DELETE FROM decisions",
    "BEGIN",
    "PREPARE x AS SELECT 1",
    "SELECT 1; DROP VIEW decisions",
    "SELECT 1; SELECT 2",
    "",
    "-- nothing",
    "SELECT ?",
    "SELECT nonsense FROM decisions",
    "not even SQL",
    "SELECT " + "+".join(["1"] * 2000),
    "SELECT 'half of a surrogate: \ud83d'",
]


@pytest.mark.parametrize("query", FORBIDDEN)
def test_everything_else_is_refused_and_changes_no_file(small_run, small, query):
    (part, *_) = read_manifest(small_run).tables["decisions"]
    path = part_path(small_run.resolve(), part)
    before = digests(small_run)
    with pytest.raises(QueryError, match="must be"):
        small.select(query.format(part=path, folder=path.parent))
    assert digests(small_run) == before
    assert small.select("FROM decisions").num_rows == 75


def digests(folder):
    return {path: sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_the_connection_itself_is_locked_too(small_run, small):
    """If the check of queries failed, files and settings would still be inaccessible."""
    import duckdb

    for query in ("FROM read_csv('/etc/passwd')", "SET threads = 1", f"FROM read_text('{small_run / MANIFEST}')"):
        with pytest.raises(duckdb.Error):
            small._connection.execute(query)


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_runs_on_a_full_and_on_an_empty_log(small, nothing, name):
    full, empty = small.recipe(name), nothing.recipe(name)
    assert full.schema.names == empty.schema.names
    assert full.schema.names[0] == "run"
    assert empty.num_rows == 0
    assert (full.num_rows == 0) == (name in ("check", "memory-calibration", "policy-values"))


def test_an_unknown_recipe_is_refused_and_the_error_lists_the_known_ones(small):
    with pytest.raises(QueryError, match="acceptance-over-time"):
        small.recipe("acceptance")
    with pytest.raises(QueryError):
        small.recipe("_summary")


def test_acceptance_over_time_counts_windows_of_twenty_prompts_and_marks_drifts(tmp_path):
    events = [prompt(offset=number, judged=4, accepted=1 if number < 20 else 3) for number in range(25)]
    events += [make_drift(offset=offset, description=f"drift at prompt {offset}") for offset in (23, 21)]
    with LogReader([write_run(tmp_path, events)]) as log:
        first, second = log.recipe("acceptance-over-time").to_pylist()
    assert (first["first_offset"], first["last_offset"], first["prompts"]) == (0, 19, 20)
    assert (first["acceptance_rate"], second["acceptance_rate"]) == (0.25, 0.75)
    assert (first["judged"], second["judged"]) == (80, 20)
    assert first["drifts"] is None
    assert second["drifts"] == "drift at prompt 21. drift at prompt 23"


def test_recipes_give_the_values_of_the_small_run(small):
    lengths = {row["pieces"]: row for row in small.recipe("by-ngram-length").to_pylist()}
    assert (lengths[1]["judged"], lengths[1]["accepted"]) == (30, 15)
    assert (lengths[2]["judged"], lengths[2]["acceptance_rate"]) == (15, 1.0)
    indexes = [row["acceptance_rate"] for row in small.recipe("by-position").to_pylist()]
    assert indexes == [1.0, 0.0, None]
    (worst,) = small.recipe("rejected-tokens").to_pylist()
    assert (worst["proposed"], worst["rejected"], worst["judged"]) == (" the", 15, 45)
    assert worst["most_common_replacement"] == " a"
    (ngram,) = small.recipe("ngrams-that-pay").to_pylist()
    assert (ngram["token"], ngram["pieces"], ngram["accepted_pieces"]) == (" the", [8, 9], 30)
    docs, code = small.recipe("stage-times").to_pylist()
    assert (docs["ms_decode_per_block"], docs["seconds_learn"]) == (250.0, 0.5)
    assert (code["seconds_verify"], code["seconds_learn"]) == (5.0, 0.25)
    buckets = small.recipe("calibration-of-head").to_pylist()
    assert [(row["decisions"], row["accepted_fraction"]) for row in buckets] == [(15, 0.0), (45, pytest.approx(2 / 3))]
    assert [row["judged"] for row in small.recipe("acceptance-by-version").to_pylist()] == [24, 21]


def test_the_recipe_of_drifts_marks_those_that_were_acted_upon(tmp_path):
    actions = ("reset", "recall", "none", "cooldown")
    with LogReader([write_run(tmp_path, [make_drift(action=action) for action in actions])]) as log:
        rows = log.recipe("drifts").to_pylist()
    assert [row["action"] for row in rows] == list(actions)
    assert [row["acted_upon"] for row in rows] == [make_drift(action=action).acted_upon for action in actions]
    assert [row["acted_upon"] for row in rows] == [True, True, False, False]


JUPYTER_WITHOUT_WIDGETS = """
import sys
from types import ModuleType, SimpleNamespace
sys.modules["IPython"] = ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["ipywidgets"] = None

import duckdb
from store.query.log_reader import LogReader
try:
    duckdb.connect(":memory:").execute("SET enable_progress_bar = false")
except duckdb.Error as error:
    print(error)
with LogReader([]) as log:
    print(log.select("SELECT 1 AS one").to_pylist())
"""


def test_a_log_can_be_read_in_jupyter_without_widgets():
    """In Jupyter without widgets, DuckDB refuses settings of its progress bar. It detects a kernel at its import."""
    command = [sys.executable, "-c", JUPYTER_WITHOUT_WIDGETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "ipywidgets" in done.stdout, "DuckDB refused the setting"
    assert done.stdout.endswith("[{'one': 1}]\n")


def test_a_limited_number_of_rows_has_a_limited_size_too(small, monkeypatch):
    monkeypatch.setattr(queries, "_FETCHED_BYTES", 16 << 20)
    wide = "SELECT repeat('x', 4000) AS text FROM range(20000)"
    with pytest.raises(QueryError, match="at most 16 MB"):
        small.select(wide, most=10_000)
    assert small.select(wide, most=2000).num_rows == 2000
    assert small.select(wide).num_rows == 20_000
