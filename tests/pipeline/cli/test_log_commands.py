import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from event_making import make_completed
from typer.testing import CliRunner

from pipeline.cli.log import check, compact, sql
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.reports.rows import CELL_CHARACTERS, SHOWN_ROWS
from store.errors import QueryError, RunError
from store.events import Origin, Outcome, TokenDecision, Translation
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.run_log import Commit, RunLog

ACCEPTED = TokenDecision(
    offset=0,
    prompt_id="docs-0",
    dataset="docs",
    target="big",
    block=0,
    position=0,
    index=0,
    pieces=(7, 8),
    translation=Translation.NGRAM,
    proposed_id=70,
    proposed_bytes=b" the",
    outcome=Outcome.ACCEPTED,
    emitted_id=70,
    emitted_bytes=b" the",
    origin=Origin.ACCEPTED,
    drafter_levels=(0.5, 0.5),
    target_levels=(0.25, 1.0),
    uniform=0.25,
    head_estimate=None,
    entropy=1.5,
    drafter_version=0,
    head_version=0,
    cache_version=0,
)

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


def test_without_a_query_the_views_their_columns_and_the_recipes_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = call("sql")
    assert answer.exit_code == 0
    for words in (
        "decisions",
        "tokens",
        "token_id",
        "head_estimate",
        "acceptance-over-time",
        "per window of 20 prompts",
    ):
        assert words in answer.stdout


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


def test_a_run_without_a_completed_prompt_is_not_the_default(runs):
    """Such as one that was interrupted before the first."""
    write(runs / "two", ACCEPTED, make_completed(0))
    os.utime(runs / "two" / MANIFEST, (1, 1))
    query = ["SELECT DISTINCT run FROM tokens", "--runs", runs, "--format", "csv"]
    assert call("sql", *query).stdout == "run\ntwo\n"


MANY = "SELECT 'r' AS same, i AS number, {} FROM range(21) t(i)".format(
    ", ".join(f"i + {n} AS c{n}" for n in range(20))
)


def heads_of(stdout):
    """The headings of every printed table, each in one line."""
    for table in stdout.split("┏")[1:]:
        lines = [line.strip("┃").split("┃") for line in table.splitlines() if line.startswith("┃")]
        yield ["".join(cell.strip() for cell in cells) for cells in zip(*lines, strict=True)]


def test_a_long_table_fits_its_terminal_by_leaving_columns_out(runs, monkeypatch):
    query = [MANY, "--runs", runs]
    assert max(map(len, call("sql", *query).stdout.splitlines())) > 120
    monkeypatch.setenv("COLUMNS", "50")
    answer = call("sql", *query)
    assert max(map(len, answer.stdout.splitlines())) <= 50
    (heads,) = heads_of(answer.stdout)
    assert heads[0] == "number", "what is the same in all rows is left out first"
    assert "…" in heads[1:-1]
    assert f"{len(heads) - 1} of 22 columns fit" in answer.stderr
    narrow = call("sql", "SELECT 1 AS a, 2 AS b", "--runs", runs)
    assert "…" not in narrow.stdout
    assert "fit" not in narrow.stderr


@pytest.mark.parametrize("columns", ["30", "60", "90", "200"])
def test_a_short_table_fits_its_terminal_with_all_its_columns(runs, monkeypatch, columns):
    wide = call("sql", "SELECT * FROM decisions", "--runs", runs)
    monkeypatch.setenv("COLUMNS", columns)
    answer = call("sql", "SELECT * FROM decisions", "--runs", runs)
    assert max(map(len, answer.stdout.splitlines())) <= int(columns)
    first, *others = heads_of(answer.stdout)
    (all_heads,) = heads_of(wide.stdout)
    key, shown = first[0], [first[0], *first[1:], *(head for heads in others for head in heads[1:])]
    assert sorted(shown) == sorted(all_heads)
    assert key == "seq", "every table begins with the first column that tells the rows apart"
    assert all(heads[0] == key for heads in others)
    assert answer.stderr == ""


