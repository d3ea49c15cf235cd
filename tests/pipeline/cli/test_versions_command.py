"""`omnidraft versions` and `omnidraft dashboard --mlflow` on the command line."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import warm_python
from registry_making import CLOSED, MODEL, LittleRun, new_store
from serving import free_port, wait_until_up
from typer.testing import CliRunner

from pipeline.cli.pages import HOST, dashboard
from pipeline.cli.versions import versions_group
from store.errors import CorruptError, ModelError, OmnidraftError, UsageError
from store.registry.mlflow_client import connect
from store.registry.registered_version import name_of_pair
from store.registry.registry import default_uri, list_versions

app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(versions_group, name="versions")
app.command()(dashboard)


def publish(folder: Path, uri: str, versions: int, name: str = MODEL) -> None:
    """Publish a run of so many versions."""
    probed = {"acceptance": 0.25, "acceptance_low": 0.2, "acceptance_high": 0.3}
    run = LittleRun(folder, model=name)
    for version in range(versions):
        reason = "drift" if version else "baseline"
        run.publish({"mean_accepted_length": 2.5, **probed}, target="big", reason=reason)
    run.finish()
    run.sync(uri)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_with(tmp_path_factory.mktemp("runs"), 2)


def store_with(folder: Path, versions: int) -> Path:
    publish(folder / "tuesday", new_store(folder), versions)
    return folder


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_list_is_a_table_with_the_newest_first(runs: Path):
    pair, head, *rows = output_of("versions", "--runs", str(runs)).splitlines()
    assert pair == f"drafter for big: models:/{MODEL}"
    assert re.split(" {2,}", head.strip()) == [
        "version", "aliases", "acceptance on the probe", "published", "changes", "in MLflow"
    ]  # fmt: skip
    probe, when = "0.250 (0.200 to 0.300)", "2026-01-02 03:04 UTC, "
    newest = ["tuesday/1", "candidate", probe, f"{when}drift at prompt 100", "drafter +1 update; n-grams +7", "2"]
    assert re.split(" {2,}", rows[0].strip()) == newest
    assert re.split(" {2,}", rows[1].strip())[-3:] == [f"{when}baseline", "the drafter as it was loaded", "1"]


def test_each_pair_has_numbers_and_aliases_of_its_own(tmp_path: Path):
    runs = store_with(tmp_path / "runs", 2)
    other = name_of_pair("small", "builtin:drafter")
    where = ("--runs", str(runs))
    publish(runs / "friday", default_uri(runs), 1, other)
    listed = json.loads(output_of("versions", *where, "--json"))
    assert [(one["name"], one["number"], one["aliases"]) for one in listed] == [
        (other, 1, ["candidate"]), (MODEL, 2, ["candidate"]), (MODEL, 1, []),
    ]  # fmt: skip
    titles = [line for line in output_of("versions", *where).splitlines() if "models:/" in line]
    assert [title.split("models:/")[1] for title in titles] == [other, MODEL]
    with pytest.raises(UsageError, match=f"one of them must be named, such as with --name: {other}, {MODEL}"):
        output_of("versions", "promote", "1", *where)
    promoted = output_of("versions", "promote", "friday/0", *where, "--name", other)
    assert promoted.startswith("champion: friday/0, every file")
    assert champion(runs) == 1
    output_of("versions", "promote", "2", *where, "--name", MODEL)
    assert sorted((one["name"], one["number"]) for one in json.loads(output_of("versions", *where, "--json"))
                  if "champion" in one["aliases"]) == [(other, 1), (MODEL, 2)]  # fmt: skip


def test_show_prints_the_manifest_the_metrics_and_how_to_use_it(runs: Path):
    printed = output_of("versions", "show", "tuesday/1", "--runs", str(runs))
    assert printed.startswith("tuesday/1, drift at prompt 100: drafter +1 update; n-grams +7\n")
    for line in ("target +builtin:target", "counter drafter_version +1", "parent +tuesday/0"):
        assert re.search(f"{line} ", printed), line
    assert re.search(r"mean_accepted_length +2\.5 *\n", printed)
    use = shlex.split(printed.splitlines()[-1].removeprefix("use it: omnidraft "))
    assert use == ["replay", "--drafter", "models:/omnidraft-drafter/2", "--runs", str(runs)]


def test_show_is_for_programs_too(runs: Path):
    details = json.loads(output_of("versions", "show", "2", "--runs", str(runs), "--json"))
    assert details["manifest"]["digest"] == details["tags"]["digest"]
    assert details["metrics"]["mean_accepted_length"] == 2.5


def test_a_model_that_was_never_published_has_no_versions(runs: Path):
    assert "no version yet" in output_of("versions", "--runs", str(runs), "--name", "other")
    assert json.loads(output_of("versions", "--runs", str(runs), "--name", "other", "--json")) == []


def test_an_error_names_what_to_try(runs: Path):
    with pytest.raises(ModelError, match="must have a version 7, but has 1 to 2"):
        output_of("versions", "show", "7", "--runs", str(runs))
    with pytest.raises(ModelError, match=r"its number or an alias \(candidate\), got 'champion'"):
        output_of("versions", "show", "champion", "--runs", str(runs))
    with pytest.raises(UsageError, match="--dry-run needs --keep"):
        output_of("versions", "sync", "--dry-run", "--runs", str(runs))


def test_versions_alone_lists_and_its_help_names_all_commands(runs: Path):
    assert output_of("versions", "--runs", str(runs)) == output_of("versions", "show", "--runs", str(runs))
    shown = output_of("versions", "--help")
    for command in ("show", "compare", "promote", "rollback", "export", "sync"):
        assert f"│ {command} " in shown


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return store_with(tmp_path / "runs", 5)


def champion(runs: Path) -> int | None:
    found = [version.number for version in list_versions(default_uri(runs)) if "champion" in version.aliases]
    return found[0] if found else None


def test_a_version_is_promoted_and_rolled_back(five: Path):
    where = ("--runs", str(five))
    assert output_of("versions", "promote", "2", *where).splitlines() == [
        "champion: tuesday/1, every file as it was published",
        f"use it: omnidraft replay --drafter models:/omnidraft-drafter@champion --runs {shlex.quote(str(five))}",
    ]
    assert "instead" not in output_of("versions", "promote", "#2", *where), "it took its own place"
    promoted = output_of("versions", "promote", "4", *where).splitlines()[0]
    assert promoted == "champion: tuesday/3, every file as it was published; instead of tuesday/1"
    assert champion(five) == 4
    assert "champion: tuesday/1 again, instead of tuesday/3" in output_of("versions", "rollback", *where)
    assert champion(five) == 2
    with pytest.raises(
        ModelError, match=f"former champion.*`omnidraft versions promote VERSION --name {MODEL} --mlflow-uri"
    ):
        output_of("versions", "rollback", *where)
    assert output_of("versions", "show", "champion", *where) == output_of("versions", "show", "2", *where)


def test_a_damaged_version_is_not_put_into_service(five: Path):
    output_of("versions", "promote", "2", "--runs", str(five))
    weights = files_of(five, 4) / "model.safetensors"
    weights.write_bytes(b"other")
    with pytest.raises(CorruptError, match=r"model\.safetensors was changed"):
        output_of("versions", "promote", "4", "--runs", str(five))
    assert champion(five) == 2


def test_prune_leaves_what_is_in_use(five: Path):
    where = ("--runs", str(five))
    output_of("versions", "promote", "2", *where)
    assert "nothing to delete" in output_of("versions", "sync", "--keep", "1", *where)  # all are in one line
    publish_unrelated(five)
    before = output_of("versions", *where)
    assert output_of("versions", "sync", "--keep", "1", "--dry-run", *where) == "would delete #3, #4, #5\n"
    assert output_of("versions", *where) == before
    shown = output_of("versions", "sync", "--keep", "1", "--dry-run", "--json", *where)
    assert json.loads(shown) == {"sent": {}, "would_delete": [3, 4, 5]}
    assert output_of("versions", "sync", "--keep", "1", *where).endswith("deleted #3, #4, #5\n")
    assert [version.number for version in list_versions(default_uri(five))] == [7, 6, 2, 1]


def test_sync_sends_what_is_missing_of_all_runs_or_of_some(tmp_path: Path):
    """Each goes to the store that it was published to, unless another is named."""
    runs = tmp_path / "runs"
    uri, elsewhere = new_store(runs), new_store(tmp_path / "elsewhere")
    for name in ("monday", "it's 1%20"):
        LittleRun(runs / name).publish()
    moved = LittleRun(runs / "wednesday")
    moved.publish()
    replace(moved.description, uri=elsewhere).write(moved.folder)
    where = ("--runs", str(runs))
    assert output_of("versions", "sync", f"{runs}/monday", *where) == f"{runs}/monday: versions sent: 1, points: 0\n"
    assert json.loads(output_of("versions", "sync", "--json", *where)) == {
        "sent": {
            f"{runs}/it's 1%20": {"versions": 1, "points": 0},
            f"{runs}/monday": {"versions": 0, "points": 0},
            f"{runs}/wednesday": {"versions": 1, "points": 0},
        },
        "deleted": [],
    }
    assert [version.run for version in list_versions(uri)] == ["it's 1%20", "monday"]
    assert [version.run for version in list_versions(elsewhere)] == ["wednesday"]
    with pytest.raises(OmnidraftError, match="must hold a run that publishes"):
        output_of("versions", "sync", str(tmp_path), *where)
    with pytest.raises(OmnidraftError, match=f"{runs}/monday: MLflow at {CLOSED} must answer"):
        output_of("versions", "sync", f"{runs}/monday", "--mlflow-uri", CLOSED)


def files_of(runs: Path, number: int) -> Path:
    where = connect(default_uri(runs)).get_model_version_download_uri(MODEL, str(number))
    return Path(where.removeprefix("file://"))


def publish_unrelated(runs: Path) -> None:
    """Publish the baseline and the first version of a newer run, so that the candidate is not of the first run."""
    publish(runs / "friday", default_uri(runs), 2)


@pytest.mark.parametrize("command", [("versions",), ("dashboard", "--mlflow")], ids=" ".join)
def test_without_a_store_both_name_the_command_that_makes_one(tmp_path: Path, command: tuple[str, ...]):
    with pytest.raises(UsageError, match="`omnidraft replay` makes one"):
        output_of(*command, "--runs", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_reported_before_anything_starts(runs: Path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} must be free.*--port {port + 1}"):
            output_of("dashboard", "--mlflow", "--runs", str(runs), "--port", str(port))


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_pages_are_served_on_loopback_and_end_cleanly(runs: Path, number: signal.Signals):
    port = free_port()
    code = "import typer, pipeline.cli.pages as c; typer.run(c.dashboard)"
    command = [sys.executable, "-c", code, "--mlflow", "--runs", str(runs), "--port", str(port)]
    served = warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        wait_until_up(f"http://{HOST}:{port}/health", served)
        assert listening_addresses(port) == {"0100007F"}
    finally:
        served.send_signal(number)
        printed, _ = served.communicate(timeout=200)
    assert served.returncode == 0
    pages = f"http://{HOST}:{port}/#/"
    assert f"{pages}experiments/1/runs?viewStateShareKey=omnidraft&workflowType=machine_learning" in printed
    replays = "searchFilter=tags.kind%20%3D%20%27replay%27"
    assert f"{pages}experiments/1/runs?compareRunsMode=CHART&{replays}&workflowType=machine_learning" in printed
    assert f"{pages}models?workflowType=machine_learning" in printed
    assert listening_addresses(port) == set(), "a server process was left behind"


def listening_addresses(port: int) -> set[str]:
    """Hexadecimal local addresses that listen on the port; 0100007F is 127.0.0.1. Linux only."""
    if not os.path.exists("/proc/net/tcp"):
        pytest.skip("needs /proc/net/tcp")
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == "0A" and int(address.split(":")[1], 16) == port:
                    found.add(address.split(":")[0])
    return found
