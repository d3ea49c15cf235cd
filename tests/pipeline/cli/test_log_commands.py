import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from synthetic_runs import decision
from typer.testing import CliRunner

from pipeline.cli.log import check, compact, sql
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.reports.rows import CELL_CHARACTERS, SHOWN_ROWS
from store.errors import QueryError
from store.events import Translation
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.run_log import Commit, RunLog

LEVELS = {"drafter_levels": (0.5, 0.5), "target_levels": (0.25, 1.0), "uniform": 0.25}
ACCEPTED = decision(pieces=(7, 8), translation=Translation.NGRAM, head_estimate=None, entropy=1.5, **LEVELS)

app = typer.Typer()
app.command()(sql)
app.command()(check)
app.command()(compact)


def call(*arguments):
    with write_log(LogLevel.INFO, as_json=False):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(folder, *decisions):
    with RunLog(folder) as log:
        for decision in decisions:
            log.append(decision)
    return folder


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "runs" / "one", ACCEPTED, replace(ACCEPTED, position=1, index=1))
    return tmp_path / "runs"


def test_the_newest_run_is_queried_unless_another_or_all_are_named(runs):
    write(runs / "two", ACCEPTED)
    os.utime(runs / "one" / MANIFEST, (1, 1))
    query = ["SELECT run, count(*) AS n FROM tokens GROUP BY run ORDER BY run", "--runs", runs, "--format", "csv"]
    newest = call("sql", *query)
    assert newest.stdout == "run,n\ntwo,1\n"
    assert newest.stderr == "the newest of 2 runs: two; --all-runs queries all\n"
    every = call("sql", *query, "--all-runs")
    assert (every.stdout, every.stderr) == ("run,n\none,2\ntwo,1\n", "")
    assert call("sql", *query, "--run", runs / "one").stdout == "run,n\none,2\n"
    both = call("sql", *query, "--run", runs / "one", "--all-runs")
    assert isinstance(both.exception, QueryError)


def test_csv_and_json_are_clean_and_lossless(runs):
    query = """
        SELECT pieces, emitted_bytes, head_estimate, uniform, 'a,"b"' || chr(10) AS text, 'nan'::FLOAT AS nan
        FROM decisions LIMIT 1
    """
    (row,) = csv.DictReader(io.StringIO(call("sql", query, "--runs", runs, "--format", "csv").stdout))
    plain = {"emitted_bytes": "20746865", "head_estimate": "", "uniform": "0.25", "text": 'a,"b"\n', "nan": ""}
    assert row == {"pieces": "[7, 8]", **plain}
    (row,) = json.loads(call("sql", query, "--runs", runs, "--format", "json").stdout)
    plain = {"emitted_bytes": "20746865", "head_estimate": None, "uniform": 0.25, "text": 'a,"b"\n', "nan": None}
    assert row == {"pieces": [7, 8], **plain}


def test_a_table_rounds_floats_trims_long_cells_and_keeps_to_a_line_each(runs):
    query = "SELECT 2 / 3 AS ratio, repeat('x', 99) AS long, 'a' || chr(10) || '[red]b' AS text, 1e-9 AS tiny"
    answer = call("sql", query, "--runs", runs).stdout
    assert "0.6667 " in answer
    assert "x" * (CELL_CHARACTERS - 1) + "…" in answer
    assert "x" * CELL_CHARACTERS not in answer
    assert r"a\n[red]b" in answer
    assert "1e-09" in answer
    assert len(answer.splitlines()) == 5


def test_a_long_table_is_cut_with_a_message_on_standard_error(runs):
    answer = call("sql", f"SELECT i FROM range({SHOWN_ROWS + 7}) t(i)", "--runs", runs)
    assert f"more rows than these {SHOWN_ROWS}" in answer.stderr
    assert f" {SHOWN_ROWS - 1} " in answer.stdout
    assert f" {SHOWN_ROWS} " not in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["SELECT 1", "--recipe", "drifts"], QueryError, "both"),
        (["--recipe", "nonsense"], QueryError, "acceptance-over-time"),
        (["DROP VIEW tokens"], QueryError, "SELECT"),
        (["FROM read_csv('/etc/passwd')"], QueryError, "read_csv"),
    ],
)
def test_impossible_requests_are_errors_of_ours(runs, arguments, error, words):
    answer = call("sql", *arguments, "--runs", runs)
    assert isinstance(answer.exception, error)
    assert words in str(answer.exception)
    assert answer.stdout == ""


def test_check_derives_the_latest_run_again(runs):
    write(runs / "older", ACCEPTED)
    os.utime(runs / "older" / MANIFEST, (1, 1))
    answer = call("check", "--runs", runs)
    assert answer.exit_code == 0
    assert f"{runs / 'one'}: derived 2 judged decisions again (of 2 in the log): 0 mismatches" in answer.stdout


def test_check_fails_on_a_mismatch_and_shows_it(tmp_path):
    run = write(tmp_path / "run", ACCEPTED, replace(ACCEPTED, position=1, index=1, uniform=0.75))
    answer = call("check", "--run", run)
    assert answer.exit_code == 1
    assert "derived 2 judged decisions again (of 2 in the log): 1 mismatch," in answer.stdout
    assert "0.7500" in answer.stdout


def damage(run, table="decisions"):
    """Flip one bit of the table's first part and return its path."""
    path = part_path(run, read_manifest(run).tables[table][0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def test_compact_reports_what_it_did(tmp_path):
    run = tmp_path / "runs" / "run"
    with RunLog(run) as log:
        for position in range(3):
            log.append(replace(ACCEPTED, position=position, index=position))
            log.commit(Commit(dict), wait=True)
    answer = call("compact", "--run", run)
    assert answer.stdout.startswith(f"{run}: 3 parts became 1, ")
    assert call("compact", "--run", run, "--grace", "0").stdout.endswith("3 replaced files removed\n")
    (report,) = json.loads(call("compact", "--run", run, "--json").stdout)
    assert (report["run"], report["parts_before"], report["parts_after"], report["damaged"]) == (str(run), 1, 1, [])
    damaged = damage(run)
    write(tmp_path / "runs" / "other", ACCEPTED)
    answer = call("compact", "--runs", tmp_path / "runs")
    assert answer.exit_code == 0
    assert answer.stderr == f"{damaged} is not as it was written; left as it is\n"


def test_the_commands_load_the_heavy_libraries_late_or_never(runs):
    code = (
        "import sys; from pipeline.cli.log import sql; heavy = {'torch', 'transformers', 'mlflow'}; "
        "print(sorted((heavy | {'duckdb', 'pyarrow', 'rich.table'}) & set(sys.modules))); "
        f"from pathlib import Path; sql('SELECT 1 AS one', runs=Path({str(runs)!r})); "
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[0] == "[]"
    assert answer.stdout.splitlines()[-1] == "[]"
