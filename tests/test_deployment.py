"""`examples/`: every command, option, setting, file, port and metric that the deployment uses exists."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_parsing import parse_command

from pipeline.config.environment import OTHERS, PREFIX, read_environment
from pipeline.config.settings import Config, load

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "examples" / "deploy"
BOARD = DEPLOY / "grafana" / "boards" / "omnidraft.json"
METRICS = ROOT / "tests" / "golden" / "frozen" / "metrics.json"  # what the server exposes


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def services() -> Mapping[str, Any]:
    """The services of the compose file by name."""
    found: Mapping[str, Any] = read_yaml("compose.yaml")["services"]
    return found


@pytest.fixture(scope="module")
def board() -> Mapping[str, Any]:
    """The dashboard that Grafana reads."""
    found: Mapping[str, Any] = json.loads(BOARD.read_text())
    return found


@pytest.fixture(scope="module")
def labels() -> Mapping[str, set[str]]:
    """The labels of every sample of `/metrics`, by its name."""
    families = json.loads(METRICS.read_text()).values()
    return {name: set(labels) for family in families for name, labels in family["labels by sample"].items()}


def own_commands(services: Mapping[str, Any]) -> Iterator[list[str]]:
    """The words after `omnidraft` of every service that runs it."""
    for service in services.values():
        if service["image"] == "omnidraft" and "entrypoint" not in service:
            yield service["command"]


def read_mounts(service: Mapping[str, Any]) -> dict[str, str]:
    """The mounts of a service by their path in the container."""
    return {place: source for source, place, *_ in (mount.split(":") for mount in service.get("volumes", ()))}


def test_the_sample_configuration_changes_settings():
    given = load(ROOT / "examples" / "settings.toml")
    assert len(given.list_given()) > 10
    assert given != Config()


def test_commands_of_services_parse(services: Mapping[str, Any]):
    commands = list(own_commands(services))
    assert [words[0] for words in commands] == ["zoo", "serve", "dashboard"]
    for words in commands:
        parse_command(words)


@pytest.mark.slow  # the import of MLflow's commands
def test_the_command_of_mlflow_parses(services: Mapping[str, Any]):
    from mlflow.cli import cli

    assert services["mlflow"]["entrypoint"] == ["mlflow"]
    name, *options = services["mlflow"]["command"]
    known = {spelling for one in cli.commands[name].params for spelling in one.opts}
    assert {option.partition("=")[0] for option in options} <= known


def test_variables_of_services_are_settings(services: Mapping[str, Any]):
    given = services["server"]["environment"]
    config = Config().with_overrides(read_environment(given))
    assert config.publish.mlflow_uri == given["OMNIDRAFT_PUBLISH_MLFLOW_URI"]
    others = {f"{PREFIX}{name}" for name in OTHERS}
    for service in services.values():
        for name in service.get("environment", ()):
            assert not name.startswith(PREFIX) or name in others or read_environment({name: "1"}), name


def test_files_and_volumes_of_services_exist(services: Mapping[str, Any]):
    volumes, sources = read_yaml("compose.yaml")["volumes"], set[str]()
    for service in services.values():
        sources |= set(read_mounts(service).values())
    assert [one for one in sources if one.startswith(".") and not (DEPLOY / one).exists()] == []
    assert {one for one in sources if not one.startswith(".")} == set(volumes)
    configuration = shlex.join(services["server"]["command"]).partition("--config ")[2].split()[0]
    assert read_mounts(services["server"])[configuration] == "../settings.toml"
    assert all(name in services for service in services.values() for name in service.get("depends_on", ()))


def test_services_wait_for_what_they_need_and_its_health_is_checked(services: Mapping[str, Any]):
    conditions = {name: one["condition"] for name, one in services["server"]["depends_on"].items()}
    assert conditions == {"model": "service_completed_successfully", "mlflow": "service_healthy"}
    for name in ("server", "mlflow"):
        command, *words = services[name]["healthcheck"]["test"]
        assert (command, words[:2]) == ("CMD", ["python", "-c"])
        compile(words[2], name, "exec")
        port = re.search(r"127\.0\.0\.1:(\d+)/health'", words[2])
        assert port
        assert services[name]["ports"] == [f"127.0.0.1:{port[1]}:{port[1]}"]


def test_ports_are_open_to_this_machine_only_and_are_those_of_the_commands(services: Mapping[str, Any]):
    for name in ("server", "dashboard", "mlflow"):
        words = " ".join(services[name]["command"]).replace("=", " ")
        port = re.search(r"--port (\d+)", words)
        assert port, name
        assert services[name]["ports"] == [f"127.0.0.1:{port[1]}:{port[1]}"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_prometheus_and_grafana_reach_what_they_read(services: Mapping[str, Any]):
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": f"/run/secrets/{secret}"}
    assert read_yaml("compose.yaml")["secrets"][secret] == {"environment": "OMNIDRAFT_API_KEY"}
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    (provider,) = read_yaml("grafana/provisioning/dashboards/boards.yaml")["providers"]
    assert (DEPLOY / read_mounts(services["grafana"])[provider["options"]["path"]]) == BOARD.parent


def test_the_image_copies_what_exists_and_the_context_has_it():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(kept) == sorted(copied)
    build = read_yaml("compose.yaml")["services"]["model"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"


def queries(board: Mapping[str, Any]) -> Iterator[str]:
    """Every query of a board."""
    yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    yield from (one["expr"] for one in board["annotations"]["list"])
    yield from (one["definition"] for one in board["templating"]["list"])


def test_the_board_queries_metrics_of_the_server_with_their_labels(
    board: Mapping[str, Any], labels: Mapping[str, set[str]]
):
    for query in queries(board):
        names = re.findall(r"(?:vllm|omnidraft):\w+", query)
        assert names, query
        assert set(names) <= labels.keys(), query
        grouped = re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query)
        used = {label for group in grouped for label in group.split(", ")} | set(re.findall(r"[{,](\w+)[=!]", query))
        assert used <= set.union(*(labels[name] for name in names)), query


def test_every_panel_of_the_board_names_a_label_that_its_query_keeps(board: Mapping[str, Any]):
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["datasource"]["uid"] == "prometheus"
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]), panel["title"]


def test_the_board_shows_every_metric_of_omnidraft(board: Mapping[str, Any], labels: Mapping[str, set[str]]):
    shown = " ".join(queries(board))
    left_out = {"omnidraft:drafted_pieces_total", "omnidraft:prefix_cache_prompts_total"}
    assert {name for name in labels if name.startswith("omnidraft:") and name not in shown} == left_out