def test_folded_text_is_whole(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    query = "SELECT 'a b c d e f g h i j k l m n o p' AS some_text, 1 AS a_long_name UNION ALL SELECT 'q', 2"
    lines = call("sql", query, "--runs", runs).stdout.splitlines()
    assert [cell.strip() for cell in lines[1].strip("┃").split("┃")] == ["", "a_"]
    cells = [line.strip("│").split("│")[0].strip() for line in lines if line.startswith("│")]
    assert " ".join(cells) == "a b c d e f g h i j k l m n o p q"


def test_a_row_that_is_too_wide_is_shown_one_value_a_line(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    answer = call("sql", "SELECT * FROM decisions LIMIT 1", "--runs", runs)
    assert (
        answer.stdout == call("sql", "SELECT * FROM decisions LIMIT 1", "--runs", runs, "--format", "vertical").stdout
    )


def test_one_value_a_line_shows_long_values_whole(runs):
    query = "SELECT 1 AS a, repeat('x', 99) AS long, NULL AS nothing UNION ALL SELECT 2, 'y', NULL"
    answer = call("sql", query, "--runs", runs, "--format", "vertical")
    row = ["  a        {}", "  long     {}", "  nothing"]
    expected = ["row 1", row[0].format(1), row[1].format("x" * 99), row[2], "row 2", row[0].format(2), "  long     y"]
    assert answer.stdout.splitlines() == [*expected, row[2]]


def test_json_is_json_by_its_own_option_too(runs):
    assert json.loads(call("sql", "SELECT 1 AS a", "--runs", runs, "--json").stdout) == [{"a": 1}]


def test_runs_is_the_default_folder(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    assert call("sql", "SELECT count(*) AS n FROM tokens", "--format", "csv").stdout == "n\n2\n"


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


@pytest.mark.parametrize(("output", "expected"), [("csv", "run\n"), ("json", "[]\n")])
def test_no_rows_are_still_well_formed(runs, output, expected):
    assert call("sql", "SELECT run FROM tokens WHERE false", "--runs", runs, "--format", output).stdout == expected


def test_dates_and_structs_have_a_form_in_json(runs):
    query = "SELECT DATE '2026-01-02' AS day, {'a': [1.5]} AS nested, sum(position) AS total FROM decisions"
    (row,) = json.loads(call("sql", query, "--runs", runs, "--format", "json").stdout)
    assert row["day"] == "2026-01-02"
    assert row["nested"] == {"a": [1.5]}
    assert row["total"] == 1


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


def test_a_table_of_an_endless_result_is_printed_without_waiting_for_its_end(runs):
    answer = call("sql", "SELECT md5(i::VARCHAR) AS text FROM range(1000000000000) t(i)", "--runs", runs)
    assert "more rows" in answer.stderr


def test_columns_of_the_same_name_keep_their_values_apart(runs):
    query = "SELECT 1 AS a, 2 AS a, 3 AS b"
    lines = call("sql", query, "--runs", runs).stdout.splitlines()
    assert [cell.strip() for cell in lines[3].strip("│").split("│")] == ["1", "2", "3"]
    assert call("sql", query, "--runs", runs, "--format", "csv").stdout == "a,a,b\n1,2,3\n"
    answer = call("sql", query, "--runs", runs, "--format", "json")
    assert isinstance(answer.exception, QueryError)
    assert "different names" in str(answer.exception)
    assert answer.stdout == ""


@pytest.mark.parametrize("output", ["table", "csv", "json"])
@pytest.mark.parametrize("value", ["'infinity'::TIMESTAMP", "'20000-01-01'::DATE", "['0044-01-01 (BC)'::DATE]"])
def test_dates_beyond_the_calendar_are_refused_with_a_way_out(runs, output, value):
    answer = call("sql", f"SELECT {value} AS x", "--runs", runs, "--format", output)
    assert isinstance(answer.exception, QueryError)
    assert "cast it to VARCHAR" in str(answer.exception)
    assert call("sql", f"SELECT ({value})::VARCHAR AS x", "--runs", runs, "--format", output).exit_code == 0


def test_a_recipe_runs_by_name(runs):
    answer = call("sql", "--recipe", "by-ngram-length", "--runs", runs, "--format", "json")
    (row,) = json.loads(answer.stdout)
    assert (row["pieces"], row["judged"], row["acceptance_rate"]) == (2, 2, 1.0)


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


@pytest.mark.parametrize("arguments", [["sql", "SELECT 1"], ["check"], ["sql", "--recipe", "drifts"]])
def test_no_runs_are_an_error_that_names_the_command_that_makes_one(tmp_path, arguments):
    answer = call(*arguments, "--runs", tmp_path / "nowhere")
    assert isinstance(answer.exception, RunError)
    assert "omnidraft replay" in str(answer.exception)


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


def test_check_reports_as_json(tmp_path):
    run = write(tmp_path / "run", ACCEPTED, replace(ACCEPTED, position=1, index=1, uniform=0.75))
    answer = call("check", "--run", run, "--json")
    found = json.loads(answer.stdout)
    assert (answer.exit_code, found["run"], found["judged"], found["changed_files"]) == (1, str(run), 2, [])
    assert [row["position"] for row in found["mismatches"]] == [1]
    sound = call("check", "--run", write(tmp_path / "sound", ACCEPTED), "--json")
    assert (sound.exit_code, json.loads(sound.stdout)["mismatches"]) == (0, [])


def test_check_names_every_changed_file_and_checks_the_rest(tmp_path):
    run = tmp_path / "run"
    with RunLog(run) as log:
        for position in range(3):
            log.append(replace(ACCEPTED, position=position, index=position))
            log.commit(Commit(dict), wait=True)
    first = damage(run)
    last = part_path(run, read_manifest(run).tables["decisions"][2])
    last.unlink()
    answer = call("check", "--run", run)
    assert answer.exit_code == 1
    assert answer.stderr.splitlines() == [f"{path} is not as it was written" for path in (first, last)]
    assert "derived 1 judged decisions again (of 1 in the log): 0 mismatches, 0 wrong counts, 2 changed files" in (
        answer.stdout
    )


def test_sql_reads_the_undamaged_parts_on_request(tmp_path):
    run = write(tmp_path / "run", ACCEPTED)
    path = damage(run)
    answer = call("sql", "SELECT count(*) AS n FROM decisions", "--run", run, "--skip-damaged", "--format", "csv")
    assert (answer.exit_code, answer.stdout) == (0, "n\n0\n")
    assert answer.stderr == f"{path} is not as it was written; left out\n"


def test_compact_reports_what_it_did_and_what_it_would_do(tmp_path):
    run = tmp_path / "runs" / "run"
    with RunLog(run) as log:
        for position in range(3):
            log.append(replace(ACCEPTED, position=position, index=position))
            log.commit(Commit(dict), wait=True)
    answer = call("compact", "--runs", tmp_path / "runs", "--dry-run")
    assert answer.stdout == f"{run}: 3 parts would become 1; 0 replaced files removed\n"
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
